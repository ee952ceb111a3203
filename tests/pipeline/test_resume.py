"""Resuming in mid-epoch: what is left is bit for bit the undisturbed rest, however it is loaded and by how many."""

import itertools
import json
from collections import Counter

import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies
from torch.utils.data import Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from labkit import (
    BatchLoader,
    BucketBatchSampler,
    Buckets,
    CUDAPrefetcher,
    FolderStore,
    ImageDataset,
    LoaderConfig,
    PixelStore,
    make_loader,
)

COLUMNS = ["path", "width", "height"]


class Numbers(Dataset):
    """Each sample is its number and a random one; `loaded` lists those that were asked for."""

    def __init__(self, count: int):
        self.count, self.loaded = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.loaded.append(index)
        return index, torch.rand(2)


def numbers_loader(count=30, *, num_workers=0, batch_size=4, seed=0, **options):
    config = LoaderConfig(batch_size=batch_size, num_workers=num_workers, seed=seed, oversubscribe=True)
    return make_loader(Numbers(count), config, **{"shuffle": True} | options)


def equal(batches, others) -> bool:
    pairs = list(zip(batches, others, strict=True))
    return all(torch.equal(first, second) for pair in pairs for first, second in zip(*pair, strict=True))


def resumes(make, make_again, n_taken: int, epoch: int = 1) -> None:
    """Take some batches of an epoch, resume in another loader, and compare with the epoch as a whole, and the next."""
    whole = make()
    whole.set_epoch(epoch)
    expected, following = list(whole), list(whole)
    begun = make()
    begun.set_epoch(epoch)
    iterator = iter(begun)
    taken = list(itertools.islice(iterator, n_taken))
    state = json.dumps(begun.state_dict())
    assert len(state) < 1000
    del iterator
    resumed = make_again()
    resumed.load_state_dict(json.loads(state))
    assert json.dumps(resumed.state_dict()) == state
    assert equal(taken + list(resumed), expected)
    assert equal(list(resumed), following)


class TestMakeLoader:
    @pytest.mark.parametrize("n_taken", [0, 1, 3, 7, 8])
    @pytest.mark.parametrize("again", [0, 1, 3])
    def test_the_rest_is_the_same_for_any_number_of_workers(self, n_taken, again):
        resumes(lambda: numbers_loader(num_workers=2), lambda: numbers_loader(num_workers=again), n_taken)

    def test_nothing_that_was_given_is_loaded_again(self):
        begun = numbers_loader(10_000, batch_size=10)
        list(itertools.islice(begun, 900))
        resumed = numbers_loader(10_000, batch_size=10)
        resumed.load_state_dict(begun.state_dict())
        list(resumed)
        assert len(resumed.dataset.loaded) == 1000
        assert not set(resumed.dataset.loaded) & set(begun.dataset.loaded)

    @pytest.mark.parametrize("options", [{"drop_last": True}, {"shuffle": False}, {"shuffle": True, "seed": 4}])
    def test_other_orders(self, options):
        resumes(lambda: numbers_loader(**options), lambda: numbers_loader(**options), 5)

    def test_images(self, first_photos):
        def make(num_workers):
            dataset = ImageDataset(FolderStore(first_photos(10)), transform=lambda image: image[:, :32, :32])
            return make_loader(dataset, LoaderConfig(batch_size=3, num_workers=num_workers), shuffle=True)

        resumes(lambda: make(2), lambda: make(0), 2)

    def test_between_epochs_and_after_the_last_batch(self):
        loader = numbers_loader()
        assert loader.state_dict()["epoch"] == 0
        for _ in range(2):
            for n_batches, _ in enumerate(loader, 1):
                state = loader.state_dict()
                assert state["n_batches"] == n_batches
        assert state["epoch"] == 1
        assert (loader.state_dict()["epoch"], loader.state_dict()["n_batches"]) == (2, 0)
        resumed = numbers_loader()
        resumed.load_state_dict(state)
        assert list(resumed) == []
        assert resumed.epoch == 2

    def test_an_epoch_that_was_left(self):
        loader = numbers_loader()
        next(iter(loader))
        state = loader.state_dict()
        assert (state["epoch"], state["n_batches"]) == (0, 1)
        loader.set_epoch(5)
        assert loader.state_dict()["epoch"] == 5

    def test_another_epoch_begins_at_its_head(self):
        loader = numbers_loader()
        list(itertools.islice(loader, 3))
        resumed = numbers_loader()
        resumed.load_state_dict(loader.state_dict())
        resumed.set_epoch(3)
        assert len(list(resumed)) == 8


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_image_data_sets_in_torchdatas_stateful_data_loader(first_photos, num_workers):
    def make():
        dataset = ImageDataset(FolderStore(first_photos(10)), transform=lambda image: image[:, :32, :32])
        method = {"multiprocessing_context": "fork"} if num_workers else {}
        generator = torch.Generator().manual_seed(3)
        return StatefulDataLoader(dataset, 3, shuffle=True, generator=generator, num_workers=num_workers, **method)

    whole, begun, resumed = list(make()), make(), make()
    taken = list(itertools.islice(begun, 2))
    resumed.load_state_dict(begun.state_dict())
    assert equal(taken + list(resumed), whole)


