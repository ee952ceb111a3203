"""diagnose(): does this training wait for its data, for which part of it, and what to change first."""

import contextlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from labkit.core import preserve_rng_state, require_int
from labkit.measure import make_frame, page_cache_state, speedup_interval, tree_usage
from labkit.tuning.advice import Costs, advise
from labkit.tuning.diagnosis import Diagnosis
from labkit.tuning.epochs import CannotDiagnose
from labkit.tuning.gpu_utilization import gpu_utilization
from labkit.tuning.io_wait import Making, making_in_one_process, waiting_of
from labkit.tuning.loader_traits import LoaderTraits, of_data_set
from labkit.tuning.training_loop import LOADER, RECEIVE, STEP, STEP_AND_COPY, TOGETHER, LoopParts, counted

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

    Raises:
        CannotDiagnose: a ValueError: the loader gives nothing or can be iterated only once or not at all, the step
            cannot be called, or there are no batches or rounds.

    Taught in: notebooks/12_find_the_stall.ipynb
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
    parts.rest()
    step_s = parts.replay(parts.host, 2)
    of_round = limit_s / (rounds + 1) - (4 * parts.queue + 2) * loading_s  # the queue is filled and emptied
    a_batch = 2 * step_s + loading_s + (step_s + loading_s)
    n = max(min(batches, _MIN_BATCHES), min(batches, int(of_round / a_batch)))
    return max(1, n // parts.at_once) * parts.at_once


def _run_round(parts: LoopParts, n: int, number: int) -> dict[str, float]:
    """Seconds per batch of each part."""
    replays = [(STEP, parts.on_device), (STEP_AND_COPY, parts.host)][:: 1 if number % 2 else -1]
    parts.rest()
    found = {name: parts.replay(kept, n) for name, kept in replays}
    if parts.on_device is parts.host:  # the same work twice: the difference is noise
        found[STEP] = found[STEP_AND_COPY] = (found[STEP] + found[STEP_AND_COPY]) / 2
    found[RECEIVE] = parts.receive()
    parts.drain()
    found[LOADER] = parts.load(n)
    if found[LOADER] < found[STEP_AND_COPY]:
        parts.rest()  # in training the queue is full then: filling it is not part of a batch
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
