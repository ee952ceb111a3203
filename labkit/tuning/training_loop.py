"""The parts of a training loop, timed alone and together, from which `diagnose` works out the costs.

A loader that works ahead has batches ready after every pause. So a part is timed only from a known state of the queue:
full, to time the receiving of a batch that is ready; empty, to time the making of one.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from labkit.core import move_tensors
from labkit.measure import core_time, count_images, fresh, synchronize, tree_usage, versions
from labkit.tuning.epochs import CannotDiagnose, Epochs
from labkit.tuning.io_wait import run_queue_s
from labkit.tuning.loader_traits import starts_workers, torch_loader

STEP, STEP_AND_COPY, RECEIVE, LOADER, TOGETHER = "step", "step and copy", "receive", "loader", "loader and step"

_KEPT = 4  # batches to replay; a single one would stay in the processor's caches
_UNKNOWN_QUEUE = 8  # batches that an unknown loader may have ready


class LoopParts:
    """Runs a loader and a step, separately and together. Call `begin` first and `close` last.

    Args:
        loader: Any iterable of batches; it is iterated epoch after epoch.
        step: Called with each batch.
        device: Where batches are moved to, to time the step without its copy; None: nothing is moved.
        count: Images in a batch.
    """

    def __init__(self, loader: Iterable[Any], step: Callable[[Any], Any], *, device: Any, count: Callable[[Any], int]):
        self._step, self._count, self._device = step, count, device
        self.torch_loader = torch_loader(loader)
        self.innermost = loader if self.torch_loader is None else self.torch_loader
        self.epochs = Epochs(loader, anew=starts_workers(self.torch_loader))
        self._batches = iter(self.epochs)
        self.queue = queue_length(loader)
        self.at_once = max(1, getattr(self.torch_loader, "num_workers", 0))  # batches that arrive together
        self.cpu_s_a_batch: list[float] = []
        self.step_cpu_s: list[float] = []
        self.spans: list[dict[str, Any]] = []  # of the last `train`
        self._slowest_s = 0.0  # per batch, with the starts of epochs

    def begin(self) -> None:
        """Take the batches to replay, and do the first steps, which compile, choose algorithms and allocate."""
        self.host = [next(self._batches) for _ in range(_KEPT)]
        self.on_device = self.host
        if self._device is not None:
            self.on_device = [move_tensors(batch, self._device) for batch in self.host]
        self.n_images = sum(self._count(batch) for batch in self.host) / _KEPT
        first = [fresh(batch, whole=True) for batch in self.host[:2]]
        before = versions(first)
        given = [self._step(fresh(batch)) for batch in first]
        if any(inspect.isgenerator(result) or inspect.iscoroutine(result) for result in given):
            raise CannotDiagnose("step returns a generator or a coroutine and has not run: pass a plain function")
        self._writes = versions(first) != before
        synchronize()

    def close(self) -> None:
        """Abandon the current epoch and its workers."""
        self._batches.close()

    def rest(self) -> None:
        """Give the loader time to fill its queue: working ahead would slow down what is timed."""
        batches = 1 if self.torch_loader is None else self.queue
        time.sleep(1.3 * batches * self._slowest_s)

    def drain(self) -> None:
        """Take all batches that are ready, so that the next one has to be made."""
        for _ in range(self.queue + 2):
            next(self._batches)

    def replay(self, batches: list[Any], n: int) -> float:
        """Seconds per batch for n steps over batches from memory; each step gets them as the loader gave them."""
        sources, seconds, cpu_s = itertools.islice(itertools.cycle(batches), n), 0.0, 0.0
        at_once = len(batches) if self._writes else n  # copies of tensors: a few at a time, to save memory
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
        """Seconds to take a batch that is ready; only after `rest`.

        One batch of each worker, since a worker that has handed one over makes another and is slow to hand over the
        next. The mean, since batches that arrive out of order are received while an earlier one is awaited. Without the
        time in the run queue: whoever has the core is making batches.
        """
        of_workers = 1 if self.torch_loader is None else queue_length(self.torch_loader)
        n, before_s = max(1, min(self.at_once, of_workers - 1)), run_queue_s()
        seconds = self._seconds_per_batch(n, _ignore, least=1)
        if not getattr(self.torch_loader, "num_workers", 0):  # this thread may make the batch right now
            return seconds
        return max(0.0, seconds - (run_queue_s() - before_s) / n)

    def load(self, n: int) -> float:
        """Seconds per batch for n unused batches; only after `drain`."""
        before, cores, start = tree_usage(), core_time(), time.perf_counter()
        seconds = self._seconds_per_batch(n, _ignore)
        self._slowest_s = max(self._slowest_s, (time.perf_counter() - start) / n)
        self.cpu_s_a_batch.append(cores.with_stolen(tree_usage().cpu_s - before.cpu_s) / n)
        return seconds

    def train(self, n: int) -> float:
        """Seconds per batch for n batches, each followed by its step; only after `drain` or `load`.

        Some batches before them are not timed, until workers and step have settled.
        """
        self._seconds_per_batch(self.at_once, self._step)
        self.spans = []
        return self._seconds_per_batch(n, self._step)

    def _seconds_per_batch(self, n: int, use: Callable[[Any], Any], *, least: int | None = None) -> float:
        """Seconds per batch within an epoch: without the first batches of a new one, as many as arrive together.

        Args:
            least: If fewer batches remain, none is left out. Default: half of them.
        """
        counted_s, n_counted, starting = 0.0, 0, 0
        synchronize()
        start = last = time.perf_counter()
        for number in range(n):
            n_gaps = len(self.epochs.gaps_s)
            batch = next(self._batches)
            received = time.perf_counter()
            use(batch)
            starting = self.at_once if len(self.epochs.gaps_s) > n_gaps else starting - 1
            if number == n - 1:
                synchronize()
            now = time.perf_counter()
            self._add_spans(number, last - start, received - start, now - start)
            if starting <= 0:
                counted_s, n_counted = counted_s + now - last, n_counted + 1
            last = now
        return counted_s / n_counted if n_counted >= (least or n / 2) else (last - start) / n

    def _add_spans(self, batch: int, asked_s: float, received_s: float, done_s: float) -> None:
        for kind, start_s, end_s in (("wait", asked_s, received_s), ("step", received_s, done_s)):
            self.spans.append({"lane": "host", "kind": kind, "start_s": start_s, "end_s": end_s, "batch": batch})


def _ignore(batch: Any) -> None: ...


def queue_length(loader: Any) -> int:
    """Batches that a loader has ready at most, after a pause."""
    workers = torch_loader(loader)
    if workers is None:
        return _UNKNOWN_QUEUE
    of_workers = workers.num_workers * (workers.prefetch_factor or 2) if workers.num_workers else 0
    return of_workers if workers is loader else of_workers + 2  # the wrapper may hold some too


def counted(batch: Any) -> int:
    """Images in a batch; 1 if they cannot be counted, so that rates are batches per second."""
    try:
        return count_images(batch)
    except (TypeError, StopIteration):
        return 1
