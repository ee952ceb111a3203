"""What the machine did: CPU seconds, memory and bytes read of the process tree, and the work of all cores meanwhile.

The file is also a script that samples the memory of another process. A thread of the measured process would compete for
Python's global lock and count as part of the measurement.
"""

import os
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # of the times in /proc
MAX_OTHERS = 0.25  # of the time of all cores that other programs may use without disturbing what is measured
SLOWED = 1.3  # processor seconds with all cores busy, over those of a process alone: the most that was seen


@dataclass(frozen=True)
class CoreTime:
    """Seconds of all cores together, since the machine started.

    busy_s: Running something.
    stolen_s: Ready to run something while the host ran something else.
    """

    busy_s: float
    stolen_s: float

    def __sub__(self, earlier: "CoreTime") -> "CoreTime":
        return CoreTime(max(0.0, self.busy_s - earlier.busy_s), max(0.0, self.stolen_s - earlier.stolen_s))

    def with_stolen(self, cpu_s: float) -> float:
        """`cpu_s` used since then, plus a share of the stolen time: the same as their share of the work."""
        since = core_time() - self
        busy_s = max(since.busy_s, cpu_s)  # two clocks of the kernel
        return cpu_s + (since.stolen_s * cpu_s / busy_s if busy_s > 0 else 0.0)


def core_time() -> CoreTime:
    """Core time of this machine; zeros if the kernel does not report it.

    Source: /proc/stat, see proc(5)
    """
    try:
        times = cpu_times()
    except (OSError, ValueError):  # a container that hides them
        return CoreTime(0.0, 0.0)
    busy_s = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    return CoreTime(busy_s, times.get("steal", 0.0))


def cpu_times() -> Mapping[str, float]:
    """Seconds of all cores together, by what they did. OSError, ValueError: the kernel does not say."""
    kinds = "user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"
    with open("/proc/stat") as file:  # psutil is no part of a watched training
        return dict(zip(kinds, (int(ticks) / _TICKS_PER_S for ticks in file.readline().split()[1:]), strict=False))


# Ids of processes that are not measured, with their descendants: our samplers, and processes that measure themselves.
excluded_pids: set[int] = set()

_CHILDREN_FILE = "/proc/thread-self/children"  # exists if the kernel lists the children of processes
# What reading about a process raises that has ended, or of which the kernel tells nothing.
_UNKNOWN = (OSError, ValueError, IndexError)


