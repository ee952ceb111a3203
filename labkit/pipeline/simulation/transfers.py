"""Methods of tensors that cross between host and device, or ask where a tensor is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.pipeline.simulation.simulation import active
from labkit.pipeline.simulation.streams import SimulatedStream
from labkit.pipeline.simulation.tensor import DEVICE, SimulatedTensor, device_function, host_function

aten = torch.ops.aten
_on_host: Callable[..., Tensor] = Tensor.to  # before anything replaces it


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, options: dict) -> Tensor:
        return aten._to_copy.default(source.detach(), device=torch.device("cuda"), **options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _to_host(gradient, False), None


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, non_blocking: bool) -> Tensor:
        return _to_host(source, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _ToDevice.apply(gradient, {"non_blocking": False}), None


def _to_host(source: Tensor, non_blocking: bool) -> Tensor:
    """As torch does, to page-locked memory where the host need not wait."""
    source = source.detach()
    with host_function():
        like = torch.empty_like(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"))
        pinned = active().pinned
        pageable = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        target = pinned.empty_like(like) if non_blocking else pageable
        return target.copy_(source, non_blocking=non_blocking)


def _on_device(*args: Any, **kwargs: Any) -> Tensor:
    with device_function(), torch._C.DisableTorchFunctionSubclass():  # otherwise it would come back to `to`
        return _on_host(*args, **kwargs)


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if isinstance(self, SimulatedTensor):
        return _from_device(self, device or DEVICE, dtype, non_blocking, copy, memory_format)
    if device is None or device.type != "cuda":
        return _on_host(self, *args, **kwargs, copy=copy)
    _require_known(device)
    options = {"dtype": dtype, "non_blocking": non_blocking, "memory_format": memory_format}
    return _ToDevice.apply(self, options)


def _from_device(
    self: Tensor, device: torch.device, dtype: Any, non_blocking: bool, copy: bool, memory_format: Any
) -> Tensor:
    _require_known(device)
    if device.type == "cpu":
        moved = _ToHost.apply(self, non_blocking)
        return moved.to(dtype or moved.dtype)
    options = {} if memory_format is None else {"memory_format": memory_format}
    return _on_device(self, dtype or self.dtype, non_blocking, copy, **options)


def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    device = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
    return to(self, device, None, non_blocking)


def cpu(self: Tensor, **kwargs: Any) -> Tensor:
    return to(self, "cpu")


def pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if isinstance(self, SimulatedTensor):
        raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")
    return active().pinned.copy_of(self)


def is_pinned(self: Tensor, device: Any = None) -> bool:
    return not isinstance(self, SimulatedTensor) and active().pinned.holds(self)


def record_stream(self: Tensor, stream: SimulatedStream) -> None:
    if not isinstance(self, SimulatedTensor):
        raise NotImplementedError("record_stream is for tensors of a device, and this one is on the CPU")
    block = self.memory.block
    if stream.queue is not block.queue:
        block.users.add(stream.queue)


# What replaces the methods of `torch.Tensor` during a simulation.
METHODS: dict[str, Callable[..., Any]] = {
    method.__name__: method for method in (to, cuda, cpu, pin_memory, is_pinned, record_stream)
}


def _require_known(device: torch.device) -> None:
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(f"a simulation has the devices 'cpu' and 'cuda', got {str(device)!r}")
    if device.index not in (None, 0):
        raise RuntimeError(f"a simulation has one device, cuda:0, got {str(device)!r}")