@pytest.fixture(scope="module")
def sources(first_photos, tmp_path_factory):
    store = FolderStore(first_photos(13))
    path = tmp_path_factory.mktemp("pixels") / "pixels"
    return {"files": store, "pixels": PixelStore.build(store, path, short_side=64)}


class TestBatchLoader:
    @pytest.mark.parametrize("n_taken", [0, 1, 4, 6, 7])
    @pytest.mark.parametrize("kind", ["files", "pixels"])
    def test_the_rest_is_the_same_for_any_number_of_threads(self, sources, kind, n_taken):
        def make(num_threads):
            return BatchLoader(sources[kind], size=32, batch_size=2, num_threads=num_threads, prefetch_factor=3)

        resumes(lambda: make(2), lambda: make(1), n_taken)

    @pytest.mark.slow
    def test_processes(self, sources):
        def make(num_processes):
            return BatchLoader(sources["pixels"], size=32, batch_size=2, num_processes=num_processes)

        resumes(lambda: make(2), lambda: make(0), 3)
        resumes(lambda: make(0), lambda: make(1), 3)

    def test_one_kind_of_loader_reads_no_state_of_the_other(self, sources):
        loader = BatchLoader(sources["files"], batch_size=4)
        with pytest.raises(ValueError, match="n_samples=30, this loader has 13: make the loader as it was"):
            loader.load_state_dict(numbers_loader().state_dict())


def shared_loader(world_size: int, rank: int, *, count=50, batch_size=3, **options):
    sampler = DistributedSampler(range(count), num_replicas=world_size, rank=rank, seed=1, **options)
    return numbers_loader(count, shuffle=False, sampler=sampler, batch_size=batch_size)


def run_ranks(world_size: int, n_batches: int | None, state=None, **options):
    """Numbers that all ranks gave in `n_batches` each, and the state of the last rank."""
    came = []
    for rank in range(world_size):
        loader = shared_loader(world_size, rank, **options)
        loader.set_epoch(2)
        if state:
            loader.load_state_dict(state)
        given_batches = list(itertools.islice(iter(loader), n_batches))
        came.append([int(number) for numbers, _ in given_batches for number in numbers])
    return came, loader.state_dict()


