"""One report for the processes of a distributed training on this machine."""

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.util.files import write_atomic
from labkit.util.process import number_in_environment
from labkit.watching.advice import Costs
from labkit.watching.findings import WatchReport

_PATIENCE_S = 60.0


def combine_ranks(report: WatchReport, environment: Mapping[str, str] = os.environ) -> WatchReport | None:
    """The report with a row for each rank, and the figures of the one that waits longest: it holds up all others.

    Under torchrun and whatever sets its variables, the other processes of this machine hand theirs to the first.

    Returns:
        The report; None in the processes that only hand theirs over.
    """
    place = _place(environment)
    if place is None or (place[1] and not _has_siblings()):  # the first has ended, or they are left over
        return report
    (rank, local, n_local), folder = place, _meeting_place(environment)
    if folder is None:
        note = "Another user owns the folder where the ranks would meet, so each reports for itself."
        return replace(report, notes=[*report.notes, note])
    if local:
        text = json.dumps({"rank": rank, **report.to_dict()})
        write_atomic(folder / f"{local}.json", text.encode())
        return None
    return _combine(report, rank, _gather(folder, n_local - 1))


def _place(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """The rank, that on this machine, and how many there are on it; None if this process trains alone.

    Variables may be left over from another program, and then say nothing or no such thing.
    """
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, local, n_local = (number_in_environment(name, -1, environment) for name in names)
    return (rank, local, n_local) if n_local > 1 and 0 <= local < n_local and rank >= local else None


def _meeting_place(environment: Mapping[str, str]) -> Path | None:
    """A folder that the ranks of one start share, and nobody else; None if it is somebody else's, or a link.

    When their parent started is part of its name, so that an earlier run whose parent had the same number is no
    part of this one. Other users can guess the name, so it is used only if this user owns it.
    """
    import psutil

    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    started = psutil.Process(os.getppid()).create_time()
    key = "-".join([str(os.getppid()), repr(started), *(environment.get(name, "") for name in names)])
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"labkit-watch-{user}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    return folder if is_own else None


def _gather(folder: Path, n_others: int) -> list[dict[str, Any]]:
    """What the other ranks handed over; those that did not in time are missing. Removes the folder."""
    deadline, found, comes = time.monotonic() + _PATIENCE_S, list[Path](), True
    while comes and len(found) < n_others:
        comes = time.monotonic() < deadline and _has_siblings()  # asked before looking: they end when they have written
        found = sorted(folder.glob("*.json"))
        time.sleep(0.05)
    others = [json.loads(path.read_bytes()) for path in found]
    for path in found:
        path.unlink()
    with suppress(OSError):
        folder.rmdir()
    return others


def _has_siblings() -> bool:
    """Whether whoever started this process has started others that still run, as the ranks of one training are."""
    import psutil

    with suppress(psutil.Error):
        siblings = psutil.Process(os.getppid()).children()
        return any(each.pid != os.getpid() and each.status() != psutil.STATUS_ZOMBIE for each in siblings)
    return True  # nothing is known of them


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
