"""`lk.diagnose`: does this training wait for its data, for which part of it, and what to change first?

Its parts are timed alone and together. A loader that works ahead has batches ready after every pause, so a part is
timed only from a known state of the queue: full, to time the receiving of a batch that is ready; empty, to time the
making of one.
"""

import contextlib
import importlib
import inspect
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import pandas as pd

from labkit.errors import CannotDiagnose
from labkit.measure.frames import make_frame
from labkit.measure.statistics import speedup_interval
from labkit.measure.steady import count_images, fresh, page_cache_state, synchronize, versions
from labkit.measure.usage import core_time, tree_usage
from labkit.util.arguments import require_int
from labkit.util.process import preserve_rng_state
from labkit.util.tensor_trees import move_tensors
from labkit.watching.advice import Costs, LoaderTraits, advise, of_data_set, starts_workers, torch_loader
from labkit.watching.findings import Diagnosis
from labkit.watching.timings import Epochs, Making, gpu_utilization, making_in_one_process, run_queue_s, waiting_of


def named_function(name: str) -> Any:
    """The function behind `package.module:function`, from the current folder or from what is installed.

    Raises:
        CannotDiagnose: another form, no such module or no such function. What the module itself raises while it is
            imported is passed on.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.endswith(".py"):
        example = "train:make_training for train.py in this folder"
        raise CannotDiagnose(f"{name!r}: write module:function, such as {example}")
    if module_name.startswith("."):
        raise CannotDiagnose(f"{name!r}: name the module from the current folder, without a leading dot")
    module = _import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in inspect.getmembers(module, inspect.isfunction) if value.__module__ == module_name]
        raise CannotDiagnose(f"{module_name} has no function {function_name}; it has {', '.join(own) or 'none'}")
    return function


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise CannotDiagnose(f"there is no module {name} here ({os.getcwd()}) and none is installed") from None
        raise


def made_training(name: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """The loader and the step that the function returns.

    Args:
        name: `package.module:function`.
        arguments: For the script's `sys.argv`, as if it were started with them.

    Raises:
        CannotDiagnose: it returns something else, or needs arguments of its own.
    """
    sys.argv = [name.partition(":")[0], *arguments]
    function = named_function(name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise CannotDiagnose(f"{name}: {error}; it must work without arguments") from None
    returned = function()
    parts = returned if isinstance(returned, tuple | list) else [returned]
    if len(parts) != 2 or not hasattr(parts[0], "__iter__") or not callable(parts[1]):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise CannotDiagnose(f"{name} gave {kinds}: return loader, step, where step(batch) trains on a batch")
    return parts[0], parts[1]


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
        self.epochs = Epochs(loader, starts_workers=starts_workers(self.torch_loader))
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

    def wait_until_full(self) -> None:
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


_MIN_BATCHES = 4  # per part of a round: with fewer, one odd batch decides


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    *,
    batches: int = 20,
    rounds: int = 3,
    limit_s: float = 100.0,
    device: Any = None,
    evict: Callable[[], int] | None = None,
    count: Callable[[Any], int] | None = None,
) -> Diagnosis:
    """Find out what training waits for, by running its parts alone and together.

    Each round runs the step on batches from memory, both where it needs them and where the loader leaves them; then
    the loader alone; then both together. The differences are the costs of the parts. The loader's part is split by how
    one process makes a batch: processor time, and time in which others had the core, is preparing; the rest is waiting
    for storage.

    The step really trains, on the same few batches: pass a copy of a model that you need. Batches arrive as the loader
    gave them, whatever the step does to them; global random generators are restored.

    Args:
        loader: Any iterable of batches that can be iterated again, also of another library.
        step: Called with each batch, as the loader gives it; moves it to the device itself.
        batches: In each part of a round; fewer if they take too long, and a multiple of the number of workers.
        rounds: How often all parts are measured.
        limit_s: Seconds that it may take, about; a loader or a step of many seconds per batch takes longer.
        device: Where the step needs its batches. None: the current CUDA device; without CUDA nothing is copied.
        evict: Drops the data from the page cache and returns their bytes. None: the store's own `evict`, if any.
        count: Returns the images of a batch, where `compare`'s rule does not fit.

    >>> loader = lk.BatchLoader("photos", size=64, batch_size=4)
    >>> found = lk.diagnose(loader, lambda batch: batch[0].float().sum(), batches=4, limit_s=5)
    >>> print(found)  # doctest: +SKIP
    Training waits for its data 71% of the time: prepare 69%, start 2%.

    Raises:
        CannotDiagnose: a ValueError: the loader gives nothing or can be iterated only once or not at all, the step
            cannot be called, or there are no batches or rounds.
    """
    _check_arguments(step, batches, rounds)
    device = _default_device() if device is None else device
    parts = LoopParts(loader, step, device=device, count=count or counted)
    return _measure(parts, batches, rounds, limit_s, evict)


def _measure(parts: LoopParts, batches: int, rounds: int, limit_s: float, evict: Any) -> Diagnosis:
    with preserve_rng_state(*_generators(parts.torch_loader)):
        try:
            parts.begin()
            n = _affordable_batches(parts, batches, rounds, limit_s)
            with gpu_utilization() as busy:
                table = pd.DataFrame([_run_round(parts, n, number) for number in range(rounds)])
            cold = _cold_ratio(parts, evict, n, table[LOADER].median())
        finally:
            parts.close()
        making = _measure_making(parts, table, limit_s)
    costs = _share_out_costs(parts, table.median(), making)
    advice = advise(costs, LoaderTraits.of(parts.innermost))
    low, high = speedup_interval(((table[TOGETHER] + costs.start) / table[STEP]).to_numpy())
    return Diagnosis(
        shares={"compute": float(costs.step / costs.together), **costs.lost}, ceiling=costs.together / costs.step,
        ceiling_low=low, ceiling_high=high, recommendations=advice, costs=costs,
        gpu_utilization=statistics.fmean(busy) if busy else None, cold=cold, frame=_make_frame(table, n, parts),
        spans=pd.DataFrame(parts.spans),
    )  # fmt: skip


def _check_arguments(step: Any, batches: int, rounds: int) -> None:
    if not callable(step):
        raise CannotDiagnose(f"step must be a function of one batch, got a {type(step).__name__}")
    try:
        require_int("batches", batches)
        require_int("rounds", rounds)
    except ValueError as error:
        raise CannotDiagnose(str(error)) from None


def _default_device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _generators(workers: Any) -> set[Any]:
    """The random generators that decide the order of a loader's data."""
    found = {getattr(of, "generator", None) for of in (workers, getattr(workers, "sampler", None))}
    return found - {None}


