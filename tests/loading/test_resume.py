"""Resuming in mid-epoch: what is left is bit for bit the undisturbed rest, however it is loaded and by how many."""

import itertools
import json
import re
from collections import Counter
from functools import partial

import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies
from torch.utils.data import DistributedSampler, Sampler, Subset

import labkit as lk
from tests.loaders import Numbers, loader_of, rows, same


def saved(state: dict) -> dict:
    """A state as a checkpoint gives it back."""
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)


def resumes(make, make_again, n_taken: int, epoch: int = 1) -> None:
    """Take some batches of an epoch, resume in another loader, and compare with the epoch as a whole, and the next."""
    whole, begun, resumed = make(), make(), make_again()
    whole.set_epoch(epoch)
    expected, following = list(whole), list(whole)
    begun.set_epoch(epoch)
    iterator = iter(begun)
    taken = list(itertools.islice(iterator, n_taken))
    state = saved(begun.state_dict())
    assert saved(iterator.state_dict()) == state or not n_taken
    del iterator
    resumed.load_state_dict(state)
    assert saved(resumed.state_dict()) == state
    if n_taken < len(expected):
        assert same(taken + list(resumed), expected)
    else:  # where the next epoch begins
        assert same(taken, expected)
    assert same(list(resumed), following)


def drawn_loader(n_samples=30, num_workers=0, **options):
    return loader_of(Numbers(n_samples), num_workers, **{"shuffle": True, **options})


class TestMakeLoader:
    @pytest.mark.parametrize(("n_taken", "again"), [(0, 0), (1, 3), (8, 1)])
    def test_gives_the_same_rest_for_any_number_of_workers(self, n_taken, again):
        resumes(lambda: drawn_loader(num_workers=2), lambda: drawn_loader(num_workers=again), n_taken)

    def test_loads_nothing_again_that_was_given(self):
        loaded = []
        begun, resumed = (loader_of(Numbers(300, loaded.append), batch_size=10, shuffle=True) for _ in range(2))
        list(itertools.islice(begun, 25))
        resumed.load_state_dict(begun.state_dict())
        list(resumed)
        assert sorted(loaded) == list(range(300))

    def test_resumes_where_the_training_sets_the_epoch_itself(self):
        def make():
            return loader_of(Numbers(24), sampler=DistributedSampler(range(24), num_replicas=2, rank=0))

        begun, resumed = make(), make()
        begun.sampler.set_epoch(3)
        iterator = iter(begun)
        next(iterator)
        state, expected = begun.state_dict(), rows(iterator)
        resumed.load_state_dict(state)
        resumed.sampler.set_epoch(state["epoch"])
        assert rows(resumed) == expected


class TestBatchLoader:
    @pytest.mark.parametrize("n_taken", [0, 5, 6])
    @pytest.mark.parametrize("kind", ["pictures", "pixels"])
    def test_gives_the_same_rest_for_any_number_of_threads(self, kind, n_taken, request):
        source = request.getfixturevalue(kind)
        for order in ({}, {"sampler": [5] * 11}):
            options = {"size": 32, "batch_size": 2, "prefetch_factor": 3, **order}
            makers = (partial(lk.BatchLoader, source, num_threads=number, **options) for number in (2, 1))
            resumes(*makers, n_taken)


class TestCUDAPrefetcher:
    def test_has_no_state_where_its_loader_has_none(self):
        assert not hasattr(lk.CUDAPrefetcher([torch.zeros(1)], "cpu"), "state_dict")


