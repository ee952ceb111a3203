"""Training loops whose stalls are known: on a clock that only they move, or in real time, with real workers.

On a busy machine a nap of 20 ms takes longer, and in the next second less long again. So stalls in real time note how
long they were, and what `diagnose` should say is reckoned from that.
"""

import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.watching import diagnose, timings

BATCH = 4
_CAUSES = ("step", "fetch", "prepare", "copy", "hand_over")


class Clock:
    """Stands in for `time`. It moves by what a stall says, and a microsecond a reading, however busy the machine is."""

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0

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
    """Let `diagnose` read a clock that only stalls move, on a machine where nothing is stolen and no thread queues."""
    clock = Clock()
    for module in (diagnose, timings):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "run_queue_s", lambda: 0.0)
    monkeypatch.setattr("psutil.cpu_times", lambda: None)
    return clock


class Host:
    """What psutil tells, to be set: seconds in which the cores ran something, or were not let; and its own clock."""

    def __init__(self, clock: Clock | None = None):
        self.busy_s = self.stolen_s = 0.0
        self.clock = clock

    def passes(self, *, busy_s: float = 0.0, stolen_s: float = 0.0) -> None:
        self.busy_s, self.stolen_s = self.busy_s + busy_s, self.stolen_s + stolen_s

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.busy_s, nice=0.0, system=0.0, idle=77.0, iowait=88.0, steal=self.stolen_s)


class RealClock:
    """Naps, and busy loops to prepare. Notes seconds by cause and round: forked workers write into the same memory."""

    def __init__(self, rounds: int = 1):
        self._rounds = rounds
        self._seconds, self._times = (multiprocessing.Array(kind, rounds * len(_CAUSES)) for kind in "dq")
        self.round = multiprocessing.Value("q", -1)  # -1: nothing is noted
        _clocks[id(self)] = self

    def spend(self, cause: str, seconds: float) -> None:
        start = time.perf_counter()
        if cause == "prepare":
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(seconds)
        if self.round.value >= 0:
            position = self.round.value * len(_CAUSES) + _CAUSES.index(cause)
            with self._seconds.get_lock():
                self._seconds[position] += time.perf_counter() - start
                self._times[position] += 1

    @contextmanager
    def noting_training(self) -> Iterator[None]:
        """Note while `diagnose` trains: the time in which it runs loader and step together."""
        train, rounds = diagnose.LoopParts.train, iter(range(self._rounds))

        def noted(parts: diagnose.LoopParts, n: int) -> float:
            self.round.value = next(rounds)
            try:
                return train(parts, n)
            finally:
                self.round.value = -1

        with mock.patch.object(diagnose.LoopParts, "train", noted):
            yield

    def medians(self) -> dict[str, float]:
        """Seconds a time: the median of the rounds, as `diagnose` takes it."""
        noted: dict[str, list[float]] = {}
        for cause, seconds, times in zip(_CAUSES * self._rounds, self._seconds, self._times, strict=True):
            noted.setdefault(cause, []).extend([seconds / times] if times else [])
        return {cause: statistics.median(seconds) for cause, seconds in noted.items() if seconds}


_clocks: dict[int, RealClock] = {}  # their memory cannot be pickled; forked workers know the same objects


@dataclass(frozen=True)
class Stalls:
    """Seconds a batch; `fetch` and `prepare` as one process needs them."""

    step: float = 0.04
    fetch: float = 0.0
    prepare: float = 0.0
    copy: float = 0.0
    hand_over: float = 0.0
    num_workers: int = 0

    def shares(self) -> dict[str, float]:
        """What training spends its time on, as seen from the process that trains."""
        making, busy = self.fetch + self.prepare, self.step + self.copy + self.hand_over
        together = max(making / self.num_workers, busy) if self.num_workers else making + busy
        waits = (together - busy) / making if making else 0.0
        seconds = {
            "compute": self.step, "fetch": waits * self.fetch, "prepare": waits * self.prepare,
            "copy": self.copy, "hand-over": self.hand_over, "start": 0.0,
        }  # fmt: skip
        return {name: value / together for name, value in seconds.items()}

    def loader_and_step(self, clock: Clock | RealClock, **options: Any) -> tuple[DataLoader, Callable[["Batch"], None]]:
        """For `diagnose`, with device="fake"; workers are processes where the clock is real."""
        if self.num_workers:
            options |= {"persistent_workers": True, "multiprocessing_context": "fork"}
        kind = _SimulatedWorkers if self.num_workers and isinstance(clock, Clock) else DataLoader

        def step(batch: Batch) -> None:
            clock.spend("step", self.step)
            if self.copy and batch.on_host:
                clock.spend("copy", self.copy)

        def collate(samples: list[torch.Tensor]) -> Batch:
            return Batch(torch.stack(samples), clock, self.hand_over)

        return kind(_Slow(self, clock), BATCH, num_workers=self.num_workers, collate_fn=collate, **options), step


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


class _SimulatedWorkers(DataLoader):
    """Batches when torch's workers would have them ready: each begins one when it is free and the queue has room."""

    def __iter__(self) -> Iterator["Batch"]:
        stalls, clock = self.dataset.stalls, self.dataset.clock
        taken_s = deque([clock.wall_s] * self.num_workers * self.prefetch_factor)
        ready_s = deque([clock.wall_s] * self.num_workers)
        for indices in self.batch_sampler:
            ready_s.append(max(taken_s.popleft(), ready_s.popleft()) + stalls.fetch + stalls.prepare)
            clock.sleep(max(0.0, ready_s[-1] - clock.wall_s) + stalls.hand_over)
            taken_s.append(clock.wall_s)
            yield Batch(torch.zeros(len(indices), 3, 8, 8), clock, stalls.hand_over)


@dataclass
class Batch:
    """Arrives after a nap, where it comes from a worker; `to` takes it off the host."""

    images: torch.Tensor
    clock: Any
    hand_over: float
    on_host: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    def to(self, device: Any) -> "Batch":
        return Batch(self.images, self.clock, self.hand_over, on_host=False)

    def __reduce__(self):
        return _arrive, (self.images, id(self.clock), self.hand_over)


def _arrive(images: torch.Tensor, clock: int, hand_over: float) -> Batch:
    if hand_over:
        _clocks[clock].spend("hand_over", hand_over)
    return Batch(images, _clocks[clock], hand_over)


# Stalls, and what to change first.
KNOWN = {
    "nothing": (Stalls(), "none"),
    "workers that keep up": (Stalls(step=0.06, fetch=0.02, num_workers=2), "none"),
    "fetch": (Stalls(fetch=0.03), "workers"),
    "prepare": (Stalls(prepare=0.03), "workers"),
    "copy": (Stalls(copy=0.03), "copy"),
    "fetch, in workers": (Stalls(fetch=0.16, num_workers=2), "storage"),
    "prepare, in workers": (Stalls(prepare=0.16, num_workers=2), "decoding"),
    "hand-over": (Stalls(hand_over=0.04, fetch=0.01, num_workers=2), "hand-over"),
    "fetch and prepare": (Stalls(fetch=0.02, prepare=0.05), "workers"),
    "fetch and copy": (Stalls(fetch=0.02, copy=0.04), "copy"),
    "prepare and copy": (Stalls(prepare=0.04, copy=0.02), "workers"),
    "fetch and hand-over": (Stalls(fetch=0.24, hand_over=0.03, num_workers=2), "storage"),
    "prepare and hand-over": (Stalls(prepare=0.24, hand_over=0.03, num_workers=2), "decoding"),
    "copy and hand-over": (Stalls(copy=0.02, hand_over=0.05, num_workers=2), "hand-over"),
}
