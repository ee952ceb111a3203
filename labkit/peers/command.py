"""What `python -m labkit peers` prints and writes."""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from labkit.measure.frames import save_frame
from labkit.measure.plots import WIDTH_IN
from labkit.peers.peer import CLASSES
from labkit.peers.ranking import (
    against_best,
    append_runs,
    group_by_class,
    left_out,
    peer_table,
    plot_peers,
    read_collection,
)
from labkit.peers.registry import PEERS, compare_peers, missing_modules
from labkit.util.files import write_atomic
from labkit.util.machine import env_id
from labkit.util.pictures import png_bytes

console = Console()
if not console.is_terminal:
    console.width = 140  # keep the table's columns when piped
_COSTS = {
    "cpu_s_per_1000": ".2f", "peak_mem_mb": ",.0f", "startup_s": ".1f", "of_limit": ".0%",
}  # fmt: skip
_print_line = partial(console.print, highlight=False, markup=False, soft_wrap=True)


def list_peers() -> None:
    """Print each peer: installed, or how to install it."""
    for peer in PEERS.values():
        missing = missing_modules(peer)
        state = f"missing ({', '.join(missing)}): {peer.install}" if missing else "installed"
        _print_line(f"{peer.name:<28} {state}")
        if peer.published:
            _print_line(f"{'':<28} published: {peer.published}")
    for name, in_class in CLASSES.items():
        _print_line(f"--class {name:<20} {in_class.title}")


def run_peers(
    profile: str,
    *,
    peer_class: str | None = None,
    only: Sequence[str] = (),
    rounds: int | None = None,
    append: str | os.PathLike = "",
    results: Path = Path("results"),
) -> None:
    """Compare the peers, print the table, and write `results/<env_id>/peers-<name>.csv` and `.png`.

    Args:
        append: A CSV to add the runs to, see `append_runs`.

    Other arguments, and errors, as for `labkit.compare_peers`.
    """
    name, title = peer_class or profile, CLASSES[peer_class].title if peer_class else profile
    if append and Path(append).exists():
        read_collection(append)  # refused now, not after the measurement, as is a folder that cannot be written to
    folder = results.resolve() / env_id()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    frame = compare_peers(profile, peer_class=peer_class, only=only, rounds=rounds)
    path = save_frame(frame, folder / f"peers-{name}.csv")
    figure = Figure(figsize=(WIDTH_IN, 1.9 + 0.28 * frame["variant"].nunique()), layout="constrained")
    plot_peers(frame, ax=figure.add_subplot())
    write_atomic(path.with_suffix(".png"), png_bytes(figure, dpi=120))
    console.print(_make_rich_table(frame, title))
    for name, row in against_best(frame).iterrows():
        found = f"no peer in its class ({row['class']})"
        if row["best_peer"]:
            speedup = f"{row['speedup']:.2f}{_format_interval(row['ci_low'], row['ci_high'])}"
            found = f"{speedup} times as fast as the best peer of its class, {row['best_peer']} ({row['class']})"
        _print_line(f"{name}: {found}")
    for name, note in peer_table(frame)["note"].items():
        if note:
            _print_line(f"{name}: {note}")
    for name, row in left_out(frame).iterrows():
        _print_line(f"{name} {row['state']}: {row['why']}")
    _print_line(f"wrote {path} and its .png")
    if append:
        append_runs(frame, append)
        _print_line(f"added the runs to {append}")


def _make_rich_table(frame: pd.DataFrame, profile: str) -> Table:
    title = f"{profile}: all loaders do the same work, in one run; in brackets: 95 % intervals"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("loader", no_wrap=True)
    for name in ("images/s", "speed-up", "CPU s / 1000", "peak MB", "start s", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = peer_table(frame)
    limits = rows["kind"] == "limit"
    for group_title, members in {**group_by_class(rows[~limits]), "limits": rows[limits]}.items():
        table.add_row(group_title, style="italic")
        for name, row in members.iterrows():
            rate = f"{row['images_per_s']:,.0f}{_format_interval(row['rate_low'], row['rate_high'], ',.0f')}"
            speedup = f"{row['speedup']:.2f}{_format_interval(row['ci_low'], row['ci_high'])}"
            costs = ["" if pd.isna(row[name]) else f"{row[name]:{digits}}" for name, digits in _COSTS.items()]
            style = "bold" if row["kind"] == "labkit" else None
            table.add_row(f"  {name}", rate, speedup, *costs, style=style)
    return table


def _format_interval(low: float, high: float, number_format: str = ".2f") -> str:
    return f" [{low:{number_format}}, {high:{number_format}}]" if pd.notna(low) else ""  # one round has none
