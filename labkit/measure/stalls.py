"""diagnose(): does this training wait for its data, for which part of it, and what to change first."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.measure import loop_parts
from labkit.measure.advice import LITTLE, Costs, Recommendation, advise, of_data_set
from labkit.measure.batches import page_cache_state
from labkit.measure.loop_parts import LOADER, RECEIVE, STEP, STEP_AND_COPY, TOGETHER, LoopParts
from labkit.measure.processes import tree_usage
from labkit.measure.results import make_frame, speedup_interval
from labkit.measure.utilization import GpuUtilization
from labkit.measure.waiting import Making, making_in_one_process, waiting_of

SHARES = ("compute", "fetch", "prepare", "copy", "hand-over")

_LEAST_BATCHES = 4  # in a window: below, one odd batch is all that is seen


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        shares: Share of the wall time by cause, in sum 1: `compute`, and what training waits for: `fetch` (storage),
            `prepare` (decoding, augmenting, collating), `copy` (to the device), `hand-over` (from workers).
        ceiling: How many times as fast training would be if data were free.
        ceiling_low, ceiling_high: Its 95 % interval over the rounds.
        recommendation: The change that should bring most.
        recommendations: All that are worth it, the best first.
        costs: Seconds a batch.
        gpu_utilization: Share of the time, 0 to 1, in which the GPU ran a kernel; None where NVML does not answer.
        cold: How many times as long the loader alone takes when its files are not in the page cache; None where
            they cannot be evicted.
        frame: The runs that all of it is reckoned from, as `compare` gives them.
    """

    shares: dict[str, float]
    ceiling: float
    ceiling_low: float
    ceiling_high: float
    recommendations: list[Recommendation]
    costs: Costs
    gpu_utilization: float | None
    cold: float | None
    frame: pd.DataFrame

    @property
    def recommendation(self) -> Recommendation:
        return self.recommendations[0]

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        return [_waiting(self), _free(self), str(self.recommendation)]

    def plot(self, ax: Any = None) -> Any:
        """Where the time of a batch goes, beside the step alone. Returns the Axes."""
        from labkit.measure.plots import plot_stalls

        parts = {"compute": self.costs.step, **_lost_s(self.costs)}
        rows = [{"variant": "training", "stage": stage, "seconds": seconds} for stage, seconds in parts.items()]
        rows.append({"variant": "if data were free", "stage": "compute", "seconds": self.costs.step})
        ax = plot_stalls(pd.DataFrame(rows), ax=ax)
        ax.set(xlabel="seconds a batch", title=f"ceiling: {self.ceiling:.2f}x")
        return ax

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        from html import escape

        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f'<img alt="{escape(self.sentences[0])}" src="data:image/png;base64,{_picture(self)}">{words}'


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
    takes in one process: processor time is preparing, the rest is waiting for storage.

    The step really trains, on the same few batches again and again: hand over a copy of a model that you need.

    Args:
        loader: Any iterable of batches that can be gone through again: `torch.utils.data.DataLoader`, `BatchLoader`,
            a loader of another library.
        step: Called with each batch, as the loader gives it; copies it to the device itself, if it has to be there.
        batches: In each part of a round; fewer where they would take too long.
        rounds: How often all is measured.
        limit_s: Seconds that it may take, about; a loader or a step of many seconds a batch takes longer.
        device: Where the step needs its batches. None: the current CUDA device, where the model can be; without CUDA
            nothing is copied.
        evict: Drops the data from the page cache and returns their bytes. None: the store's own `evict`, if it has one.
        count: Images of a batch, where `compare`'s rule does not fit.

    Returns:
        A `Diagnosis`; a notebook shows it as a picture and three sentences.

    Raises:
        ValueError: a loader that gives nothing, or can be gone through only once; or no batches, no rounds.
        TypeError: `step` cannot be called.

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    _check(step, batches, rounds)
    device = _device() if device is None else device
    parts = LoopParts(loader, step, device=device, count=count or loop_parts.counted)
    try:
        n = _affordable(parts, batches, rounds, limit_s)
        with GpuUtilization() as gpu:
            measured = [_round(parts, n, number) for number in range(rounds)]
        cold = _cold(parts, loader, evict, n, measured)
    finally:
        parts.close()
    table = pd.DataFrame(measured)
    making = _making(loader, parts, table, limit_s)
    costs = _costs(loader, table.median(), making)
    ratios = (table[TOGETHER] / table[STEP]).to_numpy()
    low, high = speedup_interval(ratios)
    parts_s = {"compute": costs.step, **_lost_s(costs)}
    return Diagnosis(
        shares={name: seconds / costs.together for name, seconds in parts_s.items()},
        ceiling=costs.together / costs.step, ceiling_low=low, ceiling_high=high,
        recommendations=advise(costs, loader), costs=costs, gpu_utilization=gpu.share, cold=cold,
        frame=_frame(table, n, parts, loader),
    )  # fmt: skip


def _check(step: Any, batches: int, rounds: int) -> None:
    if not callable(step):
        raise TypeError(f"step is a {type(step).__name__}: a function of one batch is wanted")
    if batches < 1 or rounds < 1:
        raise ValueError(f"batches={batches}, rounds={rounds}: at least one of each is wanted")


def _device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _affordable(parts: LoopParts, batches: int, rounds: int, limit_s: float) -> int:
    """Batches a window, so that all of it stays within the limit."""
    step_s = parts.replay(parts.host, 2) / 2
    parts.drain()
    loading_s = parts.load(2) / 2
    of_round = limit_s / (rounds + 1) - (2 * parts.queue + 2) * loading_s  # the queue is filled and emptied
    a_batch = 2 * step_s + loading_s + (step_s + loading_s)
    return max(min(batches, _LEAST_BATCHES), min(batches, int(of_round / a_batch)))


