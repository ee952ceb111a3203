"""Batches from memory: how fast training could be if data were free."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from labkit.core import iter_tensors, map_tensors, move_tensors, require_int


class ReplayLoader:
    """The first batches of a loader, kept in memory and repeated: no loader can be faster.

    Args:
        loader: Any iterable of batches; the first `n_batches` are taken at once.
        n_batches: Batches to keep.
        length: Batches in an epoch; the kept ones are repeated. Default: `n_batches`.
        device: Keep the batches there, so that copying to the device is free too.

    Raises:
        ValueError: the loader ended before `n_batches`.

    The batches are the kept tensors themselves, not copies: a step that changes its input in place changes the replay.
    Only tensors in shared memory, which come from workers, are copied, once: each would keep a file open.

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """

    repeats_batch_sampler = True

    def __init__(self, loader: Iterable[Any], n_batches: int, *, length: int | None = None, device: Any = None):
        require_int("n_batches", n_batches)
        self.batch_sampler = range(n_batches if length is None else require_int("length", length))
        kept = [map_tensors(batch, _copy_if_shared) for batch in islice(loader, n_batches)]
        if len(kept) < n_batches:
            raise ValueError(f"n_batches is {n_batches}, but the loader gave only {len(kept)} batches: ask for fewer")
        self._batches = kept if device is None else [move_tensors(batch, device) for batch in kept]
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_workers = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return (self._batches[position % len(self._batches)] for position in self.batch_sampler)


def _copy_if_shared(tensor: Any) -> Any:
    return tensor.clone() if tensor.device.type == "cpu" and tensor.is_shared() else tensor


def fresh(batch: Any, *, whole: bool = False) -> Any:
    """The batch in new containers, so that a step that takes items out of a dict changes no other's.

    Args:
        whole: Copy its tensors too, for a step that writes into them.
    """
    return map_tensors(batch, lambda tensor: tensor.clone() if whole else tensor)


def versions(batches: Any) -> list[int]:
    """How often each tensor was written to, as counted by torch."""
    return [tensor._version for tensor in iter_tensors(batches) if not tensor.is_inference()]
