"""How far a data set of shards has come, and the clock that its workers share."""

from dataclasses import dataclass

import torch
from torch.utils.data import get_worker_info

from labkit.data.shards.place import Place
from labkit.data.shards.streams import Stream

_NOBODY, _NO_WORKER = -2, -1  # beside the seeds of loaders' passes, which are not negative


class Clock:
    """The number of the epoch, and where its samples begin in the endless row of passes. Workers share it.

    An epoch of `n_samples` over all ranks begins where the one before it ended. After a resume with another number
    of ranks, epochs have another length from there on.
    """

    def __init__(self) -> None:
        # Epoch; an epoch and where that one began; by whom a state was taken up.
        self._numbers = torch.tensor([0, 0, 0, _NOBODY]).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._numbers[0])

    def set_epoch(self, epoch: int) -> None:
        self._numbers[0] = epoch

    def start(self, n_samples: int) -> int:
        """Where this epoch begins, if each has `n_samples`."""
        epoch, known_epoch, known_start, _ = self._numbers.tolist()
        return known_start + (epoch - known_epoch) * n_samples

    def resume(self, epoch: int, next_start: int) -> None:
        """Go on with `epoch`; the next one begins at `next_start`."""
        self._numbers.copy_(torch.tensor([epoch, epoch + 1, next_start, _NOBODY]))

    def take_up(self) -> bool:
        """Whether this process may go on from a state: all workers of the first pass over a loader may, no later one.

        Workers of a later pass are copies of the same parent, which knows nothing of the first. They have another seed.
        """
        worker = get_worker_info()
        taker = worker.seed - worker.id if worker else _NO_WORKER
        taken_by = int(self._numbers[3])  # read once: another worker may be loading its state now
        if taken_by == _NOBODY:
            self._numbers[3] = taker
        return taken_by in (_NOBODY, taker)


@dataclass
class Progress:
    """What is left to the newest iterator of a data set.

    Attributes:
        epoch: The epoch that it reads.
        start: Where that epoch begins in the row of passes.
        world_size: Number of ranks when it began.
        num_workers: Number of workers then.
        streams: What is still to come, the current one first; none when it is over.
    """

    epoch: int
    start: int
    world_size: int
    num_workers: int
    streams: list[Stream]

    def place_of(self, stream: Stream) -> Place:
        """The place whose order a stream is part of."""
        return Place(stream.rank, self.world_size, stream.worker, self.num_workers)

    def advance(self, *, counts: bool) -> None:
        """The next sample is done. One that does not count was skipped, and is made up for."""
        stream = self.streams[0]
        n_left = None if stream.n_left is None else stream.n_left - counts
        self.streams[:1] = [] if n_left == 0 else [stream._replace(first=stream.first + 1, n_left=n_left)]
