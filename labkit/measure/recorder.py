"""Where a recorder is installed, which keeps what `compare` and `plot_speedup` find. Without one, nothing is kept."""

from typing import TYPE_CHECKING, Any, Protocol

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
    """Install the recorder of this process; None removes it."""
    global _installed
    _installed = recorder


def current_recorder() -> Recorder | None:
    """The recorder of this process, if one is installed."""
    return _installed
