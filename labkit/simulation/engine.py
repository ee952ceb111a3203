"""The clock of a simulated device: streams are queues, and each engine runs one operation at a time.

Kernels and copies move real bytes when the simulated clock says so.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

ENGINES = ("compute", "copy to device", "copy to host")


class Span(NamedTuple):
    """What a lane did from when to when."""

    lane: str
    kind: str
    start_s: float
    end_s: float


class Queue:
    """A CUDA stream: what is submitted to it runs in that order, whatever the host does meanwhile."""

    def __init__(self, number: int):
        self.number = number
        self.waiting: deque[Operation] = deque()
        self.newest: Operation | None = None
        self.n_submitted = 0
        self.free_at_s = 0.0

    def head(self) -> "Operation | None":
        """The operation that runs next, if none of this stream runs and what it waits for is done."""
        first = self.waiting[0] if self.waiting else None
        is_blocked = first is None or first.is_running or (first.after is not None and not first.after.is_done)
        return None if is_blocked else first


@dataclass(eq=False)
class Operation:
    """What a stream does: a kernel, a copy, or a mark without an engine that takes no time.

    Args:
        queue: Its stream.
        name: For timelines and messages.
        engine: One of `ENGINES`, or "" for a mark.
        seconds: How long the engine takes.
        after: Of any stream; must be done before this one starts.
    """

    queue: Queue
    name: str
    engine: str = ""
    seconds: float = 0.0
    after: "Operation | None" = None
    submitted_s: float = math.nan
    start_s: float = math.nan
    end_s: float = math.nan
    is_done: bool = False
    knows: dict[int, int] = field(default_factory=dict)  # stream -> how many of its operations are done before this one

    @property
    def is_running(self) -> bool:
        return not self.is_done and not math.isnan(self.start_s)

    def start(self) -> None:
        """Called at `start_s`."""

    def end(self) -> None:
        """Called at `end_s`."""

    def comes_after(self, other: "Operation") -> bool:
        """Whether the program orders the two, whatever time they take."""
        return self.knows.get(other.queue.number, 0) >= other.knows[other.queue.number]


class Engine:
    """Runs operations in simulated time, and holds the time of the host, which moves on by `advance` and `wait` alone.

    Work submitted at one time can only start then or later. So everything up to the host's time is settled and has
    been run; what lies after it runs when the host gets there.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queues: list[Queue] = []
        self.host_knows: dict[int, int] = {}
        self.spans: list[Span] = []
        self._busy_until_s = dict.fromkeys(ENGINES, 0.0)
        self._running: list[tuple[float, int, Operation]] = []
        self._numbers = count()

    def new_queue(self) -> Queue:
        self.queues.append(Queue(len(self.queues)))
        return self.queues[-1]

    def submit(self, operation: Operation) -> Operation:
        queue = operation.queue
        queue.n_submitted += 1
        befores = [before.knows for before in (queue.newest, operation.after) if before is not None]
        operation.knows = _merge(self.host_knows, *befores, {queue.number: queue.n_submitted})
        operation.submitted_s = self.now_s
        queue.newest = operation
        queue.waiting.append(operation)
        self._run(until_s=self.now_s)
        return operation

    def advance(self, seconds: float) -> None:
        """Let the host be busy for a while."""
        self.now_s += seconds
        self._run(until_s=self.now_s)

    def wait(self, operation: Operation | None) -> None:
        """Let the host wait until an operation is done."""
        if operation is None:
            return
        while not operation.is_done:
            self._run_next(math.inf)
        self.add_span("host", "wait", self.now_s, operation.end_s)
        self.now_s = max(self.now_s, operation.end_s)
        self.host_knows = _merge(self.host_knows, operation.knows)
        self._run(until_s=self.now_s)

    def has_seen(self, operation: Operation | None) -> bool:
        """Whether an operation is done by now; if so, what the host does next comes after it."""
        if operation is None or operation.is_done:
            self.host_knows = _merge(self.host_knows, operation.knows if operation else {})
            return True
        return False

    def _run(self, until_s: float) -> None:
        while self._run_next(until_s):
            pass

    def _run_next(self, until_s: float) -> bool:
        """Do what comes next, the end of an operation or the start of one; False if it comes later than `until_s`."""
        next_end_s = self._running[0][0] if self._running else math.inf
        start_s, _, operation = min(self._possible_starts(), default=(math.inf, 0, None), key=lambda start: start[:2])
        if min(next_end_s, start_s) > until_s or min(next_end_s, start_s) == math.inf:
            return False
        if operation is None or next_end_s <= start_s:
            self._end(heapq.heappop(self._running)[2])
        else:
            self._start(operation, start_s)
        return True

    def _possible_starts(self) -> list[tuple[float, float, Operation]]:
        """When the first operation of each stream can start, and since when it has been ready."""
        starts = []
        for queue in self.queues:
            operation = queue.head()
            if operation is not None:
                ready_s = max(operation.submitted_s, queue.free_at_s, operation.after.end_s if operation.after else 0.0)
                starts.append((max(ready_s, self._busy_until_s.get(operation.engine, 0.0)), ready_s, operation))
        return starts

    def _start(self, operation: Operation, start_s: float) -> None:
        operation.start_s, operation.end_s = start_s, start_s + operation.seconds
        if operation.engine:
            self._busy_until_s[operation.engine] = operation.end_s
        operation.start()
        heapq.heappush(self._running, (operation.end_s, next(self._numbers), operation))

    def _end(self, operation: Operation) -> None:
        operation.end()
        operation.is_done, operation.after = True, None
        operation.queue.waiting.popleft()
        operation.queue.free_at_s = operation.end_s
        if operation.engine:
            self.add_span(operation.engine, operation.name, operation.start_s, operation.end_s)

    def add_span(self, lane: str, kind: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(lane, kind, start_s, end_s))


def _merge(*known: dict[int, int]) -> dict[int, int]:
    merged: dict[int, int] = {}
    for one in known:
        for stream, number in one.items():
            merged[stream] = max(merged.get(stream, 0), number)
    return merged


class Kernel(Operation):
    """Computes from what memory holds when it starts; its results are there when it ends.

    Kernels that change their input in place run when they end.
    """

    def __init__(
        self, queue: Queue, name: str, seconds: float, work: Callable[[], Any], outputs: Iterable[Tensor] = (),
        *, in_place: bool = False,
    ):  # fmt: skip
        super().__init__(queue, name, "compute", seconds)
        self._work, self._outputs, self._in_place = work, list(outputs), in_place
        self._results: list[Tensor] = []

    def start(self) -> None:
        if not self._in_place:
            self._results = self._compute()

    def end(self) -> None:
        results = self._compute() if self._in_place else self._results
        for output, result in zip(self._outputs, results, strict=True):
            output.copy_(result)
        self._work, self._outputs, self._results = list, [], []  # which hold memory

    def _compute(self) -> list[Tensor]:
        with torch.no_grad(), _disable_current_modes():
            return self._work()


class Copy(Operation):
    """Between host and device: half of the bytes at its start, the other half at its end, so that both see it move."""

    def __init__(self, queue: Queue, engine: str, seconds: float, source: Tensor, target: Tensor):
        super().__init__(queue, engine, engine, seconds)
        self._source, self._target = source, target
        self._half = len(source) // 2 if source.dim() else 0

    def start(self) -> None:
        if self._half:
            self._target[: self._half].copy_(self._source[: self._half])

    def end(self) -> None:
        if self._half:
            self._target[self._half :].copy_(self._source[self._half :])
        else:
            self._target.copy_(self._source)
        self._source = self._target = torch.empty(0)
