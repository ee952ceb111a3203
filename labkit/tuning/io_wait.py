"""Whether a loader computes or waits for storage: a process that waits uses no processor time.

In the run queue, or while the host of a virtual machine runs others, a process neither computes nor waits for data.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.measure import core_time


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
            raise ValueError("the loader cannot run in this process")
        return self.seconds


def making_in_one_process(loader: Any, *, limit_s: float, n_batches: int) -> Making:
    """Make batches of a `torch.utils.data.DataLoader` in this process, with one thread, as a worker makes them.

    Args:
        loader: The loader; its own workers are not used, and global random generators are restored.
        limit_s: No batch is started after so many seconds.
        n_batches: At most; another one before them does not count.
    """
    from labkit.core import preserve_rng_state

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


class _Schedule(threading.local):
    """The file in which the kernel says how long this thread has waited, kept open: opening it costs most of a read."""

    file: Any = None
    pid = 0


_schedule = _Schedule()


def run_queue_s() -> float:
    """Seconds that this thread has waited in the run queue, which is not waiting for data."""
    try:
        if _schedule.pid != os.getpid():  # the first time, or after a fork
            _schedule.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
            _schedule.pid = os.getpid()
        return int(os.pread(_schedule.file.fileno(), 64, 0).split()[1]) / 1e9
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
