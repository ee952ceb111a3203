"""The order in which a shuffle buffer gives samples, and reading in that order from any place in it."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


def shuffled(items: Iterable[Item], size: int, initial: int, seed: str) -> Iterator[Item]:
    """Items through a buffer of `size`, from which random ones are given once `initial` are in it.

    As WebDataset's `shuffle`, two items come in for each that is given, until the buffer is full. The order depends on
    the seed and the number of items alone, so that it can be drawn without reading the items.
    """
    draw = random.Random(seed).random
    initial = min(initial, size)
    source, buffer = iter(items), []
    for item in source:
        buffer.append(item)
        if len(buffer) < size:
            buffer.extend(islice(source, 1))
        if len(buffer) >= initial:
            yield _take(buffer, int(draw() * len(buffer)))
    while buffer:
        yield _take(buffer, int(draw() * len(buffer)))


def _take(buffer: list[Item], position: int) -> Item:
    """Take an item out; the last one fills its place, as nothing has to move then."""
    buffer[position], buffer[-1] = buffer[-1], buffer[position]
    return buffer.pop()


def resume(order: Iterator[int], n_read: int, read_from: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """Items in the rest of an order, after its first `n_read`.

    Args:
        order: Positions in the source, in the order to give them.
        n_read: How many were given before. Their items are read only where they stand behind one that is missing.
        read_from: Gives the source's items from a position on.
    """
    positions = np.fromiter(islice(order, n_read), np.int64)
    is_given = np.zeros(positions.max(initial=-1) + 2, bool)
    is_given[positions] = True
    first = int(is_given.argmin())
    source = enumerate(read_from(first), first)
    held: dict[int, Any] = {}
    for position in order:
        while position not in held:
            number, item = next(source)
            if number >= len(is_given) or not is_given[number]:
                held[number] = item
        yield held.pop(position)
