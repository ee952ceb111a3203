"""Guesses of speed-ups, and what was measured where `plot_speedup` marks them."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.measure.recorder import OUTCOME_COLUMNS, current_recorder
from labkit.util.machine import env_id


@dataclass(frozen=True)
class Prediction:
    """A reader's guess of a variant's speed-up."""

    label: str
    speedup: float
    because: str = ""

    def __repr__(self) -> str:
        return f"{self.label}: you expect {self.speedup:g}x" + (f", because {self.because}" if self.because else "")


# Label -> guess, None while the reader has not made one. `labkit.predict` fills it, `plot_speedup` marks the guesses.
guesses: dict[str, Prediction | None] = {}

_session_outcomes: dict[tuple[str, str], dict[str, Any]] = {}  # by experiment and label


def keep_outcome(runs: pd.DataFrame, label: str, estimate: pd.Series) -> None:
    """Keep a guess with what was measured, in place of an earlier one for the same experiment and label.

    Where the guess is still to be made, an earlier one is forgotten. Unnamed experiments and runs of another machine,
    such as reference runs, do not count.

    Args:
        runs: The experiment's runs.
        label: A variant in `guesses`.
        estimate: That variant's row of `summarize`.
    """
    experiment = runs["experiment"].iloc[0]
    if not experiment or runs["env_id"].iloc[0] != env_id():
        return
    if guess := guesses[label]:
        _session_outcomes[experiment, label] = {
            "experiment": experiment, "label": label, "because": guess.because, "guess": guess.speedup,
            "measured": float(estimate["speedup"]), "ci_low": float(estimate["ci_low"]),
            "ci_high": float(estimate["ci_high"]),
        }  # fmt: skip
    else:
        _session_outcomes.pop((experiment, label), None)
    if recorder := current_recorder():
        rows = [row for (name, _), row in _session_outcomes.items() if name == experiment]
        recorder.record_outcomes(experiment, rows)


def outcomes() -> pd.DataFrame:
    """All guesses that were compared with a measurement, in this session or, if there is a recorder, in any other.

    Returns:
        One row per guess, with the columns `OUTCOME_COLUMNS`.

    Raises:
        ValueError: a file of recorded guesses is damaged; names it.
    """
    recorder = current_recorder()
    rows = [*_session_outcomes.values(), *(recorder.recorded_outcomes() if recorder else ())]
    latest = {(row["experiment"], row["label"]): row for row in rows}  # a recorded one may be newer
    return pd.DataFrame(list(latest.values()), columns=list(OUTCOME_COLUMNS)).sort_values("experiment", kind="stable")
