"""What Linux says of a process and of the machine, in /proc and /sys: nothing of it is known on other systems.

In come numbers of processes and folders of cgroups; out go calls, files and connections of a process, mounts, quotas
and pressures, and the `Memory` of a training: of its process and of each worker, whether it grows, and how many more
workers would fit. Nothing is attached to a process, and only the standard library is imported.
"""

import ipaddress
import os
import re
import resource
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from labkit.util.machine import CGROUP, MEMBERSHIP, cgroup_folders


def descriptor_of(pid: int, paths: set[str]) -> str:
    """The link in /proc of a descriptor that a process has of one of these files."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for number in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{number}") in paths:
                    return f"{folder}/{number}"
    return ""


def read_text(path: str | Path) -> str:
    """The contents of a file; empty if it cannot be read."""
    with suppress(OSError, ValueError):  # a group's name in a container may hold what no path can
        return Path(path).read_text(errors="replace")
    return ""


def state_of(pid: int) -> str:
    """The letter of the state of a process, as in `ps`; X: there is none; empty: the system has no /proc."""
    none = "X" if os.path.exists("/proc/self/stat") else ""
    return (read_text(f"/proc/{pid}/stat").rpartition(")")[2].split() or [none])[0]


# Numbers of the system calls that wait, on x86-64 and on 64-bit ARM.
_NUMBERS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 4: "stat", 7: "poll", 17: "pread64", 23: "select", 35: "nanosleep",
        42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4",
        72: "fcntl", 73: "flock", 74: "fsync", 202: "futex", 217: "getdents64", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
        281: "epoll_pwait", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 61: "getdents64", 63: "read", 64: "write",
        67: "pread64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync", 95: "waitid", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
        211: "sendmsg", 212: "recvmsg", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
_OF_DESCRIPTORS = ("read", "write", "pread64", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept", "flock")


def system_call(pid: int, thread: int) -> str:
    """The call in which a thread waits, with its file and its place in the kernel: `read /mnt/a.jpg (nfs_wait)`."""
    words, place = (
        read_text(f"/proc/{pid}/task/{thread}/syscall").split(),
        read_text(f"/proc/{pid}/task/{thread}/wchan"),
    )
    number = int(words[0]) if words and re.fullmatch("[0-9]+", words[0]) else -1
    name = _NUMBERS.get(os.uname().machine, {}).get(number, "")
    if name in _OF_DESCRIPTORS:
        with suppress(OSError, ValueError, IndexError):
            name += f" {_readable(pid, os.readlink(f'/proc/{pid}/fd/{int(words[1], 16)}'))}"
    return f"{name} ({place})".strip() if place not in ("", "0") else name


def _readable(pid: int, target: str) -> str:
    """A file with its file system, `/data/a.jpg [nfs4]`; a socket with whom it is connected to, `[10.0.0.1:80]`."""
    if found := re.fullmatch(r"socket:\[(\d+)\]", target):
        for table in ("tcp", "tcp6"):
            for row in read_text(f"/proc/{pid}/net/{table}").splitlines()[1:]:
                fields = row.split()
                if fields[9:10] == [found[1]]:
                    return f"[{_address(fields[2])}]"
        return "[socket]"
    return f"{target} [{mount_of(target).kind}]" if target.startswith("/") else target


def _address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080."""
    host, _, port = text.partition(":")
    with suppress(ValueError):
        packed = b"".join(bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8))
        return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"
    return "socket"


class Mount(NamedTuple):
    """A file system and where it is mounted: `ext4` at `/data`."""

    kind: str
    path: str


