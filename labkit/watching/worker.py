"""What a process notes of the batches that it makes, and what a worker leaves of that in files, written and read here.

In come the calls by which `DataLoader` makes batches; out go a `BatchTiming` and the seconds of its samples for each. A
worker has a folder, and in it `3.times` with its batches and their samples, `3.lines` with the stacks that its lines
were seen in, `3.hand` with the sample that it has in hand, `3.stacks` with its calls when somebody asked for them, and
`3.threads` with those that its libraries compute with.

A process that waits uses no processor time; in the run queue, or while the host of a virtual machine runs others, it
neither computes nor waits for data. Batches of a `DataLoader` are timed where they are made, in a worker or in the
training process.
"""

import faulthandler
import io
import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from labkit.watching.lines import LineSampler

# The sample in hand, and the calls of a process that somebody asks for.


class LastingFile(io.FileIO):
    """A file without a buffer that is open until nobody has it any more, which is no mistake to warn of."""

    def __del__(self) -> None:
        self.close()


class Hand:
    """The sample that a process has in hand, where another process can read it whatever holds this one up.

    A batch notes its indices at once, and then for each sample when it is begun: the last one that was is in hand.

    Args:
        file: What the notes are shared by; default: they are memory of this process.
    """

    _REST, UNKNOWN = -1.0, -2.0  # in place of an index: none, and one that is no number

    def __init__(self, file: Any = None):
        self._file, self._is_busy = file, False
        self._grow(128)

    def _grow(self, n_numbers: int) -> None:
        """Have a place for so many numbers."""
        place: Any = bytearray(8 * n_numbers)
        if self._file is not None:
            self._file.write(place[self._file.tell() :])  # a hole on a full disk would end the process later
            place = mmap.mmap(self._file.fileno(), len(place))
        self._noted = memoryview(place).cast("d")

    @classmethod
    def shared(cls, path: str) -> "Hand":
        """One in a new file, which `from_file` reads."""
        return cls(LastingFile(path, "wb+"))

    @classmethod
    def from_file(cls, path: str) -> "Hand | None":
        """What another process noted; None if there is no such file."""
        with suppress(OSError), open(path, "rb") as file:
            data, found = file.read(), cls()
            found._noted = memoryview(data[: len(data) // 8 * 8]).cast("d")
            return found
        return None

    def begin(self, indices: list[Any]) -> "memoryview[float]":
        """Note what a batch is made of.

        Returns:
            Numbers in pairs: when a sample is begun, which its maker sets, and its index; then when all are made. If
            another thread makes a batch meanwhile, they are in nobody's hand.
        """
        n_numbers = 2 * len(indices) + 4
        if len(self._noted) < n_numbers and not self._is_busy:
            with suppress(OSError, ValueError):  # a full disk
                self._grow(n_numbers)
        noted = self._noted
        if self._is_busy or len(noted) < n_numbers:
            noted = memoryview(bytearray(8 * n_numbers)).cast("d")
        else:
            self._is_busy = True
        noted[0:n_numbers:2] = array("d", bytes(4 * n_numbers))
        try:
            numbers = array("d", indices)
        except Exception:  # they are no numbers
            numbers = array("d", [self.UNKNOWN]) * len(indices)
        numbers.append(self._REST)
        noted[1 : n_numbers - 2 : 2] = numbers
        return noted

    def rest(self, noted: "memoryview[float]") -> None:
        """The batch is made, or given up."""
        if noted is self._noted:
            noted[0], self._is_busy = 0.0, False

    def _last(self) -> tuple[float, float]:
        last = 0.0, self._REST
        for since_s, index in zip(self._noted[::2], self._noted[1::2], strict=False):
            if not since_s:
                break
            last = since_s, index
        return last

    @property
    def since_s(self) -> float:
        """Since when, by `time.perf_counter()`."""
        return self._last()[0]

    @property
    def index(self) -> float | None:
        """Its index, or `UNKNOWN`; None: no sample is being made."""
        number = self._last()[1]
        return None if number == self._REST else number


hand_here = Hand()  # of this process, whether it trains or is a worker

SIGNAL = int(getattr(signal, "SIGRTMAX", 3)) - 3  # asks a process for its stacks; 0: macOS has none to spare
_answers: Any = None  # the file in which this process answers; closed when it ends


def answer_with_stacks(path: str) -> None:
    """Let this process, and those that it forks, append their stacks to a file when they are asked by `SIGNAL`."""
    global _answers
    if SIGNAL and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        file = LastingFile(path, "ab")
        faulthandler.register(SIGNAL, file, all_threads=True)
        _answers = file


def answers_in() -> str:
    """The path of that file; empty if there is none."""
    return getattr(_answers, "name", "")


# For how long a thread has waited for a core.


class _Opened:
    """A file's descriptor, closed with this object. Of a file object that is open at its end, Python would warn."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:  # noqa: SIM105 - as Python ends, other modules may be gone
            close(self.descriptor)
        except (OSError, AttributeError):  # the program closed all that it had; or it could not be opened
            pass


class _Schedule(threading.local):
    """The file in which the kernel says how long this thread has waited, kept open: opening it costs most of a read."""

    file: "_Opened"
    pid = 0


_schedule = _Schedule()


def run_queue_s() -> float:
    """Seconds that this thread has waited in the run queue, which is not waiting for data."""
    try:
        if _schedule.pid != os.getpid():  # the first time, or after a fork
            _schedule.file, _schedule.pid = _Opened("/proc/thread-self/schedstat"), os.getpid()
        return int(os.pread(_schedule.file.descriptor, 64, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux, or not recorded by this kernel
        return 0.0


# What is noted of a batch, and of its samples.

_FORMAT = struct.Struct("<6dq")  # of a batch, and how many bytes follow on its samples
_SEEDED = "labkit.loading.seeding"  # whose indices seed as they are taken


class BatchTiming(NamedTuple):
    """One batch, as whoever made it saw it.

    start_s, end_s: `time.perf_counter()`, which on Linux is one clock for all processes.
    busy_s: Processor seconds, and seconds in which others had the core: not waiting for data.
    collate_s: Seconds of the collate function.
    epoch: Number of the fetcher in its process: workers make a new one for each epoch.
    queued_s: Seconds of `busy_s` in which others had the core.
    """

    start_s: float
    end_s: float
    busy_s: float
    collate_s: float
    epoch: float
    queued_s: float = 0.0


Samples = list[tuple[Any, float]]  # index and seconds
Noted: TypeAlias = bytes  # of a batch's samples: what `Hand.begin` describes, or nothing


MOST_SAMPLE_BYTES, _MOST_BATCH_BYTES = 16 * 2**20, 64 * 2**20  # of a process: about a million samples, and batches


class Making:
    """What a process notes of the batches that it makes; one a process, since torch's classes are changed for all.

    Attributes:
        put: Called with each batch, and with what `samples_of` makes its samples of; None: nothing is noted.
        hand: The sample that is being made.
        lines: Which lines it is made by.
        n_fetchers: Epochs of its loaders so far: torch makes a fetcher for each.
    """

    def __init__(self) -> None:
        self.put: Callable[[BatchTiming, Noted], object] | None = None
        self.hand, self.lines, self.n_fetchers = hand_here, LineSampler(), 0

    def begin_epoch(self, fetcher: Any) -> None:
        """torch has made a fetcher, whose batches are those of an epoch."""
        fetcher.collate_fn = _TimedCollate(fetcher.collate_fn)
        fetcher._labkit_epoch, fetcher._labkit_one_by_one = self.n_fetchers, _makes_one_by_one(fetcher)
        self.n_fetchers += 1

    def make(self, fetch: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
        """Let a fetcher make a batch, and note it."""
        put, collate = self.put, fetcher.collate_fn
        if put is None or not isinstance(collate, _TimedCollate):
            return fetch(fetcher, indices)
        hand, lines, noted, samples = self.hand, self.lines, None, b""
        if type(indices).__module__ == _SEEDED:
            noted = indices.noted = hand.begin(list.copy(indices))  # taking them one by one would seed
        elif fetcher._labkit_one_by_one and type(indices) is list:
            indices = _Indices(indices)
            noted = indices.noted = hand.begin(indices)
        collate.seconds, queued_s, cpu_s = 0.0, run_queue_s(), time.process_time() - lines.cpu_s
        start_s = time.perf_counter()
        try:
            data = lines.making(fetch, fetcher, indices)
        finally:
            if noted is not None:
                size = 2 * len(indices) + 1 if noted[1] != Hand.UNKNOWN else 0
                samples = noted[:size].tobytes()
                hand.rest(noted)
                del indices.noted
        end_s = time.perf_counter()
        queued_s = run_queue_s() - queued_s
        busy_s = max(0.0, time.process_time() - lines.cpu_s - cpu_s) + queued_s
        timing = BatchTiming(start_s, end_s, busy_s, collate.seconds, fetcher._labkit_epoch, queued_s)
        put(timing, samples)
        return data

    def begin_again(self) -> None:
        """A forked process has none of its parent's threads, and may have its switch interval."""
        usual, self.lines = self.lines, LineSampler()
        usual.forked()


making = Making()  # of this process
os.register_at_fork(after_in_child=lambda: making.begin_again())


class _TimedCollate:
    def __init__(self, collate: Callable[[Any], Any]):
        self.collate, self.seconds = collate, 0.0

    def __call__(self, samples: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return self.collate(samples)
        finally:
            self.seconds = time.perf_counter() - start_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collate, name)


_LONG_S = 1e-3  # of a sample: less is not looked into


def one_by_one(iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """`__iter__` of a batch's indices that notes which one is in hand: also for `make_loader`'s, which seed as well.

    It sets what `Hand.begin` gave them as `noted`. What this thread stood in line for a core is not the sample's: it is
    asked for where it can matter, and taken off the times. This runs for every sample: a function more would cost as
    much as all that it does.
    """

    @wraps(iterate)
    def __iter__(*indices: Any) -> Iterator[Any]:
        noted, clock, place = getattr(indices[0], "noted", None), time.perf_counter, 0
        if noted is None:  # no batch is being made
            yield from iterate(*indices)
            return
        last_s, before_s, queued_s = math.inf, run_queue_s(), 0.0
        for index in iterate(*indices):
            now_s = clock()
            if now_s - last_s > _LONG_S:
                queued_s = run_queue_s() - before_s
            last_s = now_s
            noted[place] = now_s - queued_s
            place += 2
            yield index
        noted[place] = clock() - (run_queue_s() - before_s)

    return __iter__


class _Indices(list[Any]):
    """The indices of a batch, for whoever goes through them one after the other and makes their samples meanwhile."""

    noted: "memoryview[float]"
    __iter__ = one_by_one(list.__iter__)


def _makes_one_by_one(fetcher: Any) -> bool:
    """Whether the samples of a batch are made one by one, and not by a method of the data set that takes them all."""
    data = fetcher.dataset
    while type(data).__module__ == "torch.utils.data.dataset" and hasattr(data, "indices"):  # torch's Subset
        data = data.dataset
    takes_all = type(fetcher).__name__ == "_MapDatasetFetcher" and callable(getattr(data, "__getitems__", None))
    return fetcher.auto_collation and not takes_all


# A worker, and its files.


class TimedWorker:
    """A `worker_init_fn` that lets the worker note the batches that it makes, then calls the loader's own.

    Args:
        own: The loader's `worker_init_fn`, or None.
        folder: Each worker writes there, into files of its own.
        change: Changes torch's classes for good in a worker that was not forked.
    """

    def __init__(self, own: Callable[[int], object] | None, folder: str, change: Callable[[ModuleType], object]):
        self._own, self._folder, self._change = own, folder, change
        self._takes_lines = LineSampler.is_allowed

    def __call__(self, worker: int) -> None:
        with suppress(Exception):  # no times are better than no worker
            name = os.path.join(self._folder, str(worker))
            file = LastingFile(f"{name}.times", "ab")
            put, hand, lines = partial(_write, file), Hand.shared(f"{name}.hand"), LineSampler(f"{name}.lines")
            LineSampler.is_allowed = LineSampler.is_allowed and self._takes_lines
            lines.start()
            making.hand, making.lines = hand, lines
            answer_with_stacks(f"{name}.stacks")
            is_forked = making.put is not None  # it has the changed classes
            making.put, making.n_fetchers = put, 0
            if not is_forked:
                self._change(sys.modules["torch.utils.data._utils.fetch"])
        if self._own is not None:
            self._own(worker)
        with suppress(Exception):
            Path(self._folder, f"{worker}.threads").write_text(json.dumps(_threads_here()))


def _write(file: Any, made: BatchTiming, noted: Noted) -> None:
    with suppress(OSError):  # a full disk must not end the training
        n_written = file.tell()
        if n_written < _MOST_BATCH_BYTES:
            noted = noted if n_written < MOST_SAMPLE_BYTES else b""
            data = _FORMAT.pack(*made, len(noted)) + noted
            if file.write(data) < len(data):  # a full disk takes a part
                file.truncate(n_written)
                file.seek(n_written)


def read_times(folder: str) -> dict[int, list[BatchTiming]]:
    """What the workers of one iterator wrote, by worker."""
    return {
        int(path.stem): [timing for timing, *_ in _records(path.read_bytes())] for path in Path(folder).glob("*.times")
    }


class TimesReader:
    """Reads the same epoch by epoch while they go on writing; of each file only what is new."""

    def __init__(self) -> None:
        self._n_read: dict[Path, int] = defaultdict(int)  # bytes
        self._kept: dict[tuple[str, int], dict[int, list[BatchTiming]]] = defaultdict(lambda: defaultdict(list))

    def read(self, folder: str, epoch: int) -> dict[int, list[BatchTiming]]:
        """What the workers wrote of an epoch that has ended, by worker; given once.

        Args:
            folder: Of the workers; empty: there are none.
            epoch: As they count.
        """
        for path in Path(folder).glob("*.times") if folder else ():
            with open(path, "rb") as file:
                file.seek(self._n_read[path])
                data, n_read = file.read(), 0
            for timing, _, end in _records(data):
                if end <= len(data):  # else it is still being written
                    self._kept[folder, int(timing.epoch)][int(path.stem)].append(timing)
                    n_read = end
            self._n_read[path] += n_read
        return self._kept.pop((folder, epoch), {})


def read_samples(folder: str) -> list[Samples]:
    """Index and seconds of each sample that the workers of one iterator wrote; a list for each worker."""
    return [
        [sample for _, noted, _ in _records(path.read_bytes()) for sample in samples_of(noted)]
        for path in Path(folder).glob("*.times")
    ]


def _threads_here() -> dict[str, int]:
    """Threads that libraries compute with in this process, as far as they are imported."""
    counts = {"torch": "get_num_threads", "cv2": "getNumThreads"}
    return {name: getattr(sys.modules[name], count)() for name, count in counts.items() if name in sys.modules}


def read_threads(folder: str) -> dict[str, int]:
    """The most threads that a library computes with in a worker of one iterator; of no folder, none."""
    found = dict[str, int]()
    for path in Path(folder).glob("*.threads") if folder else ():
        with suppress(ValueError):  # a killed worker may leave part of it
            for name, count in json.loads(path.read_text()).items():
                found[name] = max(count, found.get(name, 0))
    return found


def _records(data: bytes) -> Iterator[tuple[BatchTiming, Noted, int]]:
    """What a worker wrote of each batch, and where that ends; a killed one may leave part of the last."""
    end = 0
    while end + _FORMAT.size <= len(data):
        *timing, size = _FORMAT.unpack_from(data, end)
        if not 0 <= size < 2**31:  # a damaged file
            return
        start, end = end + _FORMAT.size, end + _FORMAT.size + size
        yield BatchTiming(*timing), data[start:end] if end <= len(data) else b"", end


def samples_of(noted: Noted) -> Samples:
    """Index and seconds of each sample of a batch, until the next one was begun, less those in line for a core."""
    numbers = array("d", noted)
    starts_s, indices = numbers[::2], numbers[1::2]
    return [
        (index, max(0.0, end_s - start_s))
        for index, start_s, end_s in zip(indices, starts_s, starts_s[1:], strict=False)
        if end_s
    ]
