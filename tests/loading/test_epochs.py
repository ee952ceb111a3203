"""Epochs: each pass is the next one, whoever counts, in loaders of labkit, torch and torchdata; ranks share them."""

import copy
import functools
import itertools
import os
import pickle
import warnings
from collections import Counter
from functools import partial

import pandas as pd
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import labkit as lk
from labkit.data.shards_read import ShardWarning
from labkit.loading.samplers import LoaderWarning
from tests.children import in_children
from tests.loaders import Numbers, firsts, indices, loader_of, red, rows, solid
from tests.memory_store import MemoryStore

# Of torchdata, about torch itself; and of torch, about this machine's cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class TestOfALoader:
    @pytest.mark.parametrize(("num_workers", "persistent"), [(0, None), (2, True), (2, False)])
    def test_two_at_once_give_what_each_gives_alone(self, num_workers, persistent):
        expected = [rows(one) for one in [loader_of(shuffle=True)] for _ in range(2)]
        loader = loader_of(num_workers=num_workers, persistent_workers=persistent, shuffle=True, batch_size=2)
        pairs = list(zip(loader, loader, strict=True))
        assert len(pairs) == 6
        assert [[tuple(row) for pair in pairs for row in pair[side].tolist()] for side in range(2)] == expected

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_are_those_that_the_training_sets_on_its_sampler(self, num_workers):
        sampler, oracle = (DistributedSampler(range(12), num_replicas=2, rank=0, seed=3) for _ in range(2))
        sampler.set_epoch(4)  # before the loader is made
        loader = loader_of(num_workers=num_workers, sampler=sampler)
        for epoch in (4, 5, 5, 2, 3):
            oracle.set_epoch(epoch)
            if epoch != 4:
                loader.sampler.set_epoch(epoch)
            assert indices(loader) == list(oracle)
            assert loader.epoch == epoch + 1
        assert len({tuple(indices(loader)) for _ in range(3)}) == 3  # they go on by themselves
        loader.set_epoch(2)
        oracle.set_epoch(2)
        assert indices(loader) == list(oracle)


class TestOfForeignLoaders:
    """Loaders of other libraries are made of this one's parts."""

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_give_the_same_batches_and_other_ones_each_epoch(self, num_workers):
        own = loader_of(num_workers=2, shuffle=True, seed=5)
        expected = [rows(own) for _ in range(2)]
        made = loader_of(num_workers=0, shuffle=True, seed=5)
        foreign = DataLoader(made.dataset, batch_sampler=made.batch_sampler, num_workers=num_workers)
        assert [rows(foreign) for _ in range(2)] == expected
        assert expected[0] != expected[1]

    def test_may_be_set(self):
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
        made, expected = loader_of(), rows(loader_of())
        first, second, _ = made.batch_sampler
        joined = first[1:] + second[:1]
        assert rows(DataLoader(made.dataset, batch_sampler=[joined])) == expected[1:5]


WORKERS = {
    "none": {},
    "two": {"num_workers": 2, "multiprocessing_context": "fork"},
    "two that stay": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
}
every_kind_of_workers = pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
no_or_two_workers = pytest.mark.parametrize("options", [WORKERS["none"], WORKERS["two"]], ids=["none", "two"])

NUMBERS = list(range(40))
SIZES = pd.DataFrame({"path": [f"{n}.jpg" for n in NUMBERS], "width": [100, 150] * 20, "height": [150, 100] * 20})


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    store = MemoryStore({f"all/{number:02}.png": solid(number) for number in NUMBERS})
    root = tmp_path_factory.mktemp("shards") / "set"
    return lk.write_shards(store, root, max_count=6, engine="threads", progress=False)


def make(source, epoch=None, **options):
    """`read_shards` of numbers, or a `BucketBatchSampler` of them."""
    if source == "buckets":
        made = lk.BucketBatchSampler(SIZES, 4, buckets=lk.Buckets(((100, 150), (150, 100))))
    else:
        made = lk.read_shards(
            source, **{"shuffle": True, "shuffle_buffer": 8, "shuffle_initial": 4, "transform": red, **options}
        )
    if epoch is not None:
        made.set_epoch(epoch)
    return made