class TestRanks:
    @settings(max_examples=12, deadline=None)
    @given(
        strategies.lists(strategies.tuples(strategies.integers(1, 5), strategies.integers(0, 3)), max_size=3),
        strategies.integers(1, 5),
    )
    def test_each_sample_comes_once_however_the_ranks_change(self, begun, last_world_size):
        state, came = None, []
        for world_size, n_batches in begun:
            ranks, state = run_ranks(world_size, n_batches, state)
            came += [number for rank in ranks for number in rank]
            if state["epoch"] != 2:  # it is over
                break
        else:
            ranks, _ = run_ranks(last_world_size, None, state)
            came += [number for rank in ranks for number in rank]
        assert len({len(rank) for rank in ranks}) == 1
        counted = Counter(came)
        assert counted.keys() == set(range(50))
        assert sum(counted.values()) - 50 <= sum(world_size for world_size, _ in begun) + last_world_size  # filled up

    def test_with_drop_last_none_comes_twice(self):
        ranks, state = run_ranks(2, 3, drop_last=True)
        rest, _ = run_ranks(3, None, state, drop_last=True)
        came = [number for rank in ranks + rest for number in rank]
        assert len(came) == len(set(came)) == 18 + 30

    def test_the_state_of_one_rank_serves_all(self):
        ranks, state = run_ranks(2, 4)
        rest, _ = run_ranks(2, None, state)
        whole, _ = run_ranks(2, None)
        assert [taken + left for taken, left in zip(ranks, rest, strict=True)] == whole

    def test_one_process_needs_the_same_sampler(self):
        _, state = run_ranks(2, 4)
        with pytest.raises(ValueError, match=r"sampler='DistributedSampler\(shuffle=True, seed=1, drop_last=False\)'"):
            numbers_loader(50, batch_size=3).load_state_dict(state)


class TestStatesThatDoNotFit:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"count": 31}, "with n_samples=30, this loader has 31: make the loader as it was, or begin the epoch"),
            ({"batch_size": 5}, "with batch_size=4, this loader has 5"),
            ({"seed": 1}, "with seed=0, this loader has 1"),
            ({"shuffle": False}, r"with sampler='ShuffledSampler\(seed=0\)', this loader has 'SequentialSampler\(\)'"),
        ],
    )
    def test_what_differs_is_named(self, change, said):
        with pytest.raises(ValueError, match=said):
            numbers_loader(**change).load_state_dict(numbers_loader().state_dict())

    def test_other_keys(self, first_photos):
        stores = [FolderStore(first_photos(count)) for count in (4, 5)]
        first, other = (make_loader(torch.utils.data.Subset(ImageDataset(store), range(3))) for store in stores)
        other.load_state_dict(first.state_dict())  # of a part, nobody knows the keys
        first, other = (make_loader(ImageDataset(store)) for store in stores)
        with pytest.raises(ValueError, match="with n_samples=4"):
            other.load_state_dict(first.state_dict())
        with pytest.raises(ValueError, match="with keys_crc32="):
            first.load_state_dict(first.state_dict() | {"keys_crc32": 1})

    @pytest.mark.parametrize("state", [None, {}, {"version": 1}])
    def test_no_state(self, state):
        with pytest.raises(ValueError, match="this is not a state of Loader: give the one"):
            numbers_loader().load_state_dict(state)

    def test_a_sampler_whose_order_is_another_each_time(self):
        loader = numbers_loader(shuffle=False, sampler=RandomSampler(range(30)))
        list(itertools.islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="does not begin epoch 0 with the 3 batches that were handed out before"):
            next(iter(loader))


class TestCUDAPrefetcher:
    @pytest.mark.parametrize("depth", [1, 3])
    def test_batches_that_are_only_copied_ahead_come_after_the_resume(self, depth):
        def make():
            return CUDAPrefetcher(numbers_loader(), "cpu", depth=depth)

        for n_taken in range(9):
            resumes(make, make, n_taken)

    def test_a_loader_without_a_state_has_none_here(self):
        assert not hasattr(CUDAPrefetcher([torch.zeros(1)], "cpu"), "state_dict")


