"""Each epoch of a watched training in figures, while it goes on: for loggers such as W&B and TensorBoard.

This runs within the training: only the standard library is imported.
"""

import math
import statistics
from dataclasses import replace

from labkit.watching.accounts import Accounts, Spent, account_for, costs_of, pauses
from labkit.watching.advice import CAUSES, MIN_SHARE
from labkit.watching.batches import rounded
from labkit.watching.record import Record
from labkit.watching.seen import Epoch, SeenLoader
from labkit.watching.worker import TimesReader

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
        validations, checkpoints = map(Spent, pauses(self._record))
        found = list[dict[str, float]]()
        for number, (seen, of_loader) in enumerate(epochs):
            epoch, following = seen.epochs[of_loader], seen.epochs[of_loader + 1 : of_loader + 2]
            if epoch.ended_s is None and not following:
                continue  # it runs, or the loop has left it for good
            if epoch.began_s not in self._found:
                self._found[epoch.began_s] = self._figures(seen, of_loader, following)
            until_s = next((later.epochs[of].began_s for later, of in epochs[number + 1 :]), math.inf)
            paused = {
                "validation_s": validations.within(epoch.began_s, until_s),
                "checkpoint_s": checkpoints.within(epoch.began_s, until_s),
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
        spans = [(each.began_s, each.ended_s or each.batches[-1].received_s) for each in seen.epochs if each.batches]
        if not any(began_s < until_s and since_s < ended_s for began_s, ended_s in spans for since_s, until_s in taken):
            found += [(seen, number) for number, epoch in enumerate(seen.epochs) if epoch.batches]
            taken += spans
    return sorted(found, key=lambda each: each[0].epochs[each[1]].began_s)


def pace_of(accounts: Accounts) -> dict[str, float]:
    """How often a batch was ready when it was asked for, 0 to 1, and percentiles of the step; NaN: unknown."""
    steps_s = [turn.step_s for turn in accounts.of("training")]
    both = steps_s * 2 if len(steps_s) == 1 else steps_s  # quantiles() takes two values at least
    cuts = statistics.quantiles(both, n=100, method="inclusive") if both else [math.nan] * 99
    return {"ready": accounts.ready} | {f"step_p{each}_ms": 1e3 * cuts[each - 1] for each in _PERCENTILES}


def figures_of(record: Record, accounts: Accounts) -> dict[str, float]:
    """The same for the whole training, with the seconds of its pauses."""
    validations, checkpoints = map(Spent, pauses(record))
    since_s = min(epoch.began_s for epoch in accounts.loader.epochs)
    return pace_of(accounts) | {
        "validation_s": validations.within(since_s, math.inf), "checkpoint_s": checkpoints.within(since_s, math.inf),
    }  # fmt: skip


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
