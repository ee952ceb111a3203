"""Memory of the host that the simulation takes for page-locked."""

import weakref

import numpy as np
import torch
from torch import Tensor


class PinnedMemory:
    """Knows its tensors and all views of them by where their storage lies, for as long as that exists."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._addresses

    def empty_like(self, tensor: Tensor) -> Tensor:
        """New page-locked memory for as many values, dense, in the tensor's order of dimensions."""
        buffer = np.empty(max(1, tensor.numel() * tensor.itemsize), np.uint8)
        address = buffer.ctypes.data
        self._addresses.add(address)
        weakref.finalize(buffer, self._addresses.discard, address)
        items = torch.from_numpy(buffer)[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        return items.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def copy_of(self, tensor: Tensor) -> Tensor:
        return tensor if self.holds(tensor) else self.empty_like(tensor).copy_(tensor)
