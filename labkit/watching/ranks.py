"""One report for the processes of a distributed training on this machine.

In come the `WatchReport`s of its processes, by files; out goes the one of the process that waits longest, with a row
for each.
"""

import hashlib
import math
import os
import pickle
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from labkit.measure.usage import children
from labkit.util.files import write_atomic
from labkit.util.ranks import LIGHTNING, OPEN_MPI, OWN_LINES, SLURM, Ranks, find_ranks
from labkit.watching.advice import MIN_SHARE, advise, slowest_line
from labkit.watching.linux import read_text, state_of
from labkit.watching.loaders import LoaderTraits, rounded
from labkit.watching.report import WatchReport

_PATIENCE_S = 60.0


def combine_ranks(report: WatchReport, environment: Mapping[str, str] = os.environ) -> WatchReport | None:
    """The report with a row for each rank, and the figures of the one that waits longest: it holds up all others.

    Whatever launcher started them, the other processes of this machine hand theirs to the first.

    Returns:
        The report; None in the processes that only hand theirs over.
    """
    found = find_ranks(environment)
    local, n_local = found.local_rank, found.n_local
    if local is None or n_local is None or n_local < 2:
        return report
    if local and not _others_run(found, environment):  # the first has ended, or the variables are left over
        return report
    folder = _meeting_place(found, environment)
    if folder is None:
        note = "Another user owns the folder where the ranks would meet, so each reports for itself."
        return replace(report, notes=[*report.notes, note])
    if local:
        write_atomic(folder / f"{local}.report", pickle.dumps((found.rank, report)))
        return None
    note = "Ranks wait for one another; these are the figures of rank {}, which waits longest for data."
    others = _gather(folder, n_local - 1, lambda: _others_run(found, environment))
    return combine("rank", [(found.rank, report), *others], note, report.command)


def _start(found: Ranks, environment: Mapping[str, str]) -> tuple[tuple[str, ...], str] | None:
    """Names of the variables that all ranks of one start share, and of one that differs; None: their parent tells.

    A shell may lie between these launchers and each rank.
    """
    if found.launcher in (OPEN_MPI, OWN_LINES) and {"OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"} <= set(environment):
        return ("PMIX_NAMESPACE",), "PMIX_RANK"
    if found.launcher in (SLURM, OWN_LINES) and "SLURM_STEP_ID" in environment:
        return ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), "SLURM_LOCALID"
    return None


def _parent(found: Ranks) -> int:
    """The process that started the ranks: Lightning's first one starts the others."""
    return os.getpid() if found.launcher == LIGHTNING and not found.local_rank else os.getppid()


def _meeting_place(found: Ranks, environment: Mapping[str, str]) -> Path | None:
    """A folder that the ranks of one start share, and nobody else; None if it is somebody else's, or a link.

    When their parent started is part of its name, so that an earlier run whose parent had the same number is no
    part of this one. Other users can guess the name, so it is used only if this user owns it.
    """
    parent = _parent(found)
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    started = read_text(f"/proc/{parent}/stat").rpartition(")")[2].split()[19:20]  # see proc(5)
    key = "-".join([str(parent), *started])
    if start := _start(found, environment):
        key = "-".join(environment.get(name, "") for name in start[0])
    elif found.launcher != LIGHTNING:  # which sets them after the first has begun
        key = "-".join([key, *(environment.get(name, "") for name in names)])
    user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"labkit-watch-{user}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & 0o077
    return folder if is_own else None


def _gather(folder: Path, n_others: int, others_run: Callable[[], bool]) -> list[tuple[int, WatchReport]]:
    """What the other ranks handed over; those that did not in time are missing. Removes the folder."""
    deadline, found, comes = time.monotonic() + _PATIENCE_S, list[Path](), True
    while comes and len(found) < n_others:
        comes = time.monotonic() < deadline and others_run()  # asked before looking: they end when they have written
        found = sorted(folder.glob("*.report"))
        time.sleep(0.05)
    others = [pickle.loads(path.read_bytes()) for path in found]  # noqa: S301 - of this user's ranks
    for path in found:
        path.unlink()
    with suppress(OSError):
        folder.rmdir()
    return others


