"""What watching or diagnosing a training showed: as numbers, in words, as a picture, and as files.

The libraries for it, such as pandas, are imported only when there is a report to make.
"""

import json
import math
import os
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from labkit.errors import NothingSeen
from labkit.measure.statistics import speedup_interval
from labkit.measure.usage import CoreTime
from labkit.util.files import write_atomic
from labkit.util.pictures import png_base64
from labkit.watching.advice import MIN_SHARE, Costs, Recommendation, advise
from labkit.watching.observe import FEW, REPLAY, Batch, Epoch, Observer, SeenLoader, describe_nothing
from labkit.watching.timings import BatchTiming, DeviceTimes

SHARES = ("compute", "fetch", "prepare", "copy", "hand-over", "start")


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        shares: Share of the wall time by cause, in sum 1: `compute`, and what training waits for: `fetch` (storage),
            `prepare` (decoding, augmenting, collating), `copy` (to the device), `hand-over` (from workers), `start` (of
            an epoch: workers that start again).
        ceiling: How much faster training would be if data were free (2.0: twice as fast).
        ceiling_low, ceiling_high: Its 95 % interval over the rounds.
        recommendation: The change with the largest expected gain.
        recommendations: All changes that are worth it, the best first.
        costs: Seconds per batch.
        gpu_utilization: Share of the time, 0 to 1, in which the GPU ran a kernel; None if NVML does not answer.
        cold: How many times as long the loader alone takes if its files are not in the page cache; None if they
            cannot be evicted.
        frame: The runs behind these numbers, as `compare` returns them.
        spans: The host's last round of training, what it waited for and its steps: `plot_timeline` draws it, and
            `save_trace` saves it. On a GPU a step may end here before its kernels do.
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
    spans: pd.DataFrame

    @property
    def recommendation(self) -> Recommendation:
        return self.recommendations[0]

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        return [describe_waiting(self.shares), _describe_ceiling(self), str(self.recommendation)]

    def plot(self, ax: Any = None) -> Any:
        """Where the time of a batch goes, compared with the step alone. Returns the Axes."""
        return plot_costs(self.costs, f"ceiling: {self.ceiling:.2f}x", ax)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        from html import escape

        from matplotlib.figure import Figure

        from labkit.measure.plots import WIDTH_IN
        from labkit.util.pictures import png_base64

        figure = Figure(figsize=(WIDTH_IN, 2.6), layout="constrained")
        self.plot(ax=figure.add_subplot())
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f'<img alt="{escape(self.sentences[0])}" src="data:image/png;base64,{png_base64(figure)}">{words}'


def plot_costs(costs: Costs, title: str, ax: Any = None) -> Any:
    """Where the time of a batch goes, compared with the step alone. Returns the Axes."""
    from labkit.measure.plots import plot_stalls, write_title

    parts = {"compute": costs.step, **costs.lost_s}
    rows = [{"variant": "training", "stage": stage, "seconds": seconds} for stage, seconds in parts.items()]
    rows.append({"variant": "if data were free", "stage": "compute", "seconds": costs.step})
    ax = plot_stalls(pd.DataFrame(rows), ax=ax)
    ax.set(xlabel="seconds per batch")
    write_title(ax, title)
    return ax


def describe_waiting(shares: dict[str, float]) -> str:
    """A sentence on the shares of the time."""
    lost = {name: shares[name] for name in SHARES[1:]}
    total = sum(lost.values())
    if total < MIN_SHARE:
        return f"Training does not wait for its data: {shares['compute']:.0%} of the time is the step itself."
    ordered = sorted(lost.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005)
    return f"Training waits for its data {total:.0%} of the time: {parts}."


def _describe_ceiling(found: Diagnosis) -> str:
    within = f" [{found.ceiling_low:.2f}, {found.ceiling_high:.2f}]" if found.ceiling_low == found.ceiling_low else ""
    words = f"Were data free, it would be {found.ceiling:.2f}x{within} as fast"
    if found.gpu_utilization is not None:
        words += f"; the GPU was busy {found.gpu_utilization:.0%} of the time that was measured"
    if found.cold is not None and round(found.cold, 1) > 1:
        words += f"; from a cold page cache the loader takes {found.cold:.1f}x as long"
    return words + "."


