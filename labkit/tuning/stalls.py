"""diagnose(): does this training wait for its data, for which part of it, and what to change first."""

import contextlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from labkit.core import preserve_rng_state
from labkit.measure import make_frame, page_cache_state, speedup_interval, tree_usage
from labkit.tuning import training_loop as loop_parts
from labkit.tuning.advice import Costs, advise, of_data_set
from labkit.tuning.diagnosis import Diagnosis, lost_s
from labkit.tuning.epochs import CannotDiagnose
from labkit.tuning.gpu_utilization import GpuUtilization
from labkit.tuning.io_wait import Making, making_in_one_process, waiting_of
from labkit.tuning.training_loop import LOADER, RECEIVE, STEP, STEP_AND_COPY, TOGETHER, LoopParts

_LEAST_BATCHES = 4  # in a window: below, one odd batch is all that is seen


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

    In each round: the step on batches from memory, where it needs them and where the loader leaves them; the loader
    alone; both together. The differences are what the parts cost. The loader's part is split by what making a batch
    takes in one process: processor time, and time in which others had the core, is preparing; the rest is waiting for
    storage.

    The step really trains, on the same few batches again and again: hand over a copy of a model that you need. The
    batches stay as the loader gave them, whatever the step writes into their tensors or takes out of their dicts;
    global random generators are given back as they were.

    Args:
        loader: Any iterable of batches that can be gone through again: `torch.utils.data.DataLoader`, `BatchLoader`,
            a loader of another library.
        step: Called with each batch, as the loader gives it; copies it to the device itself, if it has to be there.
        batches: In each part of a round; fewer where they would take too long, and a multiple of the workers, whose
            batches come all at once.
        rounds: How often all is measured.
        limit_s: Seconds that it may take, about; a loader or a step of many seconds a batch takes longer.
        device: Where the step needs its batches. None: the current CUDA device, where the model can be; without CUDA
            nothing is copied.
        evict: Drops the data from the page cache and returns their bytes. None: the store's own `evict`, if it has one.
        count: Images of a batch, where `compare`'s rule does not fit.

    Returns:
        A `Diagnosis`; a notebook shows it as a picture and three sentences.

    Raises:
        CannotDiagnose: a ValueError: a loader that gives nothing, can be gone through only once or not at all; a
            step that cannot be called; no batches, no rounds.

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    _check(step, batches, rounds)
    device = _device() if device is None else device
    parts = LoopParts(loader, step, device=device, count=count or loop_parts.counted)
    with preserve_rng_state(*_generators(parts.torch_loader)):
        try:
            parts.begin()
            n = _affordable(parts, batches, rounds, limit_s)
            with GpuUtilization() as gpu:
                measured = [_round(parts, n, number) for number in range(rounds)]
            cold = _cold(parts, evict, n, measured)
        finally:
            parts.close()
        table = pd.DataFrame(measured)
        making = _making(parts, table, limit_s)
    costs = _costs(parts, table.median(), making)
    low, high = speedup_interval(((table[TOGETHER] + costs.start) / table[STEP]).to_numpy())
    parts_s = {"compute": costs.step, **lost_s(costs)}
    return Diagnosis(
        shares={name: float(seconds / costs.together) for name, seconds in parts_s.items()},
        ceiling=costs.together / costs.step, ceiling_low=low, ceiling_high=high,
        recommendations=advise(costs, parts.innermost), costs=costs, gpu_utilization=gpu.share, cold=cold,
        frame=_frame(table, n, parts),
    )  # fmt: skip


def _check(step: Any, batches: int, rounds: int) -> None:
    if not callable(step):
        raise CannotDiagnose(f"step is a {type(step).__name__}: a function of one batch is wanted")
    if batches < 1 or rounds < 1:
        raise CannotDiagnose(f"batches={batches}, rounds={rounds}: at least one of each is wanted")


def _device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _generators(workers: Any) -> set[Any]:
    """Those that decide the order of a loader's data."""
    found = {getattr(of, "generator", None) for of in (workers, getattr(workers, "sampler", None))}
    return found - {None}


