"""Tensors of a simulated device: their bytes are in the host's memory, and change in simulated time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.pipeline.simulation.memory import Memory
from labkit.pipeline.simulation.simulation import View, active

DEVICE = torch.device("cuda", 0)
_depth = 0


def is_inside_device_function() -> bool:
    """Whether torch is within a function of device tensors: what it allocates there is on the device, too."""
    return _depth > 0


@contextmanager
def device_function() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def host_function() -> Iterator[None]:
    """Within, what torch allocates is the host's again."""
    global _depth
    depth, _depth = _depth, 0
    try:
        yield
    finally:
        _depth = depth


class SimulatedTensor(Tensor):
    """Says that it is on `cuda:0`. To torch's C++ it is a tensor of the CPU without storage.

    So autograd runs in the thread that calls it, and no CUDA library is asked for anything. `elem` is the view of the
    block that holds the values, once the simulated clock has come that far; `memory` keeps the block in use.
    """

    elem: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, elem: Tensor, memory: Memory) -> "SimulatedTensor":
        self = Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype
        )
        self.elem, self.memory = elem, memory
        return self

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def view_of_block(self) -> View:
        return self.elem, self.memory

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with device_function(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return active().call(func, args, kwargs or {})

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE, **kwargs)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host")
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.detach().cpu()!r}"[:-1] + ", device='cuda:0')"
