"""Time a loader: its start, its first batch, its steady state and its end, each on its own.

The rate is that of the steady state. A clock over a short epoch would time the start and the end of the workers, and a
queue that filled before the first batch: four batches of two workers read as slower than no workers at all. So loaders
that can be repeated go on with the next pass, with the workers and queues that already run, while the clock needs them.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from operator import length_hint
from typing import Any

import pandas as pd

from labkit.errors import ArgumentError, WrongTypeError
from labkit.measure.unchanged import unchanged
from labkit.measure.usage import CoreTime, core_time, excluded_cpu_s, tree_usage
from labkit.util.arguments import require_callable, require_int, require_iterable
from labkit.util.process import closing_pass
from labkit.util.tensor_trees import map_tensors, move_tensors


def count_images(batch: Any) -> int:
    """Images in a batch, by the rule in `compare`."""
    if isinstance(batch, int):
        return batch
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return 1 if len(shape) == 3 else int(shape[0])
    if isinstance(batch, Mapping):
        return count_images(next(iter(batch.values())))
    if is_dataclass(batch) and fields(batch):
        return count_images(getattr(batch, fields(batch)[0].name))
    if isinstance(batch, list | tuple) and len(batch):
        return count_images(batch[0])
    raise WrongTypeError(
        f"cannot count the images of a {type(batch).__name__}: pass count= to lk.compare, or let the loader give their "
        "number"
    )


def synchronize() -> None:
    """Wait for the GPU, if one is in use, so that queued work is part of the measured time."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def page_cache_state(before: int | None, after: int | None) -> str:
    """The state of the page cache, from `read_bytes` before and after a run."""
    return "warm" if before is not None and before == after else "unknown"


class LoaderWrapper:
    """A loader around another one, `loader`, whose batches it hands on one by one.

    Attributes:
        batches_ahead: Batches that it takes before it hands out the first.
    """

    loader: Any
    batches_ahead = 0


class WithStep(LoaderWrapper):
    """What `with_step` returns."""

    def __init__(self, loader: Iterable[Any], step: Callable[[Any], Any]):
        self.loader = require_iterable("loader", loader, "an iterable of batches")
        require_callable("step", step)
        self._step = step
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_workers = getattr(loader, "num_workers", 0)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self._step(batch)
            yield batch


def with_step(loader: Iterable[Any], step: Callable[[Any], Any]) -> WithStep:
    """A loader and the step that takes its batches, as one iterable: a training loop for `compare`.

    Args:
        loader: Any iterable of batches.
        step: Called with each batch, in this process, before the batch is handed on.

    A generator would do the same, but `compare` cannot see through it: it knows neither how many batches the loader
    holds ready nor how to lengthen its epoch.

    >>> lk.compare({"training": lambda: lk.with_step(loader, step)}, baseline="training")  # doctest: +SKIP

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    return WithStep(loader, step)


class WholePass:
    """What `whole_pass` returns."""

    def __init__(self, loader: Iterable[Any], count: Callable[[Any], int]):
        self.loader, self._count = require_iterable("loader", loader, "an iterable of batches"), count

    def __iter__(self) -> Iterator[int]:
        yield sum(map(self._count, self.loader))


def whole_pass(loader: Iterable[Any], count: Callable[[Any], int] = count_images) -> WholePass:
    """One pass over a loader as a single batch, for `compare`: the start, the first batch and the end are in its rate.

    Args:
        loader: Any iterable of batches.
        count: Returns the images of a batch.

    >>> lk.compare({"whole": lambda: lk.whole_pass(loader)}, baseline="whole")  # doctest: +SKIP

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    return WholePass(loader, count)