def _affordable(parts: LoopParts, batches: int, rounds: int, limit_s: float) -> int:
    """Batches a window, so that all of it stays within the limit."""
    parts.drain()
    loading_s = parts.load(max(2, parts.at_once))
    parts.rest()
    step_s = parts.replay(parts.host, 2)
    of_round = limit_s / (rounds + 1) - (4 * parts.queue + 2) * loading_s  # the queue is filled and emptied
    a_batch = 2 * step_s + loading_s + (step_s + loading_s)
    n = max(min(batches, _LEAST_BATCHES), min(batches, int(of_round / a_batch)))
    return max(1, n // parts.at_once) * parts.at_once


def _round(parts: LoopParts, n: int, number: int) -> dict[str, float]:
    """Seconds a batch of each part."""
    replays = [(STEP, parts.on_device), (STEP_AND_COPY, parts.host)][:: 1 if number % 2 else -1]
    found = {}
    parts.rest()
    for name, kept in replays:
        found[name] = parts.replay(kept, n)
    if parts.on_device is parts.host:  # the same work twice: what differs is noise
        found[STEP] = found[STEP_AND_COPY] = (found[STEP] + found[STEP_AND_COPY]) / 2
    found[RECEIVE] = parts.receive()
    parts.drain()
    found[LOADER] = parts.load(n)
    if found[LOADER] < found[STEP_AND_COPY]:
        parts.rest()  # in training its queue is full then: filling it is no part of a batch
    found[TOGETHER] = parts.train(n)
    return found


def _cold(parts: LoopParts, evict: Any, n: int, measured: list[dict[str, float]]) -> float | None:
    evict = evict or getattr(of_data_set(parts.innermost, "store"), "evict", None)
    if evict is None:
        return None
    try:
        evicted, before = evict(), tree_usage().read_bytes
    except OSError:  # a system that cannot, or data on no disk of this machine
        return None
    parts.drain()
    seconds = parts.load(n)
    of_epoch = (n + parts.queue) / (parts.epochs.length or 1)
    expected = int(evicted * min(1.0, of_epoch))
    if page_cache_state(before, tree_usage().read_bytes, asked=True, evicted=expected) != "cold":
        return None
    return seconds / statistics.median(found[LOADER] for found in measured)


def _making(parts: LoopParts, table: pd.DataFrame, limit_s: float) -> Making:
    if parts.torch_loader is not None:
        with contextlib.suppress(Exception):  # a data set that works only inside its workers, as was just seen
            return making_in_one_process(parts.torch_loader, limit_s=limit_s / 10, n_batches=10)
    return waiting_of(parts.innermost, table[LOADER].median(), statistics.median(parts.cpu_s_a_batch))


def _costs(parts: LoopParts, seconds: pd.Series, making: Making) -> Costs:
    """What is lost, shared out: first what was seen to take the training's own time, the rest to making batches."""
    step, steady = seconds[STEP], max(seconds[TOGETHER], seconds[STEP])
    start = parts.epochs.starting_s(steady - step)
    copy = min(max(0.0, seconds[STEP_AND_COPY] - step), steady - step)
    hand_over = min(_received(parts, seconds), steady - step - copy)
    rest = steady - step - copy - hand_over
    return Costs(
        step=step, copy=copy, hand_over=hand_over, fetch=rest * making.waiting, prepare=rest * (1 - making.waiting),
        start=start, together=steady + start, making=making.seconds, waiting=making.waiting,
        step_cpu=statistics.median(parts.step_cpu_s),
    )  # fmt: skip


def _received(parts: LoopParts, seconds: pd.Series) -> float:
    """Receiving is a cost of its own only where batches are made elsewhere: else it is the making itself."""
    if parts.torch_loader is not None:
        return seconds[RECEIVE] if parts.torch_loader.num_workers else 0.0
    works_ahead = seconds[RECEIVE] < seconds[LOADER] / 2
    return seconds[RECEIVE] if works_ahead else 0.0


def _frame(table: pd.DataFrame, n: int, parts: LoopParts) -> pd.DataFrame:
    rows = [
        {
            "variant": name, "round": number, "order": order, "is_warmup": False, "n_images": n * parts.n_images,
            "steady_s": n * seconds, "images_per_s": parts.n_images / seconds,
        }
        for number, found in table.iterrows()
        for order, (name, seconds) in enumerate(found.items())
    ]  # fmt: skip
    own = {"batch_size": parts.n_images, "num_workers": getattr(parts.innermost, "num_workers", 0)}
    return make_frame(rows, experiment="diagnose", baseline=TOGETHER, rung=False, **own)
