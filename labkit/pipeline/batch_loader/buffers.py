"""Memory for batches, used again when nobody holds it."""

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class BatchBuffers:
    """Hand out memory for batches of images.

    New memory costs a page fault every 4 KB, for raw pixels as much as reading them. So the memory of a batch is
    reused once its tensor, and everything that shares it, is gone; a batch that is kept is never overwritten. Pinned
    memory comes from torch, which waits for unfinished copies before it hands memory out again.

    Args:
        shape: Of a batch, in the order of its memory.
        dtype: NumPy's.
        n_kept: Number of free buffers to keep.
        pin_memory: Use page-locked memory, so that copies to the GPU overlap with compute.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type, n_kept: int, pin_memory: bool):
        self._shape, self._dtype, self._pin_memory = shape, dtype, pin_memory
        self._free: deque[np.ndarray] = deque(maxlen=n_kept)

    def take(self) -> tuple[np.ndarray, Tensor]:
        """An array to fill, and a tensor over the same memory."""
        if self._pin_memory:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
            pinned = torch.empty(self._shape, dtype=dtype, pin_memory=True)
            return pinned.numpy(), pinned
        memory = self._free.pop() if self._free else np.empty(self._shape, self._dtype)
        lent = memory.view()  # torch keeps this object alive as long as any tensor over it
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent, torch.from_numpy(lent)
