"""`lk.BucketBatchSampler`: what an epoch holds for each rank, its order, state and refusals."""

import json
from collections import Counter
from itertools import chain, islice, pairwise

import numpy as np
import pandas as pd
import pytest
import torch.distributed
from hypothesis import given, settings, strategies as st
from torch.utils.data import Subset

import labkit as lk

SHAPES = ((100, 200), (150, 150), (200, 100), (300, 75))
BUCKETS = lk.Buckets(SHAPES)


def frame_of(counts: list[int]) -> pd.DataFrame:
    """So many images of each shape, mixed."""
    sizes = np.repeat(np.array(SHAPES)[: len(counts)], counts, axis=0)
    widths, heights = np.random.default_rng(4).permutation(sizes).T
    return pd.DataFrame({"path": [f"{n:04}.jpg" for n in range(len(sizes))], "width": widths, "height": heights})


def samplers(sizes, batch_size=4, world_size=1, **options) -> list[lk.BucketBatchSampler]:
    options = {"buckets": BUCKETS, "world_size": world_size, **options}
    return [lk.BucketBatchSampler(sizes, batch_size, rank=rank, **options) for rank in range(world_size)]


def epochs_of(ranks: list[lk.BucketBatchSampler], epoch: int = 0) -> list[list[list[int]]]:
    """The batches of each rank."""
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in ranks]


def widths_of(sizes: pd.DataFrame, batch: list[int]) -> set[int]:
    """Each shape has a width of its own."""
    return set(sizes.width.to_numpy()[batch].tolist())


def without_shuffling(sizes: pd.DataFrame, batch_size: int, world_size: int) -> list[list[list[int]]]:
    """The oracle, list by list: the batches of each rank, or an empty list or batch where there are too few."""
    batches = []
    for width, _ in SHAPES:
        bucket = sizes.index[sizes.width == width].tolist()
        batches += [bucket[at : at + batch_size] for at in range(0, len(bucket), batch_size)]
    while len(batches) % world_size:
        largest = max(batches, key=len)
        place, half = batches.index(largest), (len(largest) + 1) // 2
        batches[place : place + 1] = [largest[:half], largest[half:]]
    return [batches[rank::world_size] for rank in range(world_size)]


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(any), batch_size=st.integers(1, 9),
    world_size=st.integers(1, 9), epoch=st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_is_what_is_promised(counts, batch_size, world_size, epoch):
    """Unshuffled, the oracle's batches bucket by bucket; shuffled, batches of as many images, each of one bucket."""
    sizes, options = frame_of(counts), {"batch_size": batch_size, "world_size": world_size}
    expected = without_shuffling(sizes, **options)
    if not all(batches and all(batches) for batches in expected):
        with pytest.raises(ValueError, match="equally many batches"):
            samplers(sizes, **options)
        return
    assert epochs_of(samplers(sizes, shuffle=False, **options), epoch) == expected
    ranks = samplers(sizes, **options)
    each = epochs_of(ranks, epoch)
    assert [len(sampler) for sampler in ranks] == [len(batches) for batches in each] == list(map(len, expected))
    batches = list(chain(*each))
    assert all(len(widths_of(sizes, batch)) == 1 for batch in batches)
    assert sorted(map(len, batches)) == sorted(map(len, chain(*expected)))
    times = Counter(chain(*batches))
    assert all(type(index) is int for index in times)
    assert times == Counter(sizes.index)


def test_rows_that_are_left_out_keep_the_numbers_of_the_others():
    sizes = frame_of([10, 10])
    some = sizes[sizes.index % 3 > 0].sample(frac=1, random_state=0)
    (batches,) = epochs_of(samplers(some))
    assert sorted(chain(*batches)) == sorted(some.index)
    assert all(len(widths_of(sizes, batch)) == 1 for batch in batches)


