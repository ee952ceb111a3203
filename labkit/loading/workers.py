"""Worker processes of a loader: how they are started and set up, what they were started with, and how they died."""

import errno
import multiprocessing
import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from labkit.errors import OperationError
from labkit.loading.resume import FailedBatch
from labkit.loading.seeding import held_by
from labkit.util.machine import main_is_script
from labkit.util.process import keep_freed_memory

# Starting them

_SLOW_IMPORTS = ("torchvision.transforms", "torchvision.transforms.v2", "albumentations", "kornia", "cv2", "simplejpeg")
_OWN_IMPORTS = ("labkit.data.", "labkit.loading.")  # of which data sets are made
_MAX_SOCKET_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")  # of the 107 of a socket's path on Linux
_PICKLING_REMEDY = (
    "spawn and forkserver pickle the data set, so it may hold no open file, lock or connection; open those "
    "where they are first used"
)
_SYSTEM_REMEDY = (
    "the system refused what they need: see that /dev/shm can be written to and has room (df /dev/shm), and the limits "
    "of files and processes (ulimit -n, ulimit -u); or pass num_workers=0"
)
_START_ERRORS = (TypeError, AttributeError, multiprocessing.ProcessError, OSError)


def worker_context(start_method: str | None) -> multiprocessing.context.BaseContext:
    """The context to start workers in; a fork server imports slow libraries once, before the first worker.

    None, in a notebook or console: a fork server where Python would fork. The kernel's threads hold locks, which a fork
    copies as they are. In a script: Python's own, since a fork alone needs no main guard.
    """
    return _Context(start_method)


class _Context(multiprocessing.context.BaseContext):
    """Chooses when workers start: until then, as with torch's loader, the program may call `set_start_method`.

    Nor does it take the method of the whole program, as `multiprocessing.get_context()` would.
    """

    def __init__(self, start_method: str | None):
        self._method = start_method

    def get_context(self, method: str | None = None) -> Any:
        context = multiprocessing.get_context(method or self.get_start_method())
        if context.get_start_method() == "forkserver":
            # Every worker is forked from the server: with these imported it starts in a tenth of a second.
            loaded = [name for name in sys.modules if name in _SLOW_IMPORTS or name.startswith(_OWN_IMPORTS)]
            context.set_forkserver_preload(["__main__", "labkit.loading.torch_loader", *loaded])
        return context

    def get_start_method(self, allow_none: bool = False) -> str:
        if self._method is not None:
            return self._method
        chosen = multiprocessing.get_start_method(allow_none=True)
        method = chosen or multiprocessing.get_all_start_methods()[0]  # the first is Python's default
        return "forkserver" if method == "fork" and not main_is_script() else method

    @property
    def Process(self) -> Any:
        return self.get_context().Process


def note_start(error: BaseException, num_workers: int) -> None:
    """Tell the remedy of an error by which workers do not start."""
    if isinstance(error, _START_ERRORS):
        is_refused = isinstance(error, OSError) and error.errno not in (None, errno.EPIPE)
        remedy = _SYSTEM_REMEDY if is_refused else _PICKLING_REMEDY
        error.add_note(f"while starting {num_workers} workers: {remedy}")


def prepare_to_start_workers() -> None:
    """Make what they share. RuntimeError, in words of its own, where Python would refuse to start or reach them."""
    if multiprocessing.current_process().daemon:
        raise OperationError(
            "a daemonic process, such as a worker of a multiprocessing.Pool or of another DataLoader, cannot start "
            "workers: pass num_workers=0 here, or use concurrent.futures.ProcessPoolExecutor, whose processes can"
        )
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_SOCKET_FOLDER_BYTES:
        raise OperationError(
            f"the temporary folder {folder} has a name of over {_MAX_SOCKET_FOLDER_BYTES} bytes, too long for the "
            "sockets by which workers hand over their batches: set TMPDIR to a shorter one, or num_workers=0"
        )
    _share_socket_folder()


_FOLDER_OWNER = "labkit_tempdir_of"


def _share_socket_folder() -> None:
    """Let the processes that this one starts put their sockets into its folder: it stays if one is killed, not theirs.

    Workers inherit what is noted of their parent.
    """
    about = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # private
    if not os.path.isdir(about.get("tempdir") or ""):  # somebody may have removed it
        about["tempdir"], about[_FOLDER_OWNER] = tempfile.mkdtemp(prefix="pymp-"), os.getpid()
        multiprocessing.util.Finalize(None, shutil.rmtree, (about["tempdir"], True), exitpriority=-100)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C while workers start: a half-started worker cannot be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *call: delayed.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            signal.raise_signal(signal.SIGINT)


