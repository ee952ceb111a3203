"""The clock of a simulated device: streams are queues, and each engine runs one operation at a time.

When an operation is submitted, its place in simulated time is known. Its bytes move when the host's clock gets there.
"""

import heapq
import math
import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from labkit.simulation.torch_names import disable_current_modes

ENGINES = ("compute", "copy to device", "copy to host")


class Queue:
    """A CUDA stream: what is submitted to it runs in that order, whatever the host does meanwhile."""

    def __init__(self, number: int):
        self.number, self.n_submitted = number, 0
        self.newest: Operation | None = None


@dataclass(eq=False)
class Operation:
    """What a stream does: a kernel, a copy, or a mark without an engine that takes no time.

    Args:
        queue: Its stream.
        name: For timelines and messages.
        engine: One of `ENGINES`, or "" for a mark.
        seconds: How long the engine takes.
    """

    queue: Queue
    name: str
    engine: str = ""
    seconds: float = 0.0
    start_s: float = math.nan
    end_s: float = math.nan
    knows: dict[int, int] = field(default_factory=dict)  # stream -> how many of its operations are done before this one

    def comes_after(self, other: "Operation") -> bool:
        """Whether the program orders the two, whatever time they take."""
        return self.knows.get(other.queue.number, 0) >= other.knows[other.queue.number]


class Engine:
    """Places operations in simulated time, and holds the host's time, which moves on by `advance` and `wait` alone.

    What happens by the host's time has happened to the bytes, too, in its order.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queues: list[Queue] = []
        self.host_knows: dict[int, int] = {}
        self.spans: list[tuple[str, str, float, float]] = []
        self._busy: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
        self._pending: list[tuple[float, int, Any]] = []
        self._numbers = count()
        self._turn = threading.RLock()  # a DataLoader's thread pins batches beside the training

    def new_queue(self) -> Queue:
        self.queues.append(Queue(len(self.queues)))
        return self.queues[-1]

    def submit(
        self, operation: Operation, *, after: Operation | None = None, begin: Callable[[], Any] | None = None,
        finish: Callable[[], Any] | None = None,
    ) -> Operation:  # fmt: skip
        """Run an operation as soon as its stream, `after` (an operation of any stream) and its engine allow.

        `begin` and `finish`, called at its start and its end, read and change the bytes in memory.
        """
        with self._turn:
            queue = operation.queue
            queue.n_submitted += 1
            earlier = [one for one in (queue.newest, after) if one is not None]
            operation.knows = _merge(
                self.host_knows, *(one.knows for one in earlier), {queue.number: queue.n_submitted}
            )
            operation.start_s = max([self.now_s, *(one.end_s for one in earlier)])
            if operation.engine:
                operation.start_s = self._reserve(operation.engine, operation.start_s, operation.seconds)
            operation.end_s = operation.start_s + operation.seconds
            queue.newest = operation
            if begin is not None:
                heapq.heappush(self._pending, (operation.start_s, next(self._numbers), begin))
            heapq.heappush(self._pending, (operation.end_s, next(self._numbers), partial(self._end, operation, finish)))
            self.advance(0.0)
            return operation

    def _end(self, operation: Operation, finish: Callable[[], Any] | None) -> None:
        if finish is not None:
            finish()
        if operation.engine:
            self.add_span(operation.engine, operation.name, operation.start_s, operation.end_s)

    def _reserve(self, engine: str, ready_s: float, seconds: float) -> float:
        """The first time from `ready_s` on at which the engine is free for long enough."""
        busy = self._busy[engine] = [span for span in self._busy[engine] if span[1] > self.now_s]
        start_s = ready_s
        for begin_s, end_s in busy:
            if begin_s >= start_s + seconds:
                break
            start_s = max(start_s, end_s)
        insort(busy, (start_s, start_s + seconds))
        return start_s

    def advance(self, seconds: float) -> None:
        """Let the host be busy for a while."""
        with self._turn:
            self.now_s += seconds
            while self._pending and self._pending[0][0] <= self.now_s:
                with torch.no_grad(), disable_current_modes():
                    heapq.heappop(self._pending)[2]()

    def wait(self, operation: Operation | None) -> None:
        """Let the host wait until an operation is done."""
        if operation is not None:
            begun_s = self.now_s
            self.now_s = max(begun_s, operation.end_s)  # itself: a sum may be a little less
            self.advance(0.0)
            self.add_span("host", "wait", begun_s, operation.end_s)
            self.has_seen(operation)

    def has_seen(self, operation: Operation | None) -> bool:
        """Whether an operation is done by now; if so, what the host does next comes after it."""
        is_done = operation is None or operation.end_s <= self.now_s
        if operation is not None and is_done:
            self.host_knows = _merge(self.host_knows, operation.knows)
        return is_done

    def add_span(self, lane: str, kind: str, start_s: float, end_s: float) -> None:
        """Note what a lane did from when to when, for the timeline."""
        if end_s > start_s:
            self.spans.append((lane, kind, start_s, end_s))


def _merge(*known: dict[int, int]) -> dict[int, int]:
    merged: dict[int, int] = {}
    for one in known:
        for stream, number in one.items():
            merged[stream] = max(merged.get(stream, 0), number)
    return merged
