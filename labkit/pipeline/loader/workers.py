"""Worker processes: how they start, how they end, and what the caller learns when one dies."""

import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from labkit.core import keep_freed_memory, main_is_script

_SLOW_IMPORTS = ("torchvision.transforms", "torchvision.transforms.v2", "albumentations", "kornia", "cv2", "simplejpeg")
_OWN_IMPORTS = ("labkit.data.", "labkit.pipeline.")  # of which data sets are made


class WorkerDied(RuntimeError):
    """A worker process ended without an error of its own: killed by the system, or crashed in native code."""


def explain_death(error: BaseException, workers: Sequence[Any]) -> str | None:
    """How workers died, if `error` is how torch reports that, or what follows from it; else None.

    Args:
        error: What asking for a batch raised.
        workers: The processes.
    """
    text = str(error)
    # With pinned memory a thread fetches the batches. It ends when it cannot fetch those of a dead worker.
    is_report = isinstance(error, RuntimeError) and text.startswith(("DataLoader worker (pid", "Pin memory thread"))
    if not is_report:
        if not isinstance(error, OSError | EOFError) or "in DataLoader worker process" in text:
            return None
        # A worker that is being killed closes its sockets before it ends; until then nothing can be fetched.
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=2.0)
    codes = {worker.pid: worker.exitcode for worker in workers if worker.exitcode}
    causes = [f"worker {pid} {_explain_exit_code(code)}" for pid, code in codes.items()]
    return "; ".join(causes) or (text if text.startswith("DataLoader") else None)


def silence_deaths(iterator: Any) -> None:
    """Let only the caller that waits for a batch learn of a dead worker, within a second.

    torch's signal handler would raise wherever the main thread happens to be: in a training step, between two epochs,
    or in code that has nothing to do with the thread that iterates. Who waits looks for dead workers every 5 s. A torch
    without these names keeps its ways.
    """
    with suppress(AttributeError):
        torch.utils.data._utils.signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    if (look := getattr(type(iterator), "_try_get_data", None)) is not None:
        itself = weakref.ref(iterator)  # else the iterator would hold itself, and the workers stay
        iterator._try_get_data = lambda timeout=1.0: look(itself(), timeout)


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
    # An error in place of what cannot be pickled: the main process would wait for it for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_pickling_error  # type: ignore[attr-defined]  # private
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # Forked by a fork server. torch watches that, which in turn waits for its workers: both would stay for ever
        # after a kill of the main process.
        threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()


def _end_with(parent: Any, folder: str) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _send_pickling_error(queue: Any, error: Exception, message: tuple[int, Any]) -> None:
    number, content = message
    wrapper = torch._utils.ExceptionWrapper
    if not isinstance(content, wrapper):
        error.add_note("while sending a batch to the main process: it may hold only what can be pickled")
        content = wrapper((type(error), error, error.__traceback__), where="in a DataLoader worker process")
    content.exc_type = RuntimeError
    queue.put((number, content))


def _remove_if_orphaned(folder: str) -> None:
    """Remove the main process's folder of sockets, if that was killed and cannot do it."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)
