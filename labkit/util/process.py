"""This process: its allocator and threads, its random state, values made once, its output and bars."""

import io
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from labkit.util.machine import main_is_script

if TYPE_CHECKING:  # commands that need none of them start without
    from tqdm import tqdm

_LARGEST_BLOCK_BYTES = 32 * 2**20 - 2**16  # glibc learns from blocks of at most 32 MiB, header and rounding included


def keep_freed_memory() -> None:
    """Free one large block, which was never touched: from then on, glibc keeps most memory that the process frees.

    glibc gives large freed blocks back to the system, and the next image then pays a page fault for every 4 KB. What is
    large, it learns from the blocks that are freed: the limits rise up to 32 MiB for a block and 64 MiB for the end of
    the heap, and stay there (M_MMAP_THRESHOLD in mallopt(3)). A long run gets there sooner or later. A new process is
    below, and PIL's rate on large photos then depends, twofold and more, on what ran before. Forked processes inherit
    the limits. Limits set by hand stay as they are, and so do other allocators.
    """
    import numpy as np

    np.empty(_LARGEST_BLOCK_BYTES, np.uint8)


_lock = threading.Lock()


def use_one_torch_thread() -> None:
    """Limit torch to the calling thread; worker threads that each start more threads would compete for the cores.

    `torch.set_num_threads` sets the number for this thread and for all threads started later, so another thread
    restores the latter. Does nothing if torch is not loaded.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with _lock:
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
        restorer.start()
        restorer.join()


def end_workers(batches: Any) -> None:
    """End a pass over torch's `DataLoader` that failed: the error's traceback would keep its workers alive."""
    if not getattr(batches, "_persistent_workers", False):  # those belong to the loader
        getattr(batches, "_shutdown_workers", lambda: None)()


@contextmanager
def closing_pass(batches: Iterator[Any], loader: Any) -> Iterator[Iterator[Any]]:
    """Close a pass over a loader at the end, as generators and labkit's loaders can; after an error, end its workers.

    Its loader then learns at once that it was left, not when the last reference to it is gone. A loader that is its own
    iterator stays open.
    """
    try:
        yield batches
    except BaseException:
        end_workers(batches)
        raise
    finally:
        if not isinstance(loader, Iterator):
            getattr(batches, "close", lambda: None)()


def note_unknown_class(error: BaseException) -> None:
    """Note why workers of torch's `DataLoader` ended, where they cannot have the class that a notebook's cell defines.

    torch says no more than that a worker exited: what went wrong, it says on a stderr that a notebook may not show.
    """
    if "exited unexpectedly" not in str(error) or main_is_script():
        return
    import multiprocessing  # whoever watches a script imports nothing that the script does not

    for frame, _ in walk_tb(error.__traceback__):
        batches = frame.f_locals.get("self")
        methods = [getattr(worker, "_start_method", None) for worker in getattr(batches, "_workers", ())]
        if not methods or (methods[0] or multiprocessing.get_start_method()) == "fork":
            continue
        parts = [getattr(batches, name, None) for name in ("_dataset", "_collate_fn", "_worker_init_fn")]
        own: list[Any] = [part if hasattr(part, "__qualname__") else type(part) for part in parts]
        if names := [part.__qualname__ for part in own if part.__module__ == "__main__"]:
            error.add_note(
                f"Workers that are spawned, or come from a fork server, import {names[0]}, and cannot where a cell "
                "defines it. Write it into a file: put its code and its imports into a cell that begins with "
                f"`%%writefile my_data.py`, run that cell, and then `from my_data import {names[0]}`. "
                "Or use lk.make_loader, whose workers take it from the notebook"
            )
            return


def on_cpu() -> AbstractContextManager[Any]:
    """A block whose new tensors are on the CPU, whatever `torch.set_default_device` says."""
    import torch
    from torch.utils import _device

    # Where there is none to undo, calls of torch take no time for it. Its public name for that makes a tensor, which a
    # forked process cannot where the device is CUDA.
    is_set = getattr(_device, "CURRENT_DEVICE", "unknown") is not None
    return torch.device("cpu") if is_set else nullcontext()


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators at the end: loading in the main process must not reseed the model's dropout."""
    import numpy as np

    with ExitStack() as restorers:
        if (torch := sys.modules.get("torch")) is not None:  # else nobody has drawn from its generators
            devices = range(len(torch.cuda.default_generators)) if torch.cuda.is_initialized() else ()
            restorers.enter_context(torch.random.fork_rng(devices))
        restorers.callback(random.setstate, random.getstate())
        restorers.callback(np.random.set_state, np.random.get_state())
        yield


Made = TypeVar("Made")


class Lazy(Generic[Made]):
    """A value made on first use, once for all threads. Forks keep their parent's value; a pickle makes its own."""

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._value: Made
        self._owner: int | None = None
        self._locks: dict[int, threading.Lock] = {}  # by process: another thread may hold one during a fork

    def __call__(self) -> Made:
        if not self._is_made():
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                if not self._is_made():
                    self._value = self._make()
                    self._owner = os.getpid()
        return self._value

    def _is_made(self) -> bool:
        return self._owner is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)


class PerProcess(Lazy[Made]):
    """A value that each process makes for itself, forks included, such as a connection or an open file."""

    def _is_made(self) -> bool:
        return self._owner == os.getpid()


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line that called labkit: once there, whichever of its functions finds the reason.

    In a notebook, once in a run of a cell: Python's own record of what it has said is lost whenever a filter changes.
    """
    if shell := _notebook():
        if _said_in_cell.get((category, message)) == shell.execution_count:
            return
        _said_in_cell[category, message] = shell.execution_count
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "labkit":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


_said_in_cell: dict[tuple[type[Warning], str], int] = {}


def _notebook() -> Any:
    """The shell of a notebook's kernel, if that is what runs this process."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def print_utf8() -> None:
    """Switch ASCII streams to UTF-8, as in a C locale without coercion; for commands only.

    Otherwise a file name, or the ellipsis in shortened help, would make a command fail.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding in ("ascii", "ANSI_X3.4-1968", "US-ASCII"):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def progress_bar(iterable: Any = None, *, show: bool = True, **options: Any) -> "tqdm":
    """A `tqdm` bar that disappears when done; `TQDM_DISABLE=1` hides it.

    In a notebook it is text in the cell's output, and not a widget as `tqdm.auto` would show: a saved notebook keeps a
    widget's place, where "Error displaying widget" stands when the notebook is opened again.
    """
    from tqdm import tqdm

    silent = os.environ.get("TQDM_DISABLE", "0") not in ("", "0") or not show
    if not silent and _notebook():
        options |= {"file": _CellOutput(), "ncols": 80, "ascii": False}
    return tqdm(iterable, leave=False, disable=silent, **options)


class _CellOutput:
    """A file for one line of text, which a notebook shows in the output of the running cell: each write replaces it."""

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str) -> None:
        from IPython.display import display

        # Of a line of spaces, by which a bar is erased, an output without content is left: it takes no room.
        data = {"text/plain": line} if (line := text.strip()) else {}
        if self._handle is not None:
            self._handle.update(data, raw=True)
        elif data:
            self._handle = display(data, raw=True, display_id=True)

    def flush(self) -> None:
        """Nothing: what is written is shown at once."""
