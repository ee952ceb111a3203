"""What `watch` says, as a page in the terminal: on the stderr it was started with, whatever the script makes of it."""

import io
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from labkit.tuning.watch.observing import Control, SeenLoader

if TYPE_CHECKING:
    from labkit.tuning.watch.report import WatchReport

_BAR = 40
_EVERY_S = 10.0
_ABOVE = (200, 3)  # lowest numbers to try for a descriptor: those from 3 on are the script's files


class Terminal:
    """The process's stderr as it was at the start: a script may close it, replace `sys.stderr`, or redirect it.

    It is silent where there was none, and once nobody reads it.
    """

    def __init__(self) -> None:
        self.stream = _own_stderr()

    def tell(self, text: str) -> None:
        """Say one line."""
        with suppress(OSError, ValueError):
            self.stream.write(f"labkit watch: {text}\n")

    def show(self, report: "WatchReport") -> None:
        """Shares as bars, then the sentences, the loaders, and the ranks."""
        from rich.console import Console

        width = None if self.stream.isatty() else 160
        console = Console(file=self.stream, highlight=False, soft_wrap=True, width=width)
        console.print(f"\n[bold]labkit watch[/bold] {report.n_batches} batches", markup=True)
        for name, share in report.shares.items():
            console.print(f"{name:<10} {share:6.1%}  {'#' * round(_BAR * share)}", markup=False)
        for sentence in report.sentences:
            console.print(sentence, markup=False)
        for other in report.recommendations[1:]:
            console.print(f"Then: {other}", markup=False)
        console.print(_table(report.loaders.drop(columns="made")), crop=False)
        if report.ranks is not None:
            console.print(_table(report.ranks), crop=False)


def _own_stderr() -> TextIO:
    """stderr under a descriptor of its own, which processes that the script starts or forks do not keep open."""
    try:
        descriptor = _copied(2)
    except OSError:  # it is closed, and a file of the script may get its number
        return io.StringIO()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", write_through=True)


def _copied(descriptor: int) -> int:
    try:
        import fcntl
    except ImportError:  # Windows
        return os.dup(descriptor)
    for above in _ABOVE[:-1]:
        with suppress(ValueError, OSError):  # a process may be allowed fewer files
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE[-1])


def _table(frame: Any) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in frame.columns:
        table.add_column(str(name), justify="left" if name in ("loader", "role") else "right", no_wrap=True)
    for row in frame.itertuples(index=False):
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row))
    return table


class ProgressLine(Control):
    """Says every ten seconds how far the training is, and how much of the time it waited."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._next_s = terminal, time.perf_counter() + _EVERY_S

    def received(self, seen: SeenLoader, data: object) -> None:
        if (now := time.perf_counter()) >= self._next_s:
            self._next_s = now + _EVERY_S
            batches = [batch for epoch in seen.epochs for batch in epoch.batches[-50:]]
            if len(batches) > 1:
                waited_s = sum(batch.received_s - batch.asked_s for batch in batches[1:])
                share = waited_s / max(1e-9, batches[-1].received_s - batches[0].received_s)
                self._terminal.tell(f"{seen.kind}, batch {seen.n_batches}; waiting {share:.0%} of the time")
