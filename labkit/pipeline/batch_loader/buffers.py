"""Memory for batches that is used again once nobody holds the batch."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class BatchBuffers:
    """Gives memory for batches of uint8 images.

    Fresh memory costs a page fault every 4 KB, which for raw pixels is as dear as reading them. So a batch's memory
    comes back when its tensor, and everything that shares it, is gone; a batch that is kept is never written over.
    Pinned memory comes from torch, which waits for copies under way before it gives memory out again.

    Args:
        shape: (batch_size, height, width, 3).
        n_kept: Free ones to keep.
        pin_memory: Page-locked memory, for copies to the GPU that overlap.
    """

    def __init__(self, shape: tuple[int, ...], n_kept: int, pin_memory: bool):
        self._shape, self._pin_memory = shape, pin_memory
        self._free: deque[np.ndarray] = deque(maxlen=n_kept)

    def take(self) -> tuple[np.ndarray, Tensor]:
        """An array to fill, and the tensor over the same memory to hand on."""
        if self._pin_memory:
            pinned = torch.empty(self._shape, dtype=torch.uint8, pin_memory=True)
            return pinned.numpy(), pinned
        memory = self._free.pop() if self._free else np.empty(self._shape, np.uint8)
        lent = memory.view()  # torch holds this very object until the last tensor over it is gone
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent, torch.from_numpy(lent)
