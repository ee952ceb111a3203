"""How far a data set of shards has come, and the clock that its workers share."""

import os
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from labkit.data.shards.place import Place
from labkit.data.shards.streams import Stream

_NO_WORKER = -1  # beside the seeds of loaders' passes, which are not negative


class _Kind(IntEnum):
    SET = 0  # an epoch was set
    RESUMED = 1  # a state was loaded
    BEGUN = 2  # a worker began a pass


class _Entry(NamedTuple):
    """What happened to the clock: eight numbers, so that none is written across two pages of memory."""

    kind: int
    epoch: int = -1  # that was set; of a state that was loaded, or that a worker holds
    next_start: int = 0  # of a state: where the epoch after its own begins
    is_set: int = 0  # of a state: whether `set_epoch` decides
    rank: int = 0
    seed: int = 0  # of the loader's pass that the worker belongs to
    worker: int = 0
    process: int = 0


class Pass(NamedTuple):
    """One pass over the data set, as each of its workers learns of it.

    Attributes:
        epoch: Its number.
        resumes: Whether it goes on from the state that its worker holds.
        n_counted: How many passes of its rank were counted so far; 0 if `set_epoch` decides.
    """

    epoch: int
    resumes: bool
    n_counted: int


class Clock:
    """The number of the epoch, and where its samples begin in the endless row of passes. Workers share it.

    If `set_epoch` was called, it decides. Else passes are counted, of each rank by itself: worker by worker it is noted
    in a file without a name who began which, since workers share nothing else, and a loader tells its data set of no
    pass. Short appends are atomic, so all workers see the passes in one order.

    An epoch of `n_samples` over all ranks begins where the one before it ended. After a resume with another number
    of ranks, epochs have another length from there on.
    """

    def __init__(self, content: bytes = b"") -> None:
        self._open(_open_file())
        os.write(self._file, content)

    def _open(self, file: int) -> None:
        self._file, self._n_read = file, 0
        weakref.finalize(self, os.close, file)
        self._epoch, self._is_set = 0, False
        self._known = 0, 0  # an epoch, and where that one begins
        self._resumed: dict[int, tuple[int, int]] = {}  # by rank, the pass that went on from the newest state
        self._n_begun: Counter[tuple[int, int, int]] = Counter()  # by each reader: rank, seed, worker
        self._own: dict[tuple[int, int, int, int], Pass] = {}  # the newest of each reader and process
        self._passes: dict[tuple[int, tuple[int, int]], Pass] = {}  # by rank, and by seed and number
        self._last: dict[int, int] = {}  # epoch of each rank
        self._n_counted: Counter[int] = Counter()  # passes of each rank

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a copy has a clock of its own, which goes on from here
            return {"content": os.pread(self._file, os.fstat(self._file).st_size, 0)}
        return {"file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._open(state["file"].detach())
        else:
            Clock.__init__(self, state["content"])

    def epoch(self, rank: int) -> int:
        """That was set, else that of the rank's next pass."""
        self._read()
        return self._epoch if self._is_set or rank not in self._last else self._last[rank] + 1

    @property
    def is_set(self) -> bool:
        """Whether `set_epoch` decides on the epoch."""
        self._read()
        return self._is_set

    def set_epoch(self, epoch: int) -> None:
        self._write(_Entry(_Kind.SET, epoch))

    def start(self, epoch: int, n_samples: int) -> int:
        """Where an epoch begins, if each has `n_samples`."""
        self._read()
        known_epoch, known_start = self._known
        return known_start + (epoch - known_epoch) * n_samples

    def resume(self, epoch: int, next_start: int, *, is_set: bool) -> None:
        """Go on with `epoch`; the next one begins at `next_start`."""
        self._write(_Entry(_Kind.RESUMED, epoch, next_start, is_set))

    def begin(self, place: Place, resumed_epoch: int | None) -> Pass:
        """A pass of this process.

        Args:
            place: Of this process.
            resumed_epoch: That of the state it holds, if any. All workers of the first pass over a loader may go on
                from a state, no later one: workers of that are copies of the same parent, which knows nothing of the
                first.
        """
        worker = get_worker_info()
        seed = worker.seed - worker.id if worker else _NO_WORKER
        epoch = -1 if resumed_epoch is None else resumed_epoch
        reader = place.rank, seed, place.worker, os.getpid()
        self._write(_Entry(_Kind.BEGUN, epoch, 0, 0, *reader))
        self._read()
        return self._own[reader]

    def _write(self, entry: _Entry) -> None:
        os.write(self._file, np.array(entry, np.int64).tobytes())

    def _read(self) -> None:
        """Learn of what happened since the last time, here and in other processes."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size - self._n_read, self._n_read)
        self._n_read = size
        for values in np.frombuffer(data, np.int64).reshape(-1, len(_Entry._fields)).tolist():
            entry = _Entry(*values)
            if entry.kind == _Kind.BEGUN:
                self._note_pass(entry)
                continue
            self._epoch, self._is_set = entry.epoch, entry.kind == _Kind.SET or bool(entry.is_set) or self._is_set
            if entry.kind == _Kind.RESUMED:
                self._known, self._resumed = (entry.epoch + 1, entry.next_start), {}

    def _note_pass(self, entry: _Entry) -> None:
        rank, reader = entry.rank, (entry.rank, entry.seed, entry.worker)
        key = entry.seed, self._n_begun[reader]  # persistent workers begin the next pass with the same seed
        self._n_begun[reader] += 1
        resumes = entry.epoch >= 0 and self._resumed.setdefault(rank, key) == key
        resumes = resumes and (not self._is_set or entry.epoch == self._epoch)
        if (rank, key) not in self._passes:
            counted = self._last.get(rank, self._epoch - 1) + 1
            self._last[rank] = self._epoch if self._is_set else entry.epoch if resumes else counted
            self._n_counted[rank] += not self._is_set
            n_counted = 0 if self._is_set else self._n_counted[rank]
            self._passes[rank, key] = Pass(self._last[rank], resumes, n_counted)
        self._own[*reader, entry.process] = self._passes[rank, key]._replace(resumes=resumes)


def _open_file() -> int:
    """A file without a name, to whose end all writing goes; open in this process and in its forks."""
    import fcntl  # here: Windows has none

    if hasattr(os, "memfd_create"):
        file = os.memfd_create("labkit-clock")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


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
