"""The memory of a training: of its process and of each worker, whether it grows, and how many more workers would fit.

Memory that a worker shares with the training process, such as what it was forked with, counts once however many workers
there are; what is its own is what one more worker would take. The kernel adds both up for a process, which takes 14 ms
per GB, so a thread looks seldom. Nothing is known on other systems than Linux.
"""

import os
import re
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from labkit.util.machine import CGROUP, MEMBERSHIP, cgroup_folders
from labkit.watching.linux import read_text

_FIRST_S, _EVERY_S, _MOST_OF_TIME = 1.0, 5.0, 0.01  # between looks, and the share of the time that they may take
_WARM_S, _LEAST_GROWTH_S = 30.0, 60.0  # in which a worker fills its caches, and for which it is then seen to grow
_GROWS = 0.01  # a minute: less is the allocator's play
_MANY = 100  # more workers than anybody asks about
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
            told += f"; room for {more or 'no'} more workers{each}" if more < _MANY else "; RAM is not short"
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
    """Looks at the memory of this process and of its workers, in a thread."""

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
