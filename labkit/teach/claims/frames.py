"""The frames that other notebooks have recorded, and ratios read from them with their intervals."""

import os
import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.core import env_id
from labkit.measure import RESULTS_VARIABLE, load_frame, speedup_interval, summarize
from labkit.teach.claims.verdicts import Reading
from labkit.teach.reference import reference_runs

_SCALES = ("ci", "laptop", "gpu")
REHEARSAL = "ci scale is a rehearsal"
NOT_COLD = "the kernel did not show that the bytes came from the disk"


class Frames:
    """Recorded runs of one machine, by the name of their experiment."""

    def __init__(self, frames: Iterable[pd.DataFrame]):
        self._runs = {}
        for frame in frames:
            for experiment, runs in frame.groupby("experiment", sort=False):
                self._runs[str(experiment)] = runs.reset_index(drop=True)
        machines = sorted({str(name) for runs in self._runs.values() for name in runs["env_id"].unique()})
        if machines and machines != [env_id()]:
            raise ValueError(
                f"runs of {', '.join(machines)} cannot be judged here: this machine is {env_id()}, and different "
                "machines are not compared"
            )

    def find(self, pattern: str) -> pd.DataFrame | None:
        """Runs of the experiment that fits (`*` stands for anything), the largest scale first; else None."""
        fitting = [runs for experiment, runs in self._runs.items() if fnmatchcase(experiment, pattern)]
        return max(fitting, key=_scale_rank, default=None)

    def on_gpu(self) -> "Frames":
        """Only what was measured on a CUDA device: here, or else in a stored reference run."""
        return _OnGPU(self)


class _OnGPU(Frames):
    def __init__(self, own: Frames):
        self._own = own

    def find(self, pattern: str) -> pd.DataFrame | None:
        runs = self._own.find(pattern)
        if runs is not None and set(runs["device"]) == {"cuda"}:
            return runs
        stored = reference_runs(pattern)
        return next((runs for runs in stored.values() if set(runs["device"]) == {"cuda"}), None)


Read = Callable[[Frames], Reading | None]


def read_folder(results: str | os.PathLike | None) -> list[pd.DataFrame]:
    """All frames of this machine.

    Args:
        results: The folder that tours write, `results`, or this machine's in it; default: where a running tour
            collects, else `results` here or in the clone. Only a folder that was asked for has to be there.

    Raises:
        FileNotFoundError: the folder is not there, or holds no frames of this machine; says what to run.
        ValueError: a file in it is no frame of runs; names it.
    """
    folder = _default_folder() if results is None else _asked_folder(Path(results))
    return [load_frame(path) for path in sorted(folder.glob("*.csv"))]


def _asked_folder(results: Path) -> Path:
    for folder in (results / env_id() / "frames", results / "frames"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no frames of this machine ({env_id()}) in {results}: `python -m labkit tour` records them"
    )


def _default_folder() -> Path:
    from labkit.core import NOTEBOOK_FOLDER

    if collected := os.environ.get(RESULTS_VARIABLE):
        return Path(collected)
    here, clone = (root / "results" / env_id() / "frames" for root in (Path(), NOTEBOOK_FOLDER.parent))
    return here if here.is_dir() else clone


def paired(experiment: str, variant: str, baseline: str, *, cold: bool = False) -> Read:
    """Speed-up of one variant over another of the same experiment, by rounds; `cold` runs have to have been cold."""

    def read(frames: Frames) -> Reading | None:
        runs = frames.find(experiment)
        own, base = (_label(runs, label) for label in (variant, baseline))
        if own is None or base is None:
            return None
        runs = runs[runs["variant"].isin([own, base])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own notebook has said how stable it was, and the note says it again
            row = summarize(runs, base).loc[own]
        return Reading(
            row["speedup"], row["ci_low"], row["ci_high"], int(row["n_runs"]), note=row["note"],
            **_origin(runs, cold=cold),
        )  # fmt: skip

    return read


def apart(quick: tuple[str, str], slow: tuple[str, str], *, cold: bool = False) -> Read:
    """Ratio of the rates of two variants of different experiments, each an (experiment, variant), not interleaved.

    `cold`: the slow one's runs have to have been cold.
    """

    def read(frames: Frames) -> Reading | None:
        one, other = rates(frames, *quick), rates(frames, *slow)
        if one is None or other is None or one["env_id"].iloc[0] != other["env_id"].iloc[0]:
            return None
        logs = [np.log(runs["images_per_s"].to_numpy()) for runs in (one, other)]
        low, high = speedup_interval(*(np.exp(values) for values in logs))
        origins = [_origin(one), _origin(other, cold=cold)]
        named = {name: _both(origin[name] for origin in origins) for name in origins[0]}
        ratio = float(np.exp(logs[0].mean() - logs[1].mean()))
        return Reading(ratio, low, high, min(len(one), len(other)), note="not interleaved", **named)

    return read


def reckoned(experiment: str, variant: str, ratio_of: Callable[[np.ndarray], np.ndarray], note: str) -> Read:
    """Ratio that follows from a measured rate: `ratio_of` the images/s of each run, with their interval."""

    def read(frames: Frames) -> Reading | None:
        runs = rates(frames, experiment, variant)
        if runs is None:
            return None
        ratios = ratio_of(runs["images_per_s"].to_numpy())
        ratio = float(np.exp(np.log(ratios).mean()))
        return Reading(ratio, *speedup_interval(ratios), len(runs), note=note, **_origin(runs))

    return read


def on_gpu(read: Read) -> Read:
    """The same, of runs on a CUDA device only."""
    return lambda frames: read(frames.on_gpu())


def more_by(read: Read) -> Read:
    """One and a share that was read, with its interval: the cost of something added."""

    def more(frames: Frames) -> Reading | None:
        share = read(frames)
        if share is None:
            return None
        return Reading(**{**vars(share), "ratio": 1 + share.ratio, "low": 1 + share.low, "high": 1 + share.high})

    return more


def rates(frames: Frames, experiment: str, variant: str) -> pd.DataFrame | None:
    """Runs of a variant that count."""
    runs = frames.find(experiment)
    label = _label(runs, variant)
    return None if label is None else runs[(runs["variant"] == label) & ~runs["is_warmup"].astype(bool)]


def _label(runs: pd.DataFrame | None, pattern: str) -> str | None:
    """The last variant that fits: of shards or workers, the most."""
    labels = [] if runs is None else [label for label in runs["variant"].unique() if fnmatchcase(label, pattern)]
    return labels[-1] if labels else None


def _origin(runs: pd.DataFrame, *, cold: bool = False) -> dict[str, str]:
    counted = runs[~runs["is_warmup"].astype(bool)]
    scales = "/".join(map(str, counted["scale"].unique())) if "scale" in counted else ""
    warm = cold and set(counted["page_cache"]) != {"cold"}
    doubts = [REHEARSAL] * ("ci" in re.split("/", scales)) + [NOT_COLD] * warm
    return {
        "experiment": str(counted["experiment"].iloc[0]), "scale": scales,
        "device": "/".join(map(str, counted["device"].unique())), "doubt": "; ".join(doubts),
    }  # fmt: skip


def _both(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(name for name in names if name))


def _scale_rank(runs: pd.DataFrame) -> int:
    scale = str(runs["scale"].iloc[0]) if "scale" in runs else ""
    return _SCALES.index(scale) if scale in _SCALES else -1
