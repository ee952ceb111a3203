"""Keep frames and guesses as files: an IPython extension for the kernels of `labkit tour` and `labkit lab`."""

import json
import os
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import ArgumentError
from labkit.measure.recorder import OUTCOME_COLUMNS, RESULTS_VARIABLE, set_recorder
from labkit.util.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd

EXTENSION_ARGUMENTS = ["--ext", __name__]  # for ipykernel


_MAX_STEM_LENGTH = 100  # characters


class FolderRecorder:
    """Writes each experiment's frame to a folder, as CSV, and its guesses to `predictions/` next to it, as JSON.

    Args:
        frames: The folder of the frames; made when something is recorded.
    """

    def __init__(self, frames: str | os.PathLike):
        self.frames = Path(frames).absolute()
        self.predictions = self.frames.parent / "predictions"

    def record_frame(self, frame: "pd.DataFrame") -> None:
        from labkit.measure.frames import save_frame

        save_frame(frame, self.frames / f"{file_stem(frame['experiment'].iloc[0])}.csv")

    def record_outcomes(self, experiment: str, outcomes: list[dict[str, Any]]) -> None:
        write_atomic(self.predictions / f"{file_stem(experiment)}.json", json.dumps(outcomes, indent=1).encode())

    def recorded_outcomes(self) -> list[dict[str, Any]]:
        return [row for path in sorted(self.predictions.glob("*.json")) for row in _read_outcomes(path)]


def record_to_results_folder() -> None:
    """Install a `FolderRecorder` in this process, if `LABKIT_RESULTS` names a folder."""
    if folder := os.environ.get(RESULTS_VARIABLE):
        set_recorder(FolderRecorder(folder))


def load_ipython_extension(shell: Any) -> None:
    """Called by a kernel that is started with `EXTENSION_ARGUMENTS`."""
    record_to_results_folder()


def file_stem(experiment: str) -> str:
    """A file name for an experiment, unique to it: where characters had to be replaced, a checksum is added."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", experiment)
    if stem.replace("_", " ") == experiment and len(stem) <= _MAX_STEM_LENGTH and not stem.startswith("."):
        return stem
    checksum = zlib.crc32(experiment.encode("utf-8", "surrogateescape"))
    return f"{stem.lstrip('.')[:_MAX_STEM_LENGTH]}-{checksum:08x}"


def _read_outcomes(path: Path) -> list[dict[str, Any]]:
    try:
        return [{name: row[name] for name in OUTCOME_COLUMNS} for row in json.loads(path.read_text())]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{path} holds no predictions: delete it, and run its notebook again") from error
