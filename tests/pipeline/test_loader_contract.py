"""What a trainer expects of `make_loader` and `BatchLoader`: real parts, epochs, shares of ranks, nothing lost."""

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

import labkit as lk
from labkit.loading.samplers import LoaderWarning
from tests.paths import REPO

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file


class Drawn(Dataset):
    """Items are (index, a draw of each library that a transform may use)."""

    def __init__(self, n_samples=12):
        self.n_samples, self.transform = n_samples, None

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        item = torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.random()])
        return self.transform(item) if self.transform else item


def loader_of(dataset=None, num_workers=0, *, batch_size=4, seed=0, persistent_workers=None, **options):
    config = lk.LoaderConfig(
        batch_size=batch_size, num_workers=num_workers, seed=seed, persistent_workers=persistent_workers
    )
    return lk.make_loader(Drawn() if dataset is None else dataset, config, **options)


def rows(loader):
    """All samples of a pass, as tuples."""
    return [tuple(row) for batch in loader for row in batch.tolist()]


def indices(loader):
    return [int(row[0]) for row in rows(loader)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """12 photos of noise, 40 x 48 pixels, in two classes."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(12):
        path = root / f"class{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    return lk.FolderStore(root)


WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


class TestParts:
    @WORKERS
    def test_are_those_that_were_given(self, num_workers):
        dataset, sampler = Drawn(), DistributedSampler(range(12), num_replicas=2, rank=1)
        loader = loader_of(dataset, num_workers, sampler=sampler)
        assert loader.dataset is dataset
        assert loader.sampler is sampler
        assert loader.batch_sampler.sampler is sampler
        assert (len(loader.sampler), len(loader), loader.batch_size, loader.drop_last) == (6, 2, 4, False)
        batches = BatchSampler(range(12), 5, True)
        loader = loader_of(dataset, num_workers, batch_sampler=batches, collate_fn=list)
        assert loader.batch_sampler is batches
        assert loader.sampler is batches.sampler
        assert loader.collate_fn is list
        assert (loader.batch_size, len(loader)) == (5, 2)
        assert isinstance(loader, DataLoader)

    def test_of_its_own_order_are_torchs(self):
        assert type(loader_of().sampler) is SequentialSampler
        shuffled = loader_of(shuffle=True)
        assert isinstance(shuffled.sampler, RandomSampler)
        assert len(shuffled.sampler) == 12
        assert isinstance(shuffled.batch_sampler, BatchSampler)

    @WORKERS
    def test_what_is_set_on_the_data_set_takes_effect_from_the_next_epoch_on(self, num_workers):
        loader = loader_of(num_workers=num_workers)
        first = rows(loader)
        loader.dataset.transform = lambda item: item + 100
        assert [row[0] for row in rows(loader)] == [row[0] + 100 for row in first]
        loader.dataset.transform = None
        assert indices(loader) == list(range(12))

    def test_what_is_set_deeper_in_the_data_set_takes_effect_too(self):
        class Scale:
            factor = 1

            def __call__(self, item):
                return item * self.factor

        dataset = Drawn()
        dataset.transform = Scale()
        loader = loader_of(Subset(dataset, range(4)), 1)
        assert indices(loader) == [0, 1, 2, 3]
        dataset.transform.factor = 10
        assert indices(loader) == [0, 10, 20, 30]

    def test_workers_stay_where_nothing_was_set(self):
        loader = loader_of(num_workers=1, batch_transform=lambda batch: os.getpid())
        assert set(loader) == set(loader)

    @WORKERS
    def test_a_replaced_collate_function_is_used(self, num_workers):
        loader = loader_of(num_workers=num_workers)
        assert [type(batch) for batch in loader] == [torch.Tensor] * 3
        loader.collate_fn = tuple
        assert [(len(batch), type(batch)) for batch in loader] == [(4, tuple)] * 3

    def test_a_replaced_sampler_is_used(self):
        loader = loader_of(shuffle=True)
        loader.batch_sampler.sampler = [3, 1, 2]
        assert indices(loader) == [3, 1, 2]


class TestForeignLoaders:
    """Loaders of other libraries are made of this one's parts."""

    @WORKERS
    def test_of_its_batch_sampler_give_the_same_batches_and_other_ones_each_epoch(self, num_workers):
        own = loader_of(num_workers=2, shuffle=True, seed=5)
        expected = [rows(own) for _ in range(2)]
        made = loader_of(num_workers=0, shuffle=True, seed=5)
        foreign = DataLoader(made.dataset, batch_sampler=made.batch_sampler, num_workers=num_workers)
        assert [rows(foreign) for _ in range(2)] == expected
        assert expected[0] != expected[1]

    def test_leave_the_global_random_state_alone(self):
        made = loader_of(shuffle=True)
        before = torch.get_rng_state(), random.getstate()
        for _ in DataLoader(made.dataset, batch_sampler=made.batch_sampler, generator=torch.Generator()):
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]

    def test_may_set_the_epoch(self):
        own = loader_of(shuffle=True)
        own.set_epoch(7)
        expected = rows(own)
        made = loader_of(shuffle=True)
        foreign = DataLoader(made.dataset, batch_sampler=made.batch_sampler)
        for told in (made.batch_sampler, made.batch_sampler.sampler):
            for _ in range(2):
                told.set_epoch(7)
                assert rows(foreign) == expected

    def test_may_cut_and_join_batches(self):
        made = loader_of()
        first, second, _ = made.batch_sampler
        joined = first[1:] + second[:1]
        expected = rows(loader_of())
        found = rows(DataLoader(made.dataset, batch_sampler=[joined]))
        assert found == [expected[1], expected[2], expected[3], expected[4]]