def descendants(pid: int, excluded: Collection[int] = ()) -> list[int]:
    """Process ids of all live descendants of `pid`, without those `excluded` and their descendants."""
    found: list[int] = []
    for child in children(pid):
        if child not in excluded:
            found += [child, *descendants(child, excluded)]
    return found


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`, also of those that have ended and that it has not waited for.

    They come from the kernel's lists, else from all processes, which takes far longer.
    """
    found: list[int] = []
    with suppress(*_UNKNOWN):
        if not os.path.exists(_CHILDREN_FILE):
            return [child for child, parent in _parents() if parent == pid]
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_UNKNOWN), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def _parents() -> list[tuple[int, int]]:
    """Every process with its parent."""
    if not os.path.exists("/proc/self/stat"):  # macOS
        listed = subprocess.run(["/bin/ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
        return [(int(pid), int(parent)) for pid, parent in map(str.split, listed.stdout.splitlines())]
    found = list[tuple[int, int]]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(*_UNKNOWN), open(f"/proc/{pid}/stat") as file:
            found.append((int(pid), int(file.read().rpartition(")")[2].split()[1])))
    return found


@dataclass(frozen=True)
class Usage:
    """Totals of a process tree since its start: `cpu_s` in seconds, `read_bytes` from storage (None: unknown)."""

    cpu_s: float
    read_bytes: int | None


def tree_cpu_s() -> float:
    """Processor seconds of the current process and all its descendants, including those that have ended.

    The totals of a process that ends go to the parent that waits for it, so nothing is lost between two calls.
    """
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime
    return cpu_s + sum(map(_cpu_s, descendants(os.getpid(), excluded_pids)))


def tree_usage() -> Usage:
    """Usage of the current process and all its descendants, including those that have ended."""
    read_bytes = _read_bytes(os.getpid())
    if read_bytes is not None:
        read_bytes += sum(_read_bytes(pid) or 0 for pid in descendants(os.getpid(), excluded_pids))
    return Usage(tree_cpu_s(), read_bytes)


def excluded_cpu_s() -> float:
    """CPU seconds so far of the processes that are not measured, which are ours all the same."""
    return sum(map(_cpu_s, {child for pid in excluded_pids for child in (pid, *descendants(pid))}))


def _cpu_s(pid: int) -> float:
    with suppress(*_UNKNOWN), open(f"/proc/{pid}/stat") as file:  # its own and its ended children's, user and system
        return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / _TICKS_PER_S
    return 0.0  # where it has ended, its time counts for its parent


def _read_bytes(pid: int) -> int | None:
    with suppress(*_UNKNOWN), open(f"/proc/{pid}/io") as file:
        return int(file.read().partition("\nread_bytes: ")[2].split()[0])
    return None


def tree_memory() -> "pd.DataFrame":
    """Memory of the current process and of each of its descendants.

    Returns:
        One row per process: `process` ("main", "child 1", ...), `pid`, `pss_mb` (shared pages divided among users)
        and `private_mb` (unshared pages), in MB (1e6 bytes). Linux only: elsewhere no rows.
    """
    import pandas as pd  # here, since processes that only measure themselves do not need them

    rows = []
    for number, pid in enumerate((os.getpid(), *descendants(os.getpid(), excluded_pids))):
        if memory := _memory_of(pid):  # else it has ended, or the system does not report PSS
            private = memory["Private_Clean"] + memory["Private_Dirty"] + memory.get("Private_Hugetlb", 0)
            name = f"child {number}" if number else "main"
            rows.append({"process": name, "pid": pid, "pss_mb": memory["Pss"] / 1e6, "private_mb": private / 1e6})
    return pd.DataFrame(rows, columns=["process", "pid", "pss_mb", "private_mb"])


class PeakMemory:
    """Largest memory of the process tree between `begin()` and `end()`, in MB (1e6 bytes).

    It is PSS, so that forked workers do not count as copies of their parent; NaN where the kernel does not report it
    (Linux does). A context manager, which can be used for many runs; those with `is_sampled` set to False have NaN.
    """

    is_sampled = True
    _process: Any = None  # samples us

    def __enter__(self) -> "PeakMemory":
        if os.path.exists("/proc/self/smaps_rollup"):
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the measured processes
            )
            excluded_pids.add(self._process.pid)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            with self._process:  # waits for its end and closes the pipes
                self._process.kill()  # it has nothing to save
            excluded_pids.discard(self._process.pid)

    def begin(self) -> None:
        self._send(",".join(["begin", *map(str, excluded_pids)]))

    def now(self) -> None:
        """Ask for a sample, without waiting for it: a short run may have no other while its workers live."""
        self._send("now")

    def end(self) -> float:
        answer = self._process.stdout.readline() if self._send("end") else b""  # empty, too, if the sampler was killed
        return int(answer) / 1e6 if answer else float("nan")

    def _send(self, command: str) -> bool:
        if self._process is None or not self.is_sampled:
            return False
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{command}\n".encode())
        return True


_INTERVAL_S = 0.05
_MAX_SHARE = 0.02  # of one core's time that sampling may take: reading PSS costs milliseconds in a large process


def pss_bytes(pid: int) -> int:
    """PSS of one process: a page shared by n processes counts 1/n. 0 if it has ended."""
    return _memory_of(pid).get("Pss", 0)


def _memory_of(pid: int) -> dict[str, int]:
    """Bytes of memory of one process by their kinds, as proc(5) names them; empty if it has ended."""
    with suppress(*_UNKNOWN), open(f"/proc/{pid}/smaps_rollup") as file:
        return {
            name: 1024 * int(count) for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", file.read(), re.MULTILINE)
        }
    return {}


def _serve(pid: int) -> None:
    """Sample the tree of `pid` until standard input is closed, as told by words there.

    `begin,12,34` starts sampling without the processes 12 and 34 and their descendants, `now` samples at once, and
    `end` prints the peak in bytes.
    """
    peak, excluded = 0, {os.getpid()}
    pause: float | None = None
    # os.read, since a buffered reader would hide a second command from select.
    while commands := os.read(0, 4096).decode().split() if select.select([0], [], [], pause)[0] else ["now"]:
        for command, *pids in (word.split(",") for word in commands):
            if command == "begin":
                peak, pause, excluded = 0, _INTERVAL_S, {os.getpid(), *map(int, pids)}
                continue
            start = time.process_time()
            peak = max(peak, sum(map(pss_bytes, (pid, *descendants(pid, excluded)))))
            pause = max(_INTERVAL_S, (time.process_time() - start) / _MAX_SHARE)
            if command == "end":
                print(peak, flush=True)
                pause = None


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
