"""From what was noted of a training to what a batch costs it, and to a report."""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.measure import speedup_interval
from labkit.tuning.advice import Costs
from labkit.tuning.watch.device_time import DeviceTimes
from labkit.tuning.watch.fetching import Made
from labkit.tuning.watch.observing import REPLAY, Batch, Epoch, Observer, SeenLoader

_LEAST_S = 1e-9  # what the clock can tell: nothing is left of a step whose time is all that of copies
_UNSETTLED = 3  # batches in which a training compiles, chooses algorithms and allocates
_FEW_AT_REST = 5  # batches: with fewer, a worker's last one decides
_MOST_BLOCKS = 20
_LEAST_OF_BLOCK = 3  # batches


class _Ready(NamedTuple):
    """When a batch was ready, and whether its worker made no other one when it was asked for."""

    end_s: float
    at_rest: bool


class Turn(NamedTuple):
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
    turns: list[Turn]
    made_by: dict[int, list[Made]]

    @property
    def starts_s(self) -> list[float]:
        """From the beginning of each epoch to its first batch."""
        return [each.batches[0].received_s - each.began_s for each in self.loader.epochs if each.batches]

    @property
    def made(self) -> list[Made]:
        return [made for of_worker in self.made_by.values() for made in of_worker]

    def of(self, phase: str) -> list[Turn]:
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


def _settled(loader: SeenLoader, ends: dict[Batch, _Ready], beside: "_Spent", apart: "_Spent") -> list[Turn]:
    """The turns of all epochs, without the first ones of each."""
    answering_s, turns = _answering_s(ends), list[Turn]()
    for number, epoch in enumerate(loader.epochs):
        of_epoch = list(_turns(epoch, answering_s, beside, apart))
        turns += of_epoch[_n_unsettled(loader, number) :] or of_epoch[1:]
    return turns


def _n_unsettled(loader: SeenLoader, epoch: int) -> int:
    """Batches at the beginning of an epoch that say nothing of the others."""
    return max(1, loader.traits.num_workers or 0) + (0 if epoch else _UNSETTLED)


def _made_of(loader: SeenLoader, observer: Observer) -> tuple[dict[int, list[Made]], dict[Batch, _Ready]]:
    """How its batches were made, by worker, and for each that is known when it was ready."""
    times, ends = observer.times(loader), dict[Batch, _Ready]()
    made: dict[int, list[Made]] = defaultdict(list)
    for number, epoch in enumerate(loader.epochs):
        of_workers = times.get(number - epoch.number, {})
        own = {worker: [each for each in of if each.epoch == epoch.number] for worker, of in of_workers.items()}
        ends |= _ready_in(epoch, own)
        for worker, of_worker in [*own.items(), (-1, epoch.made_here)]:
            made[worker] += of_worker
    return made, ends


def _ready_in(epoch: Epoch, made: dict[int, list[Made]]) -> dict[Batch, _Ready]:
    """When the batches of an epoch were ready: each worker's in the order in which it made them."""
    in_order, found = {worker: iter(of_worker) for worker, of_worker in made.items()}, {}
    for batch in epoch.batches:
        if batch.phase != REPLAY and batch.worker in in_order and (of_it := next(in_order[batch.worker], None)):
            found[batch] = _Ready(of_it.end_s, _rests(made[batch.worker], batch.asked_s))
    return found


def _rests(made: list[Made], at_s: float) -> bool:
    """Whether a worker makes no batch at a time."""
    last = bisect_right(made, at_s, key=lambda each: each.start_s) - 1
    return last < 0 or made[last].end_s <= at_s


def _answering_s(ends: dict[Batch, _Ready]) -> float:
    """What receiving a batch takes beside its unpickling, from a worker that rests; 0 if they hardly ever do.

    One that makes another batch answers late, which is a matter of the making.
    """
    at_rest_s = [
        max(0.0, batch.received_s - batch.asked_s - batch.loaded_s)
        for batch, ready in ends.items()
        if ready.at_rest and ready.end_s <= batch.asked_s
    ]
    return statistics.median(at_rest_s) if len(at_rest_s) >= _FEW_AT_REST else 0.0


def _turns(epoch: Epoch, answering_s: float, beside: "_Spent", apart: "_Spent") -> Iterator[Turn]:
    """The batches of an epoch with their steps.

    Args:
        answering_s: What receiving a batch takes beside its unpickling. A batch that came before its turn was unpickled
            while another was waited for, and is counted there.
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
        yield Turn(wait_s + theirs_s, hand_over_s, max(0.0, step_s), cpu_s, batch.phase)


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
    """95 % interval of `together` over `step`, from blocks of neighbouring batches."""
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


def _step_blocks(turns: list[Turn]) -> list[float]:
    return [max(_LEAST_S, mean_s) for mean_s in _block_means([turn.step_s for turn in turns])]


def _block_means(seconds: list[float]) -> list[float]:
    n_blocks = min(_MOST_BLOCKS, len(seconds) // _LEAST_OF_BLOCK)
    return [float(block.mean()) for block in np.array_split(seconds, n_blocks)] if n_blocks >= 2 else seconds


def _mean(turns: list[Turn], name: str) -> float:
    known = [value for turn in turns if not math.isnan(value := getattr(turn, name))]
    return statistics.fmean(known or [0.0])


def _waiting_share(made: list[Made]) -> float:
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
