"""The parts of a training loop, each timed alone and then together: what `diagnose` reckons with.

A loader that works ahead has batches waiting whenever nobody asked for a while. So a part is timed only from a known
state of its queue: full, for what it costs to receive a batch that is ready; empty, for what it costs to make one.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from labkit.core import map_tensors
from labkit.measure import count_images, fresh, synchronize, tree_usage, versions
from labkit.tuning.epochs import CannotDiagnose, Epochs
from labkit.tuning.io_wait import in_line_s
from labkit.tuning.steal_time import core_time

STEP, STEP_AND_COPY, RECEIVE, LOADER, TOGETHER = "step", "step and copy", "receive", "loader", "loader and step"

_KEPT = 4  # batches to replay; a single one would sit in the processor's caches
_UNKNOWN_QUEUE = 8  # batches that a loader of unknown make may have ready
_WRAPPED = ("loader", "dataloader", "base_dataloader")  # where timm, Accelerate and labkit keep the loader they wrap


class LoopParts:
    """Runs a loader and a step, apart and together; `begin` comes first, `close` last.

    Args:
        loader: Any iterable of batches; it is gone through epoch after epoch.
        step: Called with each batch.
        device: Where batches are moved to, to see what the step's own copy costs; None: nothing is moved.
        count: Images in a batch.
    """

    def __init__(self, loader: Iterable[Any], step: Callable[[Any], Any], *, device: Any, count: Callable[[Any], int]):
        self._step, self._count, self._device = step, count, device
        self.torch_loader = torch_loader(loader)
        self.innermost = loader if self.torch_loader is None else self.torch_loader
        self.epochs = Epochs(loader, anew=starts_workers(self.torch_loader))
        self._batches = iter(self.epochs)
        self.queue = queue_length(loader)
        self.at_once = max(1, getattr(self.torch_loader, "num_workers", 0))  # batches that come together
        self.cpu_s_a_batch: list[float] = []
        self.step_cpu_s: list[float] = []
        self._slowest_s = 0.0  # a batch alone, the epochs' starts included

    def begin(self) -> None:
        """Take the batches to replay, and do the first steps: they compile, choose algorithms, allocate."""
        self.host = [next(self._batches) for _ in range(_KEPT)]
        self.on_device = self.host
        if self._device is not None:
            self.on_device = [map_tensors(batch, lambda item: item.to(self._device)) for batch in self.host]
        self.n_images = sum(self._count(batch) for batch in self.host) / _KEPT
        first = [fresh(batch, whole=True) for batch in self.host[:2]]
        before = versions(first)
        given = [self._step(fresh(batch)) for batch in first]
        if any(inspect.isgenerator(result) or inspect.iscoroutine(result) for result in given):
            raise CannotDiagnose("step gives a generator or a coroutine and has not run: a function is wanted")
        self._writes = versions(first) != before
        synchronize()

    def close(self) -> None:
        """Leave the epoch under way, and its workers."""
        self._batches.close()

    def rest(self) -> None:
        """Give the loader time to fill its queue: what works ahead takes the processor from what is timed."""
        batches = 1 if self.torch_loader is None else self.queue
        time.sleep(1.3 * batches * self._slowest_s)

    def drain(self) -> None:
        """Take what lies ready: what comes next has to be made."""
        for _ in range(self.queue + 2):
            next(self._batches)

    def replay(self, batches: list[Any], n: int) -> float:
        """Seconds a batch of n steps over batches from memory; a step finds them as the loader gave them."""
        sources, seconds, cpu_s = itertools.islice(itertools.cycle(batches), n), 0.0, 0.0
        at_once = len(batches) if self._writes else n  # whole copies: only a few at a time, for the memory's sake
        while copies := [fresh(batch, whole=self._writes) for batch in itertools.islice(sources, at_once)]:
            synchronize()
            start, cpu_start = time.perf_counter(), time.process_time()
            for batch in copies:
                self._step(batch)
            synchronize()
            seconds, cpu_s = seconds + time.perf_counter() - start, cpu_s + time.process_time() - cpu_start
        self.step_cpu_s.append(cpu_s / n)
        return seconds / n

    def receive(self) -> float:
        """Seconds for taking a batch that is ready; only after a rest.

        One of each worker: who has given a batch away makes another, and is slow to hand over the next. The mean, since
        batches that come out of order are received while an earlier one is awaited. Less the time in line for a core:
        whoever has it is making batches.
        """
        n, before_s = max(1, min(self.at_once, self.queue_of_workers - 1)), in_line_s()
        seconds = self._taking(n, _nothing, least=1)
        if not getattr(self.torch_loader, "num_workers", 0):  # may make the batch right now, in this thread
            return seconds
        return max(0.0, seconds - (in_line_s() - before_s) / n)

    def load(self, n: int) -> float:
        """Seconds a batch of n batches that nobody uses; only after `drain`."""
        before, cores, start = tree_usage(), core_time(), time.perf_counter()
        seconds = self._taking(n, _nothing)
        self._slowest_s = max(self._slowest_s, (time.perf_counter() - start) / n)
        self.cpu_s_a_batch.append(cores.with_stolen(tree_usage().cpu_s - before.cpu_s) / n)
        return seconds

    def train(self, n: int) -> float:
        """Seconds a batch of n batches, each followed by its step; only after `drain` or `load`.

        Before them some that are not timed: after batches that nobody used, workers and step have to find their rhythm.
        """
        self._taking(self.at_once, self._step)
        return self._taking(n, self._step)

    @property
    def queue_of_workers(self) -> int:
        """Batches that workers have ready after a rest."""
        return 1 if self.torch_loader is None else queue_length(self.torch_loader)

    def _taking(self, n: int, use: Callable[[Any], Any], *, least: int | None = None) -> float:
        """Seconds a batch within an epoch: left out are the first ones of another, as many as come together.

        Args:
            least: Batches that have to remain, else none is left out. None: half of them.
        """
        counted_s, n_counted, starting = 0.0, 0, 0
        synchronize()
        start = last = time.perf_counter()
        for number in range(n):
            n_gaps = len(self.epochs.gaps_s)
            use(next(self._batches))
            starting = self.at_once if len(self.epochs.gaps_s) > n_gaps else starting - 1
            if number == n - 1:
                synchronize()
            now = time.perf_counter()
            if starting <= 0:
                counted_s, n_counted = counted_s + now - last, n_counted + 1
            last = now
        return counted_s / n_counted if n_counted >= (least or n / 2) else (last - start) / n


def _nothing(batch: Any) -> None: ...


def torch_loader(loader: Any) -> Any:
    """The `torch.utils.data.DataLoader` that a loader is, or wraps as timm's and labkit's prefetchers do; or None."""
    from torch.utils.data import DataLoader

    for _ in range(4):
        if loader is None or isinstance(loader, DataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        loader = next((attributes[name] for name in _WRAPPED if name in attributes), None)
    return None


def starts_workers(loader: Any) -> bool:
    """Whether torch's loader starts its workers for every epoch."""
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


def queue_length(loader: Any) -> int:
    """Batches that a loader has ready at most, when nobody asks for a while."""
    workers = torch_loader(loader)
    if workers is None:
        return _UNKNOWN_QUEUE
    of_workers = workers.num_workers * (workers.prefetch_factor or 2) if workers.num_workers else 0
    return of_workers if workers is loader else of_workers + 2  # what wraps it may hold some too


def counted(batch: Any) -> int:
    """Images in a batch; 1 where nobody can tell, so that rates are batches a second."""
    try:
        return count_images(batch)
    except (TypeError, StopIteration):
        return 1