_NO_STEP = 1000  # times the step: a ceiling beyond it is no rate that training could reach


@dataclass(frozen=True)
class WatchReport:
    """What a training waited for.

    Attributes:
        shares: Share of the time by cause, in sum 1, as `Diagnosis` has them.
        ceiling: How much faster training would be if data were free.
        ceiling_low, ceiling_high: Its 95 % interval.
        is_bound: The ceiling was not measured by replaying batches. While workers and the step share the cores, the
            step looks longer than it is, and free data would bring at least this much.
        recommendations: All changes that are worth it, the best first.
        costs: Seconds per batch.
        n_batches: Batches that the figures are from.
        loader_s: Seconds per batch of the loader alone; None if it was not measured.
        loaders: One row per loader: what it is, how many batches it gave, how long they were waited for, and how a
            batch was made.
        spans: The host's waits and steps, and the workers' batches: `plot_timeline` draws them.
        cpu_share: Share of the usable cores that were busy, with whatever else ran on them.
        gpu_utilization: Share of the time in which the GPU ran a kernel; None if NVML does not answer.
        notes: What else should be known.
        command: The script and its arguments, without secrets.
        ranks: One row per process of a distributed training; None for a single one.
    """

    shares: dict[str, float]
    ceiling: float
    ceiling_low: float
    ceiling_high: float
    is_bound: bool
    recommendations: list[Recommendation]
    costs: Costs
    n_batches: int
    loader_s: float | None
    loaders: pd.DataFrame
    spans: pd.DataFrame
    cpu_share: float | None
    gpu_utilization: float | None
    notes: list[str] = field(default_factory=list)
    command: str = ""
    ranks: pd.DataFrame | None = None

    @property
    def recommendation(self) -> Recommendation:
        return self.recommendations[0]

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        if self.n_batches < FEW:
            seen = "1 batch was" if self.n_batches == 1 else f"{self.n_batches} batches were"
            few = f"Only {seen} seen after the first: too few for a ceiling or advice."
            few += f" Let the training take at least {FEW} steps."
            return [describe_waiting(self.shares), few, *self.notes]
        return [describe_waiting(self.shares), self._describe_ceiling(), str(self.recommendation), *self.notes]

    def _describe_ceiling(self) -> str:
        if self.ceiling > _NO_STEP:
            return f"Were data free, hardly anything would be left: the step is less than 1/{_NO_STEP} of the time."
        within = "" if math.isnan(self.ceiling_low) else f" [{self.ceiling_low:.2f}, {self.ceiling_high:.2f}]"
        words = f"Were data free, it would be {self.ceiling:.2f}x{within} as fast"
        if self.is_bound:
            words = f"Were data free, it would be at least {self._least:.2f}x as fast"
            words += f" (as it was seen, {self.ceiling:.2f}x{within})" if within else ""
        if self.cpu_share is not None:
            words += f"; the cores were busy {self.cpu_share:.0%} of the time"
        if self.gpu_utilization is not None:
            words += f"; the GPU was busy {self.gpu_utilization:.0%} of it"
        return words + "."

    def plot(self, ax: Any = None) -> Any:
        """Where the time of a batch goes, compared with the step alone. Returns the Axes."""
        ceiling = f"at least {self._least:.2f}x" if self.is_bound else f"{self.ceiling:.2f}x"
        ceiling = f"over {_NO_STEP}x" if self.ceiling > _NO_STEP else ceiling
        return plot_costs(self.costs, f"ceiling: {ceiling}", ax)

    @property
    def _least(self) -> float:
        """What the ceiling is at least, if it is a bound: free data slow down nothing."""
        return self.ceiling if math.isnan(self.ceiling_low) else max(1.0, self.ceiling_low)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON."""
        best = self.recommendation
        return {
            "shares": self.shares, "ceiling": self.ceiling, "ceiling_low": _finite(self.ceiling_low),
            "ceiling_high": _finite(self.ceiling_high), "ceiling_is_bound": self.is_bound,
            "recommendation": {
                "rung": best.rung, "action": best.action, "why": best.why, "speedup": best.speedup,
                "speedup_low": best.speedup_low, "notebook": best.notebook, "settings": dict(best.settings),
            },
            "recommendations": [str(each) for each in self.recommendations], "n_batches": self.n_batches,
            "costs_s": {name: getattr(self.costs, name) for name in self.costs.__dataclass_fields__},
            "loader_s": self.loader_s, "cpu_share": self.cpu_share, "gpu_utilization": self.gpu_utilization,
            "loaders": json.loads(self.loaders.to_json(orient="records")), "notes": self.notes,
            "command": self.command,
            "ranks": None if self.ranks is None else json.loads(self.ranks.to_json(orient="records")),
        }  # fmt: skip

    def save_json(self, path: Path | str) -> Path:
        """Write the figures as JSON."""
        write_atomic(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return Path(path)

    def save_html(self, path: Path | str) -> Path:
        """Write one page that needs no other file, with the timeline."""
        title = escape(self.command or "labkit watch")
        style = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}img{max-width:100%}"
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}'
            f"td,th{{padding:.2em .8em;text-align:right}}</style><h1>{title}</h1>{self._repr_html_()}"
            f"{_picture(self._plot_timeline, 'Timeline of the last steps')}"
            f"{self.loaders.to_html(index=False, border=0, float_format='{:.4g}'.format, na_rep='')}</html>"
        )
        write_atomic(Path(path), page.encode())
        return Path(path)

    def _plot_timeline(self, ax: Any) -> None:
        from labkit.measure.plots import plot_timeline

        plot_timeline(last_spans(self.spans), ax=ax)

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return _picture(lambda ax: self.plot(ax=ax), self.sentences[0]) + words


def last_spans(spans: pd.DataFrame, n_batches: int = 12) -> pd.DataFrame:
    """The spans from the beginning of the last batches on, from time 0."""
    hosts = spans[spans["lane"] == "host"]
    if hosts.empty:
        return spans
    begin_s = hosts.loc[hosts["batch"] > hosts["batch"].max() - n_batches, "start_s"].min()
    kept = spans[spans["end_s"] > begin_s]
    return kept.assign(start_s=(kept["start_s"] - begin_s).clip(lower=0), end_s=kept["end_s"] - begin_s)


def _picture(draw: Any, words: str) -> str:
    from matplotlib.figure import Figure

    from labkit.measure.plots import WIDTH_IN

    figure = Figure(figsize=(WIDTH_IN, 2.6), layout="constrained")
    draw(figure.add_subplot())
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{png_base64(figure)}">'


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_LEAST_S = 1e-9  # what the clock can tell: nothing is left of a step whose time is all that of copies
_UNSETTLED = 3  # batches in which a training compiles, chooses algorithms and allocates
_FEW_AT_REST = 5  # batches: with fewer, a worker's last one decides
_MOST_BLOCKS = 20
_LEAST_OF_BLOCK = 3  # batches


class _Ready(NamedTuple):
    """When a batch was ready, and whether its worker made no other one when it was asked for."""

    end_s: float
    at_rest: bool


class StepTiming(NamedTuple):
    """One batch and its step; seconds.

    wait_s: For all loaders that the step takes batches from.
    hand_over_s: Of it, with the batch ready.
    step_s: Until the next batch is asked for, without what other loops within it took.
    step_cpu_s: Processor seconds of the process meanwhile.
    """

    wait_s: float
    hand_over_s: float
    step_s: float
    step_cpu_s: float
    phase: str


@dataclass(frozen=True)
class Accounts:
    """What is known of the training.

    loader: The one that most of its batches came from.
    turns: Its batches and their steps, without the first ones of each epoch.
    made_by: Its batches as they were made, by worker; -1: the training process.
    """

    loader: SeenLoader
    turns: list[StepTiming]
    made_by: dict[int, list[BatchTiming]]

    @property
    def starts_s(self) -> list[float]:
        """Seconds from the beginning of each epoch to its first batch."""
        return [each.batches[0].received_s - each.began_s for each in self.loader.epochs if each.batches]

    @property
    def made(self) -> list[BatchTiming]:
        return [made for of_worker in self.made_by.values() for made in of_worker]

    def of(self, phase: str) -> list[StepTiming]:
        return [turn for turn in self.turns if turn.phase == phase]


def find_accounts(observer: Observer) -> Accounts | None:
    """The accounts of the training; None if fewer than two batches were asked for."""
    training = observer.training or observer.loaders
    loader = max(training, key=lambda each: each.n_batches, default=None)
    if loader is None or loader.n_batches < 2:
        return None
    made, ends = _made_of(loader, observer)
    beside = _waits([each for each in training if each is not loader])
    apart = _loops([each for each in observer.loaders if each not in training])
    return Accounts(loader, _settled(loader, ends, beside, apart), made)


def _settled(loader: SeenLoader, ends: dict[Batch, _Ready], beside: "_Spent", apart: "_Spent") -> list[StepTiming]:
    """The turns of all epochs, without the first ones of each."""
    answering_s, turns = _answering_s(ends), list[StepTiming]()
    for number, epoch in enumerate(loader.epochs):
        of_epoch = list(_turns(epoch, answering_s, beside, apart))
        turns += of_epoch[_n_unsettled(loader, number) :] or of_epoch[1:]
    return turns


def _n_unsettled(loader: SeenLoader, epoch: int) -> int:
    """Batches at the beginning of an epoch that say nothing of the others."""
    return max(1, loader.traits.num_workers or 0) + (0 if epoch else _UNSETTLED)


def _made_of(loader: SeenLoader, observer: Observer) -> tuple[dict[int, list[BatchTiming]], dict[Batch, _Ready]]:
    """How its batches were made, by worker, and for each that is known when it was ready."""
    times, ends = observer.times(loader), dict[Batch, _Ready]()
    made: dict[int, list[BatchTiming]] = defaultdict(list)
    for number, epoch in enumerate(loader.epochs):
        of_workers = times.get(number - epoch.number, {})
        own = {worker: [each for each in of if each.epoch == epoch.number] for worker, of in of_workers.items()}
        ends |= _ready_in(epoch, own)
        for worker, of_worker in [*own.items(), (-1, epoch.made_here)]:
            made[worker] += of_worker
    return made, ends


def _ready_in(epoch: Epoch, made: dict[int, list[BatchTiming]]) -> dict[Batch, _Ready]:
    """When the batches of an epoch were ready: each worker's in the order in which it made them."""
    in_order, found = {worker: iter(of_worker) for worker, of_worker in made.items()}, {}
    for batch in epoch.batches:
        if batch.phase != REPLAY and batch.worker in in_order and (of_it := next(in_order[batch.worker], None)):
            found[batch] = _Ready(of_it.end_s, _rests(made[batch.worker], batch.asked_s))
    return found