# Within a worker


def set_up_worker() -> None:
    """Set up a worker: no Ctrl-C, one thread for OpenCV, freed memory is kept, errors and kills are noticed.

    If its parent was killed, the worker ends within seconds, and removes the folder that its parent could not remove.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OPENCV_FOR_THREADS_NUM"] = "1"  # for a cv2 that is imported later
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    keep_freed_memory()
    # An error in place of what cannot be pickled: the main process would wait for it forever.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_pickling_error  # type: ignore[attr-defined]  # private
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    multiprocessing.util.Finalize(None, _remove_orphaned, (os.getppid(),), exitpriority=-200)  # the last of all
    if parent.pid != os.getppid():
        # Forked by a fork server, which torch watches and which waits for its workers: both would stay forever
        # after a kill of the main process.
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    _remove_orphaned(0, partial(shutil.rmtree, ignore_errors=True))  # with its socket, and the server's
    os._exit(1)


def _remove_orphaned(started_by: int, remove: Callable[[str], None] = os.rmdir) -> None:
    """Remove the folder of the workers' sockets, if it was the parent's, and that has ended; if it is empty."""
    about: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # private
    parent = multiprocessing.parent_process()
    if parent is not None and about.get(_FOLDER_OWNER) == parent.pid and os.getppid() != started_by:
        with suppress(OSError):
            remove(about["tempdir"])


def _send_pickling_error(queue: Any, error: Exception, message: tuple[int, Any]) -> None:
    number, content = message
    if not isinstance(content, FailedBatch):
        error.add_note("while sending a batch to the main process: it may hold only what can be pickled")
        content = FailedBatch(error)
    content.error.exc_type = RuntimeError  # type: ignore[union-attr]  # its own class may be what cannot be pickled
    queue.put((number, content))


# What persistent workers were started with

_LONG = 1000  # items of a list that is data, not settings
_LARGE = 1 << 26  # bytes of an array, which take some 20 ms to compare
_PLAIN = (int, float, complex, str, bytes)


def attributes_of(roots: Sequence[Any]) -> list[Any]:
    """What objects hold, and what those hold: where something is replaced, the list is another one."""
    found: list[Any] = []
    waiting, seen = list(roots), set[int]()
    while waiting:
        item = waiting.pop()
        held: list[Any] = []
        contents = 0  # of what is compared as a whole
        if id(item) not in seen and not isinstance(item, str | bytes | type):
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                contents = 0 if item.is_inference() else item._version
            elif isinstance(item, np.ndarray):
                is_small = item.nbytes <= _LARGE and not item.dtype.hasobject
                contents = _checksum(item) if is_small else 0
            else:
                held = list(held_by(item))
        if len(held) > _LONG:
            contents = _checksum(np.fromiter(map(id, held), np.int64, len(held)))
        else:
            waiting += held
        found += item, len(held), contents
    return found


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
        for one, other in zip(before, now, strict=True)
    )


# How they died


def explain_death(error: BaseException, workers: Sequence[Any]) -> str:
    """How workers died, if any did; else nothing.

    Args:
        error: What asking for a batch raised.
        workers: The processes.
    """
    if isinstance(error, OSError | EOFError) and "in DataLoader worker process" not in str(error):
        # A dying worker closes its sockets, then its sentinel, and ends last: only then it has an exit code.
        dying = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=5.0)
        for worker in workers:
            if worker.sentinel in dying:
                worker.join(timeout=5.0)
    codes = {worker.pid: worker.exitcode for worker in workers if worker.exitcode}
    return "; ".join(f"worker {pid} {_explain_exit_code(code)}" for pid, code in codes.items())


def silence_deaths(iterator: Any) -> None:
    """Let only the caller that waits for a batch learn of a dead worker.

    torch's signal handler would raise wherever the main thread happens to be: in a training step, between two epochs,
    or in code that has nothing to do with the thread that iterates. Who waits looks for dead workers every 5 s. A torch
    without these names keeps its ways.
    """
    with suppress(AttributeError):
        torch.utils.data._utils.signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


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