def plain(made, kind=DataLoader, **options):
    """A loader without a collating function of labkit: batches are lists of numbers."""
    if isinstance(made, lk.BucketBatchSampler):
        return kind(range(40), batch_sampler=made, collate_fn=list, **options)
    return kind(made, batch_size=1, collate_fn=firsts, **options)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def set_one_by_one(source, *, n_epochs, num_workers):
    """What is given where each epoch is set; how workers start makes no difference, and a fork is the fastest."""
    options = WORKERS["two"] if num_workers else {}
    return [flat(plain(make(source, epoch), **options)) for epoch in range(n_epochs)]


four_epochs = functools.cache(partial(set_one_by_one, n_epochs=4))


def told(source, options):
    """The first four epochs, for comparison; with workers, they take turns."""
    return four_epochs(source, num_workers=options.get("num_workers", 0))


class TestOfTorchsLoader:
    """Nobody sets them there, and yet none comes twice."""

    @pytest.fixture(params=["shards", "buckets"])
    def source(self, request, shards):
        return shards if request.param == "shards" else "buckets"

    @every_kind_of_workers
    def test_each_pass_is_the_next_also_of_a_new_loader(self, source, options):
        """Even where torch's generator begins with the same seed each time."""
        made = make(source)
        loader = plain(made, **options)
        epochs = [flat(loader) for _ in range(2)]
        for _ in range(2):
            torch.manual_seed(0)
            epochs.append(flat(plain(made, **options)))
        assert epochs == told(source, options)
        assert all(sorted(epoch) == NUMBERS for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 4

    @no_or_two_workers
    def test_some_samples_each_go_on_through_all(self, shards, options):
        loader = plain(make(shards, samples_per_rank=10), **options)
        assert sorted(flat(flat(loader) for _ in range(4))) == NUMBERS

    @every_kind_of_workers
    def test_one_that_was_set_decides(self, source, options):
        made, expected = make(source), told(source, options)
        loader = plain(made, **options)
        assert flat(loader) == expected[0]
        made.set_epoch(2)
        assert [flat(loader), flat(loader)] == (expected[2:] if source == "buckets" else [expected[2]] * 2)

    @no_or_two_workers
    def test_two_passes_at_once_are_two_whole_ones(self, source, options):
        loader = plain(make(source), **options)
        pairs = zip(*zip(loader, loader, strict=True), strict=True)
        assert list(map(flat, pairs)) == told(source, options)[:2]

    @no_or_two_workers
    def test_a_look_at_one_batch_leaves_the_next_whole(self, source, options):
        loader = plain(make(source), **options)
        next(iter(loader))
        assert sorted(flat(loader)) == NUMBERS

    @no_or_two_workers
    @pytest.mark.parametrize("n_taken", [0, 7])
    def test_a_resumed_training_goes_on_as_the_undisturbed_one(self, source, options, n_taken):
        if source == "buckets" and not n_taken:
            pytest.skip("torchdata resumes a batch sampler that is at its end with an empty epoch")
        begun, resumed = (plain(make(source), StatefulDataLoader, **options) for _ in range(2))
        came = [flat(begun), flat(itertools.islice(begun, n_taken)) if n_taken else []]
        resumed.load_state_dict(pickle.loads(pickle.dumps(begun.state_dict())))
        came[1] += flat(resumed)
        assert [*came, flat(resumed)] == told(source, options)[:3]

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
    def test_a_copy_goes_on_by_itself(self, shards, again):
        made, expected = make(shards), told(shards, {})
        assert flat(plain(made)) == expected[0]
        copied = again(made)
        assert [flat(plain(copied)), flat(plain(copied)), flat(plain(made))] == [*expected[1:3], expected[1]]

    def test_ranks_that_share_a_data_set_each_count_their_own(self, shards, monkeypatch):
        """As `torch.multiprocessing.spawn` and notebook launchers start them."""
        made, options = make(shards), WORKERS["two"]
        monkeypatch.setenv("WORLD_SIZE", "2")

        def count_epochs(rank):
            os.environ["RANK"] = str(rank)
            loader = plain(made, **options)
            return [flat(loader) for _ in range(2)]

        found, expected = in_children("fork", count_epochs, (0,), (1,)), []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            expected.append(set_one_by_one(shards, n_epochs=2, num_workers=2))
        assert sorted(found) == sorted(expected)
        assert found[0] != found[1]

    def test_ranks_that_count_by_themselves_are_warned_once(self, shards, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        made = make(shards)
        list(made)
        said = r"each of 2 ranks counts its own passes.*call set_epoch\(epoch\)"
        with pytest.warns(ShardWarning, match=said) as caught:
            list(made)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(made)
            unshuffled, set_each = make(shards, shuffle=False), make(shards)
            for epoch in range(3):
                list(unshuffled)
                set_each.set_epoch(epoch)
                list(set_each)


def epochs_of_rank(rank):
    """Two epochs of make_loader and of BatchLoader; those of a list, which each rank is warned about."""
    os.environ["RANK"] = str(rank)
    images = MemoryStore({f"{number:02}/x.png": solid(0) for number in range(12)})  # the label says which
    numbers = loader_of(Numbers(13), batch_size=2, shuffle=True)
    listed = loader_of(Numbers(13), batch_size=2, sampler=[3, 4, 5])
    pictures = lk.BatchLoader(images, size=32, batch_size=2)
    with pytest.warns(LoaderWarning, match="of 2, and each rank loads all that list gives: use one that shares"):
        assert indices(listed) == [3, 4, 5]
    assert [len(loader) for loader in (numbers, pictures, listed)] == [4, 3, 2]
    return [(indices(numbers), [int(n) for _, labels in pictures for n in labels]) for _ in range(2)]


class TestOfRanks:
    def test_are_shared_out_or_the_ranks_are_told(self, monkeypatch):
        """As torchrun starts them."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        epochs = in_children("fork", epochs_of_rank, (0,), (1,))
        for (ones, images), (others, other_images) in zip(*epochs, strict=True):
            assert len(ones) == len(others) == 7
            assert sorted(Counter(ones + others).values()) == [1] * 12 + [2]  # 13 samples for two ranks
            assert sorted(images + other_images) == list(range(12))
        assert epochs[0][0] != epochs[0][1]

    def test_are_whole_where_a_batch_sampler_of_another_class_does_not_share(self, monkeypatch):
        class InPairs(BatchSampler):
            def __iter__(self):
                yield from ([index, index + 1] for index in range(0, 12, 4))

        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.warns(LoaderWarning, match="each rank loads all that SequentialSampler gives"):
            assert indices(loader_of(batch_sampler=InPairs(SequentialSampler(range(12)), 4, False))) == [
                0, 1, 4, 5, 8, 9,
            ]  # fmt: skip

    def test_are_those_of_a_list_that_says_it_is_a_share(self, monkeypatch):
        class Shared(list):
            rank, num_replicas = 1, 2

        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with warnings.catch_warnings(action="error"):
            assert indices(loader_of(sampler=Shared([1, 3, 5]))) == [1, 3, 5]

    @pytest.mark.parametrize(("rank", "world_size"), [("", ""), ("-1", "-1"), ("3", "2"), ("x", "2")])
    def test_are_whole_where_the_variables_make_no_sense(self, monkeypatch, shards, rank, world_size):
        """Left empty, or over from another program; those of workers are WebDataset's."""
        for name in ("RANK", "WORKER"):
            monkeypatch.setenv(name, rank)
        for name in ("WORLD_SIZE", "NUM_WORKERS"):
            monkeypatch.setenv(name, world_size)
        assert indices(loader_of(Numbers(5))) == list(range(5))
        assert sorted(flat(plain(make("buckets")))) == NUMBERS
        assert sorted(flat(plain(make(shards)))) == NUMBERS
