"""What a training has of its machine, and where that is scarce: cores, shared memory, files, the disk of its data.

In come calls while batches are asked for, and what the report knows of the loader; out go `Resources`, with sentences.
How full something gets is looked at about once a second while batches are asked for; what the kernel counts is read
before the first batch and for the report. What a system does not tell is left out. Of libraries, only the standard one
is imported.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.measure.usage import MAX_OTHERS
from labkit.util.machine import usable_cores
from labkit.watching.advice import MIN_SHARE
from labkit.watching.linux import (
    Memory,
    MemoryWatch,
    Pressure,
    Throttling,
    file_limit,
    mount_of,
    pressures,
    shared_memory,
    throttling,
)
from labkit.watching.loaders import of_data_set, source_of

# Of /dev/shm, the share that is free where it is nearly full, and of the open files that are allowed, the share that is
# many: looks miss what comes between them, and one more batch may be in flight than at any of them. A hang lasts while
# it is looked at (`labkit.watching.stalls`), and is explained by nothing but what is full.
_LITTLE_SHM, _MANY_FILES = 0.1, 0.8
FULL_SHM, FULL_SHM_BYTES, ALL_FILES = 0.05, 64e6, 0.95
_REMOTE = re.compile(r"nfs|cifs|smb|9p|ceph|lustre|gpfs|beegfs|afs|virtiofs|fuse\.(?!fuse-overlayfs|mergerfs)")


@dataclass(frozen=True)
class Resources:
    """What a training had of its machine; None, 0 or empty: unknown.

    seconds: From its first batch to the report; None: there was no training, and pressure is that of the last minute.
    usable_cores: By affinity and the cgroup's quota.
    n_sharing: Processes of the training, such as the ranks of a machine, that share these cores.
    shm_bytes, shm_free_bytes: Of /dev/shm, where workers put batches: in all, and free at the least.
    files_limit, files_open: Descriptors that the process may have open, and had at the most.
    n_periods, n_throttled, throttled_s: Periods of the quota on CPU time in which its cgroup ran, those in which the
        quota stopped it, and for how long, summed over the cores. No periods: no quota.
    pressure: Share of the time in which some task waited for `cpu`, `io` or `memory`: of its cgroup, or where that is
        not counted, of the machine.
    mount, file_system: Where the data lie, and what that is: `/mnt/data`, `nfs4`.
    torch_threads: Threads that torch computes with in the training process.
    num_workers, worker_threads: Workers, and the threads that a library computes with in each: `torch`, `cv2`.
    step_queued, making_queued: Share of the step, and of the making of batches, in which their thread was ready to run
        and had no core.
    memory: Of the training process and its workers.
    """

    seconds: float | None = None
    usable_cores: int = field(default_factory=usable_cores)
    n_sharing: int = 1
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    files_limit: int = 0
    files_open: int = 0
    n_periods: int = 0
    n_throttled: int = 0
    throttled_s: float = 0.0
    pressure: dict[str, float] = field(default_factory=dict)
    mount: str = ""
    file_system: str = ""
    torch_threads: int | None = None
    num_workers: int = 0
    worker_threads: dict[str, int] = field(default_factory=dict)
    step_queued: float | None = None
    making_queued: float | None = None
    memory: Memory = field(default_factory=Memory)

    def facts(self) -> dict[str, str]:
        """What is known, by subject, in reading order."""
        found = dict[str, str]()
        if self.n_periods:
            found["CPU quota"] = f"used up in {self.n_throttled} of {self.n_periods} periods"
        queued = {"the step": self.step_queued, "making batches": self.making_queued}
        told = [f"{share:.0%} of {name}" for name, share in queued.items() if share is not None]
        if told:
            found["waiting for a core"] = ", ".join(told)
        if self.torch_threads:
            threads = [f"{name} {count}" for name, count in self.worker_threads.items()]
            found["threads"] = f"torch {self.torch_threads}" + f", in each worker {' and '.join(threads)}" * bool(
                threads
            )
        if self.pressure:
            found["pressure"] = ", ".join(f"{name} {share:.0%}" for name, share in self.pressure.items())
            found["pressure"] += "" if self.seconds else " of the last minute"
        if self.shm_bytes:
            found["shared memory"] = f"{_sizes(self.shm_free_bytes, self.shm_bytes)} free"
        if self.files_limit and self.files_open:
            found["open files"] = f"{self.files_open} of {self.files_limit}"
        if self.mount:
            found["data on"] = f"{self.file_system} at {self.mount}"
        return found

    def sentences(self, shares: Mapping[str, float], others_share: float) -> list[str]:
        """All facts in one, and one for each that is out of the ordinary, with what to do.

        Args:
            shares: Of the time of the training, by cause.
            others_share: Share of the cores that other programs used.
        """
        facts = {
            "usable cores": f"{self.usable_cores}{self._in_each(' for')}",
            **self.facts(),
            "other programs": f"{others_share:.0%} of the cores",
        }
        told = "; ".join(f"{subject} {finding}" for subject, finding in facts.items())
        memory = self.memory_words(shares, others_share)
        return [f"The machine: {told}.", *[f"Memory: {memory}."] * bool(memory), *self.warnings(shares, others_share)]

    def warnings(self, shares: Mapping[str, float], others_share: float) -> list[str]:
        """A sentence for each that is scarce, with what to do."""
        disturbing = others_share if others_share > MAX_OTHERS else 0.0
        return [*self._scarce_cores(shares, disturbing), *self._scarce_room(shares)]

    def memory_words(self, shares: Mapping[str, float], others_share: float) -> str:
        """The memory in words; more workers only where not fewer are advised."""
        tells_room = not _advises_fewer(self.warnings(shares, others_share))
        return self.memory.describe(n_sharing=self.n_sharing, tells_room=tells_room)

    def most_workers(self, shares: Mapping[str, float], others_share: float) -> int | None:
        """Workers that may be advised: those that fit into memory, and no more where fewer are advised; None: any."""
        if _advises_fewer(self.warnings(shares, others_share)):
            return self.num_workers
        more = self.memory.n_more_workers
        return None if more is None else self.num_workers + more // self.n_sharing

    def _scarce_cores(self, shares: Mapping[str, float], disturbing: float) -> Iterable[str]:
        # Threads that are stopped go on with the next period: at most this share of the time is lost.
        is_stopped = self.n_periods > 0 and self.n_throttled >= MIN_SHARE * self.n_periods
        if is_stopped:
            yield (
                f"The CPU quota stopped the training in {self.n_throttled / self.n_periods:.0%} of its periods, for "
                f"{self.throttled_s:.1f} s summed over the cores: raise it (docker run --cpus, a pod's "
                "resources.limits.cpu), or use fewer workers and threads."
            )
        step, making = self.step_queued or 0.0, self.making_queued or 0.0
        is_crowded = step * shares["compute"] >= MIN_SHARE or making * shares["prepare"] >= MIN_SHARE
        if is_crowded and not is_stopped:  # what stands still waits for a core, too
            making_too = f", and the making of batches {making:.0%}" * (making > 0)
            yield f"The step waits for a core {step:.0%} of its time{making_too}: {self._remedy(disturbing)}."
        elif disturbing:
            yield f"Other programs used {disturbing:.0%} of the cores: these figures are of a busy machine."
        name, most = max(self.worker_threads.items(), key=lambda item: item[1], default=("", 1))
        if is_crowded and most > 1 and most * self.num_workers * self.n_sharing > self.usable_cores:
            yield (
                f"{_counted(self.num_workers, 'worker')}{self._in_each(' in each of')} with {most} threads of {name} "
                f"each share {_cores(self.usable_cores)}: {_ONE_THREAD[name]} in worker_init_fn."
            )
        own = max(1, self.usable_cores // self.n_sharing)
        if (self.torch_threads or 0) > own:  # they wait for one another at the end of every operation
            where = self._in_each("each of") or "the training"
            yield (
                f"torch computes with {self.torch_threads} threads in {where} on {_cores(self.usable_cores)}: "
                f"torch.set_num_threads({own}), or OMP_NUM_THREADS={own}."
            )

    def _remedy(self, disturbing: float) -> str:
        """What leaves a core to a thread that waits for one."""
        if disturbing:
            # Where a core is missing, an operation of several threads waits for the one that has none.
            alone = ", or compute beside them with torch.set_num_threads(1)" if (self.torch_threads or 1) > 1 else ""
            return f"end the other programs, which used {disturbing:.0%} of the cores{alone}"
        own = self.usable_cores // self.n_sharing
        free = max(1, own - self.num_workers)
        if self.num_workers < own and (self.torch_threads or 0) > free:
            return f"use fewer threads in the training, torch.set_num_threads({free})"
        workers, threads = _counted(self.num_workers, "worker"), self.torch_threads
        of_torch = f" and {_counted(threads, 'thread')} of torch" if threads else ""
        shares = "share" if self.num_workers + (threads or 0) > 1 else "has"
        who = f"{workers}{of_torch}{self._in_each(' in each of')} {shares} {_cores(self.usable_cores)}"
        if self.num_workers + (threads or 1) <= own + 1:  # fewer would load less: the step computes on these cores
            return who
        return f"use fewer workers or threads ({who})"

    def _in_each(self, words: str) -> str:
        """The words and how many processes share the cores; nothing if one has them for itself."""
        return f"{words} {self.n_sharing} processes" if self.n_sharing > 1 else ""

    def _scarce_room(self, shares: Mapping[str, float]) -> Iterable[str]:
        if self.shm_bytes and self.shm_free_bytes < _LITTLE_SHM * self.shm_bytes:
            yield (
                f"Shared memory was nearly full ({_sizes(self.shm_free_bytes, self.shm_bytes)} of /dev/shm free): give "
                "the container more (docker run --shm-size), or use fewer workers or a smaller prefetch_factor."
            )
        if self.files_open > _MANY_FILES * self.files_limit > 0:
            yield (
                f"{self.files_open} of {self.files_limit} files were open: raise the limit (ulimit -n), or share "
                "tensors by name: torch.multiprocessing.set_sharing_strategy('file_system')."
            )
        if (memory := self.pressure.get("memory", 0.0)) >= MIN_SHARE:
            yield (
                f"Memory was so short that tasks waited for it {memory:.0%} of the time: use fewer workers, or a "
                "smaller prefetch_factor."
            )
        if _REMOTE.match(self.file_system) and shares["fetch"] >= MIN_SHARE:
            yield (
                f"The data are on {self.file_system} at {self.mount}, and {shares['fetch']:.0%} of the time goes into "
                "waiting for storage: copy them to a local disk, or read shards in sequence."
            )


def _advises_fewer(sentences: Iterable[str]) -> bool:
    return any("fewer workers" in sentence for sentence in sentences)


_ONE_THREAD = {"torch": "torch.set_num_threads(1)", "cv2": "cv2.setNumThreads(0)"}


def _cores(count: int) -> str:
    return _counted(count, "usable core")


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _sizes(part: int, whole: int) -> str:
    unit, name = (1e9, "GB") if whole >= 1e9 else (1e6, "MB")
    return f"{part / unit:.3g} of {whole / unit:.3g} {name}"


_EVERY_S = 1.0
_MOST_OF_TIME = 0.002  # that looks may take: where thousands of files are open, counting them takes milliseconds


class ResourceWatch:
    """Looks at what a training has of its machine while it runs.

    Attributes:
        runs: Whether it has begun.
        memory: What looks at its memory.
    """

    def __init__(self) -> None:
        self.runs, self.memory = False, MemoryWatch()
        self._began_s, self._next_s = 0.0, 0.0
        self._throttling, self._pressures = dict[str, Throttling](), dict[str, Pressure]()
        self._shm, self._shm_free, self._n_files, self._limit = 0, 0, 0, 0

    def begin(self) -> None:
        """The first batch is asked for."""
        self.runs, self._began_s = True, time.monotonic()  # as the kernel counts: no simulated device's clock
        with suppress(Exception):  # the script goes on, whatever cannot be read
            self._throttling, self._pressures = throttling(), pressures()
            self.memory.start()

    def stop(self) -> None:
        """Look no more."""
        self.memory.stop()

    def look(self, now_s: float) -> None:
        """Look how full things are, if it is time to. Called for each batch."""
        if now_s < self._next_s:
            return
        free, shm = shared_memory()
        self._shm_free, self._shm = min(free, self._shm_free) if self._shm else free, shm
        with suppress(OSError):  # not Linux
            self._n_files, self._limit = max(self._n_files, len(os.listdir("/proc/self/fd")) - 1), file_limit()
        self._next_s = now_s + max(_EVERY_S, (time.perf_counter() - now_s) / _MOST_OF_TIME)

    def read(self, **known: Any) -> Resources:
        """What was seen so far. If it has not begun, of this process as it is now, and of its cgroup since that began.

        Args:
            known: Other fields of `Resources`.
        """
        self._next_s = 0.0
        self.look(time.perf_counter())
        none, seconds = Throttling(0, 0, 0.0), max(1e-9, time.monotonic() - self._began_s) if self.runs else None
        since = [now - self._throttling.get(group, none) for group, now in throttling().items()]
        stopped = max(since, key=lambda each: (each.n_throttled, each.n_periods), default=none)
        pressure = {
            name: now.last_minute if seconds is None else min(1.0, (now.seconds - then.seconds) / seconds)
            for name, now in pressures().items() if (then := self._pressures.get(name, now))
        }  # fmt: skip
        return Resources(
            seconds=seconds, shm_bytes=self._shm, shm_free_bytes=self._shm_free, files_limit=self._limit,
            files_open=self._n_files, n_periods=stopped.n_periods, n_throttled=stopped.n_throttled,
            throttled_s=stopped.seconds, pressure=pressure, memory=self.memory.read(), **known,
        )  # fmt: skip


def data_places(loader: Any, first: str) -> list[str]:
    """Where a loader may read its data from, as absolute paths, the likeliest first; none of them is looked at.

    Args:
        first: What may be the file of its first sample.
    """
    found: list[Any] = [first]
    with suppress(Exception):  # data sets of the script need not answer
        for each in (of_data_set(loader, "store"), source_of(loader)):
            found += [getattr(each, "root", None), getattr(each, "path", None)]
        found.append(of_data_set(loader, "root"))
        return [os.path.abspath(each) for each in found if isinstance(each, str | Path) and str(each)]
    return []


def place_of(paths: Iterable[str]) -> dict[str, str]:
    """`mount` and `file_system` of the first of these paths that is there; empty: none is."""
    for path in map(os.path.realpath, paths):
        found = mount_of(path)
        if found.path and os.path.exists(path):
            return {"mount": found.path, "file_system": found.kind}
    return {}
