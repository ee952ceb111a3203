"""`read_shards` and `BucketBatchSampler` in torch's own loaders, where nobody sets the epoch: none comes twice."""

import copy
import itertools
import multiprocessing
import os
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import labkit as lk
from labkit.data.shards_read import ShardWarning
from tests.data.shards.test_read import at, numbered, numbers

# Of torchdata, about torch itself; and of torch, about this machine's cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

N_SAMPLES = 40
WORKERS = {
    "none": {},
    "two": {"num_workers": 2, "multiprocessing_context": "fork"},
    "two that stay": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "spawned": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "spawned ones that stay": {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
}  # fmt: skip
workers = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.exhaustive if "spawned" in name else ())
        for name, options in WORKERS.items()
    ],
)
torchs_workers = pytest.mark.parametrize("options", [WORKERS["none"], WORKERS["two"]], ids=["none", "two"])


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return numbered(tmp_path_factory.mktemp("shards") / "set", N_SAMPLES, 7)


def read(shards, epoch=None, **options):
    dataset = lk.read_shards(shards, **{"shuffle": 8, "shuffle_initial": 4, **options})
    if epoch is not None:
        dataset.set_epoch(epoch)
    return dataset


def plain(dataset, **options):
    return DataLoader(dataset, batch_size=None, **options)


def told(shards, n_epochs, options, **more):
    """What a data set gives that is told each epoch."""
    return [numbers(plain(read(shards, epoch, **more), **options)) for epoch in range(n_epochs)]


