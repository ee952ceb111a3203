"""Worker processes: how they start, how they end, and what is said when one of them dies."""

import multiprocessing.queues
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling, worker as worker_loop
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_PATIENCE_S = 5.0
_SLOW_IMPORTS = ("torchvision.transforms.v2", "albumentations", "kornia", "cv2", "simplejpeg")


class WorkerDied(RuntimeError):
    """A worker process ended without a word: killed by the system, or crashed in native code."""


class WorkersBatches(_MultiProcessingDataLoaderIter):
    """torch's iterator over workers, except that only whoever waits for a batch is told of a dead worker.

    torch's signal handler would raise wherever the main thread is just then: in a training step, between two epochs,
    or in code that has nothing to do with the thread that iterates.
    """

    def __init__(self, loader: DataLoader):
        super().__init__(loader)
        signal_handling._remove_worker_pids(id(self))
        self._worker_pids_set = False

    def _shutdown_workers(self) -> None:
        was_over = self._shutdown
        super()._shutdown_workers()
        if self._shutdown and not was_over:
            for worker in self._workers:
                worker.join(_PATIENCE_S)  # an older torch terminates those that do not end, and goes on

    def _try_get_data(self, timeout: float = 1.0) -> tuple[bool, Any]:
        try:
            return super()._try_get_data(timeout)  # at each timeout it looks for the dead; its own default is 5 s
        except (OSError, EOFError) as error:
            # A batch that cannot be fetched from its worker: one that is being killed closes its sockets, then ends.
            if self._one_ends(within_s=2.0):
                raise RuntimeError("DataLoader worker (pid unknown) exited unexpectedly") from error
            raise

    def _one_ends(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while all(worker.is_alive() for worker in self._workers):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class Epoch:
    """One pass over a Loader; ends its workers when anything goes wrong."""

    def __init__(self, loader: DataLoader, batches: Iterator[Any]):
        self._loader, self._batches = loader, batches

    def __iter__(self) -> "Epoch":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        except BaseException as error:
            died = how_a_worker_died(error, self._batches)
            self._end_workers()
            if died:
                raise WorkerDied(died) from None
            raise

    def _end_workers(self) -> None:
        batches, self._batches = self._batches, None
        if self._loader._iterator is batches:
            self._loader._iterator = None
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


def how_a_worker_died(error: BaseException, batches: Iterator[Any] | None) -> str | None:
    """What to say if torch found a worker dead, else None."""
    text = str(error)
    # With pinned memory a thread fetches the batches, and ends when a dead worker's cannot be fetched.
    if not isinstance(error, RuntimeError) or not text.startswith(("DataLoader worker (pid", "Pin memory thread")):
        return None
    dead = {worker.pid: worker.exitcode for worker in getattr(batches, "_workers", ()) if worker.exitcode}
    causes = [f"worker {pid} {_cause(code)}" for pid, code in dead.items()]
    return "; ".join(causes) or (text if text.startswith("DataLoader") else None)


def _cause(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL): most often the system ran out of memory. Use fewer workers, a smaller batch or a "
            "smaller prefetch_factor"
        )
    if exitcode == -signal.SIGBUS:
        return "ended with SIGBUS: most often /dev/shm is full. Enlarge it (docker run --shm-size), or load less ahead"
    if exitcode < 0:
        return f"ended with {signal.Signals(-exitcode).name}: native code crashed, or something killed it"
    return f"ended with exit status {exitcode}; its own message stands on stderr"


def worker_context(start_method: str | None):
    context = multiprocessing.get_context(start_method)
    if context.get_start_method() == "forkserver":
        # The server imports these once, and forks every worker from itself: a tenth of a second instead of seconds.
        loaded = [name for name in _SLOW_IMPORTS if name in sys.modules]
        context.set_forkserver_preload(["__main__", "labkit.pipeline.loader.loader", *loaded])
    return context


@contextmanager
def own_count_of_workers() -> Iterator[None]:
    """Without torch's warning of too many workers: `LoaderConfig` has warned, or was told to keep them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


@contextmanager
def interrupts_wait(context: Any) -> Iterator[None]:
    """Hold Ctrl-C back while workers start: half a worker cannot be ended, and one that is importing would complain."""
    if context.get_start_method() != "fork":
        multiprocessing.resource_tracker.ensure_running()  # started later, it would let signals through again
    multiprocessing.util.get_temp_dir()  # theirs, too: a folder of its own would outlive a worker that is killed
    waiting = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *call: waiting.append(call)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the workers inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def start_worker(worker_id: int) -> None:
    """Ctrl-C is for the main process, which ends its workers; OpenCV's threads would fight the other workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = multiprocessing.util.get_temp_dir()
    multiprocessing.util.Finalize(None, _remove_if_orphaned, (folder,), exitpriority=-100)
    os.environ["OPENCV_FOR_THREADS_NUM"] = "1"  # for a cv2 that is imported later
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_what_went_wrong
    if multiprocessing.parent_process().pid != os.getppid():  # a fork server's child
        worker_loop.ManagerWatchdog = _Starter


class _Starter:
    """What a worker asks, when it has nothing to do, whether it is still wanted.

    torch's own asks for the parent. That of a fork server's child is the server, and each lives as long as the other:
    after a kill of the main process both would stay for ever.
    """

    def is_alive(self) -> bool:
        return multiprocessing.parent_process().is_alive()


def _remove_if_orphaned(folder: str) -> None:
    """The folder of sockets is the main process', which removes it, unless it was killed."""
    if not multiprocessing.parent_process().is_alive():
        shutil.rmtree(folder, ignore_errors=True)


def _send_what_went_wrong(queue: Any, error: Exception, message: tuple[int, Any]) -> None:
    """In place of a batch or an exception that cannot be pickled: else the main process would wait for it for ever."""
    number, content = message
    if not isinstance(content, ExceptionWrapper):
        error.add_note("while sending a batch to the main process: it may hold only what can be pickled")
        content = ExceptionWrapper((type(error), error, error.__traceback__), where="in a DataLoader worker process")
    content.exc_type = RuntimeError
    queue.put((number, content))
