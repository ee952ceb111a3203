"""BucketBatchSampler: what an epoch holds under each policy and for each rank, its order, its state, its refusals."""

import json
import os
from collections import Counter
from itertools import chain, islice, pairwise

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Subset

import labkit as lk
from labkit.loading.bucket_sampler import BucketBatchSampler, check_batch_sampler

SHAPES = ((100, 200), (150, 150), (200, 100), (300, 75))
BUCKETS = lk.Buckets(SHAPES)


def frame_of(counts: list[int]) -> pd.DataFrame:
    """So many images of each shape, mixed."""
    sizes = np.repeat(np.array(SHAPES)[: len(counts)], counts, axis=0)
    widths, heights = np.random.default_rng(4).permutation(sizes).T
    return pd.DataFrame({"path": [f"{n:04}.jpg" for n in range(len(sizes))], "width": widths, "height": heights})


def samplers(sizes, batch_size=4, world_size=1, **options) -> list[BucketBatchSampler]:
    options = {"buckets": BUCKETS, "world_size": world_size, **options}
    return [BucketBatchSampler(sizes, batch_size, rank=rank, **options) for rank in range(world_size)]


def epochs_of(ranks: list[BucketBatchSampler], epoch: int = 0) -> list[list[list[int]]]:
    """The batches of each rank."""
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in ranks]


def shapes_of(sizes: pd.DataFrame, batch: list[int]) -> set[tuple[int, int]]:
    rows = sizes.loc[batch]
    return set(zip(rows.width, rows.height, strict=True))


COUNTS = st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(any)


