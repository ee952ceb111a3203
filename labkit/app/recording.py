"""Keep frames and results as files: an IPython extension for the kernels of `labkit tour` and `labkit lab`."""

import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.measure.recorder import RESULTS_VARIABLE, set_recorder
from labkit.util.files import write_atomic
from labkit.util.process import warn_caller

if TYPE_CHECKING:
    import pandas as pd

EXTENSION_ARGUMENTS = ["--ext", __name__]  # for ipykernel


_MAX_STEM_LENGTH = 100  # characters


class FolderRecorder:
    """Writes each experiment's frame to a folder, as CSV, and notebooks' results to `results/` next to it, as JSON.

    What cannot be written is a warning: a measurement that took minutes is not lost with its file.

    Args:
        frames: The folder of the frames; made when something is recorded.
    """

    def __init__(self, frames: str | os.PathLike):
        self.frames = Path(frames).expanduser().absolute()
        self.results = self.frames.parent / "results"

    def record_frame(self, frame: "pd.DataFrame") -> None:
        from labkit.measure.frames import save_frame

        path = self.frames / f"{file_stem(frame['experiment'].iloc[0])}.csv"
        _try(lambda: save_frame(frame, path))

    def record_result(self, notebook: str, record: dict[str, Any]) -> None:
        _try(lambda: write_atomic(self.results / f"{notebook}.json", json.dumps(record, indent=1).encode()))


def _try(write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        warn_caller(f"the result is not kept for the report ({error}): {REMEDY}", UnkeptWarning)


REMEDY = (
    "make room there, or set LABKIT_RESULTS to another folder and start again; a tour records in the folder where it "
    "is started"
)


class UnkeptWarning(UserWarning):
    """A frame or a result could not be written to the folder of results."""


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
