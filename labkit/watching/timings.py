"""Where the time of a step goes: making a batch, waiting for storage, standing in line for a core, copies, the device.

A process that waits uses no processor time; in the run queue, or while the host of a virtual machine runs others, it
neither computes nor waits for data. Batches of a `DataLoader` are timed where they are made, in a worker or in the
training process; the device's time by events on the stream that trains, whose reading waits for nothing.
"""

import functools
import os
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from labkit.errors import ArgumentError, CannotDiagnose
from labkit.measure.usage import core_time
from labkit.util.process import end_workers, preserve_rng_state


class Epochs:
    """Endless batches: one epoch after the other.

    Args:
        loader: Any iterable of batches.
        starts_workers: Every epoch starts like the first, so the first one's cost counts before there is a second.

    Attributes:
        gaps_s: Seconds from the end of each epoch to the first batch of the next.
        first_s: Seconds to the very first batch.
        length: Batches of an epoch; None if unknown so far.

    Raises:
        CannotDiagnose: the loader gives no batch, or cannot be iterated again.
    """

    def __init__(self, loader: Iterable[Any], *, starts_workers: bool = False):
        if not hasattr(loader, "__iter__"):
            raise CannotDiagnose(f"the loader must be an iterable of batches, got a {type(loader).__name__}")
        self._loader, self._starts_workers = loader, starts_workers
        self.gaps_s: list[float] = []
        self.first_s = 0.0
        self.length = epoch_length(loader)

    def __iter__(self) -> Generator[Any, None, None]:
        asked, n_epochs = time.perf_counter(), 0
        while True:
            n_batches, batches = 0, iter(self._loader)
            try:
                for batch in batches:
                    if not n_batches and n_epochs:
                        self.gaps_s.append(time.perf_counter() - asked)
                    elif not n_batches:
                        self.first_s = time.perf_counter() - asked
                    n_batches += 1
                    yield batch
                    asked = time.perf_counter()
            except BaseException:
                end_workers(batches)
                raise
            if not n_batches:
                what = "can be iterated only once: pass an iterable that starts again" if n_epochs else "gives no batch"
                raise CannotDiagnose(f"the loader, a {type(self._loader).__name__}, {what}")
            n_epochs, self.length = n_epochs + 1, n_batches

    def starting_s(self, waiting_s: float) -> float:
        """Seconds per batch that starting an epoch costs.

        Args:
            waiting_s: Seconds that training waits for any batch.
        """
        gaps_s = self.gaps_s or ([self.first_s] if self._starts_workers else [])
        return max(0.0, statistics.median(gaps_s) - waiting_s) / self.length if gaps_s and self.length else 0.0


def epoch_length(loader: Any) -> int | None:
    """Batches of an epoch, where the loader says so without harm."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # once asked for it, torch warns if more batches come
    try:
        return len(loader)
    except TypeError:
        return None


@dataclass(frozen=True)
class Making:
    """What making a batch costs one process.

    seconds: Wall time per batch; None if the loader cannot run in this process.
    waiting: Share of it in which nothing was computed: the process waited for a disk, a network or a lock.
    """

    seconds: float | None
    waiting: float

    @property
    def known_s(self) -> float:
        """The seconds, where they are known. Raises ValueError."""
        if self.seconds is None:
            raise ArgumentError("the loader cannot run in this process")
        return self.seconds


def making_in_one_process(loader: Any, *, limit_s: float, n_batches: int) -> Making:
    """Make batches of a `torch.utils.data.DataLoader` in this process, with one thread, as a worker makes them.

    Args:
        loader: The loader; its own workers are not used, and global random generators are restored.
        limit_s: No batch is started after this many seconds.
        n_batches: At most; another one before them does not count.
    """
    with preserve_rng_state(), _one_thread():
        batches = iter(_without_workers(loader))
        next(batches, None)  # opens files, fills caches
        made, started, cores, cpu_s, before_s = 0, time.perf_counter(), core_time(), time.process_time(), run_queue_s()
        for made, _ in enumerate(batches, 1):
            if made >= n_batches or time.perf_counter() - started > limit_s:
                break
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        busy_s = cores.with_stolen(cpu_s) + run_queue_s() - before_s
    if not made:
        return Making(None, 0.0)
    return Making(wall_s / made, min(1.0, max(0.0, 1 - busy_s / wall_s)))


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


def waiting_of(loader: Any, seconds: float, cpu_s: float) -> Making:
    """The same for any other loader, from the processor time of all its threads and processes.

    Args:
        seconds: Wall time per batch.
        cpu_s: Processor seconds per batch of the process tree, with stolen time.
    """
    n_workers = getattr(loader, "num_threads", None) or getattr(loader, "num_workers", None) or 1
    return Making(None, min(1.0, max(0.0, 1 - cpu_s / (seconds * n_workers))) if seconds > 0 else 0.0)


def _without_workers(loader: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    own = {"collate_fn": loader.collate_fn, "generator": torch.Generator().manual_seed(0)}
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **own)
    if loader.batch_sampler is None:  # the data set gives whole batches
        return DataLoader(loader.dataset, batch_size=None, sampler=loader.sampler, **own)
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **own)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    with ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        if cv2 := sys.modules.get("cv2"):
            undo.callback(cv2.setNumThreads, cv2.getNumThreads())
            cv2.setNumThreads(0)
        yield


_FORMAT = struct.Struct("<5d")
_KINDS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")


class BatchTiming(NamedTuple):
    """One batch, as whoever made it saw it.

    start_s, end_s: `time.perf_counter()`, which on Linux is one clock for all processes.
    busy_s: Processor seconds, and seconds in which others had the core: not waiting for data.
    collate_s: Seconds of the collate function.
    epoch: Number of the fetcher in its process: workers make a new one for each epoch.
    """

    start_s: float
    end_s: float
    busy_s: float
    collate_s: float
    epoch: float


class _Sink:
    """Where this process puts what it times; one a process, since torch's classes are changed for all."""

    put: Callable[[BatchTiming], object] | None = None
    n_fetchers = 0


