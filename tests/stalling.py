"""Training loops whose stalls are known: on a clock that only they move, or in real time, with real workers.

On a busy machine a nap of 20 ms takes longer, and in the next second less long again. So stalls in real time note how
long they were, and what `watch` should say is reckoned from that.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.measure import usage
from labkit.watching import lines, record, worker

BATCH = 4
_CAUSES = ("step", "fetch", "prepare", "hand_over")


class Clock:
    """Stands in for the clocks of `time`, and no thread queues for a core.

    It moves by what a stall says, and a microsecond a reading, however busy the machine is.
    """

    def __init__(self, monkeypatch: Any):
        self.wall_s = self.cpu_s = 0.0
        monkeypatch.setattr(time, "perf_counter", self.perf_counter)
        monkeypatch.setattr(time, "process_time", self.process_time)
        for module in (record, worker):
            monkeypatch.setattr(module, "run_queue_s", lambda: 0.0)

    def perf_counter(self) -> float:
        self.wall_s += 1e-6
        return self.wall_s

    def process_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds

    def spend(self, cause: str, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds * (cause == "prepare")


def stopped_time(monkeypatch: Any) -> Clock:
    """Let `watch` read a clock that only stalls move, on a machine where nothing is stolen and no thread queues."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(lines.LineSampler, "start", lambda self: None)
    monkeypatch.setattr(usage, "cpu_times", dict)
    return clock


class Host:
    """What the kernel tells, to be set: seconds in which cores ran something, or were not let."""

    def __init__(self):
        self.busy_s = self.stolen_s = 0.0

    def passes(self, *, busy_s: float = 0.0, stolen_s: float = 0.0) -> None:
        self.busy_s, self.stolen_s = self.busy_s + busy_s, self.stolen_s + stolen_s

    def cpu_times(self) -> dict[str, float]:
        return {"user": self.busy_s, "nice": 0.0, "system": 0.0, "idle": 77.0, "iowait": 88.0, "steal": self.stolen_s}


class RealClock:
    """Naps, and busy loops to prepare. Notes seconds by cause: forked workers write into the same memory."""

    def __init__(self):
        self._seconds, self._times = (multiprocessing.Array(kind, len(_CAUSES)) for kind in "dq")
        _clocks[id(self)] = self

    def spend(self, cause: str, seconds: float) -> None:
        start = time.perf_counter()
        if cause == "prepare":
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(seconds)
        with self._seconds.get_lock():
            self._seconds[_CAUSES.index(cause)] += time.perf_counter() - start
            self._times[_CAUSES.index(cause)] += 1

    def means(self) -> dict[str, float]:
        """Seconds a time."""
        noted = zip(_CAUSES, self._seconds, self._times, strict=True)
        return {cause: seconds / times for cause, seconds, times in noted if times}


_clocks: dict[int, RealClock] = {}  # their memory cannot be pickled; forked workers know the same objects


@dataclass(frozen=True)
class Stalls:
    """Seconds a batch; `fetch` and `prepare` as one process needs them."""

    step: float = 0.04
    fetch: float = 0.0
    prepare: float = 0.0
    hand_over: float = 0.0
    num_workers: int = 0

    def shares(self) -> dict[str, float]:
        """What training spends its time on, as seen from the process that trains."""
        making, busy = self.fetch + self.prepare, self.step + self.hand_over
        together = max(making / self.num_workers, busy) if self.num_workers else making + busy
        waits = (together - busy) / making if making else 0.0
        seconds = {
            "compute": self.step, "fetch": waits * self.fetch, "prepare": waits * self.prepare,
            "copy": 0.0, "hand-over": self.hand_over, "start": 0.0,
        }  # fmt: skip
        return {name: value / together for name, value in seconds.items()}

    def loader_and_step(self, clock: Clock | RealClock, **options: Any) -> tuple[DataLoader, Callable[["Batch"], None]]:
        """For `diagnose`; workers need a real clock."""
        if self.num_workers:
            options |= {"persistent_workers": True, "multiprocessing_context": "fork"}

        def step(batch: Batch) -> None:
            clock.spend("step", self.step)

        def collate(samples: list[torch.Tensor]) -> Batch:
            return Batch(torch.stack(samples), clock, self.hand_over)

        return DataLoader(_Slow(self, clock), BATCH, num_workers=self.num_workers, collate_fn=collate, **options), step


@dataclass(frozen=True)
class _Slow(Dataset):
    """A batch at a time, so that a note is one of a batch."""

    stalls: Stalls
    clock: Any

    def __len__(self) -> int:
        return 4000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        for cause in ("fetch", "prepare"):
            if seconds := getattr(self.stalls, cause):
                self.clock.spend(cause, seconds)
        return [torch.full((3, 8, 8), index % 255, dtype=torch.uint8) for index in indices]


@dataclass
class Batch:
    """Arrives after a nap, where it comes from a worker."""

    images: torch.Tensor
    clock: Any
    hand_over: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    def __reduce__(self):
        return _arrive, (self.images, id(self.clock), self.hand_over)


def _arrive(images: torch.Tensor, clock: int, hand_over: float) -> Batch:
    if hand_over:
        _clocks[clock].spend("hand_over", hand_over)
    return Batch(images, _clocks[clock], hand_over)


# Stalls, and what to change first.
KNOWN = {
    "nothing": (Stalls(), "none"),
    "fetch": (Stalls(fetch=0.03), "workers"),
    "prepare": (Stalls(prepare=0.03), "workers"),
    "prepare, in workers": (Stalls(prepare=0.16, num_workers=2), "decoding"),
    "fetch and prepare": (Stalls(fetch=0.02, prepare=0.05), "workers"),
    "fetch and hand-over": (Stalls(fetch=0.24, hand_over=0.03, num_workers=2), "storage"),
}
