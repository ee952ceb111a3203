"""What `python -m labkit peers` prints and writes."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from labkit.core import atomic_path, env_id
from labkit.measure import save_frame
from labkit.peers.plots import group_by_class, plot_peers
from labkit.peers.registry import PEERS, compare_peers, missing_modules
from labkit.peers.table import against_best, left_out, peer_table

console = Console()
if not console.is_terminal:
    console.width = 120  # keep the table's columns when piped
_print_line = partial(console.print, highlight=False, markup=False, soft_wrap=True)


def list_peers() -> None:
    """Print each peer: installed, or how to install it."""
    for peer in PEERS.values():
        missing = missing_modules(peer)
        state = f"missing ({', '.join(missing)}): {peer.install}" if missing else "installed"
        _print_line(f"{peer.name:<22} {state}")


def run_peers(
    profile: str, *, only: Sequence[str] = (), rounds: int | None = None, results: Path = Path("results")
) -> pd.DataFrame:
    """Compare the peers, print the table, and write `results/<env_id>/peers-<profile>.csv` and `.png`.

    Arguments and errors as for `labkit.compare_peers`.
    """
    frame = compare_peers(profile, only=only, rounds=rounds)
    path = save_frame(frame, results.resolve() / env_id() / f"peers-{profile}.csv")
    _save_plot(frame, path.with_suffix(".png"))
    console.print(_make_rich_table(frame, profile))
    for line in _describe_results(frame):
        _print_line(line)
    _print_line(f"wrote {path} and its .png")
    return frame


def _save_plot(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8 + 0.3 * frame["variant"].nunique()), layout="constrained")
    plot_peers(frame, ax=figure.add_subplot())
    with atomic_path(path) as partial_path:
        figure.savefig(partial_path, format="png", dpi=120)


def _make_rich_table(frame: pd.DataFrame, profile: str) -> Table:
    title = f"{profile}: all loaders do the same work, in one run; in brackets: 95 % intervals"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("loader", no_wrap=True)
    for name in ("images/s", "speed-up", "CPU s / 1000", "peak MB", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = peer_table(frame)
    limits = rows["kind"] == "limit"
    for group_title, members in {**group_by_class(rows[~limits]), "limits": rows[limits]}.items():
        table.add_row(group_title, style="italic")
        for name, row in members.iterrows():
            rate = f"{row['images_per_s']:,.0f}{_format_interval(row['rate_low'], row['rate_high'], ',.0f')}"
            speedup = f"{row['speedup']:.2f}{_format_interval(row['ci_low'], row['ci_high'])}"
            costs = f"{row['cpu_s_per_1000']:.2f}", f"{row['peak_mem_mb']:,.0f}", f"{row['of_limit']:.0%}"
            style = "bold" if row["kind"] == "labkit" else None
            table.add_row(f"  {name}", rate, speedup, *costs, style=style)
    return table


def _format_interval(low: float, high: float, number_format: str = ".2f") -> str:
    return f" [{low:{number_format}}, {high:{number_format}}]" if pd.notna(low) else ""  # one round has none


def _describe_results(frame: pd.DataFrame) -> Iterator[str]:
    """labkit's rows against the best peers, what is unstable, and which loaders did not run."""
    for name, row in against_best(frame).iterrows():
        if row["best_peer"]:
            speedup = f"{row['speedup']:.2f} x{_format_interval(row['ci_low'], row['ci_high'])}"
            yield f"{name}: {speedup} the best peer of its class, {row['best_peer']} ({row['class']})"
        else:
            yield f"{name}: no peer in its class ({row['class']})"
    yield from (f"{name}: {note}" for name, note in peer_table(frame)["note"].items() if note)
    yield from (f"{name} {row['state']}: {row['why']}" for name, row in left_out(frame).iterrows())