@contextmanager
def repeating(iterable: Any, is_wanted: Callable[[], bool]) -> Iterator[int | None]:
    """While open, `iter(iterable)` goes on with another pass as long as `is_wanted()`.

    Gives the batches of one pass, 0 if the loader does not tell, or None if it cannot be repeated. The passes are one
    to the loader: its workers keep running and its queue stays filled. Batches that were requested before `is_wanted()`
    turned false are still delivered.

    Args:
        iterable: torch's DataLoader over a map-style data set, a loader with `repeats_batch_sampler`, or a
            `LoaderWrapper` around one. Others are left alone.
        is_wanted: Asked before each batch after the first.
    """
    loader, _ = _unwrap(iterable)
    name = "batch_sampler"
    if _is_dataloader(loader) and not isinstance(loader.dataset, sys.modules["torch"].utils.data.IterableDataset):
        name = "sampler" if loader.batch_sampler is None else name
    elif not getattr(loader, "repeats_batch_sampler", False):
        yield None
        return
    sampler = vars(loader)[name]
    _put_sampler(loader, name, _RepeatedSampler(sampler, is_wanted))
    try:
        yield length_hint(sampler)  # 0 for a sampler without a length
    finally:
        _put_sampler(loader, name, sampler)


def batches_in_flight(iterable: Any) -> int:
    """Batches that a loader requests before it hands out the first; 0 for an iterable that is not known."""
    loader, ahead = _unwrap(iterable)
    if _is_dataloader(loader):
        return ahead + loader.num_workers * (loader.prefetch_factor or 0)
    return ahead + int(getattr(loader, "batches_in_flight", 0))


def _unwrap(iterable: Any) -> tuple[Any, int]:
    """The innermost loader, and the batches that those around it take ahead."""
    ahead = 0
    while isinstance(iterable, LoaderWrapper):
        ahead += iterable.batches_ahead
        iterable = iterable.loader
    return iterable, ahead


def _is_dataloader(iterable: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a DataLoader has imported it
    return torch is not None and isinstance(iterable, torch.utils.data.DataLoader)


def _put_sampler(loader: Any, name: str, sampler: Any) -> None:
    vars(loader)[name] = sampler  # past DataLoader.__setattr__, which refuses it
    running = vars(loader).get("_iterator")  # of persistent workers: torch keeps the sampler there, too
    if running is not None:
        running._index_sampler = sampler


class _RepeatedSampler:
    """A sampler's indices, pass after pass, until no more are wanted."""

    def __init__(self, sampler: Any, is_wanted: Callable[[], bool]):
        self._sampler, self._is_wanted = sampler, is_wanted

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)  # set_epoch, batch_size, sampler, ...

    def __iter__(self) -> Iterator[Any]:
        n_given, n_before = 0, -1
        while n_given > n_before:  # an empty pass would be repeated without end
            n_before = n_given
            for indices in self._sampler:
                if n_given and not self._is_wanted():
                    return
                n_given += 1
                yield indices
            if not self._is_wanted():
                return


Factory = Callable[[], Iterable[Any]]

_MIN_BATCHES = 8  # of an iterable that cannot be lengthened: fewer have no steady state
# A steady state lasts at most this many times `min_steady_s`, unless one batch of each worker takes longer.
_MAX_SHARE = 4
_N_QUEUES = 2  # and, within that, at least this many times the batches that the loader holds ready


class NoBatch(Exception):
    """An iterable ended before its first batch."""


@dataclass
class _Mark:
    """A moment of a run: what was delivered and used up to then. Reading that takes from `at_s` to `resumed_s`."""

    at_s: float
    resumed_s: float
    n_batches: int
    n_images: int
    cpu_s: float
    excluded_s: float  # of our processes that measure others, or themselves
    cores: CoreTime


