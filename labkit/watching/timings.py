"""Where the time of a step goes: making a batch, waiting for storage, standing in line for a core.

A process that waits uses no processor time; in the run queue, or while the host of a virtual machine runs others, it
neither computes nor waits for data. Batches of a `DataLoader` are timed where they are made, in a worker or in the
training process.
"""

import json
import math
import os
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

from labkit.watching.hand import Hand, LastingFile, answer_with_stacks, hand_here
from labkit.watching.lines import LineSampler


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


_FORMAT = struct.Struct("<6dq")  # of a batch, and how many bytes follow on its samples
_SEEDED = "labkit.loading.seeding"  # whose indices seed as they are taken
_KINDS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")


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


class _Sink:
    """Where this process puts what it times; one a process, since torch's classes are changed for all."""

    put: Callable[[BatchTiming, Noted], object] | None = None
    hand = hand_here
    lines = LineSampler()
    n_fetchers = 0


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
    takes_all = type(fetcher).__name__ == _KINDS[0] and callable(getattr(data, "__getitems__", None))
    return fetcher.auto_collation and not takes_all


def start_timing(
    put: Callable[[BatchTiming, Noted], object], fetch: ModuleType, change: Callable[[Any, str, Any], None]
) -> Callable[[], None]:
    """Time every batch that this process makes for a `DataLoader`; returns what ends it.

    Args:
        put: Called with each, and with what `samples_of` makes its samples of.
        fetch: `torch.utils.data._utils.fetch`.
        change: Puts what a hook makes of a method in its place, given the class, the name and the hook.

    Workers that are forked from it time theirs too once `TimedWorker` tells them where to write.
    """
    before, _Sink.put = _Sink.put, put  # another observer may be at work, as around `lk.diagnose`
    change(fetch._BaseDatasetFetcher, "__init__", _numbered)
    for kind in _KINDS:
        change(getattr(fetch, kind), "fetch", _timed)
    return lambda: setattr(_Sink, "put", before)


def _change_for_good(owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
    setattr(owner, name, hook(getattr(owner, name)))


class TimedWorker:
    """A `worker_init_fn` that lets the worker time its batches, then calls the loader's own.

    Args:
        own: The loader's `worker_init_fn`, or None.
        folder: Each worker writes its times there, into a file of its own.
    """

    def __init__(self, own: Callable[[int], object] | None, folder: str):
        self._own, self._folder = own, folder

    def __call__(self, worker: int) -> None:
        with suppress(Exception):  # no times are better than no worker
            name = os.path.join(self._folder, str(worker))
            file = LastingFile(f"{name}.times", "ab")
            put, hand, lines = partial(_write, file), Hand.shared(f"{name}.hand"), LineSampler(f"{name}.lines")
            lines.start()
            _Sink.hand, _Sink.lines = hand, lines
            answer_with_stacks(f"{name}.stacks")
            fetch = sys.modules["torch.utils.data._utils.fetch"]
            if _Sink.put is not None:  # forked: it has the changed classes
                _Sink.put, _Sink.n_fetchers = put, 0
            else:
                start_timing(put, fetch, _change_for_good)
                if seeding := sys.modules.get(_SEEDED):
                    _change_for_good(seeding.SeededIndices, "__iter__", one_by_one)
        if self._own is not None:
            self._own(worker)
        with suppress(Exception):
            Path(self._folder, f"{worker}.threads").write_text(json.dumps(_threads_here()))


def _begin_again() -> None:
    """A forked process has none of its parent's threads, and may have its switch interval."""
    usual, _Sink.lines = _Sink.lines, LineSampler()
    usual.forked()


os.register_at_fork(after_in_child=_begin_again)


def line_sampler() -> LineSampler:
    """That of this process."""
    return _Sink.lines


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


def _write(file: Any, made: BatchTiming, noted: Noted) -> None:
    with suppress(OSError):  # a full disk must not end the training
        n_written = file.tell()
        if n_written < _MOST_BATCH_BYTES:
            noted = noted if n_written < MOST_SAMPLE_BYTES else b""
            data = _FORMAT.pack(*made, len(noted)) + noted
            if file.write(data) < len(data):  # a full disk takes a part
                file.truncate(n_written)
                file.seek(n_written)


def _numbered(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.collate_fn = _TimedCollate(self.collate_fn)
        self._labkit_epoch, self._labkit_one_by_one = _Sink.n_fetchers, _makes_one_by_one(self)
        _Sink.n_fetchers += 1

    return __init__


def _timed(fetch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fetch)
    def timed_fetch(self: Any, possibly_batched_index: Any) -> Any:
        put, collate, indices = _Sink.put, self.collate_fn, possibly_batched_index
        if put is None or not isinstance(collate, _TimedCollate):
            return fetch(self, indices)
        hand, lines, noted, samples = _Sink.hand, _Sink.lines, None, b""
        if type(indices).__module__ == _SEEDED:
            noted = indices.noted = hand.begin(list.copy(indices))  # taking them one by one would seed
        elif self._labkit_one_by_one and type(indices) is list:
            indices = _Indices(indices)
            noted = indices.noted = hand.begin(indices)
        collate.seconds, queued_s, cpu_s = 0.0, run_queue_s(), time.process_time() - lines.cpu_s
        start_s = time.perf_counter()
        try:
            data = lines.making(fetch, self, indices)
        finally:
            if noted is not None:
                size = 2 * len(indices) + 1 if noted[1] != Hand.UNKNOWN else 0
                samples = noted[:size].tobytes()
                hand.rest(noted)
                del indices.noted
        end_s = time.perf_counter()
        queued_s = run_queue_s() - queued_s
        busy_s = max(0.0, time.process_time() - lines.cpu_s - cpu_s) + queued_s
        timing = BatchTiming(start_s, end_s, busy_s, collate.seconds, self._labkit_epoch, queued_s)
        put(timing, samples)
        return data

    return timed_fetch


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


class Asking(threading.local):
    """The epoch whose next batch this thread waits for, to which a batch that it makes itself belongs."""

    epoch: Any = None
    loaded_s = 0.0
    pins = False


asking = Asking()


def timed_pickler(pickler: Any) -> Any:
    """What queues between processes pickle with."""

    class TimedPickler(pickler):
        @staticmethod
        def loads(data: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            loaded = pickler.loads(data, **kwargs)
            asking.loaded_s += time.perf_counter() - began_s
            return loaded

    return TimedPickler


def answered(detach: Callable[[Any], int]) -> Callable[[Any], int]:
    """`DupFd.detach`, which asks a worker for the memory of a tensor, without its time."""

    @wraps(detach)
    def timed_detach(self: Any) -> int:
        began_s = time.perf_counter()
        try:
            return detach(self)
        finally:
            asking.loaded_s -= time.perf_counter() - began_s

    return timed_detach
