"""Guesses of speed-ups, and what was measured where they are marked: kept in memory, and on disk where frames are."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.core import env_id, write_atomic
from labkit.measure.frames import RESULTS_VARIABLE, file_stem

COLUMNS = ("experiment", "label", "guess", "measured", "ci_low", "ci_high", "because")


@dataclass(frozen=True)
class Prediction:
    """A reader's guess of a variant's speed-up."""

    label: str
    speedup: float
    because: str = ""

    def __repr__(self) -> str:
        return f"{self.label}: you expect {self.speedup:g}x" + (f", because {self.because}" if self.because else "")


# Label -> guess. `labkit.predict` fills it, `plot_speedup` marks them.
guesses: dict[str, Prediction] = {}

_met: dict[tuple[str, str], dict[str, Any]] = {}  # this session's, by experiment and label


def keep_outcome(runs: pd.DataFrame, guess: Prediction, estimate: pd.Series) -> None:
    """Keep a guess beside what was measured, in place of an earlier one for the same experiment and label.

    Neither an unnamed experiment nor the runs of another machine, as reference runs are, count.

    Args:
        runs: The experiment's runs.
        guess: The guess of one variant.
        estimate: That variant's row of `summarize`.
    """
    experiment = runs["experiment"].iloc[0]
    if not experiment or runs["env_id"].iloc[0] != env_id():
        return
    measured = {"measured": estimate["speedup"], "ci_low": estimate["ci_low"], "ci_high": estimate["ci_high"]}
    own = asdict(guess)
    own["guess"] = own.pop("speedup")
    _met[experiment, guess.label] = {"experiment": experiment, **own, **{k: float(v) for k, v in measured.items()}}
    folder = _folder()
    if folder:
        rows = [row for (name, _), row in _met.items() if name == experiment]
        write_atomic(folder / f"{file_stem(experiment)}.json", json.dumps(rows, indent=1).encode())


def outcomes() -> pd.DataFrame:
    """Every guess that has met its measurement, of this session and, where they are kept, of all others: `COLUMNS`.

    Raises:
        ValueError: a file of kept guesses is damaged; names it.
    """
    folder = _folder()
    kept = [row for path in sorted(folder.glob("*.json")) for row in _read(path)] if folder else []
    both = {(row["experiment"], row["label"]): row for row in [*_met.values(), *kept]}  # a file may be newer
    return pd.DataFrame(list(both.values()), columns=list(COLUMNS)).sort_values("experiment", kind="stable")


def _folder() -> Path | None:
    """`predictions/`, beside the folder where a tour or the lab keeps its frames; None where none are kept."""
    frames = os.environ.get(RESULTS_VARIABLE)
    return Path(frames).absolute().parent / "predictions" if frames else None


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())
        return [{name: row[name] for name in COLUMNS} for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no predictions: delete it, and run its notebook again") from error