def _others_run(found: Ranks, environment: Mapping[str, str]) -> bool:
    """Whether other ranks of this start still run on this machine."""
    if start := _start(found, environment):
        shared, own = {name: environment.get(name, "") for name in start[0]}, environment.get(start[1])
        return any(
            each.get(start[1], own) != own and all(each.get(name, "") == value for name, value in shared.items())
            for each in map(_environment_of, filter(str.isdigit, os.listdir("/proc")))
        )
    parent = _parent(found)
    if found.launcher == LIGHTNING and parent == os.getpid():
        return any("LOCAL_RANK" in _environment_of(str(each)) for each in children(parent))
    siblings = children(parent)  # this process among them, unless nothing is known of them
    ranks = siblings if found.launcher != LIGHTNING else [*siblings, parent]
    return not siblings or any(each != os.getpid() and state_of(each) not in ("Z", "X") for each in ranks)


def _environment_of(pid: str) -> dict[str, str]:
    """The variables with which a process began; none if it is another user's, or has ended."""
    return dict(line.split("=", 1) for line in read_text(f"/proc/{pid}/environ").split("\0") if "=" in line)


def combine(kind: str, every: Sequence[tuple[Any, WatchReport]], note: str, command: str) -> WatchReport:
    """The report of the process that waits longest for data, with a row for each.

    Args:
        kind: What the processes are, which names the first column.
        every: The name of each, and its report.
        note: To add; `{}` stands for the name of that process.
        command: What started them.
    """
    name, slowest = min(every, key=lambda each: each[1].shares["compute"])
    note, ranks = note.format(name), None
    if len(every) > 1 or kind == "rank":
        pace = ("ready", "step_p50_ms", "step_p99_ms")
        ranks = [
            {kind: each, "n_batches": run.n_batches, **run.shares, **{key: run.pace.get(key) for key in pace}}
            for each, run in every
        ]  # fmt: skip
        note = f"{note} {_describe_steps(kind, ranks)}".strip()
    hung = [
        f"{kind.capitalize()} {other}: {said}" for other, each in every if other != name
        for said in each.notes if said.startswith(("It hung", "A step took over"))
    ]  # fmt: skip
    notes = [*slowest.notes, *hung, note]
    found = _beside(slowest, [run for _, run in every])
    tables = found.tables if ranks is None else {**found.tables, "ranks": ranks}
    return replace(found, tables=tables, notes=notes, command=command)


def _beside(report: WatchReport, every: Sequence[WatchReport]) -> WatchReport:
    """One of the reports, in which the processes of the others are no other programs; they share its cores."""
    began_s, ended_s = report.observed_s
    by_others, n_sharing = 0.0, 1
    for run in (each for each in every if each is not report):
        overlap_s = min(ended_s, run.observed_s[1]) - max(began_s, run.observed_s[0])
        together = max(0.0, overlap_s) / (ended_s - began_s) if ended_s > began_s else 1.0
        by_others += together * max(0.0, (run.cpu_share or 0.0) - run.others_share)
        n_sharing += together > 0.5 and bool(run.affinity & report.affinity)  # else one ran after the other
    resources, advice = replace(report.resources, n_sharing=n_sharing), report.recommendations
    if (
        n_sharing > 1 and not report.is_sampled
    ):  # a process that another one starts does not know how many share its cores
        names = {each.name for each in fields(LoaderTraits)}
        traits = LoaderTraits(**{name: value for name, value in report.settings.items() if name in names})
        most_workers = resources.most_workers(report.shares, report.others_share)
        slowest = slowest_line(report.tables.get("lines", []))
        advice = advise(report.costs, traits, report.in_line_s, n_sharing, most_workers, slowest)
    others_share = max(0.0, report.others_share - by_others)
    return replace(report, others_share=others_share, resources=resources, recommendations=advice)


def _describe_steps(kind: str, rows: list[dict[str, Any]]) -> str:
    """Which process has the slowest step, in a sentence; empty if their steps take about as long, or are unknown."""
    known = [row for row in rows if not math.isnan(row["step_p50_ms"] or math.nan)]
    known.sort(key=lambda row: row["step_p50_ms"])
    if len(known) < 2 or known[-1]["step_p50_ms"] <= (1 + MIN_SHARE) * known[0]["step_p50_ms"]:
        return ""
    slow, fast = ((f"{kind} {row[kind]}", f"{rounded(row['step_p50_ms'])} ms") for row in (known[-1], known[0]))
    said = f"The slowest step is that of {slow[0]}, {slow[1]} (median; {fast[0]}: {fast[1]})."
    return f"{said} Where gradients are reduced together, a step contains waiting for the others."
