"""Training loops whose stalls are known: on a clock that stands still between them, or with real workers and naps."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.watching import diagnose, timings

BATCH = 4


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

    def burn(self, seconds: float) -> None:
        self.wall_s, self.cpu_s = self.wall_s + seconds, self.cpu_s + seconds


def stopped_time(monkeypatch: Any) -> Clock:
    """Let `diagnose` read a clock that only stalls move, on a machine where nothing is stolen and no thread queues."""
    clock = Clock()
    for module in (diagnose, timings):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "run_queue_s", lambda: 0.0)
    monkeypatch.setattr("psutil.cpu_times", lambda: None)
    return clock


class RealClock:
    sleep = staticmethod(time.sleep)

    @staticmethod
    def burn(seconds: float) -> None:
        """Use the processor for so long."""
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass


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

    def loader_and_step(self, clock: Any) -> tuple[DataLoader, Any]:
        """For `diagnose`, with device="fake"; workers are processes where the clock is real."""
        options = {"persistent_workers": True, "multiprocessing_context": "fork"} if self.num_workers else {}
        kind = SimulatedWorkers if self.num_workers and isinstance(clock, Clock) else DataLoader
        collate = partial(_collate, hand_over=self.hand_over)
        loader = kind(_Slow(self, clock), BATCH, num_workers=self.num_workers, collate_fn=collate, **options)
        return loader, lambda batch: clock.sleep(self.step + self.copy * batch.on_host)


@dataclass(frozen=True)
class _Slow(Dataset):
    stalls: Stalls
    clock: Any

    def __len__(self) -> int:
        return 4000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.clock.sleep(self.stalls.fetch)
        self.clock.burn(self.stalls.prepare)
        return [torch.full((3, 8, 8), index % 255, dtype=torch.uint8) for index in indices]


class SimulatedWorkers(DataLoader):
    """Batches when torch's workers would have them ready: each begins one when it is free and the queue has room."""

    def __iter__(self) -> Iterator["Batch"]:
        stalls, clock = self.dataset.stalls, self.dataset.clock
        taken_s = deque([clock.wall_s] * self.num_workers * self.prefetch_factor)
        ready_s = deque([clock.wall_s] * self.num_workers)
        for indices in self.batch_sampler:
            ready_s.append(max(taken_s.popleft(), ready_s.popleft()) + stalls.fetch + stalls.prepare)
            clock.sleep(max(0.0, ready_s[-1] - clock.wall_s) + stalls.hand_over)
            taken_s.append(clock.wall_s)
            yield Batch(torch.zeros(len(indices), 3, 8, 8), stalls.hand_over)


@dataclass
class Batch:
    """Arrives after a nap, where it comes from a worker; `to` takes it off the host."""

    images: torch.Tensor
    hand_over: float
    on_host: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    def to(self, device) -> "Batch":
        return Batch(self.images, self.hand_over, on_host=False)

    def __reduce__(self):
        return _arrive, (self.images, self.hand_over)


def _arrive(images: torch.Tensor, hand_over: float) -> Batch:
    time.sleep(hand_over)
    return Batch(images, hand_over)


def _collate(samples: list[torch.Tensor], hand_over: float) -> Batch:
    return Batch(torch.stack(samples), hand_over)
