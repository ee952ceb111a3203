"""What the simulation uses of torch that torch does not promise, each with what would take its place.

When a name goes, the import fails here, and with it the simulation and what the course draws with it; no training does.
"""

import torch
from torch.utils._mode_utils import no_dispatch as no_dispatch  # by hand: `torch._C._DisableTorchDispatch`
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,  # documented for extending torch; nothing else sees every operator
    _disable_current_modes as disable_current_modes,  # else DeviceMode must ask whether a kernel is running
)
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map  # `torch.utils.pytree`
from torch.utils.flop_counter import flop_registry as flop_registry  # else `FlopCounterMode` around each call

__all__ = [
    "TorchDispatchMode", "disable_current_modes", "disable_torch_function", "flop_registry", "no_dispatch",
    "parse_to", "tree_leaves", "tree_map",
]  # fmt: skip

parse_to = torch._C._nn._parse_to  # the many forms of the arguments of `Tensor.to`; else parsed by hand
disable_torch_function = torch._C.DisableTorchFunctionSubclass  # documented for extending torch


def register_no_device() -> None:
    """Let torch take the name of a CUDA device where there is none, as FakeTensorMode does."""
    torch._C._ensureCUDADeviceGuardSet()


def only_lift_cpu_tensors(value: bool) -> bool:
    """Whether torch.tensor(..., device="cuda") makes a tensor of the host and moves it; gives what was set before."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(value)
    return before