class TestAnEpoch:
    @settings(max_examples=150, deadline=None)
    @given(
        counts=COUNTS, batch_size=st.integers(1, 6), world_size=st.integers(1, 5), shuffle=st.booleans(),
        remainder=st.sampled_from(["keep", "drop", "fill"]), epoch=st.integers(0, 3),
    )  # fmt: skip
    def test_what_is_promised(self, counts, batch_size, world_size, shuffle, remainder, epoch):
        sizes, n_images = frame_of(counts), sum(counts)
        n_cut = sum(-(-count // batch_size) for count in counts)
        n_full = sum(count // batch_size for count in counts)
        options = {"remainder": remainder, "shuffle": shuffle}
        impossible = {
            "keep": -(-n_cut // world_size) * world_size > n_images, "drop": n_full < world_size, "fill": False,
        }  # fmt: skip
        if impossible[remainder]:
            with pytest.raises(ValueError, match="remainder="):
                samplers(sizes, batch_size, world_size, **options)
            return
        ranks = samplers(sizes, batch_size, world_size, **options)
        each = epochs_of(ranks, epoch)
        n_each = n_full // world_size if remainder == "drop" else -(-n_cut // world_size)
        assert [len(sampler) for sampler in ranks] == [len(batches) for batches in each] == [n_each] * world_size
        batches = [batch for of_rank in each for batch in of_rank]
        assert all(len(shapes_of(sizes, batch)) == 1 for batch in batches)
        times = Counter(index for batch in batches for index in batch)
        assert all(type(index) is int for index in times)
        assert set(times) <= set(sizes.index)
        if remainder == "keep":
            assert sorted(times.elements()) == list(sizes.index)
            assert max(map(len, batches)) <= batch_size
        else:
            assert {len(batch) for batch in batches} == {batch_size}
        if remainder == "drop":
            assert set(times.values()) == {1}
            n_left_out = sum(count % batch_size for count in counts) + n_full % world_size * batch_size
            assert times.total() == n_images - n_left_out
        if remainder == "fill":
            n_filled = sum(-count % batch_size for count in counts) + -n_cut % world_size * batch_size
            assert set(times) == set(sizes.index)
            assert times.total() == n_images + n_filled

    def test_keep_halves_the_largest_and_no_more_than_needed(self):
        each = epochs_of(samplers(frame_of([9, 8]), 8, 4))
        assert sorted(len(batch) for of_rank in each for batch in of_rank) == [1, 4, 4, 8]

    def test_fill_repeats_within_the_bucket_as_evenly_as_can_be(self):
        sampler = samplers(frame_of([3]), 8, remainder="fill")[0]
        assert sorted(Counter(next(iter(sampler))).values()) == [2, 3, 3]

    def test_drop_leaves_out_others_in_another_epoch(self):
        (sampler,) = samplers(frame_of([7, 6]), 4, remainder="drop")
        left_out = []
        for epoch in range(60):
            (batches,) = epochs_of([sampler], epoch)
            left_out += {*range(13)} - {index for batch in batches for index in batch}
        assert set(left_out) == set(range(13))

    def test_rows_that_are_left_out_keep_the_numbers_of_the_others(self):
        sizes = frame_of([10, 10])
        some = sizes[sizes.index % 3 > 0].sample(frac=1, random_state=0)
        (batches,) = epochs_of(samplers(some))
        assert sorted(index for batch in batches for index in batch) == sorted(some.index)
        assert all(len(shapes_of(sizes, batch)) == 1 for batch in batches)


class TestOrder:
    def test_by_seed_and_epoch_alone(self):
        sizes = frame_of([20, 30, 10])
        (first,), (again,) = (samplers(sizes, seed=7) for _ in range(2))
        torch.manual_seed(1)
        epochs = [epochs_of([first], epoch)[0] for epoch in range(3)]
        torch.manual_seed(2)
        assert [epochs_of([again], epoch)[0] for epoch in (2, 0, 1)] == [epochs[2], epochs[0], epochs[1]]
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs_of(samplers(sizes, seed=8))[0] != epochs[0]

    def test_without_shuffling_bucket_by_bucket_in_the_rows_order(self):
        sizes = frame_of([5, 0, 6])
        tall, wide = (sizes.index[sizes.width == width].tolist() for width in (100, 200))
        expected = [tall[:4], tall[4:], wide[:4], wide[4:]]
        assert epochs_of(samplers(sizes, shuffle=False), 3)[0] == expected

    def test_batches_of_all_buckets_are_mixed(self):
        """In 200 places of batches of two equal buckets, runs of one bucket are as long as for tosses of a coin."""
        sizes = frame_of([400, 400])
        (batches,) = epochs_of(samplers(sizes))
        tall = [shapes_of(sizes, batch) == {(100, 200)} for batch in batches]
        n_changes = sum(one != other for one, other in pairwise(tall))
        assert abs(n_changes - 100) < 4 * 50**0.5  # four standard deviations

    def test_images_of_a_bucket_meet_new_ones(self):
        (sampler,) = samplers(frame_of([40]))
        together = [{frozenset(batch) for batch in epochs_of([sampler], epoch)[0]} for epoch in range(2)]
        assert len(together[0] & together[1]) < 2


class TestState:
    """As torchdata's loader saves and loads it; `make_loader` has a state of its own."""

    @pytest.mark.parametrize("n_given", [0, 1, 5, 13])
    def test_goes_on_after_the_batches_that_were_given(self, n_given):
        sizes = frame_of([20, 18, 11])
        (whole,) = epochs_of(samplers(sizes), 2)
        assert len(whole) == 13
        (sampler,), (fresh,) = samplers(sizes), samplers(sizes)
        sampler.set_epoch(2)
        given = list(islice(sampler, n_given))
        state = json.loads(json.dumps(sampler.state_dict()))
        assert state == ({"epoch": 2, "n_given": n_given} if n_given else {"epoch": 0, "n_given": 0})
        fresh.load_state_dict(state)
        fresh.set_epoch(2)  # as loaders do: the epoch that it is in
        iter(fresh)  # torch asks twice
        assert given + list(fresh) == whole
        assert list(fresh) == epochs_of(samplers(sizes), 3)[0]

    def test_another_epoch_begins_at_its_first_batch(self):
        (sampler,) = samplers(frame_of([20]))
        next(iter(sampler))
        sampler.load_state_dict(sampler.state_dict())
        sampler.set_epoch(1)
        assert len(list(sampler)) == 5


class TestRanks:
    def test_from_the_environment_of_torchrun(self, monkeypatch):
        sizes = frame_of([20, 18])
        sampler = BucketBatchSampler(sizes, 4, buckets=BUCKETS)
        assert len(sampler) == 10
        monkeypatch.setitem(os.environ, "RANK", "1")
        monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
        assert len(sampler) == 5
        assert list(sampler) == list(samplers(sizes, world_size=2)[1])

    def test_from_torch_distributed(self, tmp_path):
        sampler = BucketBatchSampler(frame_of([20, 18]), 4, buckets=BUCKETS)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            assert list(sampler) == list(samplers(frame_of([20, 18]))[0])
        finally:
            torch.distributed.destroy_process_group()

    def test_given_ones_come_first(self, monkeypatch):
        monkeypatch.setitem(os.environ, "RANK", "1")
        monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
        assert len(samplers(frame_of([20, 18]))[0]) == 10


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"batch_size": 0}, "batch_size must be an integer >= 1"),
            ({"remainder": "pad"}, "remainder must be one of keep, drop, fill, got 'pad'"),
            ({"seed": "a"}, "seed must be an integer"),
            ({"rank": 0}, "rank and world_size must be given together, got 0 and None"),
            ({"world_size": 2}, "must be given together, got None and 2"),
            ({"rank": 2, "world_size": 2}, "rank must be below world_size, got 2 of 2"),
            ({"rank": -1, "world_size": 2}, "rank must be an integer >= 0"),
            ({"rank": 0, "world_size": 3, "batch_size": 1}, r"\"keep\" cannot give 3 ranks equally many batches"),
            ({"batch_size": 9, "remainder": "drop"}, r"leaves 0 full batches of 9 for 1 ranks: use fewer buckets"),
        ],
    )
    def test_refused(self, options, said):
        options = {"batch_size": 4, "buckets": BUCKETS, **options}
        with pytest.raises(ValueError, match=said):
            BucketBatchSampler(frame_of([5, 5]), **options)

    @pytest.mark.parametrize(
        "change",
        [
            lambda sizes: sizes.set_index("path", drop=False),
            lambda sizes: pd.concat([sizes, sizes]),
            lambda sizes: sizes.set_index(sizes.index - 1),
        ],
    )
    def test_rows_without_a_number_of_their_own(self, change):
        with pytest.raises(ValueError, match=r"sizes\.reset_index\(drop=True\) numbers them from 0"):
            samplers(change(frame_of([5])))

    def test_the_default_buckets_fit_the_frame(self):
        sampler = BucketBatchSampler(frame_of([5, 5]), 4)
        assert sampler.buckets == lk.Buckets.fit(frame_of([5, 5]))