def test_the_order_depends_on_seed_and_epoch_alone():
    sizes = frame_of([20, 30, 10])
    (first,), (again,) = (samplers(sizes, seed=7) for _ in range(2))
    torch.manual_seed(1)
    epochs = [epochs_of([first], epoch)[0] for epoch in range(3)]
    torch.manual_seed(2)
    assert [epochs_of([again], epoch)[0] for epoch in (2, 0, 1)] == [epochs[2], epochs[0], epochs[1]]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs_of(samplers(sizes, seed=8))[0] != epochs[0]


def test_batches_of_all_buckets_are_mixed():
    """In 200 places of batches of two equal buckets, runs of one bucket are as long as for tosses of a coin."""
    sizes = frame_of([400, 400])
    (batches,) = epochs_of(samplers(sizes))
    tall = [widths_of(sizes, batch) == {100} for batch in batches]
    n_changes = sum(one != other for one, other in pairwise(tall))
    assert abs(n_changes - 100) < 4 * 50**0.5  # four standard deviations


@pytest.mark.parametrize("n_given", [0, 1, 5, 13])
def test_a_state_goes_on_after_the_batches_that_were_given(n_given):
    """As torchdata's loader saves and loads it; `make_loader` has a state of its own."""
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


def test_another_epoch_than_that_of_the_state_begins_at_its_first_batch():
    (sampler,) = samplers(frame_of([20]))
    next(iter(sampler))
    sampler.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5


def test_ranks_are_torch_distributeds_or_torchruns_when_an_epoch_begins(monkeypatch):
    sizes = frame_of([20, 18])
    sampler = lk.BucketBatchSampler(sizes, 4, buckets=BUCKETS)
    assert len(sampler) == 10
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(sampler) == 5
    assert list(sampler) == list(samplers(sizes, world_size=2)[1])
    alone = samplers(sizes)[0]
    assert len(alone) == 10
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sampler.set_epoch(0)
        assert list(sampler) == list(alone)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"rank": 0}, "rank and world_size must be given together, got 0 and None"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size, got 2 of 2"),
        ({"rank": 0, "world_size": 3, "batch_size": 1}, r"cannot give 3 ranks equally many batches: 10"),
    ],
)
def test_wrong_arguments_are_refused(options, said):
    options = {"batch_size": 4, "buckets": BUCKETS, **options}
    with pytest.raises(ValueError, match=said):
        lk.BucketBatchSampler(frame_of([5, 5]), **options)


def test_rows_without_a_number_of_their_own_are_refused_with_the_remedy():
    sizes = frame_of([5])
    for wrong in (sizes.set_index("path", drop=False), pd.concat([sizes, sizes]), sizes.set_index(sizes.index - 1)):
        with pytest.raises(ValueError, match=r"sizes\.reset_index\(drop=True\) numbers them from 0"):
            samplers(wrong)


def test_the_default_buckets_fit_the_frame():
    sampler = lk.BucketBatchSampler(frame_of([5, 5]), 4)
    assert sampler.buckets == lk.Buckets.fit(frame_of([5, 5]))


class Keyed:
    def __init__(self, keys: list[str]):
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:
        return index


def test_keys_of_the_data_set_must_be_the_paths_of_the_rows():
    sizes = frame_of([5, 5])
    (sampler,) = samplers(sizes)
    keys = sizes.path.tolist()

    sampler.check_dataset(Keyed(keys))
    sampler.check_dataset(Subset(Keyed(["else.jpg", *keys]), range(1, 11)))
    sampler.check_dataset([0] * 10)  # no keys to compare
    with pytest.raises(ValueError, match=r"row 0 of sizes is '0000.jpg', but image 0 is 'else.jpg': leave out"):
        lk.make_loader(Keyed(["else.jpg", *keys]), batch_sampler=sampler)
    with pytest.raises(ValueError, match="sizes has a row 9, and the data set only 9 images"):
        sampler.check_dataset(Keyed(keys[:-1]))
    samplers(sizes[:9])[0].check_dataset(Keyed(keys[:-1]))
