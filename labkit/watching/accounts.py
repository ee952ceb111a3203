"""What each part of a watched training's time is, of a run and of each of its epochs.

In comes a `Record`. Out go `Accounts`, its batches with their steps; from them `Costs`, the seconds per batch of each
cause; and flat dicts of each epoch, while the training goes on, for loggers such as W&B and TensorBoard.

This runs within the training: only the standard library is imported.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from labkit.watching.advice import CAUSES, MIN_SHARE, Costs
from labkit.watching.device import DeviceSpan, DeviceTimes
from labkit.watching.loaders import FEW, REPLAY, Batch, Epoch, LoaderTraits, SeenLoader, rounded
from labkit.watching.record import Record
from labkit.watching.worker import BatchTiming, TimesReader

LEAST_S = 1e-9  # what the clock can tell: nothing is left of a step whose time is all that of copies
Span = tuple[float, float]  # when something began and ended
_UNSETTLED = 3  # batches in which a training compiles, chooses algorithms and allocates
_FEW_IDLE = 5  # batches: with fewer, a worker's last one decides


class _Ready(NamedTuple):
    """When a batch was ready, and whether its worker made no other one when it was asked for."""

    end_s: float
    worker_is_idle: bool


class StepTiming(NamedTuple):
    """One batch and its step; seconds.

    wait_s: For all loaders that the step takes batches from.
    hand_over_s: Of it, with the batch ready.
    step_s: Until the next batch is asked for, without what other loops within it took.
    step_cpu_s: Processor seconds of the process meanwhile.
    step_queued_s: Seconds that its thread waited for a core meanwhile.
    """

    wait_s: float
    hand_over_s: float
    step_s: float
    step_cpu_s: float
    phase: str
    step_queued_s: float = 0.0


@dataclass(frozen=True)
class Accounts:
    """What is known of the training.

    loader: The one that most of its batches came from.
    steps: Its batches and their steps, without the first ones of each epoch.
    made_by: Its batches as they were made, by worker; -1: the training process.
    in_line_s: Seconds per batch of waiting for one while a later one was ready: the head of the line.
    ready: Share of the batches, but the first of each epoch, that were ready when asked for; NaN: unknown.
    is_later: Whether these are not the first epochs of the loader.
    """

    loader: SeenLoader
    steps: list[StepTiming]
    made_by: dict[int, list[BatchTiming]]
    in_line_s: float
    ready: float = math.nan
    is_later: bool = False

    @property
    def starts_s(self) -> list[float]:
        """Seconds from the beginning of each epoch to its first batch."""
        return [each.batches[0].received_s - each.began_s for each in self.loader.epochs if each.batches]

    @property
    def made(self) -> list[BatchTiming]:
        return [made for of_worker in self.made_by.values() for made in of_worker]

    def of(self, phase: str) -> list[StepTiming]:
        return [step for step in self.steps if step.phase == phase]

    @property
    def step_queued(self) -> float | None:
        """Share of the step in which its thread waited for a core; None if the kernel does not say."""
        known = [step for step in self.of("training") if step.step_queued_s >= 0]
        return _share(sum(step.step_queued_s for step in known), sum(step.step_s for step in known))

    @property
    def making_queued(self) -> float | None:
        """The same of the making of batches."""
        return _share(sum(each.queued_s for each in self.made), sum(each.end_s - each.start_s for each in self.made))


def _share(part_s: float, whole_s: float) -> float | None:
    return min(1.0, part_s / whole_s) if part_s > 0 and whole_s > 0 else None


def find_accounts(record: Record) -> Accounts | None:
    """The accounts of the training; None if fewer than two batches were asked for."""
    chosen = record.training or record.loaders
    loader = record.main or max(chosen, key=lambda each: each.n_batches, default=None)
    if loader is None or loader.n_batches < 2:
        return None
    return account_for(record, loader, record.times(loader))


def describe_nothing(record: Record) -> str:
    """Why there is nothing to report."""
    if record.loaders:
        n_batches = max(loader.n_batches for loader in record.loaders)
        said = f"too few batches were seen ({n_batches}): let the training take at least {FEW} after its first ones"
    elif record.loop.n_steps > 1:
        said = (
            f"{record.loop.name} computes gradients, but how long it waits for batches cannot be told: let it get them "
            "by `for`, or by a call of next, without --no-lines; lk.diagnose(loader, step) takes any iterable"
        )
    else:
        said = (
            "no torch.utils.data.DataLoader and no labkit.BatchLoader was iterated in this process, or in one that it "
            "started by multiprocessing and that has ended, and no loop over anything else called backward() twice; "
            "lk.diagnose(loader, step) takes any iterable"
        )
    return "; ".join([said, *record.failed])


def account_for(
    record: Record, loader: SeenLoader, times: Mapping[int, dict[int, list[BatchTiming]]], first: int = 0
) -> Accounts:
    """The accounts of a loader.

    Args:
        record: What else was noted meanwhile.
        loader: With those of its epochs that count.
        times: What its workers noted, as `Record.times` gives it.
        first: Number of the first of these epochs.
    """
    training, since_s = record.training or record.loaders, loader.epochs[0].began_s
    made, ends = _made_of(loader, times, first)
    other_loader_waits = _waits([each for each in training if each.number != loader.number], since_s)
    loops, saves = find_pauses(record)
    steps = _settled(loader, ends, other_loader_waits, TimeSpans([*loops, *saves]), first)
    return Accounts(loader, steps, made, _in_line_s(loader, ends), _readiness(loader, ends), first > 0)


def find_pauses(record: Record) -> tuple[list[Span], list[Span]]:
    """When other loaders were looped over, as for a validation, and when the threads that train saved checkpoints."""
    training = record.training or record.loaders
    starts = sorted(epoch.began_s for each in training for epoch in each.epochs)
    others = [each for each in record.loaders if each not in training]
    spans = [epoch.span for each in others for epoch in each.epochs if epoch.batches]
    around_none = [span for span in spans if bisect_left(starts, span[0]) == bisect_left(starts, span[1])]  # no epoch
    threads = {epoch.thread for each in training for epoch in each.epochs}
    return around_none, [(began_s, ended_s) for began_s, ended_s, thread in list(record.saves) if thread in threads]


def _readiness(loader: SeenLoader, ends: dict[Batch, _Ready]) -> float:
    """Share of the batches that were ready when they were asked for; NaN if it is not known of any."""
    batches = [batch for epoch in loader.epochs for batch in epoch.batches[1:] if batch.phase != REPLAY]
    known = [ready for batch in batches if (ready := _was_ready(batch, loader.traits, ends.get(batch))) is not None]
    return statistics.fmean(known) if known else math.nan


def _was_ready(batch: Batch, traits: LoaderTraits, made: "_Ready | None") -> bool | None:
    """Whether a batch was: in the queue, which may hold later ones instead, and made, which says nothing of pinning."""
    if traits.num_workers == 0:
        return False
    if batch.ready is None and made is None:
        return None
    return batch.ready != 0 and (made is None or not traits.in_order or made.end_s <= batch.asked_s)


def _in_line_s(loader: SeenLoader, ends: dict[Batch, _Ready]) -> float:
    """Seconds per batch in which a later batch was ready, but not the one that is next in order."""
    ahead, total_s, n_batches = (loader.traits.num_workers or 0) * (loader.traits.prefetch_factor or 0), 0.0, 0
    for epoch in loader.epochs:
        known = [batch for batch in epoch.batches if batch in ends]
        for number, batch in enumerate(known):
            later = [ends[each].end_s for each in known[number + 1 : number + ahead]]
            until_s = min(ends[batch].end_s, batch.received_s)
            total_s += max(0.0, until_s - max(batch.asked_s, min(later, default=until_s)))
        n_batches += len(known)
    return total_s / n_batches if n_batches else 0.0


def _settled(
    loader: SeenLoader, ends: dict[Batch, _Ready], other_loader_waits: "TimeSpans", pauses: "TimeSpans", first: int
) -> list[StepTiming]:
    """The steps of its epochs, without the first ones of each; if the training has no others, these."""
    answering_s, steps = _answering_s(ends), list[StepTiming]()
    of_epochs = [list(_step_timings(epoch, answering_s, other_loader_waits, pauses)) for epoch in loader.epochs]
    for number, of_epoch in enumerate(of_epochs, first):
        steps += of_epoch[_n_unsettled(loader, number) :] or of_epoch[1:]
    if any(step.phase != REPLAY for step in steps):
        return steps
    return [step for of_epoch in of_epochs for step in of_epoch]


def _n_unsettled(loader: SeenLoader, epoch: int) -> int:
    """Batches at the beginning of an epoch that say nothing of the others."""
    return max(1, loader.traits.num_workers or 0) + (0 if epoch else _UNSETTLED)


def _made_of(
    loader: SeenLoader, times: Mapping[int, dict[int, list[BatchTiming]]], first: int
) -> tuple[dict[int, list[BatchTiming]], dict[Batch, _Ready]]:
    """How its batches were made, by worker, and for each that is known when it was ready."""
    ends = dict[Batch, _Ready]()
    made: dict[int, list[BatchTiming]] = defaultdict(list)
    for number, epoch in enumerate(loader.epochs, first):
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
            found[batch] = _Ready(of_it.end_s, _worker_is_idle(made[batch.worker], batch.asked_s))
    return found


def _worker_is_idle(made: list[BatchTiming], at_s: float) -> bool:
    """Whether a worker makes no batch at a time."""
    last = bisect_right(made, at_s, key=lambda each: each.start_s) - 1
    return last < 0 or made[last].end_s <= at_s


def _answering_s(ends: dict[Batch, _Ready]) -> float:
    """What receiving a batch takes in addition to its unpickling, from an idle worker; 0 if they hardly ever are.

    One that makes another batch answers late, which is a matter of the making.
    """
    from_idle_s = [
        max(0.0, batch.received_s - batch.asked_s - batch.loaded_s)
        for batch, ready in ends.items()
        if ready.worker_is_idle and ready.end_s <= batch.asked_s
    ]
    return statistics.median(from_idle_s) if len(from_idle_s) >= _FEW_IDLE else 0.0


def _step_timings(
    epoch: Epoch, answering_s: float, other_loader_waits: "TimeSpans", pauses: "TimeSpans"
) -> Iterator[StepTiming]:
    """The batches of an epoch with their steps.

    Args:
        answering_s: What receiving a batch takes in addition to its unpickling. A batch that came before its turn was
            unpickled while another was waited for, and is counted there.
        other_loader_waits: Waits for loaders that the same steps take batches from.
        pauses: Loops over all other loaders, and saving of checkpoints.
    """
    for number, batch in enumerate(epoch.batches):
        following = epoch.batches[number + 1] if number + 1 < len(epoch.batches) else None
        until_s = following.asked_s if following else epoch.ended_s
        if until_s is None:  # the loop was left, or the training ended
            return
        wait_s, gap_s = batch.received_s - batch.asked_s, until_s - batch.received_s
        theirs_s = other_loader_waits.overlap_s(batch.received_s, until_s)
        step_s = gap_s - theirs_s - pauses.overlap_s(batch.received_s, until_s)
        cpu_s = following.cpu_asked_s - batch.cpu_received_s if following else float("nan")
        hand_over_s = min(wait_s, max(0.0, batch.loaded_s) + answering_s)
        queued_s = following.queued_asked_s - batch.queued_received_s if following else float("nan")
        yield StepTiming(wait_s + theirs_s, hand_over_s, max(0.0, step_s), cpu_s, batch.phase, queued_s)


class TimeSpans:
    """Spans of time, such as pauses; what is in two of them at once counts once."""

    def __init__(self, spans: Iterable[Span]):
        disjoint = list[Span]()
        for began_s, ended_s in sorted(spans):
            if disjoint and began_s <= disjoint[-1][1]:
                disjoint[-1] = disjoint[-1][0], max(disjoint[-1][1], ended_s)
            else:
                disjoint.append((began_s, ended_s))
        self._starts = [began_s for began_s, _ in disjoint]
        self._until = [0.0, *accumulate(ended_s - began_s for began_s, ended_s in disjoint)]

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Whether any of it was meanwhile."""
        before = bisect_left(self._starts, end_s)
        return before > 0 and self._starts[before - 1] + self._until[before] - self._until[before - 1] > start_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Seconds of the spans that begin meanwhile, as a whole: what begins within a step ends within it."""
        first, last = (bisect_left(self._starts, at_s) for at_s in (start_s, end_s))
        return self._until[last] - self._until[first]


def _waits(loaders: list[SeenLoader], since_s: float) -> TimeSpans:
    """For batches of epochs that had not ended then."""
    epochs = [epoch for loader in loaders for epoch in loader.epochs if (epoch.ended_s or math.inf) > since_s]
    return TimeSpans((batch.asked_s, batch.received_s) for epoch in epochs for batch in epoch.batches)


def costs_of(accounts: Accounts, device: DeviceTimes | DeviceSpan) -> Costs:
    """Seconds per batch, by cause; the step is the replayed one where there is one, and else as it was seen."""
    steps, replayed = accounts.of("training"), accounts.of(REPLAY)
    wait_s, hand_over_s = _mean(steps, "wait_s"), _mean(steps, "hand_over_s")
    steady_s, seen_s = wait_s + _mean(steps, "step_s"), _mean(steps, "step_s")
    if device.idle_s and wait_s > 0:  # the device still computed during the rest of the wait
        idle_s = min(wait_s, statistics.fmean(device.idle_s))
        hand_over_s, seen_s, wait_s = hand_over_s * idle_s / wait_s, seen_s + wait_s - idle_s, idle_s
    n_batches = max(1, accounts.loader.n_batches)
    copy_s = min(seen_s, sum(device.copy_s) / n_batches)
    step_s = min(seen_s - copy_s, _mean(replayed, "step_s")) if replayed else seen_s - copy_s
    step_s = max(LEAST_S, step_s)
    made_s = [each.end_s - each.start_s for each in accounts.made]
    waiting = waiting_share(accounts.made) if made_s else accounts.loader.waiting
    rest_s = max(0.0, steady_s - step_s - copy_s - hand_over_s)
    start_s = _start_s(accounts, wait_s)
    return Costs(
        step=step_s, copy=copy_s, hand_over=hand_over_s, fetch=rest_s * waiting, prepare=rest_s * (1 - waiting),
        start=start_s, together=max(step_s, steady_s + start_s),
        making=statistics.fmean(made_s) if made_s else None, waiting=waiting,
        step_cpu=_mean(replayed or steps, "step_cpu_s"),
    )  # fmt: skip


def _mean(steps: list[StepTiming], name: str) -> float:
    known = [value for step in steps if not math.isnan(value := getattr(step, name))]
    return statistics.fmean(known or [0.0])


def waiting_share(made: list[BatchTiming]) -> float:
    """Share of the making in which nothing was computed."""
    wall_s, busy_s = sum(each.end_s - each.start_s for each in made), sum(each.busy_s for each in made)
    return min(1.0, max(0.0, 1 - busy_s / wall_s)) if wall_s > 0 else 0.0


def _start_s(accounts: Accounts, wait_s: float) -> float:
    """Seconds per batch that starting an epoch costs: as later ones did, or the first if all start like it."""
    traits, starts_s = accounts.loader.traits, accounts.starts_s
    if len(starts_s) == 1 and not traits.starts_workers and not accounts.is_later:
        return 0.0  # the only one: later epochs do not open files and start workers again
    made = [[batch for batch in epoch.batches if batch.phase != REPLAY] for epoch in accounts.loader.epochs]
    length = traits.n_batches or max(map(len, made))
    return max(0.0, statistics.median(starts_s[1:] or starts_s) - wait_s) / length


# Of each epoch.

_PERCENTILES = (50, 95, 99)
_MOST_TOLD = 8  # epochs in a sentence


class EpochFigures:
    """The figures of the finished epochs of a training, of each worked out once.

    Args:
        record: Of the process that trains.
    """

    def __init__(self, record: Record):
        self._record = record
        self._found: dict[float, dict[str, float]] = {}  # by when the epoch began
        self._times = TimesReader()

    def read(self) -> list[dict[str, float]]:
        """One flat dict for each epoch that has ended, in order."""
        epochs = _training_epochs(self._record)
        validations, checkpoints = map(TimeSpans, find_pauses(self._record))
        found = list[dict[str, float]]()
        for number, (seen, of_loader) in enumerate(epochs):
            epoch, following = seen.epochs[of_loader], seen.epochs[of_loader + 1 : of_loader + 2]
            if epoch.ended_s is None and not following:
                continue  # it runs, or the loop has left it for good
            if epoch.began_s not in self._found:
                self._found[epoch.began_s] = self._figures(seen, of_loader, following)
            until_s = next((later.epochs[of].began_s for later, of in epochs[number + 1 :]), math.inf)
            paused = {
                "validation_s": validations.overlap_s(epoch.began_s, until_s),
                "checkpoint_s": checkpoints.overlap_s(epoch.began_s, until_s),
            }
            found.append({"epoch": len(found), **self._found[epoch.began_s], **paused})
        return found

    def _figures(self, seen: SeenLoader, number: int, following: list[Epoch]) -> dict[str, float]:
        epoch = seen.epochs[number]
        began_with = number - epoch.number  # the epoch that started its workers
        times = {began_with: self._times.read(seen.folders.get(began_with, ""), epoch.number)}
        accounts = account_for(self._record, replace(seen, epochs=[epoch]), times, number)
        ended = epoch.device_ended or (following[0].device_began if following else epoch.device_began)
        span = self._record.device.between(epoch.device_began, ended)
        shares = dict.fromkeys(("compute", *CAUSES), math.nan)
        if accounts.of("training"):
            costs = costs_of(accounts, span)
            shares = {"compute": costs.step / costs.together, **costs.lost}
        return {"n_batches": len(epoch.batches), **shares, **pace_of(accounts)}


def _training_epochs(record: Record) -> list[tuple[SeenLoader, int]]:
    """The epochs of the training in order, by loader and number: also if each has a loader of its own.

    Where steps take batches from several loaders, those of the one that gives the most.
    """
    found, taken = list[tuple[SeenLoader, int]](), list[tuple[float, float]]()
    for seen in sorted(record.training or record.loaders, key=lambda each: -each.n_batches):
        spans = [epoch.span for epoch in seen.epochs if epoch.batches]
        if not any(began_s < until_s and since_s < ended_s for began_s, ended_s in spans for since_s, until_s in taken):
            found += [(seen, number) for number, epoch in enumerate(seen.epochs) if epoch.batches]
            taken += spans
    return sorted(found, key=lambda each: each[0].epochs[each[1]].began_s)


def pace_of(accounts: Accounts) -> dict[str, float]:
    """How often a batch was ready when it was asked for, 0 to 1, and percentiles of the step; NaN: unknown."""
    steps_s = [step.step_s for step in accounts.of("training")]
    both = steps_s * 2 if len(steps_s) == 1 else steps_s  # quantiles() takes two values at least
    cuts = statistics.quantiles(both, n=100, method="inclusive") if both else [math.nan] * 99
    return {"ready": accounts.ready} | {f"step_p{each}_ms": 1e3 * cuts[each - 1] for each in _PERCENTILES}


def figures_of(record: Record, accounts: Accounts) -> dict[str, float]:
    """The same for the whole training, with the seconds of its pauses."""
    validations, checkpoints = map(TimeSpans, find_pauses(record))
    since_s = min(epoch.began_s for epoch in accounts.loader.epochs)
    return pace_of(accounts) | {
        "validation_s": validations.overlap_s(since_s, math.inf),
        "checkpoint_s": checkpoints.overlap_s(since_s, math.inf),
    }


def describe_pace(pace: dict[str, float], ready: list[float], *, works_ahead: bool) -> str:
    """What `figures_of` gives, in words.

    Args:
        pace: Of the whole training.
        ready: Of each epoch.
        works_ahead: Whether batches can be ready before they are asked for.
    """
    first, *others = (f"up to {rounded(pace[f'step_p{share}_ms'])} ms" for share in _PERCENTILES)
    said = f"Half of the steps take {first}"
    said += "".join(f", {share}% {each}" for share, each in zip(_PERCENTILES[1:], others, strict=True)) + "."
    if works_ahead and not math.isnan(pace["ready"]):
        said += f" {pace['ready']:.0%} of the batches were ready when they were asked for"
        known = [each for each in ready if not math.isnan(each)]
        differ = known and max(known) - min(known) >= MIN_SHARE
        of_epochs = ", ".join(f"{each:.0%}" for each in known[-_MOST_TOLD:])
        said += f" (of the last epochs {of_epochs})." if differ else "."
    paused = [
        f"{name} took {rounded(pace[key])} s"
        for name, key in (("validation", "validation_s"), ("checkpoints", "checkpoint_s"))
        if pace[key]
    ]
    if paused:
        said += f" {' and '.join(paused).capitalize()}; the other figures leave this out."
    return said.strip()