class TestRepeatedIndices:
    @WORKERS
    def test_are_drawn_for_anew_each_time(self, num_workers):
        loader = loader_of(num_workers=num_workers, sampler=[5] * 16)
        epochs = [rows(loader) for _ in range(2)]
        assert len({row[1:] for epoch in epochs for row in epoch}) == 32
        assert epochs[0][0] == rows(loader_of())[5]  # the first time as always

    def test_give_the_same_for_any_number_of_workers_and_batch_size(self):
        order = [1, 2, 1, 1, 3, 2, 1, 1, 1]
        expected = rows(loader_of(sampler=order))
        assert rows(loader_of(num_workers=2, sampler=order, batch_size=2)) == expected

    @pytest.mark.parametrize("n_taken", [1, 2, 3])
    def test_resume_exactly(self, n_taken):
        whole, begun, resumed = (loader_of(num_workers=2, sampler=[5] * 14) for _ in range(3))
        taken = list(itertools.islice(begun, n_taken))
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert torch.equal(torch.cat(taken + list(resumed)), torch.cat(list(whole)))

    def test_of_a_weighted_sampler(self):
        sampler = WeightedRandomSampler([1.0] * 3, 48, generator=torch.Generator().manual_seed(1))
        found = rows(loader_of(sampler=sampler))
        assert len(set(found)) == 48

    @pytest.mark.parametrize("options", [{"num_threads": 1}, {"num_threads": 2}, {"num_processes": 1}], ids=str)
    def test_are_cropped_anew_by_batch_loader(self, photos, options):
        loader = lk.BatchLoader(photos, size=32, batch_size=8, sampler=[5] * 16, **options)
        images = torch.cat([images for images, _ in loader])
        assert len({image.numpy().tobytes() for image in images}) == 16
        [(first, _)] = lk.BatchLoader(photos, size=32, batch_size=1, sampler=[5])
        assert torch.equal(images[0], first[0])

    def test_resume_exactly_in_batch_loader(self, photos):
        whole, begun, resumed = (lk.BatchLoader(photos, size=32, batch_size=4, sampler=[5] * 14) for _ in range(3))
        taken = list(itertools.islice(begun, 2))
        resumed.load_state_dict(begun.state_dict())
        assert torch.equal(torch.cat([x for x, _ in taken + list(resumed)]), torch.cat([x for x, _ in whole]))


ONE_SHOT = {
    "generator": lambda: (index for index in range(8)),
    "map": lambda: map(int, range(8)),
    "iterator": lambda: iter(range(8)),
    "zip": lambda: zip(range(8), strict=True),
}


class TestSamplersThatEnd:
    @pytest.mark.parametrize("make", ONE_SHOT.values(), ids=ONE_SHOT)
    @pytest.mark.parametrize("argument", ["sampler", "batch_sampler"])
    def test_after_one_epoch_are_refused(self, argument, make):
        with pytest.raises(TypeError, match=rf"^{argument} is a .* can be read once: .*Give a list"):
            loader_of(**{argument: make()})

    def test_within_a_batch_sampler_are_refused(self):
        with pytest.raises(TypeError, match="can be read once"):
            loader_of(batch_sampler=BatchSampler(iter(range(8)), 4, False))

    @pytest.mark.parametrize("make", ONE_SHOT.values(), ids=ONE_SHOT)
    def test_after_one_epoch_are_refused_by_batch_loader(self, photos, make):
        with pytest.raises(TypeError, match=r"sampler is a .* can be read once"):
            lk.BatchLoader(photos, sampler=make())

    def test_without_being_an_iterator_raise_in_the_second_epoch(self):
        class Once:
            def __init__(self):
                self.left = iter(range(8))

            def __iter__(self):
                yield from self.left

            def __len__(self):
                return 8

        loader = loader_of(sampler=Once())
        assert len(list(loader)) == 2
        with pytest.raises(RuntimeError, match="gave no batch in epoch 1, although its length is 2"):
            list(loader)