@dataclass
class Stopwatch:
    """Times runs of factories.

    Args:
        count: Returns the images of a batch.
        clock: Returns seconds.
        min_steady_s: Shortest steady state of a loader that can be lengthened.
        is_warmup: One pass is long enough.
        peak_mem_mb: Called at the end of the steady state, while the workers live; gives the column of that name.
        n_steady_batches: Length of the steady state of a loader that can be lengthened, from an earlier run of it. If
            each run ended when its own clock said so, slow ones would be cut short and fast ones go on: of a loader
            whose pass takes about `min_steady_s`, the mean rate would be too low.
        keep: Called with the iterable before it is begun: notes where it stands.

    Attributes:
        n_steady_batches: After such a run, what the next ones should take.
    """

    count: Callable[[Any], int]
    clock: Callable[[], float]
    min_steady_s: float
    is_warmup: bool = False
    peak_mem_mb: Callable[[], float] = lambda: math.nan
    n_steady_batches: int | None = None
    keep: Callable[[Any], object] = lambda iterable: None

    def time(self, factory: Factory) -> tuple[Any, dict[str, Any]]:
        """Run a factory's iterable to its end; return it, and the run's columns as `labkit.compare` describes them.

        The indices of a loader that allows it are repeated until its state has been steady long enough.

        Raises:
            NoBatch: the iterable is empty.
        """
        self._n_batches, self._n_images, is_wanted, is_steady = 0, 0, True, False
        self._pass_images: int | None = None  # None: no pass was completed, or nobody knows where it ends
        synchronize()
        started_s = self.clock()
        iterable = factory()
        self.keep(iterable)
        with (
            repeating(iterable, lambda: is_wanted) as per_pass,
            closing_pass(iter(iterable), iterable) as self._batches,
        ):
            self._per_pass = per_pass or 0
            ready = self._mark(self.clock())
            if not self._take():
                raise NoBatch
            first = begin = self._mark_done()
            if per_pass is not None:  # let the queue settle, time a steady state, then take what is still under way
                self._n_ahead = batches_in_flight(iterable)
                self._n_workers = max(1, getattr(iterable, "num_workers", 0) or 0)
                if self._n_ahead and all(self._take() for _ in range(self._n_ahead)):
                    begin = self._mark_done()
                while not is_steady and self._take():
                    is_steady = self._is_long_enough(begin)
                is_wanted = False
                end = self._mark_done()
                peak_mem_mb = self.peak_mem_mb()
                shutdown_s = self._take_rest()
                if is_steady and not self.n_steady_batches:
                    self.n_steady_batches = self._plan(begin, end)
            else:  # which batch is the last, and ends the steady state, is known only after it
                shutdown_s = self._take_rest()
                end = self._mark_done()
                end.at_s -= shutdown_s
                peak_mem_mb = self.peak_mem_mb()
                self._pass_images = self._n_images
                is_steady = end.n_batches - begin.n_batches >= _MIN_BATCHES

        first_s = first.at_s - ready.resumed_s
        settle_s = begin.at_s - first.resumed_s if begin is not first else 0.0
        steady_s = end.at_s - begin.resumed_s
        # Too short for a steady state: the whole run, so that a queue which filled before the first batch is paid for.
        since, seconds = (begin, steady_s) if is_steady else (ready, first_s + settle_s + steady_s)
        cpu_s, cores = end.cpu_s - since.cpu_s, end.cores - since.cores
        return iterable, {
            "n_images": self._n_images,
            "pass_images": self._pass_images,
            "startup_s": ready.at_s - started_s,
            "first_batch_s": first_s,
            "settle_s": settle_s,
            "n_settle_batches": begin.n_batches - first.n_batches,
            "steady_s": steady_s,
            "n_steady_batches": end.n_batches - begin.n_batches,
            "n_steady_images": end.n_images - begin.n_images,
            "shutdown_s": shutdown_s,
            "is_steady": is_steady,
            "images_per_s": (end.n_images - since.n_images) / seconds if seconds > 0 else float("inf"),
            "peak_mem_mb": peak_mem_mb,
            "cpu_s": cpu_s,
            "steal_s": cores.stolen_s,
            "others_cpu_s": max(0.0, cores.busy_s - cpu_s - (end.excluded_s - since.excluded_s)),
        }

    def _is_long_enough(self, begin: _Mark) -> bool:
        n_batches, seconds = self._n_batches - begin.n_batches, self.clock() - begin.resumed_s
        if self.n_steady_batches:
            return n_batches >= self.n_steady_batches
        if n_batches % self._n_workers:
            return False  # workers deliver round-robin: count as many batches of each
        if seconds >= _MAX_SHARE * self.min_steady_s:
            return True
        if self.is_warmup:
            return self._n_batches >= (self._per_pass or 1)
        # Whole passes, since images differ.
        is_filled = n_batches >= _N_QUEUES * self._n_ahead and n_batches % (self._per_pass or 1) == 0
        return is_filled and seconds >= self.min_steady_s

    def _plan(self, begin: _Mark, end: _Mark) -> int:
        """Batches of the steady states to come, by this one's pace."""
        batches_per_s = (end.n_batches - begin.n_batches) / max(end.at_s - begin.resumed_s, 1e-9)
        wanted = max(_N_QUEUES * self._n_ahead, batches_per_s * self.min_steady_s, 1)
        whole = _round_up(wanted, math.lcm(self._per_pass or 1, self._n_workers))
        return min(whole, _round_up(max(1, _MAX_SHARE * batches_per_s * self.min_steady_s), self._n_workers))

    def _take(self) -> bool:
        try:
            batch = next(self._batches)
        except StopIteration:
            return False
        self._n_batches += 1
        self._n_images += self.count(batch)
        if self._n_batches == self._per_pass:
            self._pass_images = self._n_images
        return True

    def _take_rest(self) -> float:
        """Seconds from the last batch to the end."""
        last_s = self.clock()
        while self._take():
            last_s = self.clock()
        return self.clock() - last_s

    def _mark_done(self) -> _Mark:
        synchronize()
        return self._mark(self.clock())

    def _mark(self, at_s: float) -> _Mark:
        cpu_s, excluded_s, cores = tree_usage().cpu_s, excluded_cpu_s(), core_time()
        return _Mark(at_s, self.clock(), self._n_batches, self._n_images, cpu_s, excluded_s, cores)