class TestStatesThatDoNotFit:
    @pytest.mark.parametrize(("change", "said"), [
        ({"n_samples": 31}, "with n_samples=30, this loader has 31: make the loader as it was, or start the epoch"),
        ({"batch_size": 5}, "with batch_size=4, this loader has 5"),
        ({"seed": 1}, "with seed=0, this loader has 1"),
        ({"shuffle": False}, r"with sampler='ShuffledSampler\(seed=0\)', this loader has 'SequentialSampler\(\)'"),
        ({"shuffle": False, "sampler": DistributedSampler(range(30), 2, 0, seed=1)},
         r"this loader has 'DistributedSampler\(shuffle=True, seed=1, drop_last=False\)'"),
    ])  # fmt: skip
    def test_are_refused_and_what_differs_is_named(self, pictures, change, said):
        state = drawn_loader().state_dict()
        with pytest.raises(ValueError, match=said):
            drawn_loader(**change).load_state_dict(state)
        with pytest.raises(ValueError, match="n_samples=30, this loader has 12: make the loader as it was"):
            lk.BatchLoader(pictures, batch_size=4).load_state_dict(state)

    def test_are_those_of_other_keys(self, first_photos):
        stores = [lk.FolderStore(first_photos(count)) for count in (4, 5)]
        parts = [Subset(lk.ImageDataset(stores[1]), rows) for rows in (range(3), range(1, 4))]
        first, other = map(lk.make_loader, parts)
        with pytest.raises(ValueError, match="with keys_crc32="):
            other.load_state_dict(first.state_dict())
        numbers = list(range(5))
        first, other = (lk.make_loader(Subset(numbers, rows)) for rows in ([0, 1], [2, 3]))
        with pytest.raises(ValueError, match="with keys_crc32="):  # without keys, the numbers count
            other.load_state_dict(first.state_dict())
        first, other = (lk.make_loader(lk.ImageDataset(store)) for store in stores)
        with pytest.raises(ValueError, match="with n_samples=4"):
            other.load_state_dict(first.state_dict())
        with pytest.raises(ValueError, match="with keys_crc32="):
            first.load_state_dict(first.state_dict() | {"keys_crc32": 1})

    @pytest.mark.parametrize("state", [None, {}, {"version": 1}])
    def test_may_be_none_at_all(self, state):
        with pytest.raises(ValueError, match="this is not a state of Loader: give the one"):
            drawn_loader().load_state_dict(state)

    def test_are_those_of_a_sampler_whose_order_is_another_each_time(self):
        class Own(Sampler):
            def __len__(self):
                return 30

            def __iter__(self):
                return iter(torch.randperm(30).tolist())

        loader = drawn_loader(shuffle=False, sampler=Own())
        list(itertools.islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        said = r"Own\(\) does not begin epoch 0 with the 3 batches that were handed out before: .*RandomSampler"
        with pytest.raises(ValueError, match=said):
            next(iter(loader))


def shared_loader(rank, world_size, drop_last=False):
    sampler = DistributedSampler(range(60), num_replicas=world_size, rank=rank, seed=1, drop_last=drop_last)
    return drawn_loader(60, shuffle=False, sampler=sampler)


def bucket_loader(rank=0, world_size=1, num_workers=0, widths=(40, 80, 120), **options):
    sizes = pd.DataFrame({"path": Numbers(60).keys, "width": list(widths) * 20, "height": 80})
    options = {"batch_size": 4, "seed": 3, **options}
    sampler = lk.BucketBatchSampler(sizes, **options, rank=rank, world_size=world_size)
    return loader_of(Numbers(60), num_workers, batch_sampler=sampler)


def run_ranks(make, world_size, n_batches=None, state=None):
    """Batches of numbers that each rank gave, and the state of the last rank."""
    came = []
    for rank in range(world_size):
        loader = make(rank, world_size)
        if state:
            loader.load_state_dict(state)
        else:
            loader.set_epoch(2)
        came.append([batch[:, 0].int().tolist() for batch in itertools.islice(loader, n_batches)])
    return came, saved(loader.state_dict())


def train(make, worlds):
    """Batches that each rank gave in each part of an epoch, which goes on with other ranks."""
    state, parts = None, []
    for world_size, n_batches in worlds:
        ranks, state = run_ranks(make, world_size, n_batches, state)
        parts.append(ranks)
        if state["epoch"] != 2:  # it is over
            break
    return parts


class TestRanksThatChange:
    @pytest.mark.parametrize("kind", ["filled up", "drop_last", "torchrun's", "buckets"])
    @settings(max_examples=10, deadline=None)
    @given(
        strategies.lists(strategies.tuples(strategies.integers(1, 5), strategies.integers(0, 6)), max_size=3),
        strategies.integers(1, 5), strategies.integers(2, 7),
    )  # fmt: skip
    def test_share_each_sample_once(self, kind, begun, last_world_size, batch_size):
        def make(rank, world_size):
            if kind == "buckets":
                return bucket_loader(rank, world_size, batch_size=batch_size)
            if kind != "torchrun's":
                return shared_loader(rank, world_size, kind == "drop_last")
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(world_size))
            return drawn_loader(60)

        with pytest.MonkeyPatch.context() as patch:
            try:
                parts = train(make, [*begun, (last_world_size, None)])
            except ValueError as refused:
                said = re.search(r"cannot give (\d+) ranks equally many batches: (\d+) images make (\d+)", str(refused))
                n_ranks, n_images, n_batches = map(int, said.groups())
                assert kind == "buckets"
                assert n_images < n_batches + -n_batches % n_ranks
                return
        came = Counter(number for ranks in parts for batches in ranks for batch in batches for number in batch)
        largest = sum(len(ranks) for ranks in parts)  # that can be filled up, or left out
        assert came.keys() == set(range(60)) or kind == "drop_last"
        assert max(came.values()) == 1 or kind in ("filled up", "torchrun's")
        if kind == "buckets":
            assert all(len({len(batches) for batches in ranks}) == 1 for ranks in parts)
            assert all(len({number % 3 for number in batch}) == 1 for ranks in parts for one in ranks for batch in one)
        else:
            assert abs(came.total() - 60) <= largest
            assert len({sum(map(len, batches)) for batches in parts[-1]}) == 1

    def test_go_on_each_with_its_own_by_the_state_of_one(self):
        begun, state = run_ranks(shared_loader, 2, 4)
        rest, _ = run_ranks(shared_loader, 2, None, state)
        whole, _ = run_ranks(shared_loader, 2)
        assert [taken + left for taken, left in zip(begun, rest, strict=True)] == whole


class TestBuckets:
    @pytest.mark.parametrize(("n_taken", "again"), [(1, 0), (14, 2)])
    def test_give_the_same_rest_for_any_number_of_workers(self, n_taken, again):
        resumes(lambda: bucket_loader(num_workers=2), lambda: bucket_loader(num_workers=again), n_taken)

    def test_are_refused_where_too_few_images_are_left_for_the_new_ranks(self):
        first, resumed = bucket_loader(), bucket_loader(0, 5)
        list(itertools.islice(first, 14))
        resumed.load_state_dict(first.state_dict())
        with pytest.raises(ValueError, match="cannot give 5 ranks equally many batches: 4 images make 1 batches"):
            next(iter(resumed))

    @pytest.mark.parametrize(("change", "said"), [
        ({"batch_size": 5}, "batch_size=4, this loader has 5"), ({"seed": 1}, "seed=3"),
        ({"shuffle": False}, "shuffle=True"),
        ({"buckets": lk.Buckets(((40, 80), (120, 80)))}, "sizes_crc32="), ({"widths": (40, 80, 160)}, "sizes_crc32="),
    ], ids=str)  # fmt: skip
    def test_of_other_batches_are_refused(self, change, said):
        with pytest.raises(ValueError, match=said):
            bucket_loader(**change).load_state_dict(bucket_loader().state_dict())