def start_timing(put: Callable[[BatchTiming], object], fetch: ModuleType) -> Callable[[], None]:
    """Time every batch that this process makes for a `DataLoader`; returns what undoes it.

    Args:
        put: Called with each.
        fetch: `torch.utils.data._utils.fetch`.

    Workers that are forked from it time theirs too once `TimedWorker` tells them where to write.
    """
    _Sink.put = put
    kinds = [getattr(fetch, kind) for kind in _KINDS]
    originals = [(kind, name, getattr(kind, name)) for kind in kinds for name in ("__init__", "fetch")]
    for kind in kinds:
        kind.__init__, kind.fetch = _numbered(kind.__init__), _timed(kind.fetch)

    def stop() -> None:
        _Sink.put = None
        for kind, name, original in originals:
            setattr(kind, name, original)

    return stop


class TimedWorker:
    """A `worker_init_fn` that lets the worker time its batches, then calls the loader's own.

    Args:
        own: The loader's `worker_init_fn`, or None.
        folder: Each worker writes its times there, into a file of its own.
    """

    def __init__(self, own: Callable[[int], object] | None, folder: str):
        self._own, self._folder = own, folder

    def __call__(self, worker: int) -> None:
        with suppress(OSError):  # no times are better than no worker
            file = open(os.path.join(self._folder, f"{worker}.times"), "ab", buffering=0)  # noqa: SIM115 - until it ends
            put = partial(_write, file)
            fetch = sys.modules["torch.utils.data._utils.fetch"]
            if _Sink.put is not None:  # forked: it has the changed classes
                _Sink.put, _Sink.n_fetchers = put, 0
            else:
                start_timing(put, fetch)
        if self._own is not None:
            self._own(worker)


