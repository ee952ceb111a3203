"""Batches of buckets, and how ranks share them; the sampler's own tests have the policies as a whole."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from labkit.loading.bucket_sampler import balance_over_ranks, check_halving, cut_batches


def batches_of(lengths: list[int]) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def contents(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_batches_follow_the_order_within_buckets():
    numbers, order = np.array([2, 0, 2, 0, 0, 2]), np.array([5, 4, 3, 2, 1, 0])
    assert contents(cut_batches(numbers, order, 2, "keep")) == [[4, 3], [1], [5, 2], [0]]
    assert contents(cut_batches(numbers, order, 2, "drop")) == [[4, 3], [5, 2]]
    assert contents(cut_batches(numbers, order, 2, "fill")) == [[4, 3], [1, 4], [5, 2], [0, 5]]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), max_size=20), world_size=st.integers(1, 9))
def test_keep_halves_until_the_ranks_have_equally_many(lengths, world_size):
    batches = batches_of(lengths)
    n_needed = next(number for number in range(len(lengths), 100) if number % world_size == 0)
    if sum(lengths) < n_needed:
        with pytest.raises(
            ValueError, match=rf"cannot give {world_size} ranks equally many batches: {sum(lengths)} im"
        ):
            balance_over_ranks(batches, world_size, "keep")
        return
    check_halving(sum(lengths), len(lengths), world_size)
    shared = contents(balance_over_ranks(batches, world_size, "keep"))
    assert len(shared) == n_needed
    assert all(shared)
    assert list(chain(*shared)) == list(range(sum(lengths)))  # in their order, each once
    assert contents(batches) == contents(batches_of(lengths))  # those that were given are left as they are


def test_the_largest_are_halved_first():
    assert [len(batch) for batch in balance_over_ranks(batches_of([8, 1, 8]), 5, "keep")] == [4, 4, 1, 4, 4]
    assert [len(batch) for batch in balance_over_ranks(batches_of([3, 2, 5]), 4, "keep")] == [3, 2, 3, 2]


def test_what_is_dropped_and_what_is_repeated():
    batches = batches_of([2] * 5)
    assert contents(balance_over_ranks(batches, 2, "drop")) == contents(batches[:4])
    assert contents(balance_over_ranks(batches, 3, "fill")) == contents([*batches, batches[0]])
    assert contents(balance_over_ranks(batches[:2], 5, "fill")) == contents(
        [batches[number] for number in (0, 1, 0, 1, 0)]
    )
    assert all(balance_over_ranks([], 3, remainder) == [] for remainder in ("keep", "drop", "fill"))