class Ending(Drawn):
    """Raises StopIteration at one sample, as a `next` on a used-up iterator does."""

    def __getitem__(self, index):
        if index == 6:
            next(iter(()))
        return super().__getitem__(index)


def end(batch):
    return next(iter(()))


class TestStopIteration:
    @WORKERS
    @pytest.mark.parametrize("options", [{}, {"collate_fn": end}, {"batch_transform": end}], ids="".join)
    def test_is_an_error_and_no_end_of_the_epoch(self, num_workers, options):
        dataset = Drawn() if options else Ending()
        with pytest.raises(RuntimeError) as failure:
            list(loader_of(dataset, num_workers, **options))
        said = str(failure.value) + "".join(getattr(failure.value, "__notes__", []))
        assert "raised StopIteration" in said
        assert "sample 0" in said if options else "while loading sample 6" in said


class TestTwoPasses:
    @pytest.mark.parametrize(("num_workers", "persistent"), [(0, None), (2, True), (2, False)])
    def test_at_once_give_what_each_gives_alone(self, num_workers, persistent):
        expected = [rows(one) for one in [loader_of(shuffle=True)] for _ in range(2)]
        loader = loader_of(num_workers=num_workers, persistent_workers=persistent, shuffle=True, batch_size=2)
        pairs = list(zip(loader, loader, strict=True))
        assert len(pairs) == 6
        for side in range(2):
            assert [tuple(row) for pair in pairs for row in pair[side].tolist()] == expected[side]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_look_in_mid_epoch_changes_nothing(self, num_workers):
        undisturbed = loader_of(shuffle=True, batch_size=2)
        expected = [rows(undisturbed) for _ in range(3)]
        loader = loader_of(num_workers=num_workers, shuffle=True, batch_size=2)
        found, states = [], []
        for _ in range(3):
            found.append([])
            for number, batch in enumerate(loader):
                if number == 2:
                    assert next(iter(loader)).shape == (2, 4)
                found[-1] += [tuple(row) for row in batch.tolist()]
                states.append(loader.state_dict())
        assert found == expected
        assert [(state["epoch"], state["n_batches"]) for state in states[2:6]] == [(0, 3), (0, 4), (0, 5), (0, 6)]

    def test_a_look_in_mid_epoch_changes_nothing_in_batch_loader(self, photos):
        def epochs(look):
            loader = lk.BatchLoader(photos, size=32, batch_size=2)
            for _ in range(2):
                for number, (images, _) in enumerate(loader):
                    if look and number == 2:
                        next(iter(loader))
                    yield images
                    yield loader.state_dict()["order_crc32"]

        for one, other in zip(epochs(False), epochs(True), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    def test_steps_counted_by_next_go_on_with_the_next_epoch(self):
        loader = loader_of(num_workers=1, shuffle=True)
        expected = [rows(one) for one in [loader_of(shuffle=True)] for _ in range(3)]
        for epoch in range(3):
            iterator = iter(loader)
            assert [tuple(row) for row in next(iterator).tolist()] == expected[epoch][:4]

    def test_workers_end_with_the_loader(self):
        import multiprocessing

        loader = loader_of(num_workers=2)
        for _ in zip(loader, loader, strict=True):
            pass
        del loader
        assert multiprocessing.active_children() == []


class TestEpochs:
    def test_are_not_counted_where_no_batch_was_taken(self):
        loader, expected = loader_of(shuffle=True), rows(loader_of(shuffle=True))
        for _ in range(3):
            iter(loader)  # as Lightning does, to see whether it can
        assert rows(loader) == expected

    def test_a_resume_outlives_a_pass_of_which_no_batch_was_taken(self):
        begun, resumed = loader_of(shuffle=True), loader_of(shuffle=True)
        iterator = iter(begun)
        next(iterator)
        resumed.load_state_dict(begun.state_dict())
        iter(resumed)
        assert rows(resumed) == rows(iterator)

    def test_that_the_training_sets_on_its_sampler_count(self):
        sampler = DistributedSampler(range(12), num_replicas=2, rank=0, seed=3)
        loader = loader_of(sampler=sampler)
        for epoch in (5, 5, 2, 3):
            loader.sampler.set_epoch(epoch)
            oracle = DistributedSampler(range(12), num_replicas=2, rank=0, seed=3)
            oracle.set_epoch(epoch)
            assert indices(loader) == list(oracle)
            assert loader.epoch == epoch + 1

    def test_go_on_by_themselves(self):
        loader = loader_of(sampler=DistributedSampler(range(12), num_replicas=2, rank=0))
        assert len({tuple(indices(loader)) for _ in range(3)}) == 3

    def test_set_before_the_loader_is_made(self):
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        sampler.set_epoch(4)
        oracle = list(sampler)
        assert indices(loader_of(sampler=sampler)) == oracle

    def test_of_a_sampler_that_keeps_a_number_of_its_own(self):
        class Own(DistributedSampler):
            def set_epoch(self, epoch):
                super().set_epoch(int(epoch))

        loader = loader_of(sampler=Own(range(12), num_replicas=1, rank=0))
        assert len({tuple(indices(loader)) for _ in range(3)}) == 3
        loader.sampler.set_epoch(0)
        assert (indices(loader) is not None, loader.epoch) == (True, 1)

    def test_that_the_training_sets_on_buckets_count(self):
        def sampler():
            sizes = pd.DataFrame({"path": [str(n) for n in range(12)], "width": [64, 96] * 6, "height": 64})
            return lk.BucketBatchSampler(sizes, 2, seed=1)

        loader, oracle = loader_of(batch_sampler=sampler()), sampler()
        for epoch in (4, 4, 1):
            loader.batch_sampler.set_epoch(epoch)
            oracle.set_epoch(epoch)
            assert indices(loader) == list(itertools.chain(*oracle))

    def test_resume_and_a_training_that_sets_the_epoch_itself(self):
        def make():
            return loader_of(sampler=DistributedSampler(range(24), num_replicas=2, rank=0))

        begun, resumed = make(), make()
        begun.sampler.set_epoch(3)
        iterator = iter(begun)
        next(iterator)
        state, expected = begun.state_dict(), list(iterator)
        resumed.load_state_dict(state)
        resumed.sampler.set_epoch(state["epoch"])
        assert torch.equal(torch.cat(list(resumed)), torch.cat(expected))


RANK = """
import json, os, sys
import torch, labkit as lk
kind, folder, out = sys.argv[1:]
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 13
    def __getitem__(self, index): return torch.tensor([float(index), torch.rand(()).item()])
if kind == "make_loader":
    loader = lk.make_loader(Numbers(), lk.LoaderConfig(batch_size=2, num_workers=1), shuffle=True)
elif kind == "sampler":
    loader = lk.make_loader(Numbers(), lk.LoaderConfig(batch_size=2, num_workers=0), sampler=[3, 4, 5])
else:
    loader = lk.BatchLoader(lk.FolderStore(folder), size=32, batch_size=2)
epochs = []
for _ in range(2):
    if kind == "BatchLoader":
        epochs.append([int(n) for indices in loader._batches_of(loader._begin_epoch()) for n in indices.plain()])
    else:
        epochs.append([int(row[0]) for batch in loader for row in batch])
json.dump([len(loader), epochs], open(f"{out}/{os.environ['RANK']}.json", "w"))
"""


def run_ranks(tmp_path, kind, folder):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), kind, str(folder), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.mark.slow
class TestRanksOfTorchrun:
    def test_share_each_epoch(self, tmp_path):
        (first, second), _ = run_ranks(tmp_path, "make_loader", "")
        assert first[0] == second[0] == 4
        for one, other in zip(first[1], second[1], strict=True):
            assert len(one) == len(other) == 7
            assert set(one + other) == set(range(13))
            assert sorted(Counter(one + other).values()) == [1] * 12 + [2]
        assert first[1][0] != first[1][1]

    def test_share_the_images_of_batch_loader(self, tmp_path, photos):
        (first, second), _ = run_ranks(tmp_path, "BatchLoader", photos.root)
        for one, other in zip(first[1], second[1], strict=True):
            assert sorted(one + other) == list(range(12))
        assert first[0] == 3

    def test_keep_a_batch_sampler_of_another_class(self, monkeypatch):
        class InPairs(BatchSampler):
            def __iter__(self):
                yield from ([index, index + 1] for index in range(0, 12, 4))

        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.warns(LoaderWarning, match="each rank loads all that SequentialSampler gives"):
            found = indices(loader_of(batch_sampler=InPairs(SequentialSampler(range(12)), 4, False)))
        assert found == [0, 1, 4, 5, 8, 9]

    def test_are_told_of_a_sampler_that_does_not_share(self, tmp_path):
        (first, second), stderr = run_ranks(tmp_path, "sampler", "")
        assert first[1] == second[1] == [[3, 4, 5]] * 2
        assert "of 2, and each rank loads all that list gives: use one that shares" in stderr


