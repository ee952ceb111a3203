"""CUDAPrefetcher: the next batches are copied to the GPU while it computes on this one."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from labkit.core import iter_tensors, map_tensors


class CUDAPrefetcher:
    """A loader whose batches arrive on the device, copied ahead on a stream of their own.

    Args:
        loader: Any iterable of batches: tensors in any nest of dicts, lists, tuples and data classes. For copies
            that overlap with compute its tensors must lie in pinned memory (`pin_memory=True`).
        device: Where batches go. On a CPU there is nothing to copy: batches pass through, so the same script runs.
        depth: Batches copied ahead of the one that is handed out. One hides the copy; more even out copies of unequal
            size, at the price of a batch of GPU memory each. For a loader that stalls, give it workers and a larger
            `prefetch_factor`: `next()` waits for the batch `depth` places ahead, however many lie ready.

    One side stream lives as long as this object. Its tensors come from that stream's memory, so the consumer's stream
    is told to wait for the copy (an event), and the allocator is told that the consumer's stream uses them
    (`record_stream`): else, once the last reference is dropped, the next copy may overwrite a batch that queued kernels
    have still to read. Iterate it once an epoch, as often as the loader allows. What the loader raises comes after the
    batches before it.

    Raises:
        RuntimeError: a CUDA device is asked for and there is none.
        ValueError: `depth` is less than one.

    Source: PyTorch's notes on CUDA semantics and the caching allocator. Taught in: notebooks/07_cuda_prefetch.ipynb
    """

    def __init__(self, loader: Iterable[Any], device: Any = "cuda", *, depth: int = 1):
        if depth < 1:
            raise ValueError(f"depth={depth}: at least one batch must be on its way")
        self.loader, self.depth, self.device = loader, depth, torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device here: pass device='cpu', where batches pass through")
        self.lane = CopyStream(self.device) if self.device.type == "cuda" else PassThrough(self.device)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # While unpickling there is no loader, and asking it would not end; its `__deepcopy__` would copy it alone.
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)  # batch_size, num_workers, set_epoch, dataset, ...

    def __iter__(self) -> Iterator[Any]:
        source, ahead = iter(self.loader), deque()
        while True:
            while len(ahead) <= self.depth and not (ahead and ahead[-1].is_last):
                ahead.append(self._fetch(source))
            if ahead[0].is_last:
                ahead.popleft().end()
                return
            # No name for it here: the consumer's reference is to be the last one.
            yield self.lane.hand_over(ahead.popleft())

    def _fetch(self, source: Iterator[Any]) -> "_Entry":
        try:
            batch = next(source)
        except StopIteration:
            return _Entry(is_last=True)
        except Exception as error:
            return _Entry(is_last=True, error=error)
        return self.lane.send(batch)


class _Entry:
    """A batch on its way, or the end: of the data, or by an error."""

    def __init__(self, batch: Any = None, copied: Any = None, *, is_last: bool = False, error: Exception | None = None):
        self.batch, self.copied, self.is_last, self.error = batch, copied, is_last, error

    def end(self) -> None:
        if self.error is not None:
            raise self.error


class PassThrough:
    """Devices without streams: batches are moved as they come."""

    def __init__(self, device: torch.device):
        self.device = device

    def send(self, batch: Any) -> _Entry:
        return _Entry(map_tensors(batch, lambda item: item.to(self.device)))

    def hand_over(self, entry: _Entry) -> Any:
        return entry.batch


class CopyStream:
    """Copies on one side stream, handed over to whatever stream the consumer uses."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._warned = False

    def send(self, batch: Any) -> _Entry:
        """Start the copy of a batch; the host does not wait for it."""
        self._warn_if_unpinned(batch)
        with torch.cuda.stream(self.stream):
            sent = map_tensors(batch, lambda item: item.to(self.device, non_blocking=True))
            copied = torch.cuda.Event()
            copied.record(self.stream)
        return _Entry(sent, copied)

    def hand_over(self, entry: _Entry) -> Any:
        consumer = torch.cuda.current_stream(self.device)
        consumer.wait_event(entry.copied)
        for tensor in iter_tensors(entry.batch):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(consumer)
        return entry.batch

    def _warn_if_unpinned(self, batch: Any) -> None:
        if not self._warned and any(_is_pageable(item) for item in iter_tensors(batch)):
            self._warned = True
            warnings.warn(
                "the batches are not in pinned memory, so the host waits for every copy: build the loader with "
                "pin_memory=True",
                stacklevel=5,  # whoever iterates
            )


def _is_pageable(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.numel() > 0 and not item.is_pinned()