def mount_of(path: str, table: str | None = None) -> Mount:
    """The mount that a path is below: of kind ext4, nfs4, fuse.s3fs; `?` if it is not known.

    Args:
        path: An absolute path, without links.
        table: What `/proc/self/mountinfo` says. Default: that file.
    """
    best = Mount("?", "")
    for row in (read_text("/proc/self/mountinfo") if table is None else table).splitlines():
        fields, kinds = (part.split() for part in row.partition(" - ")[::2])
        if len(fields) < 5 or not kinds:
            continue
        mount = re.sub(r"\\([0-3][0-7]{2})", lambda code: chr(int(code[1], 8)), fields[4])  # `\040` is a space
        if len(mount) >= len(best.path) and (path + "/").startswith(mount.rstrip("/") + "/"):  # a later one is on top
            best = Mount(kinds[0], mount)
    return best


_SYSTEMS = re.compile(r"/(dev|proc|sys|usr)/|.*\.(so|py|pyc)\b|.*/labkit-scratch|pipe:|anon_inode:|/memfd:|.*deleted")


def open_files(pid: int) -> tuple[list[str], int]:
    """Files of data and sockets that a process has open, and how many descriptors in all."""
    found, folder = list[str](), f"/proc/{pid}/fd"
    with suppress(OSError):
        numbers = os.listdir(folder)
        for number in numbers:
            with suppress(OSError):
                target = os.readlink(f"{folder}/{number}")
                if not _SYSTEMS.match(target):
                    found.append(_readable(pid, target))
        return sorted(set(found) - {"[socket]"}), len(numbers)
    return found, 0


def shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm: free, and in all."""
    with suppress(OSError):
        found = os.statvfs("/dev/shm")  # noqa: S108 - where torch puts tensors that processes share
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return 0, 0


def file_limit() -> int:
    """How many descriptors this process may have open: `ulimit -n`."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Throttling(NamedTuple):
    """What the quota of a cgroup has done so far.

    n_periods: In which the group ran; mostly of 100 ms.
    n_throttled: Of them, those before whose end the group had used up its quota.
    seconds: For which its threads then stood still, summed over the cores.
    """

    n_periods: int
    n_throttled: int
    seconds: float

    def __sub__(self, earlier: "Throttling") -> "Throttling":
        n_periods, n_throttled = self.n_periods - earlier.n_periods, self.n_throttled - earlier.n_throttled
        return Throttling(n_periods, n_throttled, self.seconds - earlier.seconds)