def bucket_loader(world_size: int, rank: int, **options):
    sides = [(40 + 40 * (number % 3), 80) for number in range(60)]
    sizes = pd.DataFrame([(str(number), *side) for number, side in enumerate(sides)], columns=COLUMNS)
    sampler = BucketBatchSampler(sizes, **{"batch_size": 4, "seed": 3} | options, rank=rank, world_size=world_size)
    return make_loader(Numbers(60), LoaderConfig(num_workers=0), batch_sampler=sampler)


class TestBuckets:
    @pytest.mark.parametrize("n_taken", [0, 1, 14, 15])
    @pytest.mark.parametrize("again", [0, 2])
    def test_the_rest_is_the_same_for_any_number_of_workers(self, n_taken, again):
        def make(num_workers):
            config = LoaderConfig(num_workers=num_workers, oversubscribe=True)
            return make_loader(Numbers(60), config, batch_sampler=bucket_loader(1, 0).batch_sampler)

        resumes(lambda: make(2), lambda: make(again), n_taken)

    @settings(max_examples=30, deadline=None)
    @given(
        strategies.lists(strategies.tuples(strategies.integers(1, 5), strategies.integers(0, 6)), max_size=3),
        strategies.integers(1, 5),
        strategies.sampled_from(["keep", "drop", "fill"]),
        strategies.integers(2, 7),
    )
    def test_each_image_comes_once_however_the_ranks_change(self, begun, last_world_size, remainder, batch_size):
        state, came = None, []
        for world_size, n_batches in [*begun, (last_world_size, None)]:
            ranks = []
            for rank in range(world_size):
                loader = bucket_loader(world_size, rank, remainder=remainder, batch_size=batch_size)
                if state:
                    loader.load_state_dict(state)
                try:
                    batches = [numbers.tolist() for numbers, _ in itertools.islice(iter(loader), n_batches)]
                except ValueError as refused:
                    if remainder == "keep" and "cannot give" in str(refused) and 60 - len(came) < world_size:
                        return
                    raise
                assert all(len({number % 3 for number in batch}) == 1 for batch in batches)
                ranks.append(batches)
            assert len({len(batches) for batches in ranks}) == 1
            came += itertools.chain(*itertools.chain(*ranks))
            state = json.loads(json.dumps(loader.state_dict()))
            if state["epoch"] != 0:  # it is over
                break
        if remainder == "keep":
            assert sorted(came) == list(range(60))
        else:
            assert len(set(came)) == (len(came) if remainder == "drop" else 60)

    def test_too_few_images_for_the_new_ranks(self):
        first = bucket_loader(1, 0)
        list(itertools.islice(first, 14))
        resumed = bucket_loader(5, 0)
        resumed.load_state_dict(first.state_dict())
        with pytest.raises(ValueError, match="cannot give 5 ranks equally many batches: 4 images make 1 batches"):
            next(iter(resumed))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"batch_size": 5}, "batch_size=4, this loader has 5"),
            ({"seed": 1}, "seed=3"),
            ({"remainder": "fill"}, "remainder=keep"),
            ({"shuffle": False}, "shuffle=True"),
            ({"buckets": Buckets(((40, 80), (120, 80)))}, "sizes_crc32="),
        ],
    )
    def test_of_other_batches(self, change, said):
        with pytest.raises(ValueError, match=said):
            bucket_loader(1, 0, **change).load_state_dict(bucket_loader(1, 0).state_dict())

    def test_other_sizes_are_refused(self):
        loaders = []
        for width in (40, 50):
            sizes = pd.DataFrame([("0", width, 80), ("1", 80, 80)], columns=COLUMNS)
            sampler = BucketBatchSampler(sizes, 1)
            loaders.append(make_loader(Numbers(2), LoaderConfig(num_workers=0), batch_sampler=sampler))
        with pytest.raises(ValueError, match=r"sampler='BucketBatchSampler\(.*sizes_crc32="):
            loaders[1].load_state_dict(loaders[0].state_dict())
