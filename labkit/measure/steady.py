"""One run of a variant: its start, its first batch, its steady state and its end, each timed on its own.

The rate is that of the steady state. A clock over a short epoch would time the start and the end of the workers, and a
queue that filled before the first batch: four batches of two workers read as slower than no workers at all.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit.measure.cores import CoreTime, core_time
from labkit.measure.processes import apart_cpu_s, tree_usage
from labkit.measure.repetition import batches_in_flight, batches_per_pass, repeating
from labkit.measure.runs import synchronize

Factory = Callable[[], Iterable[Any]]

_MIN_BATCHES = 8  # of an iterable that cannot be lengthened: fewer have no steady state
# A steady state lasts at most so many times `min_steady_s`, unless one batch of each worker takes longer.
_MAX_SHARE = 4
_N_QUEUES = 2  # and, within that, at least so many times as many batches as the loader holds ready


class NoBatch(Exception):
    """An iterable ended before its first batch."""


@dataclass
class Stopwatch:
    """Times runs of factories.

    Args:
        count: Returns the images of a batch.
        clock: Returns seconds.
        min_steady_s: Shortest steady state of a loader that can be lengthened.
        is_warmup: One pass is long enough.
        on_steady: Called at the end of the steady state, while the workers live.
        n_steady_batches: Length of the steady state of a loader that can be lengthened, from an earlier run of it. If
            each run ended when its own clock said so, slow ones would be cut short and fast ones go on: of a loader
            whose pass takes about `min_steady_s`, the mean rate would be too low.

    Attributes:
        n_steady_batches: After such a run, what the next ones should take.
    """

    count: Callable[[Any], int]
    clock: Callable[[], float]
    min_steady_s: float
    is_warmup: bool = False
    on_steady: Callable[[], None] = lambda: None
    n_steady_batches: int | None = None

    def time(self, factory: Factory, *, lengthen: bool = True) -> tuple[Any, dict[str, Any]]:
        """Run a factory's iterable to its end; return it, and the run's columns as `labkit.compare` describes them.

        Args:
            factory: Returns the iterable.
            lengthen: Repeat the indices of a loader that allows it, until its state has been steady long enough.

        Raises:
            NoBatch: the iterable is empty.
        """
        run = _Run(self)
        run.start(factory)
        with repeating(run.iterable if lengthen else None, lambda: run.is_wanted) as can_repeat:
            run.per_pass = batches_per_pass(run.iterable) if can_repeat else None
            run.take_first()
            if can_repeat:
                run.take_steady()
                self.n_steady_batches = self.n_steady_batches or run.plan()
            else:
                run.take_all()
        return run.iterable, run.columns()


@dataclass
class _Mark:
    """A moment of a run: what was delivered and used up to then. Reading that takes from `at_s` to `resumed_s`."""

    at_s: float
    resumed_s: float
    n_batches: int
    n_images: int
    cpu_s: float
    apart_s: float  # of our processes that measure others, or themselves
    cores: CoreTime


@dataclass
class _Run:
    """A run in progress. Times are seconds of the stopwatch's clock."""

    watch: Stopwatch
    is_wanted: bool = True  # more batches than the loader's own pass has
    is_steady: bool = False
    n_batches: int = 0
    n_images: int = 0
    shutdown_s: float = 0.0
    per_pass: int | None = None  # batches
    n_ahead: int = 0  # batches that the loader holds ready
    pass_images: int | None = None  # None: no pass was completed, or nobody knows where it ends
    iterable: Any = None
    batches: Iterator[Any] = field(default_factory=lambda: iter(()))

    def start(self, factory: Factory) -> None:
        synchronize()
        self.started_s = self.watch.clock()
        self.iterable = factory()

    def take_first(self) -> None:
        self.batches = iter(self.iterable)
        self.ready = self._mark(self.watch.clock())
        if not self._take():
            raise NoBatch
        self.first = self.begin = self._mark_done()

    def take_steady(self) -> None:
        """Let the queue settle, time a steady state, then take what is still under way."""
        self.n_ahead = batches_in_flight(self.iterable)
        if self.n_ahead and all(self._take() for _ in range(self.n_ahead)):
            self.begin = self._mark_done()
        while not self.is_steady and self._take():
            self.is_steady = self._is_long_enough()
        self.is_wanted = False
        self.end = self._mark_done()
        self.watch.on_steady()
        self._take_rest()

    def _is_long_enough(self) -> bool:
        n_batches, seconds = self.n_batches - self.begin.n_batches, self.watch.clock() - self.begin.resumed_s
        if self.watch.n_steady_batches:
            return n_batches >= self.watch.n_steady_batches
        if n_batches % self._n_workers():
            return False  # workers deliver in turn: count as many batches of each
        if seconds >= _MAX_SHARE * self.watch.min_steady_s:
            return True
        if self.watch.is_warmup:
            return self.n_batches >= (self.per_pass or 1)
        # Whole passes, since images differ.
        is_filled = n_batches >= _N_QUEUES * self.n_ahead and n_batches % (self.per_pass or 1) == 0
        return is_filled and seconds >= self.watch.min_steady_s

    def plan(self) -> int | None:
        """Batches of the steady states to come, by this one's pace; None if it had none."""
        if not self.is_steady:
            return None
        n_batches = self.end.n_batches - self.begin.n_batches
        batches_per_s = n_batches / max(self.end.at_s - self.begin.resumed_s, 1e-9)
        wanted = max(_N_QUEUES * self.n_ahead, batches_per_s * self.watch.min_steady_s, 1)
        whole = _round_up(wanted, math.lcm(self.per_pass or 1, self._n_workers()))
        return min(whole, _round_up(max(1, _MAX_SHARE * batches_per_s * self.watch.min_steady_s), self._n_workers()))

    def _n_workers(self) -> int:
        return max(1, getattr(self.iterable, "num_workers", 0) or 0)

    def take_all(self) -> None:
        """Time an iterable as it is. Which batch is the last, and ends the steady state, is known only after it."""
        self.is_wanted = False
        self._take_rest()
        self.end = self._mark_done()
        self.end.at_s -= self.shutdown_s
        self.pass_images = self.n_images
        self.watch.on_steady()
        self.is_steady = self.end.n_batches - self.begin.n_batches >= _MIN_BATCHES

    def columns(self) -> dict[str, Any]:
        begin, end = self.begin, self.end
        first_s = self.first.at_s - self.ready.resumed_s
        settle_s = begin.at_s - self.first.resumed_s if begin is not self.first else 0.0
        steady_s = end.at_s - begin.resumed_s
        # Too short for a steady state: the whole run, so that a queue which filled before the first batch is paid for.
        since, seconds = (begin, steady_s) if self.is_steady else (self.ready, first_s + settle_s + steady_s)
        cpu_s, cores = end.cpu_s - since.cpu_s, end.cores - since.cores
        return {
            "n_images": self.n_images,
            "pass_images": self.pass_images,
            "startup_s": self.ready.at_s - self.started_s,
            "first_batch_s": first_s,
            "settle_s": settle_s,
            "n_settle_batches": begin.n_batches - self.first.n_batches,
            "steady_s": steady_s,
            "n_steady_batches": end.n_batches - begin.n_batches,
            "n_steady_images": end.n_images - begin.n_images,
            "shutdown_s": self.shutdown_s,
            "is_steady": self.is_steady,
            "images_per_s": (end.n_images - since.n_images) / seconds if seconds > 0 else float("inf"),
            "cpu_s": cpu_s,
            "steal_s": cores.stolen_s,
            "others_cpu_s": max(0.0, cores.busy_s - cpu_s - (end.apart_s - since.apart_s)),
        }

    def _take_rest(self) -> None:
        last_s = self.watch.clock()
        while self._take():
            last_s = self.watch.clock()
        self.shutdown_s = self.watch.clock() - last_s

    def _take(self) -> bool:
        try:
            batch = next(self.batches)
        except StopIteration:
            return False
        self.n_batches += 1
        self.n_images += self.watch.count(batch)
        if self.n_batches == self.per_pass:
            self.pass_images = self.n_images
        return True

    def _mark_done(self) -> _Mark:
        synchronize()
        return self._mark(self.watch.clock())

    def _mark(self, at_s: float) -> _Mark:
        cpu_s, apart_s, cores = tree_usage().cpu_s, apart_cpu_s(), core_time()
        return _Mark(at_s, self.watch.clock(), self.n_batches, self.n_images, cpu_s, apart_s, cores)


def _round_up(number: float, unit: int) -> int:
    """To a multiple of `unit`; a hair above one counts as that one."""
    return math.ceil(number / unit - 1e-9) * unit
