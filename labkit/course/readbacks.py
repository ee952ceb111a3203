"""How often code reads a tensor's value: each time, the host waits until the GPU has done all queued work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ASKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")


class _Counter(TorchDispatchMode):
    """Reads of tensors on the host and on a device, and whether there was a tensor on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"host": 0, "device": 0}
        self.has_device = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = function._schema.name, function(*args, **(kwargs or {}))
        on_device = [item.device.type != "cpu" for item in tree_leaves([args, result]) if isinstance(item, Tensor)]
        self.has_device |= any(on_device)
        asks = name in _ASKING or (name == "aten::index" and any(map(_is_mask, args[1])))
        if name in ("aten::_to_copy", "aten::copy_"):
            asks = any(on_device) and result.device.type == "cpu"
        self.counts["device" if any(on_device) else "host"] += asks
        return result


def _is_mask(index: Any) -> bool:
    """Whether an index is a mask, whose true values have to be counted to know the size of the result."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def count_readbacks(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call `function(*args)`; return its result and how many of its operations need a value on the host.

    Counts `int(tensor)`, `tensor.item()`, `if tensor`, indexing by a boolean mask, and copies from a device to the
    host. Works without a GPU, where reads cost nothing and nothing is copied: within `lk.simulated_cuda()` copies are
    seen, too. If any tensor is on a device, reads of tensors on the host do not count, since nothing waits for them.

    Taught in: notebooks/06_kornia_gpu.ipynb
    """
    with _Counter() as counter:
        result = function(*args)
    return result, counter.counts["device" if counter.has_device else "host"]
