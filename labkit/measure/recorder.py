"""What a session keeps: guesses and what was measured. A recorder, if one is installed, keeps it for other sessions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from labkit.util.machine import env_id

if TYPE_CHECKING:
    import pandas as pd

RESULTS_VARIABLE = "LABKIT_RESULTS"  # the folder for frames, set by `labkit tour` and `labkit lab` for their kernels
OUTCOME_COLUMNS = ("experiment", "label", "guess", "measured", "ci_low", "ci_high", "because")


class Recorder(Protocol):
    """Keeps the results of named experiments."""

    def record_frame(self, frame: "pd.DataFrame") -> None:
        """Keep an experiment's runs, in place of earlier ones."""

    def record_outcomes(self, experiment: str, outcomes: list[dict[str, Any]]) -> None:
        """Keep an experiment's guesses and what was measured, as dicts of `OUTCOME_COLUMNS`."""

    def recorded_outcomes(self) -> list[dict[str, Any]]:
        """The outcomes kept so far, of all sessions."""


_installed: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Install the current process's recorder; None removes it."""
    global _installed
    _installed = recorder


def current_recorder() -> Recorder | None:
    """The current process's recorder, if one is installed."""
    return _installed


@dataclass(frozen=True)
class Prediction:
    """A reader's guess of a variant's speed-up."""

    label: str
    speedup: float
    because: str = ""

    def __repr__(self) -> str:
        return f"{self.label}: you expect {self.speedup:g}x" + (f", because {self.because}" if self.because else "")


# Label -> guess, None while the reader has not made one. `course.predict` fills it, `plot_speedup` marks the guesses.
guesses: dict[str, Prediction | None] = {}

session_outcomes: dict[tuple[str, str], dict[str, Any]] = {}  # by experiment and label


def keep_outcome(runs: "pd.DataFrame", label: str, estimate: "pd.Series") -> None:
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
        session_outcomes[experiment, label] = {
            "experiment": experiment,
            "label": label,
            "because": guess.because,
            "guess": guess.speedup,
            "measured": float(estimate["speedup"]),
            "ci_low": float(estimate["ci_low"]),
            "ci_high": float(estimate["ci_high"]),
        }
    else:
        session_outcomes.pop((experiment, label), None)
    if recorder := current_recorder():
        rows = [row for (name, _), row in session_outcomes.items() if name == experiment]
        recorder.record_outcomes(experiment, rows)
