"""Worker processes: how they start, how they end, and what the caller learns when one dies."""

import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit.core import keep_freed_memory, main_is_script
from labkit.pipeline.loader.torch_internals import (
    WorkerLoader,
    WorkersBatches,
    send_pickling_errors,
    watch_starting_process,
)
from labkit.pipeline.resume import Progress

_SLOW_IMPORTS = ("torchvision.transforms", "torchvision.transforms.v2", "albumentations", "kornia", "cv2", "simplejpeg")
_OWN_IMPORTS = ("labkit.data.", "labkit.pipeline.")  # of which data sets are made


class WorkerDied(RuntimeError):
    """A worker process ended without an error of its own: killed by the system, or crashed in native code."""


class Epoch:
    """One pass over a loader; ends its workers when anything goes wrong."""

    def __init__(self, loader: WorkerLoader, batches: Iterator[Any], progress: Progress):
        self._loader, self._progress = loader, progress
        self._batches: Iterator[Any] | None = batches

    def __iter__(self) -> "Epoch":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            return self._progress.give(next(self._batches))
        except BaseException as error:
            batches, self._batches = self._batches, None
            if isinstance(error, StopIteration):
                self._progress.is_over = True
                raise
            death = describe_death(error, batches)
            self._loader.end_workers(batches)
            if death:
                raise WorkerDied(death) from None
            raise


def describe_death(error: BaseException, batches: Iterator[Any] | None) -> str | None:
    """How workers died, if `error` is how torch reports that; else None."""
    text = str(error)
    # With pinned memory a thread fetches the batches. It ends when it cannot fetch those of a dead worker.
    if not isinstance(error, RuntimeError) or not text.startswith(("DataLoader worker (pid", "Pin memory thread")):
        return None
    exit_codes = batches.exit_codes() if isinstance(batches, WorkersBatches) else {}
    causes = [f"worker {pid} {_explain_exit_code(code)}" for pid, code in exit_codes.items()]
    return "; ".join(causes) or (text if text.startswith("DataLoader") else None)


def _explain_exit_code(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            "was killed (SIGKILL): most often the system ran out of memory. Use fewer workers, a smaller batch or a "
            "smaller prefetch_factor"
        )
    if exit_code == -signal.SIGBUS:
        return "ended with SIGBUS: most often /dev/shm is full. Enlarge it (docker run --shm-size), or load less ahead"
    if exit_code < 0:
        return f"ended with {signal.Signals(-exit_code).name}: native code crashed, or something killed it"
    return f"ended with exit status {exit_code}; its own message is on stderr"


def worker_context(start_method: str | None) -> multiprocessing.context.BaseContext:
    """The context to start workers in; a fork server imports slow libraries once, before the first worker.

    None, in a notebook or console: a fork server where Python would fork. The kernel's threads hold locks, which a fork
    copies as they are. In a script: Python's own, since a fork alone needs no main guard.
    """
    context = multiprocessing.get_context(start_method)
    if start_method is None and context.get_start_method() == "fork" and not main_is_script():
        context = multiprocessing.get_context("forkserver")
    if context.get_start_method() == "forkserver":
        # Every worker is forked from the server: with these imported it starts in a tenth of a second.
        loaded = [name for name in sys.modules if name in _SLOW_IMPORTS or name.startswith(_OWN_IMPORTS)]
        context.set_forkserver_preload(["__main__", "labkit.pipeline.loader.loader", *loaded])
    return context


@contextmanager
def delay_interrupts(context: multiprocessing.context.BaseContext) -> Iterator[None]:
    """Delay Ctrl-C while workers start: a half-started worker cannot be ended, and an importing one would complain."""
    if context.get_start_method() != "fork":
        multiprocessing.resource_tracker.ensure_running()  # started later, it would unblock the signal
    multiprocessing.util.get_temp_dir()  # shared with the workers: one of a worker's own would outlive a kill
    delayed = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *call: delayed.append(call)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the workers
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if delayed:
            signal.raise_signal(signal.SIGINT)


def start_worker(worker_id: int) -> None:
    """Set up a worker: no Ctrl-C, one thread for OpenCV, freed memory is kept, errors and kills are noticed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = multiprocessing.util.get_temp_dir()
    multiprocessing.util.Finalize(None, _remove_if_orphaned, (folder,), exitpriority=-100)
    os.environ["OPENCV_FOR_THREADS_NUM"] = "1"  # for a cv2 that is imported later
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    keep_freed_memory()
    send_pickling_errors()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # forked by a fork server
        watch_starting_process()


def _remove_if_orphaned(folder: str) -> None:
    """Remove the main process's folder of sockets, if that was killed and cannot do it."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)
