"""Streams and events with the names and rules of `torch.cuda`, and the methods of tensors that cross to the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.errors import ArgumentError, OperationError
from labkit.simulation.engine import Operation, Queue
from labkit.simulation.simulated_device import active
from labkit.simulation.tensor import DEVICE, SimulatedTensor, allocating_on_device
from labkit.simulation.torch_names import disable_torch_function, parse_to


class SimulatedEvent:
    """A place in a stream. It is done when all that was submitted before it is done.

    Source: CUDA Runtime API, event management; `torch.cuda.Event`
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._enable_timing = enable_timing
        self._mark: Operation | None = None

    def record(self, stream: "SimulatedStream | None" = None) -> None:
        self._mark = active().engine.submit(Operation(_queue(stream), "event"))

    def wait(self, stream: "SimulatedStream | None" = None) -> None:
        """Let what is submitted to a stream from now on wait for the event, and the host go on."""
        if self._mark is not None:
            active().engine.submit(Operation(_queue(stream), "wait"), after=self._mark)

    def query(self) -> bool:
        return active().engine.has_seen(self._mark)

    def synchronize(self) -> None:
        active().engine.wait(self._mark)

    def elapsed_time(self, end_event: "SimulatedEvent") -> float:
        """Milliseconds from this event to another one.

        Raises:
            ValueError: one of them was made without `enable_timing=True`.
            RuntimeError: one of them is not recorded, or not done.
        """
        if not (self._enable_timing and end_event._enable_timing):
            raise ArgumentError("Both events must be created with argument 'enable_timing=True'")
        start, end = self._mark, end_event._mark
        if start is None or end is None or max(start.end_s, end.end_s) > active().now_s:
            raise OperationError("CUDA error: device not ready")
        return 1e3 * (end.end_s - start.end_s)


class SimulatedStream:
    """A queue of the device.

    Source: CUDA Runtime API, stream management; `torch.cuda.Stream`
    """

    def __init__(self, device: Any = None, priority: int = 0, *, queue: Queue | None = None):
        self.device = DEVICE
        self.queue = active().engine.new_queue() if queue is None else queue
        self._previous: list[Queue] = []

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: "SimulatedStream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False  # there are no CUDA graphs here; torch's optimizers ask

    def synchronize(self) -> None:
        active().engine.wait(self.queue.newest)

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


def _queue(stream: SimulatedStream | None) -> Queue:
    return active().current if stream is None else stream.queue


def current_stream(device: Any = None) -> SimulatedStream:
    """`torch.cuda.current_stream`."""
    return SimulatedStream(queue=active().current)


_on_host: Callable[..., Tensor] = Tensor.to  # before anything replaces it


def _to_host(source: Tensor, non_blocking: bool) -> Tensor:
    """Copy to the host as torch does: to page-locked memory where the host need not wait."""
    source = source.detach()
    with allocating_on_device(False):
        like = torch.empty_like(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"))
        pageable = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        target = active().pinned.empty_like(like) if non_blocking else pageable
        return target.copy_(source, non_blocking=non_blocking)


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
    is_there = isinstance(self, SimulatedTensor)
    if not is_there and (device is None or device.type != "cuda"):
        return _on_host(self, *args, **kwargs, copy=copy)
    device = device or DEVICE
    if device.type not in ("cpu", "cuda") or device.index not in (None, 0):
        raise OperationError(f"a simulation has the devices 'cpu' and 'cuda:0', got {str(device)!r}")
    if not is_there:
        if self.requires_grad and torch.is_grad_enabled():
            raise OperationError(
                "a simulation carries no gradients from the device to the host: make the tensor on the device, or "
                "move `tensor.detach()`"
            )
        options = {"dtype": dtype, "non_blocking": non_blocking, "memory_format": memory_format}
        return torch.ops.aten._to_copy.default(self.detach(), device=device, **options)
    if device.type == "cpu":
        return _on_host(_to_host(self, non_blocking), dtype or self.dtype)
    options = {} if memory_format is None else {"memory_format": memory_format}
    with allocating_on_device(), disable_torch_function():  # otherwise it would come back to `to`
        return _on_host(self, dtype or self.dtype, non_blocking, copy, **options)


def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    device = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
    return to(self, device, None, non_blocking)


def cpu(self: Tensor, **kwargs: Any) -> Tensor:
    return to(self, "cpu")


def pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if isinstance(self, SimulatedTensor):
        raise OperationError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")
    return active().pinned.copy_of(self)


def is_pinned(self: Tensor, device: Any = None) -> bool:
    return not isinstance(self, SimulatedTensor) and active().pinned.holds(self)


def record_stream(self: Tensor, stream: SimulatedStream) -> None:
    if not isinstance(self, SimulatedTensor):
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'CPU' backend")
    block = self.memory.block
    if stream.queue is not block.queue:
        block.users.add(stream.queue)


# What replaces the methods of `torch.Tensor` during a simulation.
METHODS: dict[str, Callable[..., Any]] = {
    method.__name__: method for method in (to, cuda, cpu, pin_memory, is_pinned, record_stream)
}