def read_times(folder: str) -> dict[int, list[BatchTiming]]:
    """What the workers of one iterator wrote, by worker."""
    found = {}
    for path in Path(folder).glob("*.times"):
        data = path.read_bytes()
        whole = data[: len(data) // _FORMAT.size * _FORMAT.size]  # a killed worker may leave part of one
        found[int(path.stem)] = [BatchTiming(*values) for values in _FORMAT.iter_unpack(whole)]
    return found


def _write(file: Any, made: BatchTiming) -> None:
    with suppress(OSError):  # a full disk must not end the training
        file.write(_FORMAT.pack(*made))


def _numbered(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.collate_fn = _TimedCollate(self.collate_fn)
        self._labkit_epoch = _Sink.n_fetchers
        _Sink.n_fetchers += 1

    return __init__


def _timed(fetch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fetch)
    def timed_fetch(self: Any, possibly_batched_index: Any) -> Any:
        put, collate = _Sink.put, self.collate_fn
        if put is None or not isinstance(collate, _TimedCollate):
            return fetch(self, possibly_batched_index)
        collate.seconds, queued_s, cpu_s = 0.0, run_queue_s(), time.process_time()
        start_s = time.perf_counter()
        data = fetch(self, possibly_batched_index)
        end_s = time.perf_counter()
        busy_s = time.process_time() - cpu_s + run_queue_s() - queued_s
        put(BatchTiming(start_s, end_s, busy_s, collate.seconds, self._labkit_epoch))
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


_MAX_PENDING = 64  # pairs of events; the oldest have long been reached when there are this many


class DeviceTimes:
    """Seconds for which the current stream had nothing to do while the host waited for a batch, and of copies.

    An event is recorded when a batch is asked for, behind the kernels that were sent so far, and another one when it is
    there. The time between them is what the device stood still for: none, if it was still busy when the batch came.

    Attributes:
        idle_s: Of each batch; empty without CUDA.
        copy_s: Of each copy from the host, on the stream that was current.
        busy: Samples of the driver, as `gpu_utilization` gives them.
    """

    def __init__(self) -> None:
        self.busy: list[float] = []
        self._sampler = ExitStack()
        self.idle_s: list[float] = []
        self.copy_s: list[float] = []
        self._pending: list[tuple[list[float], Any, Any]] = []
        self._lock = threading.Lock()  # a script may copy in several threads

    def start(self) -> Callable[[], None]:
        """Time copies by `Tensor.to` and `Tensor.cuda`; returns what undoes it."""
        from torch import Tensor

        originals = {name: getattr(Tensor, name) for name in ("to", "cuda")}
        for name, original in originals.items():
            setattr(Tensor, name, self._timed(original))

        def stop() -> None:
            for name, original in originals.items():
                setattr(Tensor, name, original)
            self.read(wait=True)
            self._sampler.close()

        return stop

    def asked(self) -> Any:
        """Called when a batch is asked for."""
        return _event() if _has_device() else None

    def received(self, asked: Any) -> None:
        """Called when it is there."""
        if asked is not None:
            if not self.idle_s and not self._pending:
                self.busy = self._sampler.enter_context(gpu_utilization())
            self._add(self.idle_s, asked)

    def read(self, *, wait: bool = False) -> None:
        """Take over the times of the events that the device has reached; all of them, if it waits."""
        with self._lock:
            while self._pending and (wait or self._pending[0][2].query()):
                into, first, last = self._pending.pop(0)
                last.synchronize()
                into.append(first.elapsed_time(last) / 1e3)

    def forget(self) -> None:
        """Begin again, in a forked process, which can use no device that its parent uses."""
        self.idle_s, self.copy_s, self.busy, self._pending = [], [], [], []
        self._lock = threading.Lock()

    def _add(self, into: list[float], first: Any) -> None:
        last = _event()
        with self._lock:
            self._pending.append((into, first, last))
            is_full = len(self._pending) > _MAX_PENDING
        if is_full:
            self.read()

    def _timed(self, original: Any) -> Any:
        @functools.wraps(original)
        def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_cuda or not _has_device():
                return original(self, *args, **kwargs)
            first = _event()
            result = original(self, *args, **kwargs)
            if result.is_cuda:
                times._add(times.copy_s, first)
            return result

        times = self
        return moved


def _has_device() -> bool:
    import torch  # by now the script has imported it

    return torch.cuda.is_initialized()


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_INTERVAL_S = 0.1


@contextmanager
def gpu_utilization() -> Iterator[list[float]]:
    """Sample the current CUDA device in a thread while the `with` block runs; no samples if NVML does not answer.

    A sample is the share of the time in which a kernel ran, 0 to 1. A kernel that uses one of a hundred multiprocessors
    counts in full: low means idle, high does not mean well used.

    Source: nvmlDeviceGetUtilizationRates, via torch.cuda.utilization.
    """
    import torch

    samples, ended = [], threading.Event()

    def sample() -> None:
        with suppress(Exception):  # NVML, or its Python package, is missing
            while not ended.wait(_INTERVAL_S):
                samples.append(torch.cuda.utilization() / 100)

    thread = threading.Thread(target=sample, name="labkit-gpu-utilization", daemon=True)
    if torch.cuda.is_initialized():
        thread.start()
    try:
        yield samples
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