class TestRanksThatChange:
    @pytest.mark.parametrize("again", [1, 2, 3])
    def test_share_out_what_is_left(self, monkeypatch, again):
        def ranks(world_size, state=None, n_batches=None):
            for rank in range(world_size):
                monkeypatch.setenv("RANK", str(rank))
                monkeypatch.setenv("WORLD_SIZE", str(world_size))
                loader = loader_of(Drawn(30), batch_size=3, shuffle=True)
                if state:
                    loader.load_state_dict(state)
                taken = torch.cat([*itertools.islice(loader, n_batches)])
                yield taken[:, 0].int().tolist(), loader.state_dict()

        begun = list(ranks(2, n_batches=2))
        rest = [numbers for numbers, _ in ranks(again, begun[0][1])]
        came = Counter(itertools.chain(*(numbers for numbers, _ in begun), *rest))
        assert set(came) == set(range(30))
        assert len({len(numbers) for numbers in rest}) == 1
        assert sum(came.values()) < 30 + again

    @pytest.mark.parametrize(("rank", "world_size"), [("", ""), ("0", "0"), ("-1", "-1"), ("3", "2"), ("x", "2")])
    def test_variables_that_make_no_sense_are_ignored(self, monkeypatch, rank, world_size):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert indices(loader_of()) == list(range(12))


