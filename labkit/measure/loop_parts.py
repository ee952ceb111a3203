"""The parts of a training loop, each timed alone and then together: what `diagnose` reckons with.

A loader that works ahead has batches waiting whenever nobody asked for a while. So a part is timed only from a known
state of its queue: full, for what it costs to receive a batch that is ready; empty, for what it costs to make one.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from labkit.measure.batches import count_images, synchronize
from labkit.measure.nested import map_tensors
from labkit.measure.processes import tree_usage

STEP, STEP_AND_COPY, RECEIVE, LOADER, TOGETHER = "step", "step and copy", "receive", "loader", "loader and step"

_KEPT = 4  # batches to replay; a single one would sit in the processor's caches
_UNKNOWN_QUEUE = 8  # batches that a loader of unknown make may have ready


class LoopParts:
    """Runs a loader and a step, apart and together.

    Args:
        loader: Any iterable of batches; it is gone through epoch after epoch.
        step: Called with each batch.
        device: Where batches are moved to, to see what the step's own copy costs; None: nothing is moved.
        count: Images in a batch.

    Raises:
        ValueError: the loader gives no batch, or cannot be gone through again.
    """

    def __init__(self, loader: Iterable[Any], step: Callable[[Any], Any], *, device: Any, count: Callable[[Any], int]):
        self._loader, self._step, self._count = loader, step, count
        self._batches = endless(loader)
        self.queue = queue_length(loader)
        self.host = [next(self._batches) for _ in range(_KEPT)]
        self.on_device = self.host
        if device is not None:
            self.on_device = [map_tensors(batch, lambda item: item.to(device)) for batch in self.host]
        self.n_images = sum(count(batch) for batch in self.host) / _KEPT
        self.cpu_s_a_batch: list[float] = []
        self._loading_s = 0.0
        for batch in self.host[:2]:  # a first step compiles, chooses algorithms, allocates
            step(batch)
        synchronize()

    def close(self) -> None:
        """Leave the epoch under way, and its workers."""
        self._batches.close()

    def rest(self, seconds: float) -> None:
        """Give the loader time to fill its queue."""
        time.sleep(max(0.0, seconds))

    def filling_s(self) -> float:
        """Seconds in which an unasked loader has surely filled its queue."""
        return 1.3 * self.queue * self._loading_s if is_torch_loader(self._loader) else 1.3 * self._loading_s

    def drain(self) -> None:
        """Take what lies ready: what comes next has to be made."""
        for _ in range(self.queue + 2):
            next(self._batches)

    def replay(self, batches: list[Any], n: int) -> float:
        """Seconds of n steps over batches from memory."""
        synchronize()
        start = time.perf_counter()
        for number in range(n):
            self._step(batches[number % len(batches)])
        synchronize()
        return time.perf_counter() - start

    def receive(self) -> tuple[float, int]:
        """Seconds for taking batches that are ready, and how many; only after a rest."""
        n = max(1, self.queue - 1) if is_torch_loader(self._loader) else 1
        start = time.perf_counter()
        for _ in range(n):
            next(self._batches)
        return time.perf_counter() - start, n

    def load(self, n: int) -> float:
        """Seconds of n batches that nobody uses; only after `drain`."""
        before, start = tree_usage(), time.perf_counter()
        for _ in range(n):
            next(self._batches)
        seconds = time.perf_counter() - start
        self.cpu_s_a_batch.append((tree_usage().cpu_s - before.cpu_s) / n)
        self._loading_s = seconds / n
        return seconds

    def train(self, n: int) -> float:
        """Seconds of n batches, each followed by its step; only after `drain` or `load`."""
        synchronize()
        start = time.perf_counter()
        for _ in range(n):
            self._step(next(self._batches))
        synchronize()
        return time.perf_counter() - start


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches, epoch after epoch."""
    n_epochs = 0
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            what = "gives no batch" if n_epochs == 0 else "can be gone through only once: hand over what gives it anew"
            raise ValueError(f"the loader, a {type(loader).__name__}, {what}")
        n_epochs += 1


def is_torch_loader(loader: Any) -> bool:
    """Whether it is torch's DataLoader, or made of it."""
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader)


def queue_length(loader: Any) -> int:
    """Batches that a loader has ready at most, when nobody asks for a while."""
    if is_torch_loader(loader):
        return loader.num_workers * (loader.prefetch_factor or 2) if loader.num_workers else 0
    return _UNKNOWN_QUEUE


def counted(batch: Any) -> int:
    """Images in a batch; 1 where nobody can tell, so that rates are batches a second."""
    try:
        return count_images(batch)
    except TypeError:
        return 1