class TestShards:
    @workers
    def test_each_pass_is_the_next_epoch(self, shards, options):
        loader = plain(read(shards), **options)
        epochs = [numbers(loader) for _ in range(3)]
        assert all(sorted(epoch) == list(range(N_SAMPLES)) for epoch in epochs)
        assert epochs == told(shards, 3, options)
        assert epochs[0] != epochs[1] != epochs[2]

    @workers
    def test_epochs_of_some_samples_go_on_through_all(self, shards, options):
        loader = plain(read(shards, samples_per_rank=10), **options)
        assert sorted(itertools.chain(*(numbers(loader) for _ in range(4)))) == list(range(N_SAMPLES))

    @workers
    def test_a_new_loader_each_epoch_goes_on(self, shards, options):
        """Also where its generator, or torch's, begins with the same seed each time."""
        dataset, epochs = read(shards), []
        for _ in range(3):
            torch.manual_seed(0)
            epochs.append(numbers(plain(dataset, **options)))
        assert epochs == told(shards, 3, options)

    @workers
    def test_an_epoch_that_was_set_decides(self, shards, options):
        dataset = read(shards)
        loader = plain(dataset, **options)
        assert numbers(loader) == told(shards, 1, options)[0]
        dataset.set_epoch(2)
        assert numbers(loader) == numbers(loader) == told(shards, 3, options)[2]

    @torchs_workers
    def test_two_passes_at_once_are_two_whole_epochs(self, shards, options):
        loader = plain(read(shards), **options)
        pairs = zip(loader, loader, strict=True)
        first, second = zip(*([int(image[0, 0, 0]) for image, _ in pair] for pair in pairs), strict=True)
        assert [list(first), list(second)] == told(shards, 2, options)

    @torchs_workers
    def test_a_look_at_one_batch_leaves_the_epoch_whole(self, shards, options):
        loader = plain(read(shards), **options)
        next(iter(loader))
        assert sorted(numbers(loader)) == list(range(N_SAMPLES))

    @torchs_workers
    @pytest.mark.parametrize("n_taken", [0, 3, 10])
    def test_a_resumed_training_goes_on_as_the_undisturbed_one(self, shards, options, n_taken):
        def load(state=None):
            loader = StatefulDataLoader(read(shards), batch_size=4, **options)
            if state is not None:
                loader.load_state_dict(state)
            return loader

        undisturbed = load()
        whole = [batches_of(undisturbed) for _ in range(3)]
        assert whole[0] != whole[1]
        begun = load()
        came = [batches_of(begun), batches_of(itertools.islice(begun, n_taken)) if n_taken else []]
        resumed = load(pickle.loads(pickle.dumps(begun.state_dict())))
        came[1] += batches_of(resumed)
        assert [*came, batches_of(resumed)] == whole

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
    def test_a_copy_goes_on_by_itself(self, shards, again):
        dataset, expected = read(shards), told(shards, 3, {})
        assert numbers(dataset) == expected[0]
        copied = again(dataset)
        assert [numbers(copied), numbers(copied)] == expected[1:]
        assert numbers(dataset) == expected[1]

    def test_ranks_that_share_a_data_set_each_count_their_own(self, shards, tmp_path, monkeypatch):
        """As `torch.multiprocessing.spawn` and notebook launchers start them."""
        dataset, expected = read(shards), {}
        for rank in range(2):
            at(monkeypatch, rank, 2)
            expected[rank] = told(shards, 2, WORKERS["two"])
        ranks = [FORK.Process(target=count_epochs, args=(dataset, rank, tmp_path / f"{rank}")) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert {rank: pickle.loads((tmp_path / f"{rank}").read_bytes()) for rank in range(2)} == expected

    def test_ranks_that_count_by_themselves_are_warned_once(self, shards, monkeypatch):
        at(monkeypatch, 0, 2)
        dataset = read(shards)
        list(dataset)
        with pytest.warns(
            ShardWarning, match=r"each of 2 ranks counts its own passes.*call set_epoch\(epoch\)"
        ) as caught:
            list(dataset)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(dataset)
            unshuffled = read(shards, shuffle=0)
            list(unshuffled), list(unshuffled)
            set_each = read(shards)
            for epoch in range(3):
                set_each.set_epoch(epoch)
                list(set_each)


FORK = multiprocessing.get_context("fork")


def count_epochs(dataset, rank, path):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    loader = plain(dataset, num_workers=2)
    path.write_bytes(pickle.dumps([numbers(loader) for _ in range(2)]))


def batches_of(loader):
    return [images[:, 0, 0, 0].tolist() for images, _ in loader]


SIZES = pd.DataFrame({"path": [f"{n}.jpg" for n in range(38)], "width": np.repeat([100, 150, 200], [20, 10, 8]),
                      "height": np.repeat([200, 150, 100], [20, 10, 8])})  # fmt: skip
BUCKETS = lk.Buckets(((100, 200), (150, 150), (200, 100)))


def bucketed(epoch=None, **options):
    sampler = lk.BucketBatchSampler(SIZES, 4, buckets=BUCKETS, **options)
    if epoch is not None:
        sampler.set_epoch(epoch)
    return sampler


def numbered_batches(sampler, **options):
    return DataLoader(range(38), batch_sampler=sampler, collate_fn=list, **options)


class TestBuckets:
    @workers
    def test_each_pass_is_the_next_epoch(self, options):
        loader = numbered_batches(bucketed(), **options)
        epochs = [list(loader) for _ in range(3)]
        assert epochs == [list(bucketed(epoch)) for epoch in range(3)]
        assert all(sorted(itertools.chain(*epoch)) == list(range(38)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]

    def test_an_epoch_that_was_set_decides(self):
        sampler = bucketed()
        list(sampler)
        sampler.set_epoch(5)
        assert [list(sampler), list(sampler)] == [list(bucketed(5)), list(bucketed(6))]

    @torchs_workers
    def test_two_passes_at_once_are_two_whole_epochs(self, options):
        loader = numbered_batches(bucketed(), **options)
        first, second = zip(*zip(loader, loader, strict=True), strict=True)
        assert [list(first), list(second)] == [list(bucketed(0)), list(bucketed(1))]

    @torchs_workers
    @pytest.mark.parametrize("n_taken", [1, 3, 7])
    def test_a_resumed_training_goes_on_as_the_undisturbed_one(self, options, n_taken):
        def load():
            return StatefulDataLoader(range(38), batch_sampler=bucketed(), collate_fn=list, **options)

        begun = load()
        came = [list(begun), list(itertools.islice(begun, n_taken))]
        resumed = load()
        resumed.load_state_dict(pickle.loads(pickle.dumps(begun.state_dict())))
        came[1] += list(resumed)
        assert [*came, list(resumed)] == [list(bucketed(epoch)) for epoch in range(3)]