def _rests(made: list[BatchTiming], at_s: float) -> bool:
    """Whether a worker makes no batch at a time."""
    last = bisect_right(made, at_s, key=lambda each: each.start_s) - 1
    return last < 0 or made[last].end_s <= at_s


def _answering_s(ends: dict[Batch, _Ready]) -> float:
    """What receiving a batch takes in addition to its unpickling, from a worker that rests; 0 if they hardly ever do.

    One that makes another batch answers late, which is a matter of the making.
    """
    at_rest_s = [
        max(0.0, batch.received_s - batch.asked_s - batch.loaded_s)
        for batch, ready in ends.items()
        if ready.at_rest and ready.end_s <= batch.asked_s
    ]
    return statistics.median(at_rest_s) if len(at_rest_s) >= _FEW_AT_REST else 0.0


def _turns(epoch: Epoch, answering_s: float, beside: "_Spent", apart: "_Spent") -> Iterator[StepTiming]:
    """The batches of an epoch with their steps.

    Args:
        answering_s: What receiving a batch takes in addition to its unpickling. A batch that came before its turn was
            unpickled while another was waited for, and is counted there.
        beside: Waits for loaders that the same steps take batches from.
        apart: Loops over all other loaders.
    """
    for number, batch in enumerate(epoch.batches):
        following = epoch.batches[number + 1] if number + 1 < len(epoch.batches) else None
        until_s = following.asked_s if following else epoch.ended_s
        if until_s is None:  # the loop was left, or the training ended
            return
        wait_s, gap_s = batch.received_s - batch.asked_s, until_s - batch.received_s
        theirs_s = beside.within(batch.received_s, until_s)
        step_s = gap_s - theirs_s - apart.within(batch.received_s, until_s)
        cpu_s = following.cpu_asked_s - batch.cpu_received_s if following else float("nan")
        hand_over_s = min(wait_s, max(0.0, batch.loaded_s) + answering_s)
        yield StepTiming(wait_s + theirs_s, hand_over_s, max(0.0, step_s), cpu_s, batch.phase)


