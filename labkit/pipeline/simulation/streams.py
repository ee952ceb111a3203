"""Streams and events with the names and rules of `torch.cuda.Stream` and `torch.cuda.Event`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit.pipeline.simulation.engine import Operation, Queue
from labkit.pipeline.simulation.simulation import active
from labkit.pipeline.simulation.tensor import DEVICE


class SimulatedEvent:
    """A place in a stream. It is done when all that was submitted before it is done.

    Source: CUDA Runtime API, event management; `torch.cuda.Event`
    """

    def __init__(self, device: Any = None, enable_timing: bool = False, blocking: bool = False, **_: Any):
        self.device, self._enable_timing = DEVICE, enable_timing
        self._mark: Operation | None = None

    def record(self, stream: "SimulatedStream | None" = None) -> None:
        simulation = active()
        queue = stream.queue if stream is not None else simulation.current
        self._mark = simulation.engine.submit(Operation(queue, "event"))

    def wait(self, stream: "SimulatedStream | None" = None) -> None:
        """Let what is submitted to a stream from now on wait for the event, and the host go on."""
        simulation = active()
        queue = stream.queue if stream is not None else simulation.current
        if self._mark is not None:
            simulation.engine.submit(Operation(queue, "wait", after=self._mark))

    def query(self) -> bool:
        return active().engine.has_seen(self._mark)

    def synchronize(self) -> None:
        active().wait(self._mark, None)

    def elapsed_time(self, end_event: "SimulatedEvent") -> float:
        """Milliseconds from this event to another one.

        Raises:
            ValueError: one of them was made without `enable_timing=True`.
            RuntimeError: one of them is not recorded, or not done.
        """
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'")
        start, end = self._mark, end_event._mark
        if start is None or end is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time")
        if not (start.is_done and end.is_done):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end.end_s - start.end_s)


class SimulatedCudaEvent(SimulatedEvent):
    """The same, with the arguments of `torch.cuda.Event`; `torch.Event` has a device first."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        super().__init__(enable_timing=enable_timing)


class SimulatedStream:
    """A queue of the device.

    Source: CUDA Runtime API, stream management; `torch.cuda.Stream`
    """

    def __init__(self, device: Any = None, priority: int = 0, *, queue: Queue | None = None, **_: Any):
        self.device, self.priority = DEVICE, priority
        self.queue = queue if queue is not None else active().next_queue()
        self._previous: list[Queue] = []

    @property
    def stream_id(self) -> int:
        return self.queue.number

    cuda_stream = stream_id

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: "SimulatedStream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedCudaEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return active().engine.has_seen(self.queue.newest)

    def is_capturing(self) -> bool:
        return False  # there are no CUDA graphs here

    def synchronize(self) -> None:
        active().wait(self.queue.newest, None)

    def __enter__(self) -> "SimulatedStream":
        self._previous.append(active().current)
        active().current = self.queue
        return self

    def __exit__(self, *_: Any) -> None:
        active().current = self._previous.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.queue.number} (simulated)>"


def current_stream(device: Any = None) -> SimulatedStream:
    return SimulatedStream(queue=active().current)


def default_stream(device: Any = None) -> SimulatedStream:
    return SimulatedStream(queue=active().default)


def set_stream(stream: SimulatedStream) -> None:
    active().current = stream.queue


@contextmanager
def use_stream(stream: SimulatedStream | None) -> Iterator[None]:
    """`torch.cuda.stream`."""
    if stream is None:
        yield
        return
    with stream:
        yield