def parse_cpu_stat(text: str) -> Throttling | None:
    """What a cgroup's `cpu.stat` says, of version 1 or 2; None: it counts no periods.

    Source: the kernel's documentation, scheduler/sched-bwc and admin-guide/cgroup-v2.
    """
    counts = {name: int(count) for name, count in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
    if "nr_throttled" not in counts:
        return None
    seconds = counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9
    return Throttling(counts.get("nr_periods", 0), counts["nr_throttled"], seconds)


def throttling(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> dict[str, Throttling]:
    """What quotas have done to this process's cgroup and its parents, whose quotas limit it, too; by their folders."""
    read = {str(group): parse_cpu_stat(read_text(group / "cpu.stat")) for group in cgroup_folders(root, membership)}
    return {group: found for group, found in read.items() if found is not None}


class Pressure(NamedTuple):
    """For how long some task stood still for want of a resource.

    seconds: So far.
    last_minute: Share of the last minute, 0 to 1.
    """

    seconds: float
    last_minute: float


def parse_pressure(text: str) -> Pressure | None:
    """What a file of the kernel's pressure stall information says; None: nothing.

    Source: the kernel's documentation, accounting/psi.
    """
    found = re.search(r"^some .*avg60=(\d+\.?\d*) .*total=(\d+)$", text, re.MULTILINE)
    return Pressure(int(found[2]) / 1e6, float(found[1]) / 100) if found else None


def pressures(
    root: Path = CGROUP, membership: Path = MEMBERSHIP, machine: Path = Path("/proc/pressure")
) -> dict[str, Pressure]:
    """For how long some task of this process's cgroup stood still: for `cpu`, `io` and `memory`.

    Where cgroups do not count it, as those of version 1, it is some task of the machine.
    """
    read = {}
    for name in ("cpu", "io", "memory"):
        paths = [*(group / f"{name}.pressure" for group in cgroup_folders(root, membership)), machine / name]
        read[name] = parse_pressure(next(filter(None, map(read_text, paths)), ""))
    return {name: found for name, found in read.items() if found is not None}


# Memory.

_FIRST_S, _EVERY_S, _MOST_OF_TIME = 1.0, 5.0, 0.01  # between looks, and the share of the time that they may take
_WARM_S, _LEAST_GROWTH_S = 30.0, 60.0  # in which a worker fills its caches, and for which it is then seen to grow
_GROWS = 0.01  # a minute: less is the allocator's play
_MANY = 32  # more workers than anybody asks about
_NO_LIMIT = 2**60  # bytes: cgroups of version 1 write a number beyond it


class ProcessMemory(NamedTuple):
    """Bytes of a process's memory.

    private: What no other process has.
    shared: What others have, too.
    anonymous: What it has allocated, and not mapped from a file: private, or shared with processes that it forked.
    """

    private: int
    shared: int
    anonymous: int


def parse_smaps(text: str) -> ProcessMemory | None:
    """What a process's `smaps_rollup` says; None: nothing.

    Source: the kernel's documentation, filesystems/proc.
    """
    found = {name: 1024 * int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    if "Private_Dirty" not in found:
        return None
    kinds = ("Private_Clean", "Private_Dirty", "Private_Hugetlb"), ("Shared_Clean", "Shared_Dirty"), ("Anonymous",)
    return ProcessMemory(*(sum(found.get(name, 0) for name in names) for names in kinds))


def room_bytes(root: Path = CGROUP, membership: Path = MEMBERSHIP, meminfo: str | None = None) -> int | None:
    """Bytes that this process and its workers may still take, by its cgroups' limits and the machine; None: unknown.

    Pages of files that a cgroup has in the cache are free: the kernel drops them first.
    """
    text = read_text("/proc/meminfo") if meminfo is None else meminfo
    found = [1024 * int(size) for size in re.findall(r"^MemAvailable: +(\d+) kB", text, re.MULTILINE)]
    for group in cgroup_folders(root, membership, "memory"):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(ValueError):  # `max`, or not there
                limit, used = (int(read_text(group / name)) for name in names)
                if limit < _NO_LIMIT:
                    cached = re.findall(r"^(?:in)?active_file (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
                    found.append(max(0, limit - used + sum(map(int, cached))))
    return min(found, default=None)


@dataclass(frozen=True)
class Memory:
    """The memory of a training; None: unknown.

    own_bytes: That the training process has allocated, at the most.
    n_workers: That lived at once, of all loaders.
    worker_private_bytes, worker_shared_bytes: Of one, at the most: the median of all.
    worker_growth_bytes: Of the private memory of one in a minute, once it has begun.
    room_bytes: That were free for the training at the least.
    """

    own_bytes: int | None = None
    n_workers: int = 0
    worker_private_bytes: int | None = None
    worker_shared_bytes: int | None = None
    worker_growth_bytes: float | None = None
    room_bytes: int | None = None

    @property
    def n_more_workers(self) -> int | None:
        """Workers that there is room for besides those that it has; None: unknown."""
        if self.room_bytes is None or not self.worker_private_bytes:
            return None
        return int(self.room_bytes / self.worker_private_bytes)

    def describe(self, *, n_sharing: int = 1, tells_room: bool = True) -> str:
        """All that is known, in words; empty: nothing is.

        Args:
            n_sharing: Processes of the training that share the machine, each with its workers.
            tells_room: Whether to say how many more workers would fit.
        """
        if self.own_bytes is None:
            return ""
        told = f"{_size(self.own_bytes)} of RAM in the training process"
        if self.worker_private_bytes is None:
            return f"{told}; {_size(self.room_bytes)} free" if self.room_bytes is not None else told
        workers = f"each of {self.n_workers} workers" if self.n_workers > 1 else "the worker"
        told += f", {_size(self.worker_private_bytes)} in {workers}"
        if self.n_more_workers is not None and tells_room:
            more = self.n_more_workers // n_sharing
            each = f" in each of {n_sharing} processes" * (n_sharing > 1)
            workers = "worker" if more == 1 else "workers"
            told += f"; room for {more or 'no'} more {workers}{each}" if more < _MANY else "; plenty of RAM is left"
        growth = self.worker_growth_bytes or 0.0
        if growth > _GROWS * self.worker_private_bytes:
            told += f"; a worker grows by {_size(growth)} a minute"
            if self.room_bytes is not None:
                in_all = growth * self.n_workers * n_sharing
                told += f", so that nothing is left after {_time(60 * self.room_bytes / in_all)}"
        return told


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.0f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"


class _Seen(NamedTuple):
    """A process as it was seen: at the most, and its private memory once it was warm and at last, with the times."""

    most: ProcessMemory
    began_s: float
    warm: tuple[float, int] | None
    last: tuple[float, int]


class MemoryWatch:
    """Looks at the memory of this process and of its workers, in a thread.

    Memory that a worker shares with the training process, such as what it was forked with, counts once however many
    workers there are; what is its own is what one more worker would take. The kernel adds both up for a process, which
    takes 14 ms per GB, so the thread looks seldom.
    """

    def __init__(self) -> None:
        self._workers = set[int]()
        self._seen: dict[int, _Seen] = {}
        self._n_workers, self._room = 0, room_bytes()
        self._ends = threading.Event()

    def add(self, pids: list[int]) -> None:
        """These processes are workers of a loader."""
        self._workers.update(pids)

    def start(self) -> None:
        threading.Thread(target=self._run, name="labkit-memory", daemon=True).start()

    def stop(self) -> None:
        self._ends.set()

    def _run(self) -> None:
        pause_s = _FIRST_S
        while not self._ends.wait(pause_s):
            began_s = time.monotonic()
            with suppress(Exception):  # the training goes on, whatever cannot be read
                self.look(began_s)
            pause_s = max(_EVERY_S, (time.monotonic() - began_s) / _MOST_OF_TIME)

    def look(self, now_s: float) -> None:
        """Look at all that live."""
        n_workers = 0
        for pid in [os.getpid(), *sorted(self._workers)]:
            found = parse_smaps(read_text(f"/proc/{pid}/smaps_rollup"))
            if found is None:
                self._workers.discard(pid)  # it has ended
                continue
            n_workers += pid in self._workers
            before = self._seen.get(pid)
            most = found if before is None else ProcessMemory(*map(max, before.most, found))
            began_s = now_s if before is None else before.began_s
            warm, last = before.warm if before else None, (now_s, found.private)
            if warm is None and now_s - began_s >= _WARM_S:
                warm = last
            self._seen[pid] = _Seen(most, began_s, warm, last)
        self._n_workers = max(self._n_workers, n_workers)
        if (room := room_bytes()) is not None:
            self._room = room if self._room is None else min(room, self._room)

    def read(self) -> Memory:
        """What was seen so far, and what is there now."""
        with suppress(Exception):
            self.look(time.monotonic())
        seen = self._seen.copy()  # the thread may add to it
        own = seen.pop(os.getpid(), None)
        workers = list(seen.values())
        grown = [
            60 * (each.last[1] - each.warm[1]) / (each.last[0] - each.warm[0]) for each in workers
            if each.warm is not None and each.last[0] - each.warm[0] >= _LEAST_GROWTH_S
        ]  # fmt: skip
        return Memory(
            own_bytes=own.most.anonymous if own else None,
            n_workers=self._n_workers,
            worker_private_bytes=int(statistics.median(each.most.private for each in workers)) if workers else None,
            worker_shared_bytes=int(statistics.median(each.most.shared for each in workers)) if workers else None,
            worker_growth_bytes=statistics.median(grown) if grown else None, room_bytes=self._room,
        )  # fmt: skip
