"""Stretches of passes: together they are every sample, in the order of each pass, whatever their lengths."""

import random
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, strategies

from labkit.data.shards_read import Passes, Stretch, cut, shard_order

COUNTS = strategies.lists(strategies.integers(0, 7), min_size=1, max_size=6).filter(any)


def samples(stretches) -> list[tuple[str, int]]:
    return [(url, number) for url, first, stop in stretches for number in range(first, stop)]


def named(counts) -> list[tuple[str, int]]:
    return [(f"shard {number}", count) for number, count in enumerate(counts)]


@given(COUNTS, strategies.lists(strategies.integers(0, 30), max_size=12), strategies.booleans(), strategies.integers())
def test_stretches_one_after_another_are_passes(counts, lengths, shuffle, seed):
    passes, start, came = Passes(named(counts), shuffle, seed), 0, []
    for length in lengths:
        stretches = samples(passes.stretches(start, length))
        assert len(stretches) == length
        start, came = start + length, came + stretches
    every = sorted((url, number) for url, count in named(counts) for number in range(count))
    n_whole, rest = divmod(len(came), len(every))
    for number in range(n_whole):
        assert sorted(came[number * len(every) :][: len(every)]) == every
    counted = Counter(came)
    assert {counted[sample] for sample in every} <= {n_whole, n_whole + bool(rest)}


def test_each_pass_has_an_order_of_shards_of_its_own():
    passes = Passes(named([1] * 20), shuffle=1, seed=0)
    first, second = (samples(passes.stretches(start, 20)) for start in (0, 20))
    assert sorted(first) == sorted(second)
    assert first != second
    assert samples(Passes(named([1] * 20), shuffle=1, seed=1).stretches(0, 20)) != first
    assert samples(Passes(named([1] * 20), shuffle=0, seed=0).stretches(3, 2)) == [("shard 3", 0), ("shard 4", 0)]


def test_shards_without_samples_are_said():
    with pytest.raises(ValueError, match="all 2 shards are empty"):
        list(Passes(named([0, 0]), 0, 0).stretches(0, 1))


@given(COUNTS, strategies.integers(0, 50), strategies.integers(0, 50))
def test_a_cut_is_that_of_the_list(counts, start, stop):
    stretches = [Stretch(url, 2, 2 + count) for url, count in named(counts)]
    whole = list(chain.from_iterable([(s.url, n) for n in range(s.first, s.stop)] for s in stretches))
    assert samples(cut(stretches, start, stop)) == whole[start:stop]
    assert samples(cut(stretches, start)) == whole[start:]


def test_the_order_is_that_of_the_seed():
    urls = [str(number) for number in range(9)]
    expected = list(urls)
    random.Random("3 1").shuffle(expected)
    assert shard_order(urls, 5, "3 1") == expected
    assert shard_order(urls, 0, "3 1") == urls