def _affordable_batches(parts: LoopParts, batches: int, rounds: int, limit_s: float) -> int:
    """Batches in each part of a round, so that all of it stays within the limit."""
    parts.drain()
    loading_s = parts.load(max(2, parts.at_once))
    parts.wait_until_full()
    step_s = parts.replay(parts.host, 2)
    of_round = limit_s / (rounds + 1) - (4 * parts.queue + 2) * loading_s  # the queue is filled and emptied
    a_batch = 2 * step_s + loading_s + (step_s + loading_s)
    n = max(min(batches, _MIN_BATCHES), min(batches, int(of_round / a_batch)))
    return max(1, n // parts.at_once) * parts.at_once


def _run_round(parts: LoopParts, n: int, number: int) -> dict[str, float]:
    """Seconds per batch of each part."""
    replays = [(STEP, parts.on_device), (STEP_AND_COPY, parts.host)][:: 1 if number % 2 else -1]
    parts.wait_until_full()
    found = {name: parts.replay(kept, n) for name, kept in replays}
    if parts.on_device is parts.host:  # the same work twice: the difference is noise
        found[STEP] = found[STEP_AND_COPY] = (found[STEP] + found[STEP_AND_COPY]) / 2
    found[RECEIVE] = parts.receive()
    parts.drain()
    found[LOADER] = parts.load(n)
    if found[LOADER] < found[STEP_AND_COPY]:
        parts.wait_until_full()  # in training the queue is full then: filling it is not part of a batch
    found[TOGETHER] = parts.train(n)
    return found


def _cold_ratio(parts: LoopParts, evict: Any, n: int, warm_s: float) -> float | None:
    """How many times as long the loader takes from a cold page cache; None if its files cannot be evicted."""
    evict = evict or getattr(of_data_set(parts.innermost, "store"), "evict", None)
    if evict is None:
        return None
    try:
        evicted, before = evict(), tree_usage().read_bytes
    except OSError:  # not possible on this system, or the data are not on a disk of this machine
        return None
    parts.drain()
    seconds = parts.load(n)
    of_epoch = (n + parts.queue) / (parts.epochs.length or 1)
    expected = int(evicted * min(1.0, of_epoch))
    if page_cache_state(before, tree_usage().read_bytes, asked=True, evicted=expected) != "cold":
        return None
    return seconds / warm_s


def _measure_making(parts: LoopParts, table: pd.DataFrame, limit_s: float) -> Making:
    if parts.torch_loader is not None:
        with contextlib.suppress(Exception):  # the data set works only inside workers
            return making_in_one_process(parts.torch_loader, limit_s=limit_s / 10, n_batches=10)
    return waiting_of(parts.innermost, table[LOADER].median(), statistics.median(parts.cpu_s_a_batch))


def _share_out_costs(parts: LoopParts, seconds: pd.Series, making: Making) -> Costs:
    """Attribute the lost time: first to what takes the training process's own time, the rest to making batches."""
    step, steady = seconds[STEP], max(seconds[TOGETHER], seconds[STEP])
    start = parts.epochs.starting_s(steady - step)
    copy = min(max(0.0, seconds[STEP_AND_COPY] - step), steady - step)
    hand_over = min(_receiving_s(parts, seconds), steady - step - copy)
    rest = steady - step - copy - hand_over
    return Costs(
        step=step, copy=copy, hand_over=hand_over, fetch=rest * making.waiting, prepare=rest * (1 - making.waiting),
        start=start, together=steady + start, making=making.seconds, waiting=making.waiting,
        step_cpu=statistics.median(parts.step_cpu_s),
    )  # fmt: skip


def _receiving_s(parts: LoopParts, seconds: pd.Series) -> float:
    """Receiving is a separate cost only if batches are made elsewhere; otherwise it is the making itself."""
    if parts.torch_loader is not None:
        return seconds[RECEIVE] if parts.torch_loader.num_workers else 0.0
    works_ahead = seconds[RECEIVE] < seconds[LOADER] / 2
    return seconds[RECEIVE] if works_ahead else 0.0


def _make_frame(table: pd.DataFrame, n: int, parts: LoopParts) -> pd.DataFrame:
    rows = [
        {
            "variant": name, "round": number, "order": order, "is_warmup": False, "n_images": n * parts.n_images,
            "steady_s": n * seconds,
            "images_per_s": parts.n_images / seconds if seconds else float("inf"),  # receiving can take no time
        }
        for number, found in table.iterrows()
        for order, (name, seconds) in enumerate(found.items())
    ]  # fmt: skip
    own = {"batch_size": parts.n_images, "num_workers": getattr(parts.innermost, "num_workers", 0)}
    return make_frame(rows, experiment="diagnose", baseline=TOGETHER, rung=False, **own)