def _round(parts: LoopParts, n: int, number: int) -> dict[str, float]:
    """Seconds a batch of each part."""
    replays = [(STEP, parts.on_device), (STEP_AND_COPY, parts.host)][:: 1 if number % 2 else -1]
    started, found = time.perf_counter(), {}
    for name, kept in replays:
        found[name] = parts.replay(kept, n) / n
    if parts.on_device is parts.host:  # the same work twice: what differs is noise
        found[STEP] = found[STEP_AND_COPY] = (found[STEP] + found[STEP_AND_COPY]) / 2
    parts.rest(parts.filling_s() - (time.perf_counter() - started))
    seconds, received = parts.receive()
    found[RECEIVE] = seconds / received
    parts.drain()
    found[LOADER] = parts.load(n) / n
    found[TOGETHER] = parts.train(n) / n
    return found


def _cold(parts: LoopParts, loader: Any, evict: Any, n: int, measured: list[dict[str, float]]) -> float | None:
    evict = evict or getattr(of_data_set(loader, "store"), "evict", None)
    if evict is None:
        return None
    try:
        evicted, before = evict(), tree_usage().read_bytes
    except OSError:  # a system that cannot, or data on no disk of this machine
        return None
    parts.drain()
    seconds = parts.load(n) / n
    n_all = len(getattr(loader, "dataset", ())) or 1
    expected = int(evicted * min(1.0, (n + parts.queue) * parts.n_images / n_all))
    if page_cache_state(before, tree_usage().read_bytes, asked=True, evicted=expected) != "cold":
        return None
    return seconds / statistics.median(found[LOADER] for found in measured)


def _making(loader: Any, parts: LoopParts, table: pd.DataFrame, limit_s: float) -> Making:
    if loop_parts.is_torch_loader(loader):
        return making_in_one_process(loader, limit_s=limit_s / 10, n_batches=20)
    return waiting_of(loader, table[LOADER].median(), statistics.median(parts.cpu_s_a_batch))


def _costs(loader: Any, seconds: pd.Series, making: Making) -> Costs:
    """What is lost, shared out: first what was seen to take the training's own time, the rest to making batches."""
    together = max(seconds[TOGETHER], seconds[STEP])
    lost = together - seconds[STEP]
    copy = min(max(0.0, seconds[STEP_AND_COPY] - seconds[STEP]), lost)
    hand_over = min(_received(loader, seconds), lost - copy)
    rest = lost - copy - hand_over
    return Costs(
        step=seconds[STEP], copy=copy, hand_over=hand_over, fetch=rest * making.waiting,
        prepare=rest * (1 - making.waiting), together=together, making=making.seconds, waiting=making.waiting,
    )  # fmt: skip


def _received(loader: Any, seconds: pd.Series) -> float:
    """Receiving is a cost of its own only where batches are made elsewhere: else it is the making itself."""
    if loop_parts.is_torch_loader(loader):
        return seconds[RECEIVE] if loader.num_workers else 0.0
    works_ahead = seconds[RECEIVE] < seconds[LOADER] / 2
    return seconds[RECEIVE] if works_ahead else 0.0


def _lost_s(costs: Costs) -> dict[str, float]:
    return {"fetch": costs.fetch, "prepare": costs.prepare, "copy": costs.copy, "hand-over": costs.hand_over}


def _frame(table: pd.DataFrame, n: int, parts: LoopParts, loader: Any) -> pd.DataFrame:
    rows = [
        {
            "variant": name, "round": number, "order": order, "is_warmup": False, "n_images": n * parts.n_images,
            "steady_s": n * seconds, "images_per_s": parts.n_images / seconds,
        }
        for number, found in table.iterrows()
        for order, (name, seconds) in enumerate(found.items())
    ]  # fmt: skip
    own = {"batch_size": parts.n_images, "num_workers": getattr(loader, "num_workers", 0)}
    return make_frame(rows, experiment="diagnose", baseline=TOGETHER, rung=False, **own)


def _waiting(found: Diagnosis) -> str:
    lost = {name: found.shares[name] for name in SHARES[1:]}
    total = sum(lost.values())
    if total < LITTLE:
        return f"Training does not wait for its data: {found.shares['compute']:.0%} of the time is the step itself."
    parts = ", ".join(f"{name} {share:.0%}" for name, share in sorted(lost.items(), key=lambda item: -item[1]))
    return f"Training waits for its data {total:.0%} of the time: {parts}."


def _free(found: Diagnosis) -> str:
    within = f" [{found.ceiling_low:.2f}, {found.ceiling_high:.2f}]" if found.ceiling_low == found.ceiling_low else ""
    words = f"Were data free, it would be {found.ceiling:.2f}x{within} as fast"
    if found.gpu_utilization is not None:
        words += f"; the GPU was busy {found.gpu_utilization:.0%} of the time that was measured"
    if found.cold is not None:
        words += f"; from a cold page cache the loader takes {found.cold:.1f}x as long"
    return words + "."


def _picture(found: Diagnosis) -> str:
    """PNG, base64."""
    import matplotlib.pyplot as plt

    from labkit.measure.pictures import png_base64

    figure, ax = plt.subplots(figsize=(7.5, 2.2), layout="constrained")
    found.plot(ax=ax)
    plt.close(figure)
    return png_base64(figure)
