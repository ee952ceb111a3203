"""How often code reads a tensor's value: each time, the host waits until the GPU has done all queued work."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ASKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        self.count += name in _ASKING or (name == "aten::index" and any(map(_is_mask, args[1])))
        return function(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    """Whether an index is a mask, whose true values have to be counted to know the size of the result."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def count_readbacks(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call `function(*args)`; return its result and how many of its operations need a value on the host.

    Counts `int(tensor)`, `tensor.item()`, `if tensor`, indexing by a boolean mask. Works without a GPU, where reads
    cost nothing; with one, `torch.cuda.set_sync_debug_mode("error")` also finds copies that wait.

    Taught in: notebooks/06_kornia_gpu.ipynb
    """
    with _Counter() as counter:
        result = function(*args)
    return result, counter.count
