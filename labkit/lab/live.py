"""The report of a tour that is running: what has been measured so far, and how long the rest takes."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType

from labkit.core import redact
from labkit.lab.notebooks import Executed, Notebook
from labkit.lab.report import frame_keys, write_index

_USUAL_S = 60.0  # for a notebook that was not stored


class LiveReport:
    """Writes `index.html` as a tour begins, with each frame of its first notebook, with each notebook, and at the end.

    The page is drawn between cells, and so takes no time from what a cell measures, only from the tour's.

    Args:
        folder: The results of this environment.
        notebooks: Those of the tour, in order.
        clock: Gives seconds.

    Attributes:
        path: The page.
        runs: The notebooks that have ended.
    """

    def __init__(self, folder: Path, notebooks: Sequence[Notebook], clock: Callable[[], float] = time.monotonic):
        self.path = folder / "index.html"
        self.runs: list[Executed] = []
        self._folder, self._notebooks, self._clock = folder, notebooks, clock
        self._doing = "making the photos"
        self._share = 0.0  # of the running notebook's cells
        self._began_s: float | None = None  # when the first notebook did
        self._shown: list[tuple[Path, int, int]] = []

    def __enter__(self) -> "LiveReport":
        self._write()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        write_index(self._folder, self.runs, status=self._describe_end(error) if error else "")

    def begin(self, notebook: Notebook) -> None:
        """Show that a notebook is running."""
        self._doing = f"running {notebook.name}, notebook {len(self.runs) + 1} of {len(self._notebooks)}"
        self._began_s = self._clock() if self._began_s is None else self._began_s
        self._share = 0.0
        self._write()

    def on_cell(self, cell: int, n_cells: int) -> None:
        """Show the first notebook's frames; called before each cell, with its index and the number of cells."""
        self._share = cell / n_cells
        if not self.runs and frame_keys(self._folder) != self._shown:
            self._write()

    def end(self, run: Executed) -> None:
        """Note that the running notebook has ended."""
        self.runs.append(run)

    def _write(self) -> None:
        self._shown = frame_keys(self._folder)
        status = f"At {_now()}: {self._doing}. {self._describe_rest()}"
        write_index(self._folder, self.runs, status=status, is_running=True)

    def _describe_rest(self) -> str:
        seconds = 0.0 if self._began_s is None else self._clock() - self._began_s
        minutes = minutes_left(self._notebooks, len(self.runs), self._share, seconds)
        n_minutes = max(1, round(minutes))
        return f"The rest takes about {n_minutes} minute{'s' if n_minutes > 1 else ''}."

    def _describe_end(self, error: BaseException) -> str:
        why = f" ({type(error).__name__}: {redact(str(error))})"
        how = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed{why}"
        return f"At {_now()}, the tour {how} while {self._doing}. What follows was measured before."


def minutes_left(notebooks: Sequence[Notebook], n_ended: int, share: float, seconds: float) -> float:
    """Minutes that the rest of a tour takes, as the stored run took them and at the pace of what has run here.

    Args:
        notebooks: Those of the tour, in order.
        n_ended: How many have ended.
        share: How much of the next one has run, 0 to 1.
        seconds: Since the first one began. While that runs, the stored run's pace is taken: a few cells tell little.
    """
    stored_s = [notebook.seconds or _USUAL_S for notebook in notebooks]
    done_s = sum(stored_s[:n_ended]) + share * sum(stored_s[n_ended : n_ended + 1])
    pace = seconds / done_s if n_ended else 1.0
    return pace * (sum(stored_s) - done_s) / 60


def _now() -> str:
    return f"{datetime.now():%H:%M}"
