"""How a `DataLoader` makes its batches: timed where they are made, in a worker or in the training process."""

import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from labkit.tuning.io_wait import run_queue_s

_FORMAT = struct.Struct("<5d")
_KINDS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")


class Made(NamedTuple):
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

    put: Callable[[Made], object] | None = None
    n_fetchers = 0


def start_timing(put: Callable[[Made], object], fetch: ModuleType) -> Callable[[], None]:
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


def read_times(folder: str) -> dict[int, list[Made]]:
    """What the workers of one iterator wrote, by worker."""
    found = {}
    for path in Path(folder).glob("*.times"):
        data = path.read_bytes()
        whole = data[: len(data) // _FORMAT.size * _FORMAT.size]  # a killed worker may leave part of one
        found[int(path.stem)] = [Made(*values) for values in _FORMAT.iter_unpack(whole)]
    return found


def _write(file: Any, made: Made) -> None:
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
        put(Made(start_s, end_s, busy_s, collate.seconds, self._labkit_epoch))
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