class TestDataset:
    def test_keys_are_compared(self):
        sizes = frame_of([5, 5])
        (sampler,) = samplers(sizes)
        keys = sizes.path.tolist()

        sampler.check_dataset(_Keyed(keys))
        sampler.check_dataset(Subset(_Keyed(["else.jpg", *keys]), range(1, 11)))
        sampler.check_dataset([0] * 10)  # no keys to compare
        with pytest.raises(ValueError, match=r"row 0 of sizes is '0000.jpg', but image 0 is 'else.jpg': sizes = "):
            sampler.check_dataset(_Keyed(["else.jpg", *keys]))
        with pytest.raises(ValueError, match="sizes has a row 9, and the data set only 9 images"):
            sampler.check_dataset(_Keyed(keys[:-1]))
        samplers(sizes[:9])[0].check_dataset(_Keyed(keys[:-1]))

    def test_the_remedy_puts_rows_in_order(self):
        sizes, dataset = frame_of([5, 5]), _Keyed([f"{n:04}.jpg" for n in (7, 3, 5)])
        ordered = sizes.set_index("path").loc[list(dataset.keys)].reset_index()  # as the message says
        (sampler,) = samplers(ordered)
        sampler.check_dataset(dataset)
        assert [dataset.keys[index] for index in sorted(chain(*sampler))] == ["0007.jpg", "0003.jpg", "0005.jpg"]

    def test_other_batch_samplers_are_only_asked_to_be_alone(self):
        check_batch_sampler([[0, 1]], [5, 6], shuffle=False, sampler=None)
        with pytest.raises(ValueError, match="got a batch_sampler and shuffle, sampler: leave out one"):
            check_batch_sampler([[0, 1]], [5, 6], shuffle=True, sampler=[1], drop_last=False)


class _Keyed:
    def __init__(self, keys: list[str]):
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_torchs_own_loader(num_workers):
    (sampler,) = samplers(frame_of([20, 18]))
    dataset = _Keyed(frame_of([20, 18]).path.tolist())
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=list)
    assert list(loader) == epochs_of(samplers(frame_of([20, 18])))[0]
