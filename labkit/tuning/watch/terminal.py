"""The report as a page in the terminal, on stderr: stdout is the script's."""

import sys
import time

from rich.console import Console
from rich.table import Table

from labkit.tuning.watch.observing import Control, SeenLoader
from labkit.tuning.watch.report import WatchReport

_BAR = 40
_EVERY_S = 10.0


def print_report(report: WatchReport) -> None:
    """Shares as bars, then the sentences, the loaders, and the ranks."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else 160)
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


def _table(frame: object) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in frame.columns:  # type: ignore[attr-defined]
        table.add_column(str(name), justify="left" if name in ("loader", "role") else "right", no_wrap=True)
    for row in frame.itertuples(index=False):  # type: ignore[attr-defined]
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row))
    return table


class ProgressLine(Control):
    """Says on stderr every ten seconds how far the training is, and how much of the time it waited."""

    def __init__(self) -> None:
        self._next_s = time.perf_counter() + _EVERY_S

    def received(self, seen: SeenLoader, data: object) -> None:
        if (now := time.perf_counter()) >= self._next_s:
            self._next_s = now + _EVERY_S
            batches = [batch for epoch in seen.epochs for batch in epoch.batches[-50:]]
            if len(batches) > 1:
                waited_s = sum(batch.received_s - batch.asked_s for batch in batches[1:])
                share = waited_s / (batches[-1].received_s - batches[0].received_s)
                said = f"labkit watch: {seen.kind}, batch {seen.n_batches}; waiting {share:.0%} of the time"
                print(said, file=sys.stderr, flush=True)