ACTS = strategies.sampled_from(["take", "take", "take", "look", "resume", "leave", "tell", "told again", "iter"])


class TestAnyCourseOfATraining:
    """Takes, looks, resumes, epochs left early or set: against a list of each epoch's samples and a few numbers."""

    @settings(max_examples=40, deadline=None)
    @given(
        acts=strategies.lists(ACTS, max_size=25),
        order=strategies.one_of(
            strategies.none(), strategies.lists(strategies.integers(0, 11), min_size=1, max_size=15)
        ),
        batch_size=strategies.integers(1, 5),
    )
    def test_gives_the_samples_of_its_epochs(self, acts, order, batch_size):
        options = {"batch_size": batch_size, **({"shuffle": True} if order is None else {"sampler": order})}

        def samples(epoch):
            loader = loader_of(**options)
            loader.set_epoch(epoch)
            return [[tuple(row) for row in batch.tolist()] for batch in loader]

        loader, running, epoch, n_taken = loader_of(**options), None, 0, 0
        for act in acts:
            if act == "take":
                running = running or iter(loader)
                expected = samples(epoch)
                if n_taken == len(expected):
                    assert next(running, None) is None
                    running, epoch, n_taken = None, epoch + 1, 0
                else:
                    assert [tuple(row) for row in next(running).tolist()] == expected[n_taken]
                    n_taken += 1
            elif act == "look" and running and n_taken:
                assert [tuple(row) for row in next(iter(loader)).tolist()] == samples(epoch + 1)[0]
            elif act == "resume" and n_taken:
                state, loader, running = json.loads(json.dumps(loader.state_dict())), loader_of(**options), None
                loader.load_state_dict(state)
            elif act == "leave" and running and n_taken:
                running, epoch, n_taken = None, epoch + 1, 0
            elif act in ("tell", "told again") and order is None and not n_taken:
                running, epoch = None, epoch if act == "told again" else 3
                loader.sampler.set_epoch(epoch)
            elif act == "iter" and not running:
                iter(loader)


class TestIndices:
    @pytest.mark.parametrize("order", [np.array([3, 1], np.uint64), np.array([3, 1]), torch.tensor([3, 1]), [True, 2]])
    def test_of_other_kinds_of_integers(self, order):
        expected = rows(loader_of(sampler=[int(index) for index in order]))
        assert rows(loader_of(sampler=order)) == expected


def test_a_subset_draws_as_its_data_set_does_one_by_one():
    """Whichever samples stand in a batch: `Subset` fetches a whole batch by one call."""
    dataset = Drawn()
    by_fours = rows(loader_of(Subset(dataset, range(12))))
    assert rows(loader_of(Subset(dataset, range(12)), batch_size=3)) == by_fours
