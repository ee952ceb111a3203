"""The shuffle buffer: a permutation that a buffer could give, WebDataset's in its statistics, resumed anywhere."""

import random
from itertools import islice

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given, strategies
from scipy.stats import ks_2samp

from labkit.data.shards_read import resume, shuffled

SIZES = strategies.integers(1, 40)


@given(strategies.integers(0, 120), strategies.integers(0, 40), SIZES, strategies.text(max_size=3))
def test_it_is_a_permutation_that_the_buffer_could_give(count, size, initial, seed):
    taken = []

    def source():
        for number in range(count):
            taken.append(number)
            yield number

    given_items = []
    for number in shuffled(source(), size, initial, seed):
        given_items.append(number)
        assert len(taken) - len(given_items) < max(size, 1)  # what the buffer still holds
    assert sorted(given_items) == list(range(count))


@pytest.mark.parametrize(("size", "initial"), [(1, 1), (10, 10), (100, 10), (1000, 1000)])
def test_its_displacements_are_those_of_webdataset(size, initial):
    ours = np.fromiter(shuffled(range(3000), size, initial, "0"), np.int64)
    theirs = np.fromiter(wds.shuffle(size, initial=initial, rng=random.Random(0))(iter(range(3000))), np.int64)
    displacements = [np.abs(order - np.arange(3000)) for order in (ours, theirs)]
    assert ks_2samp(*displacements).pvalue > 0.001


@given(strategies.integers(0, 80), SIZES, SIZES, strategies.data())
def test_the_rest_of_an_order_reads_nothing_that_stands_before_it(count, size, initial, data):
    whole = list(shuffled(range(count), size, initial, "seed"))
    n_read = data.draw(strategies.integers(0, count))
    begun_at = []

    def read_from(first):
        begun_at.append(first)
        return (f"item {number}" for number in range(first, count))

    rest = list(resume(shuffled(range(count), size, initial, "seed"), n_read, read_from))
    assert rest == [f"item {number}" for number in whole[n_read:]]
    if n_read < count:
        assert begun_at == [min(whole[n_read:])]


def test_nothing_is_held_that_was_given():
    order, held = list(shuffled(range(5000), 50, 50, "0")), []

    class Item:
        alive = 0

        def __init__(self):
            Item.alive += 1

        def __del__(self):
            Item.alive -= 1

    for _given in islice(resume(iter(order), 3000, lambda first: (Item() for _ in range(first, 5000))), 1000):
        held.append(Item.alive)
    assert max(held) <= 52  # the buffer, and the two that are being handed over


@pytest.mark.parametrize("size", [0, 1])
def test_without_a_buffer_the_order_stays(size):
    assert list(shuffled(range(50), size, 100, "0")) == list(range(50))
