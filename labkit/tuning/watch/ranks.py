"""One report for the processes of a distributed training on this machine."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.core import write_atomic
from labkit.tuning.advice import Costs
from labkit.tuning.watch.report import WatchReport

_PATIENCE_S = 60.0


def combine_ranks(report: WatchReport, environment: Mapping[str, str] = os.environ) -> WatchReport | None:
    """The report with a row for each rank, and the figures of the one that waits longest: it holds up all others.

    Under torchrun and whatever sets its variables, the other processes of this machine hand theirs to the first.

    Returns:
        The report; None in the processes that only hand theirs over.
    """
    n_local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if n_local == 1:
        return report
    folder, rank, local = _meeting_place(environment), int(environment["RANK"]), int(environment["LOCAL_RANK"])
    if local:
        text = json.dumps({"rank": rank, **report.to_dict()})
        write_atomic(folder / f"{local}.json", text.encode())
        return None
    return _combine(report, rank, _gather(folder, n_local - 1))


def _meeting_place(environment: Mapping[str, str]) -> Path:
    """A folder that the ranks of one start share, and nobody else."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    key = "-".join([str(os.getppid()), *(environment.get(name, "") for name in names)])
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"labkit-watch-{user}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _gather(folder: Path, n_others: int) -> list[dict[str, Any]]:
    """What the other ranks handed over; those that did not in time are missing. Removes the folder."""
    deadline, found = time.monotonic() + _PATIENCE_S, list[Path]()
    while len(found) < n_others and time.monotonic() < deadline:
        found = sorted(folder.glob("*.json"))
        time.sleep(0.05)
    others = [json.loads(path.read_bytes()) for path in found]
    for path in found:
        path.unlink()
    with suppress(OSError):
        folder.rmdir()
    return others


def _combine(report: WatchReport, rank: int, others: list[dict[str, Any]]) -> WatchReport:
    every = [{"rank": rank, **report.to_dict()}, *others]
    ranks = pd.DataFrame([{"rank": each["rank"], "n_batches": each["n_batches"], **each["shares"]} for each in every])
    slowest = min(every, key=lambda each: each["shares"]["compute"])
    note = f"Ranks wait for one another; these are the figures of rank {slowest['rank']}, which waits longest for data."
    if slowest is every[0]:
        return replace(report, ranks=ranks, notes=[*report.notes, note])
    none = float("nan")
    low, high = (none if slowest[name] is None else slowest[name] for name in ("ceiling_low", "ceiling_high"))
    return replace(
        report, ranks=ranks, notes=[*report.notes, note], shares=slowest["shares"], ceiling=slowest["ceiling"],
        ceiling_low=low, ceiling_high=high, costs=Costs(**slowest["costs_s"]),
    )  # fmt: skip
