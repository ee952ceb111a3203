"""What `python -m labkit peers` prints and writes."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from labkit.core import atomic_path, env_id
from labkit.measure import save_frame
from labkit.peers.plots import grouped, plot_peers
from labkit.peers.registry import PEERS, compare_peers, missing_modules
from labkit.peers.table import against_best, left_out, peer_table

console = Console()
if not console.is_terminal:
    console.width = 120  # piped, the table keeps its columns


def list_peers() -> None:
    """Print each peer: installed, or how to install it."""
    for peer in PEERS.values():
        missing = missing_modules(peer)
        state = f"missing ({', '.join(missing)}): {peer.install}" if missing else "installed"
        console.print(f"{peer.name:<22} {state}", highlight=False, markup=False, soft_wrap=True)


def run_peers(
    profile: str, *, only: Sequence[str] = (), rounds: int | None = None, results: Path = Path("results")
) -> pd.DataFrame:
    """Compare the peers, print the table, and write `results/<env_id>/peers-<profile>.csv` and `.png`.

    Arguments and errors as `labkit.compare_peers`.
    """
    frame = compare_peers(profile, only=only, rounds=rounds)
    folder = results.resolve() / env_id()
    path = save_frame(frame, folder / f"peers-{profile}.csv")
    _save_plot(frame, folder / f"peers-{profile}.png")
    console.print(_rich_table(frame, profile))
    for line in _said(frame):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"wrote {path} and its .png", highlight=False, soft_wrap=True)
    return frame


def _save_plot(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    lines = frame["variant"].nunique() + 6
    figure = Figure(figsize=(9, 1 + 0.3 * lines), layout="constrained")
    plot_peers(frame, ax=figure.add_subplot())
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _rich_table(frame: pd.DataFrame, profile: str) -> Table:
    table = Table(title=f"{profile}: the same work by all, in one run; brackets: 95 % intervals", box=SIMPLE_HEAD)
    table.add_column("loader", no_wrap=True)
    for name in ("images/s", "speed-up", "CPU s / 1000", "peak MB", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = peer_table(frame)
    limits = rows["kind"] == "limit"
    for title, members in {**grouped(rows[~limits]), "limits": rows[limits]}.items():
        table.add_row(title, style="italic")
        for name, row in members.iterrows():
            table.add_row(*_cells(name, row), style="bold" if row["kind"] == "labkit" else None)
    return table


def _cells(name: str, row: pd.Series) -> list[str]:
    return [
        f"  {name}",
        f"{row['images_per_s']:,.0f}{_interval(row['rate_low'], row['rate_high'], ',.0f')}",
        f"{row['speedup']:.2f}{_interval(row['ci_low'], row['ci_high'])}",
        f"{row['cpu_s_per_1000']:.2f}",
        f"{row['peak_mem_mb']:,.0f}",
        f"{row['of_limit']:.0%}",
    ]


def _interval(low: float, high: float, form: str = ".2f") -> str:
    return f" [{low:{form}}, {high:{form}}]" if pd.notna(low) else ""  # one round has none


def _said(frame: pd.DataFrame) -> list[str]:
    """labkit's rows against the best peers, then who did not run."""
    lines = []
    for name, row in against_best(frame).iterrows():
        if row["best_peer"]:
            speedup = f"{row['speedup']:.2f} x{_interval(row['ci_low'], row['ci_high'])}"
            lines.append(f"{name}: {speedup} the best peer of its class, {row['best_peer']} ({row['class']})")
        else:
            lines.append(f"{name}: no peer in its class ({row['class']})")
    notes = peer_table(frame)["note"]
    lines += [f"{name}: {note}" for name, note in notes.items() if note]
    return lines + [f"{name} {row['state']}: {row['why']}" for name, row in left_out(frame).iterrows()]
