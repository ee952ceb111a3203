"""How often code reads a tensor's value: each time, the host waits until the GPU has done all queued work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ASKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = function._schema.name, function(*args, **(kwargs or {}))
        self.count += name in _ASKING or (name == "aten::index" and any(map(_is_mask, args[1])))
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[0] if name == "aten::_to_copy" else args[1]
            self.count += isinstance(source, Tensor) and source.device.type != "cpu" == result.device.type
        return result


def _is_mask(index: Any) -> bool:
    """Whether an index is a mask, whose true values have to be counted to know the size of the result."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def count_readbacks(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call `function(*args)`; return its result and how many of its operations need a value on the host.

    Counts `int(tensor)`, `tensor.item()`, `if tensor`, indexing by a boolean mask, and copies from a device to the
    host. Works without a GPU, where reads cost nothing; copies are seen there only within `lk.simulated_cuda()`, as
    nothing is copied from a CPU to itself. On a GPU, `torch.cuda.set_sync_debug_mode("warn")` says the same.

    Taught in: notebooks/06_kornia_gpu.ipynb
    """
    with _Counter() as counter:
        result = function(*args)
    return result, counter.count
