"""What a session keeps: frames and results. A recorder, if one is installed, keeps them for other sessions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pandas as pd

RESULTS_VARIABLE = "LABKIT_RESULTS"  # the folder for frames, set by `labkit tour` and `labkit lab` for their kernels


class Recorder(Protocol):
    """Keeps the results of named experiments."""

    def record_frame(self, frame: "pd.DataFrame") -> None:
        """Keep an experiment's runs, in place of earlier ones."""

    def record_result(self, notebook: str, record: dict[str, Any]) -> None:
        """Keep what a notebook found, in place of earlier results."""


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
unmarked: set[str] = set()  # labels of guesses that no plot has shown yet
