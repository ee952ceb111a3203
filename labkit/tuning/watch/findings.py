"""From what was observed to a report. Its libraries, such as pandas, are imported only when there is one to make."""

import os
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from labkit.measure import CoreTime
from labkit.tuning.advice import advise
from labkit.tuning.watch.accounts import Accounts, ceiling_interval, costs_of, find_accounts
from labkit.tuning.watch.fetching import Made
from labkit.tuning.watch.observing import FEW, REPLAY, Epoch, NothingSeen, Observer, SeenLoader, describe_nothing
from labkit.tuning.watch.report import WatchReport

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
    n_turns = len(accounts.of("training"))
    if n_turns < FEW:
        notes.append(f"Only {n_turns} batches were seen: let it run longer for figures to rely on.")
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
        "loader": f"{loader.kind} {loader.number}", "made": loader.made, "role": role,
        "num_workers": loader.traits.num_workers, "n_batches": loader.n_batches,
    }  # fmt: skip


def _wait_counts(loader: SeenLoader) -> dict[str, float]:
    """Milliseconds that a batch was waited for, without the first ones of epochs, and how many were ready then."""
    batches = [batch for epoch in loader.epochs for batch in epoch.batches[1:] or epoch.batches]
    ready = [batch.ready for batch in batches if batch.ready is not None]
    wait_s = statistics.fmean([each.received_s - each.asked_s for each in batches])
    return {"wait_ms": 1e3 * wait_s, "ready": statistics.fmean(ready) if ready else float("nan")}


def _making(made: list[Made]) -> dict[str, float]:
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
