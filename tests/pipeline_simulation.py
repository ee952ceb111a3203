"""A discrete-event simulation of one GPU's loader, by SimPy: readers, cores, Python's lock, a bus, batches, the step.

It knows nothing of the formulas of `lk.plan`: it moves single images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

Times = Callable[[float, np.random.Generator], float]  # mean -> one time


def constant(mean: float, rng: np.random.Generator) -> float:
    return mean


def exponential(mean: float, rng: np.random.Generator) -> float:
    return rng.exponential(mean)


@dataclass(frozen=True)
class Pipeline:
    """All times in seconds.

    readers: Requests in flight. With `reads_apart` they are other threads than those that decode.
    gap_s: Between two requests that the storage answers.
    link_s: For which an image keeps the network to itself.
    ahead: Batches made ahead.
    """

    readers: int
    cores: int
    latency_s: float
    cpu_s: float
    step_s: float
    batch_size: int = 8
    ahead: int = 4
    reads_apart: bool = False
    lock_s: float = 0.0
    gap_s: float = 0.0
    link_s: float = 0.0
    times: Times = constant


def images_per_s(pipeline: Pipeline, n_batches: int = 400, seed: int = 0) -> float:
    """The steady rate, over the later three quarters."""
    return _Run(pipeline, seed).rate(n_batches)


class _Run:
    def __init__(self, pipeline: Pipeline, seed: int):
        self.of, self.rng, self.env = pipeline, np.random.default_rng(seed), simpy.Environment()
        room = (pipeline.ahead + 1) * pipeline.batch_size
        self.room = simpy.Container(self.env, capacity=room, init=room)
        self.cores = simpy.Resource(self.env, pipeline.cores)
        self.lock, self.storage, self.link = (simpy.Resource(self.env, 1) for _ in range(3))
        self.made = simpy.Container(self.env)
        self.read_slots = simpy.Resource(self.env, pipeline.readers)

    def rate(self, n_batches: int) -> float:
        ended = self.env.process(self._train(n_batches))
        for _ in range(self.of.readers * (1 + self.of.reads_apart) + self.of.cores * self.of.reads_apart):
            self.env.process(self._worker())
        self.env.run(until=ended)
        return ended.value

    def _worker(self) -> Any:
        while True:
            yield self.room.get(1)
            with self.read_slots.request() as slot:
                yield slot
                yield from self._held(self.storage, self.of.gap_s, exact=True)
                yield self.env.timeout(self.of.times(self.of.latency_s, self.rng))
                yield from self._held(self.link, self.of.link_s)
                if not self.of.reads_apart:
                    yield from self._decode()
            if self.of.reads_apart:
                yield from self._decode()
            yield self.made.put(1)

    def _decode(self) -> Any:
        with self.cores.request() as core:
            yield core
            yield from self._held(self.lock, self.of.lock_s)
            yield self.env.timeout(self.of.times(self.of.cpu_s - self.of.lock_s, self.rng))

    def _held(self, resource: simpy.Resource, mean: float, exact: bool = False) -> Any:
        if mean:
            with resource.request() as turn:
                yield turn
                yield self.env.timeout(mean if exact else self.of.times(mean, self.rng))

    def _train(self, n_batches: int) -> Any:
        begun_s = 0.0
        for number in range(n_batches):
            if number == n_batches // 4:
                begun_s = self.env.now
            yield self.made.get(self.of.batch_size)
            yield self.room.put(self.of.batch_size)
            yield self.env.timeout(self.of.times(self.of.step_s, self.rng))
        return (n_batches - n_batches // 4) * self.of.batch_size / (self.env.now - begun_s)
