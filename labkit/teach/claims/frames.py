"""Frames that notebooks have recorded, and ratios read from them with their intervals."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.core import IS_CLONE, NOTEBOOK_FOLDER, env_id
from labkit.measure import RESULTS_VARIABLE, load_frame, measured_runs, quiet_summary, speedup_interval, speedup_of
from labkit.teach.claims.verdicts import Reading
from labkit.teach.reference import reference_runs

_SCALE_RANKS = {"ci": 1, "laptop": 2, "gpu": 3}
REHEARSAL = "ci scale is a rehearsal"
NOT_COLD = "the kernel did not confirm that the bytes came from the disk"


class Frames:
    """Recorded runs of one machine, by experiment; later frames replace earlier ones.

    Args:
        frames: Runs of one or more experiments each.
        of_any_machine: They may be of another machine, as stored ones are.

    Raises:
        ValueError: runs of another machine.

    Attributes:
        machine: The `env_id` of the runs; empty if there are none.
    """

    def __init__(self, frames: Iterable[pd.DataFrame], *, of_any_machine: bool = False):
        self._runs: dict[str, pd.DataFrame] = {}
        for frame in frames:
            frame = frame.assign(scale=frame.get("scale", ""))
            self._runs |= {str(name): runs for name, runs in frame.groupby("experiment", sort=False)}
        machines = sorted({str(name) for runs in self._runs.values() for name in runs["env_id"].unique()})
        self.machine = ", ".join(machines)
        if machines and machines != [env_id()] and not of_any_machine:
            raise ValueError(
                f"runs of {self.machine} cannot be judged here: this machine is {env_id()}; judge them on the "
                "machine that recorded them"
            )

    def find(self, pattern: str) -> pd.DataFrame | None:
        """Runs of the experiment that matches (`*` stands for anything), of the largest scale; else None."""
        matches = [runs for experiment, runs in self._runs.items() if fnmatchcase(experiment, pattern)]
        return max(matches, key=lambda runs: _SCALE_RANKS.get(runs["scale"].iloc[0], 0), default=None)


class _GPUFrames(Frames):
    """Runs on a CUDA device only: of this machine, or else of a stored reference run."""

    def __init__(self, own: Frames):
        self._own = own

    def find(self, pattern: str) -> pd.DataFrame | None:
        runs = self._own.find(pattern)
        if runs is not None and set(runs["device"]) == {"cuda"}:
            return runs
        stored = reference_runs(pattern).values()
        return next((runs for runs in stored if set(runs["device"]) == {"cuda"}), None)


Read = Callable[[Frames], Reading | None]


def read_folder(results: str | os.PathLike | None) -> list[pd.DataFrame]:
    """All frames of this machine.

    Args:
        results: The folder that tours write to, or this machine's folder in it; must exist. Default: where a running
            tour collects frames, else `results` here or beside the notebooks' folder, if it exists.

    Raises:
        FileNotFoundError: `results` does not exist or holds no frames of this machine; says what to run.
        ValueError: a file in it is not a frame of runs; names it.
    """
    if results is not None:
        folders = [Path(results, env_id(), "frames"), Path(results, "frames")]
    elif collected := os.environ.get(RESULTS_VARIABLE):
        folders = [Path(collected)]
    else:
        beside = NOTEBOOK_FOLDER.parent if IS_CLONE else Path("..")  # a wheel's run as copies, in a folder
        folders = [root / "results" / env_id() / "frames" for root in (Path(), beside)]
    folder = next(filter(Path.is_dir, folders), None)
    if results is not None and folder is None:
        machine = f"this machine ({env_id()})"
        raise FileNotFoundError(f"no frames of {machine} in {results}: `python -m labkit tour` records them")
    return [load_frame(path) for path in sorted(folder.glob("*.csv"))] if folder else []


def paired(experiment: str, variant: str, baseline: str, *, cold: bool = False) -> Read:
    """Speed-up of one variant over another of the same experiment, by rounds; with `cold`, runs must have been cold."""

    def read(frames: Frames) -> Reading | None:
        runs = frames.find(experiment)
        own, base = (_find_label(runs, label) for label in (variant, baseline))
        if runs is None or own is None or base is None:
            return None
        runs = runs[runs["variant"].isin([own, base])]
        row = quiet_summary(runs, base).loc[own]  # its note says how stable the runs are
        ratio, low, high = row[["speedup", "ci_low", "ci_high"]]
        n_runs = int(row["n_runs"])
        return Reading(ratio, low, high, n_runs, note=row["note"], **_describe_origin(runs, cold=cold))

    return read


def separate(quick: tuple[str, str], slow: tuple[str, str], *, cold: bool = False) -> Read:
    """Ratio of the rates of two variants of different experiments, each given as (experiment, variant).

    With `cold`, runs of the slow one must have been cold.
    """

    def read(frames: Frames) -> Reading | None:
        one, other = _find_runs(frames, *quick), _find_runs(frames, *slow)
        if one is None or other is None or one["env_id"].iloc[0] != other["env_id"].iloc[0]:
            return None
        rates = [runs["images_per_s"].to_numpy() for runs in (one, other)]
        interval = speedup_interval(*rates, n_looks=max(map(_n_looks, (one, other))))
        origin = _describe_origin(one, other, cold=cold)
        return Reading(speedup_of(*rates), *interval, min(map(len, rates)), note="not interleaved", **origin)

    return read


def reckoned(experiment: str, variant: str, ratio_of: Callable[[np.ndarray], np.ndarray], note: str) -> Read:
    """Ratio computed from a measured rate: `ratio_of` the images/s of each run, with their interval."""

    def read(frames: Frames) -> Reading | None:
        runs = _find_runs(frames, experiment, variant)
        if runs is None:
            return None
        ratios = ratio_of(runs["images_per_s"].to_numpy())
        origin = _describe_origin(runs)
        interval = speedup_interval(ratios, n_looks=_n_looks(runs))
        return Reading(speedup_of(ratios), *interval, len(runs), note=note, **origin)

    return read


def on_gpu(read: Read) -> Read:
    """The same reading, from runs on a CUDA device only."""
    return lambda frames: read(_GPUFrames(frames))


def more_by(read: Read) -> Read:
    """One plus a share that was read, with its interval: the cost of something added."""

    def more(frames: Frames) -> Reading | None:
        share = read(frames)
        return share and replace(share, ratio=1 + share.ratio, low=1 + share.low, high=1 + share.high)

    return more


def _n_looks(runs: pd.DataFrame) -> int:
    """How often `compare` looked at runs: 1 for those of other timers."""
    looks = runs["n_looks"].dropna() if "n_looks" in runs else pd.Series(dtype=int)
    return int(looks.max()) if len(looks) else 1


def _find_runs(frames: Frames, experiment: str, variant: str) -> pd.DataFrame | None:
    """Runs of a variant, without warm-ups."""
    runs = frames.find(experiment)
    label = _find_label(runs, variant)
    return None if runs is None or label is None else measured_runs(runs[runs["variant"] == label])


def _find_label(runs: pd.DataFrame | None, pattern: str) -> str | None:
    """The last variant that matches: the one with the most shards or workers."""
    labels = [] if runs is None else [label for label in runs["variant"].unique() if fnmatchcase(label, pattern)]
    return labels[-1] if labels else None


def _describe_origin(*frames: pd.DataFrame, cold: bool = False) -> dict[str, Any]:
    """Fields of a `Reading` that say where it comes from; with `cold`, the last frame has to be of cold runs."""
    counted = [measured_runs(frame) for frame in frames]
    names = {name: pd.concat(counted)[name].astype(str).unique() for name in ("experiment", "scale", "device")}
    is_warm = cold and set(counted[-1]["page_cache"]) != {"cold"}
    doubts = [REHEARSAL] * ("ci" in names["scale"]) + [NOT_COLD] * is_warm
    return {**{name: "; ".join(values) for name, values in names.items()}, "doubt": "; ".join(doubts)}
