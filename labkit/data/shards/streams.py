"""What is left of an epoch, and which part of it a reader gets when the ranks or workers have changed."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from labkit.data.shards.place import Place


class Stream(NamedTuple):
    """Samples still to come, one after another, of the order that a worker had when the epoch began.

    Attributes:
        rank: The worker's rank then.
        worker: Its number there.
        first: Number of the next sample in that order. With `samples_per_rank`, the order's end is followed by its
            beginning, for what was skipped.
        n_left: How many are to come; None stands for all up to the order's end.
    """

    rank: int
    worker: int
    first: int
    n_left: int | None


def part_of(streams: Sequence[Stream], here: Place, *, is_equal: bool) -> list[Stream]:
    """The part of all that is left that `here` reads: each sample has one reader, and none has two more than another.

    The streams are laid end to end and cut there, so that each reader has its samples close together in the shards.

    Args:
        streams: Of all ranks, in the same order on each; the number of samples left is known.
        here: A reader.
        is_equal: Give all ranks, and their workers of the same number, equally many, as DistributedDataParallel needs
            it. Up to `world_size - 1` samples of this epoch come again for that.
    """
    streams = [stream for stream in streams if stream.n_left]
    total = sum(n_left for *_, n_left in streams if n_left)
    if streams and is_equal:
        n_more = -total % here.world_size
        rank, worker, first, n_left = streams[-1]
        streams[-1] = Stream(rank, worker, first, (n_left or 0) + n_more)
        total += n_more
    start = 0
    for rank, worker in product(range(here.world_size), range(here.num_workers)):
        count = here._replace(worker=worker).share(len(range(rank, total, here.world_size)))
        if (rank, worker) == (here.rank, here.worker):
            return list(_cut(streams, start, start + count))
        start += count
    raise ValueError(f"there is no {here}")


def _cut(streams: Sequence[Stream], start: int, stop: int) -> Iterator[Stream]:
    """The parts of the streams with samples `start` to `stop`, counted over all of them."""
    begin = 0
    for rank, worker, first, n_left in streams:
        length = n_left or 0
        skipped, end = max(start - begin, 0), min(stop - begin, length)
        if skipped < end:
            yield Stream(rank, worker, first + skipped, end - skipped)
        begin += length
