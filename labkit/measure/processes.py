"""What a run costs the whole process tree: CPU seconds, memory, bytes read from storage. Workers included."""

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_MAX_SHARE = 0.01  # of the time that the memory sampler may spend sampling


@dataclass(frozen=True)
class Usage:
    """Totals of a process tree since its start: `cpu_s` in seconds, `read_bytes` from storage (None: not told)."""

    cpu_s: float
    read_bytes: int | None


def tree_usage() -> Usage:
    """Usage of this process and all its descendants, those that have ended included.

    A process that ends hands its totals to the parent that waits for it, so nothing is lost between two calls.
    """
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime
    read_bytes = _read_bytes(os.getpid())
    for pid in descendants():
        cpu_s += _cpu_s(pid)
        if read_bytes is not None:
            read_bytes += _read_bytes(pid) or 0
    return Usage(cpu_s, read_bytes)


def tree_memory_mb() -> float:
    """Memory of this process and its descendants in MB (1e6 bytes).

    PSS where the kernel gives it: a page shared by n processes counts 1/n in each, so forked workers are not
    counted as copies of their parent. Elsewhere the sum of USS, which leaves shared pages out.
    """
    return sum(_memory_bytes(pid) for pid in (os.getpid(), *descendants())) / 1e6


def descendants() -> list[int]:
    """Process ids of all live descendants of this process."""
    try:
        return _descendants_by_proc(os.getpid())
    except OSError:
        return [child.pid for child in psutil.Process().children(recursive=True)]


class PeakMemory:
    """Samples the tree's memory in a thread while the `with` block runs; `peak_mb` holds the largest sample.

    Reading PSS costs milliseconds in a large process, so the sampler sleeps long enough between two samples to stay
    under 1 % of the time. Call `sample()` outside the clock, while the workers still live, to have at least one.
    """

    def __init__(self, interval_s: float = 0.1):
        self.interval_s = interval_s
        self.peak_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="labkit-peak-memory")

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> None:
        self.peak_mb = max(self.peak_mb, tree_memory_mb())

    def _run(self) -> None:
        pause = self.interval_s
        while not self._stop.wait(pause):
            start = time.thread_time()
            self.sample()
            pause = max(self.interval_s, (time.thread_time() - start) / _MAX_SHARE)


def _descendants_by_proc(pid: int) -> list[int]:
    """By /proc/PID/task/TID/children: far cheaper than reading every process's parent, as psutil has to."""
    found = []
    for task in os.listdir(_PROC / str(pid) / "task"):
        try:
            children = (_PROC / str(pid) / "task" / task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            if pid == os.getpid() and not _has_children_files():
                raise
            continue
        for child in map(int, children):
            found.append(child)
            try:
                found += _descendants_by_proc(child)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
    return found


def _has_children_files() -> bool:
    pid = os.getpid()
    return (_PROC / str(pid) / "task" / str(pid) / "children").exists()


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0  # it ended meanwhile: its parent has its time
    return times.user + times.system + getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)


def _read_bytes(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "io").read_text()
    except OSError:
        return None
    return int(text.split("\nread_bytes:")[1].split()[0])


def _memory_bytes(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return 0
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return _uss_bytes(pid)


def _uss_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_full_info().uss
    except psutil.Error:
        return 0
