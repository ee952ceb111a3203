"""Passes over all shards, one after another without end: what samples each stretch of them holds."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

Shard = TypeVar("Shard")


class Stretch(NamedTuple):
    """Samples `first` to `stop` (without it) of one shard, in their order there."""

    url: str
    first: int
    stop: int


def shard_order(shards: Sequence[Shard], shuffle: int, seed: str) -> list[Shard]:
    """The shards in an order that depends on the seed alone; in their own without `shuffle`."""
    shards = list(shards)
    if shuffle:
        random.Random(seed).shuffle(shards)
    return shards


class Passes:
    """All samples of all shards, then all again, and so on.

    Args:
        shards: Each shard's URL and number of samples.
        shuffle: Whether each pass has an order of shards of its own.
        seed: Of these orders.
    """

    def __init__(self, shards: Sequence[tuple[str, int]], shuffle: int, seed: int):
        self._shards, self._shuffle, self._seed = [Stretch(url, 0, count) for url, count in shards], shuffle, seed
        self._pass_length = sum(shard.stop for shard in self._shards)

    def stretches(self, start: int, length: int) -> Iterator[Stretch]:
        """The stretches that hold `length` samples from position `start` on; position 0 begins the first pass.

        Raises:
            ValueError: there is no sample in any shard.
        """
        if not self._pass_length:
            raise ValueError(f"all {len(self._shards)} shards are empty: there is no sample to read")
        while length > 0:
            number, position = divmod(start, self._pass_length)
            n_here = min(length, self._pass_length - position)
            yield from self._of_pass(number, position, position + n_here)
            start, length = start + n_here, length - n_here

    def _of_pass(self, number: int, start: int, stop: int) -> Iterator[Stretch]:
        return cut(shard_order(self._shards, self._shuffle, f"{self._seed} pass {number}"), start, stop)


def cut(stretches: Sequence[Stretch], start: int, stop: int | None = None) -> Iterator[Stretch]:
    """The parts of the stretches with samples `start` to `stop`, counted over all of them."""
    ends = accumulate(stretch.stop - stretch.first for stretch in stretches)
    for stretch, end in zip(stretches, ends, strict=True):
        begin = end - (stretch.stop - stretch.first)
        first = max(start - begin, 0)
        last = (end if stop is None else min(stop, end)) - begin
        if first < last:
            yield Stretch(stretch.url, stretch.first + first, stretch.first + last)