class _Spent:
    """Seconds that were spent on other loaders, by when they began."""

    def __init__(self, spans: list[tuple[float, float]]):
        spans = sorted(spans)
        self._starts = np.array([start_s for start_s, _ in spans])
        self._until = np.concatenate([[0.0], np.cumsum([end_s - start_s for start_s, end_s in spans])])

    def within(self, start_s: float, end_s: float) -> float:
        first, last = np.searchsorted(self._starts, (start_s, end_s))
        return float(self._until[last] - self._until[first])


def _waits(loaders: list[SeenLoader]) -> _Spent:
    batches = (batch for loader in loaders for epoch in loader.epochs for batch in epoch.batches)
    return _Spent([(batch.asked_s, batch.received_s) for batch in batches])


def _loops(loaders: list[SeenLoader]) -> _Spent:
    """Whole epochs: such as a validation in the middle of a training epoch."""
    epochs = (epoch for loader in loaders for epoch in loader.epochs if epoch.batches)
    return _Spent([(each.began_s, each.ended_s or each.batches[-1].received_s) for each in epochs])


def costs_of(accounts: Accounts, device: DeviceTimes) -> Costs:
    """Seconds per batch, by cause; the step is the replayed one where there is one, and else as it was seen."""
    turns, replayed = accounts.of("training"), accounts.of(REPLAY)
    wait_s, hand_over_s = _mean(turns, "wait_s"), _mean(turns, "hand_over_s")
    steady_s, seen_s = wait_s + _mean(turns, "step_s"), _mean(turns, "step_s")
    if device.idle_s and wait_s > 0:  # the device still computed during the rest of the wait
        idle_s = min(wait_s, statistics.fmean(device.idle_s))
        hand_over_s, seen_s, wait_s = hand_over_s * idle_s / wait_s, seen_s + wait_s - idle_s, idle_s
    n_batches = max(1, accounts.loader.n_batches)
    copy_s = min(seen_s, sum(device.copy_s) / n_batches)
    step_s = min(seen_s - copy_s, _mean(replayed, "step_s")) if replayed else seen_s - copy_s
    step_s = max(_LEAST_S, step_s)
    waiting, making_s = (
        _waiting_share(accounts.made),
        statistics.fmean([each.end_s - each.start_s for each in accounts.made] or [wait_s]),
    )
    rest_s = max(0.0, steady_s - step_s - copy_s - hand_over_s)
    start_s = _start_s(accounts, wait_s)
    return Costs(
        step=step_s, copy=copy_s, hand_over=hand_over_s, fetch=rest_s * waiting, prepare=rest_s * (1 - waiting),
        start=start_s, together=max(step_s, steady_s + start_s),
        making=making_s if accounts.made else None, waiting=waiting,
        step_cpu=_mean(replayed or turns, "step_cpu_s"),
    )  # fmt: skip