def _round_up(number: float, unit: int) -> int:
    """Round up to a multiple of `unit`; a hair above one counts as that one."""
    return math.ceil(number / unit - 1e-9) * unit


class StageClock:
    """Adds up the wall time of named stages::

        watch = StageClock()
        with watch("decode"):
            ...

    Args:
        clock: Seconds; for tests.

    Taught in: notebooks/01_naive_pil.ipynb
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock() - start

    def frame(self, variant: str) -> pd.DataFrame:
        """One row per stage: variant, stage, seconds; for `plot_stalls`."""
        seconds = list(self.seconds.values())
        return pd.DataFrame({"variant": variant, "stage": list(self.seconds), "seconds": seconds})


class ReplayLoader:
    """The first batches of a loader, kept in memory and repeated: no loader can be faster.

    Args:
        loader: Any iterable of batches; the first `n_batches` are taken at once, and the loader is left as it was.
        n_batches: Batches to keep.
        length: Batches in an epoch; the kept ones are repeated. Default: `n_batches`.
        device: Keep the batches there, so that copying to the device is free too.

    >>> kept = lk.ReplayLoader(lk.BatchLoader("photos", batch_size=4), 2, length=100)
    >>> sum(1 for batch in kept)
    100

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
        with unchanged(loader), closing_pass(iter(loader), loader) as batches:
            kept = [map_tensors(batch, _copy_if_shared) for batch in islice(batches, n_batches)]
        if len(kept) < n_batches:
            raise ArgumentError(
                f"n_batches is {n_batches}, but the loader gave only {len(kept)} batches: ask for fewer"
            )
        self._batches = kept if device is None else [move_tensors(batch, device) for batch in kept]
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_workers = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return (self._batches[position % len(self._batches)] for position in self.batch_sampler)


def _copy_if_shared(tensor: Any) -> Any:
    return tensor.clone() if tensor.device.type == "cpu" and tensor.is_shared() else tensor