def ceiling_interval(accounts: Accounts, costs: Costs) -> tuple[float, float]:
    """95 % interval of `together` over `step`, from blocks of neighboring batches."""
    turns, replayed = accounts.of("training"), accounts.of(REPLAY)
    together = [max(_LEAST_S, mean_s) for mean_s in _block_means([turn.wait_s + turn.step_s for turn in turns])]
    scale = costs.together / statistics.fmean(together) if together else 1.0  # with the starts of epochs
    if replayed:
        low, high = speedup_interval(np.array(together) * scale, np.array(_step_blocks(replayed)))
    else:
        steps = _step_blocks(turns)
        factor = statistics.fmean(steps) / costs.step if steps else 1.0  # copies and the device's part
        low, high = speedup_interval(np.array(together) / np.array(steps) * scale * factor)
    point = costs.together / costs.step
    return min(low, point), max(high, point)  # bursts are trimmed from the interval, not from the mean


def _step_blocks(turns: list[StepTiming]) -> list[float]:
    return [max(_LEAST_S, mean_s) for mean_s in _block_means([turn.step_s for turn in turns])]


def _block_means(seconds: list[float]) -> list[float]:
    n_blocks = min(_MOST_BLOCKS, len(seconds) // _LEAST_OF_BLOCK)
    return [float(block.mean()) for block in np.array_split(seconds, n_blocks)] if n_blocks >= 2 else seconds


def _mean(turns: list[StepTiming], name: str) -> float:
    known = [value for turn in turns if not math.isnan(value := getattr(turn, name))]
    return statistics.fmean(known or [0.0])


def _waiting_share(made: list[BatchTiming]) -> float:
    """Share of the making in which nothing was computed."""
    wall_s, busy_s = sum(each.end_s - each.start_s for each in made), sum(each.busy_s for each in made)
    return min(1.0, max(0.0, 1 - busy_s / wall_s)) if wall_s > 0 else 0.0


def _start_s(accounts: Accounts, wait_s: float) -> float:
    """Seconds per batch that starting an epoch costs: as later ones did, or the first if all start like it."""
    traits, starts_s = accounts.loader.traits, accounts.starts_s
    if len(starts_s) == 1 and not traits.starts_workers:
        return 0.0  # the only one: later epochs do not open files and start workers again
    length = traits.n_batches or max(len(epoch.batches) for epoch in accounts.loader.epochs)
    return max(0.0, statistics.median(starts_s[1:] or starts_s) - wait_s) / length


_SPAN_BATCHES = 200  # of the end of the training, in the timeline


def make_report(
    observer: Observer, used: CoreTime, seconds: float, *, loader_s: float | None, command: str
) -> WatchReport:
    """What the training waited for.

    Args:
        observer: What it noted.
        used, seconds: Of all cores, and of the clock, since it began.
        loader_s: Seconds per batch of the loader alone, if it was measured.
        command: The script and its arguments.

    Raises:
        NothingSeen: fewer than two batches were asked for.
    """
    accounts = find_accounts(observer)
    if accounts is None or not accounts.of("training"):
        raise NothingSeen(describe_nothing(observer))
    with np.errstate(all="ignore"):  # the script may have made NumPy raise
        costs = costs_of(accounts, observer.device)
        low, high = ceiling_interval(accounts, costs)
    busy = observer.device.busy
    return WatchReport(
        shares={"compute": costs.step / costs.together, **costs.lost}, ceiling=costs.together / costs.step,
        ceiling_low=low, ceiling_high=high, is_bound=not accounts.of(REPLAY),
        recommendations=advise(costs, accounts.loader.traits), costs=costs,
        n_batches=len(accounts.of("training")), loader_s=loader_s, loaders=_table(observer, accounts),
        spans=_spans(accounts),
        cpu_share=min(1.0, used.busy_s / seconds / (os.cpu_count() or 1)) if used.busy_s else None,
        gpu_utilization=statistics.fmean(busy) if busy else None, notes=[*_notes(accounts), *observer.failed],
        command=command,
    )  # fmt: skip


def _notes(accounts: Accounts) -> list[str]:
    notes = []
    if not accounts.loader.trains:
        notes.append("No optimizer of torch stepped between batches: this may not be the loader of the training.")
    threads = {epoch.thread for epoch in accounts.loader.epochs}
    if len(threads) > 1:
        notes.append("A thread of the script reads ahead of the training, which may hide part of these waits.")
    return notes


def _table(observer: Observer, accounts: Accounts) -> pd.DataFrame:
    rows = []
    for loader in (each for each in observer.loaders if each.n_batches):
        is_main = loader is accounts.loader
        made = accounts.made if is_main else [made for epoch in loader.epochs for made in epoch.made_here]
        role = "training" if is_main else "training, too" if loader.trains else "other"
        rows.append({**_counts(loader, role), **_wait_counts(loader), **_making(made)})
    return pd.DataFrame(rows)


def _counts(loader: SeenLoader, role: str) -> dict[str, Any]:
    return {
        "loader": f"{loader.kind} {loader.number}", "role": role,
        "num_workers": loader.traits.num_workers, "n_batches": loader.n_batches,
    }  # fmt: skip


def _wait_counts(loader: SeenLoader) -> dict[str, float]:
    """Milliseconds that a batch was waited for, without the first ones of epochs, and how many were ready then."""
    batches = [batch for epoch in loader.epochs for batch in epoch.batches[1:] or epoch.batches]
    ready = [batch.ready for batch in batches if batch.ready is not None]
    wait_s = statistics.fmean([each.received_s - each.asked_s for each in batches])
    return {"wait_ms": 1e3 * wait_s, "ready": statistics.fmean(ready) if ready else float("nan")}


def _making(made: list[BatchTiming]) -> dict[str, float]:
    """Milliseconds of the parts of a batch, where it was made."""
    if not made:
        return dict.fromkeys(("storage_ms", "getitem_ms", "collate_ms"), float("nan"))
    wall_s = statistics.fmean([each.end_s - each.start_s for each in made])
    collate_s = statistics.fmean([each.collate_s for each in made])
    storage_s = max(0.0, wall_s - statistics.fmean([each.busy_s for each in made]))
    parts = {"storage": storage_s, "getitem": max(0.0, wall_s - collate_s - storage_s), "collate": collate_s}
    return {f"{name}_ms": 1e3 * seconds for name, seconds in parts.items()}


def _spans(accounts: Accounts) -> pd.DataFrame:
    """The last batches, as the host and those that made them saw them."""
    epochs = accounts.loader.epochs
    kept = [(epoch, number) for epoch in epochs for number in range(len(epoch.batches))][-_SPAN_BATCHES:]
    began_s = kept[0][0].batches[kept[0][1]].asked_s
    rows = [
        {"lane": f"worker {worker}", "kind": "load", "start_s": made.start_s, "end_s": made.end_s, "batch": -1}
        for worker, of_worker in sorted(accounts.made_by.items())
        for made in of_worker if worker >= 0 and made.start_s >= began_s
    ]  # fmt: skip
    rows += [row for count, (epoch, number) in enumerate(kept) for row in _host_spans(epoch, number, count)]
    frame = pd.DataFrame(rows)
    return frame.assign(start_s=frame["start_s"] - began_s, end_s=frame["end_s"] - began_s)


def _host_spans(epoch: Epoch, number: int, count: int) -> Iterator[dict[str, Any]]:
    batch = epoch.batches[number]
    following = epoch.batches[number + 1].asked_s if number + 1 < len(epoch.batches) else epoch.ended_s
    kind = "load" if batch.worker == -1 and epoch.made_here else "wait"
    yield {"lane": "host", "kind": kind, "start_s": batch.asked_s, "end_s": batch.received_s, "batch": count}
    if following is not None:
        yield {"lane": "host", "kind": "step", "start_s": batch.received_s, "end_s": following, "batch": count}
