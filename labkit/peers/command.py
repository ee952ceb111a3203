"""What `python -m labkit peers` prints and writes."""

import html
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from labkit.errors import GilError
from labkit.measure.frames import save_frame
from labkit.measure.gil import find_sampler
from labkit.measure.plots import WIDTH_IN
from labkit.peers.peer import CLASSES
from labkit.peers.ranking import against_best, group_by_class, left_out, peer_table, plot_peers
from labkit.peers.registry import PEERS, compare_peers, missing_modules
from labkit.peers.run import append_runs, comparisons, read_collection
from labkit.util.files import write_atomic
from labkit.util.machine import env_id
from labkit.util.pictures import png_base64, png_bytes

console = Console()
if not console.is_terminal:
    console.width = 140  # keep the table's columns when piped
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100% }} .wide {{ overflow-x: auto }} table {{ border-collapse: collapse; font-size: 14px }}
td, th {{ padding: .3rem .6rem; text-align: right; border-top: 1px solid #ccc; vertical-align: top }}
td:last-child, td:nth-last-child(2) {{ text-align: left; min-width: 16rem }}
</style></head><body>
<h1>{title}</h1><p>{about}</p><img alt="Images per second of each loader" src="data:image/png;base64,{picture}">
{sentences}<div class="wide">{rows}</div></body></html>
"""
_COSTS = {
    "cpu_s_per_1000": ".2f", "peak_mem_mb": ",.0f", "startup_s": ".1f", "gil_us_per_image": ".0f", "of_limit": ".0%",
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
) -> pd.DataFrame:
    """Compare the peers, print the table, and write `results/<env_id>/peers-<name>.csv`, `.png` and a page.

    Args:
        append: A CSV to add the runs to, see `append_runs`. Comparisons of other machines in it are shown, too.

    Other arguments, and errors, as for `labkit.compare_peers`.
    """
    name, title = peer_class or profile, CLASSES[peer_class].title if peer_class else profile
    if append and Path(append).exists():
        read_collection(append)  # refused now, not after the measurement
    frame = compare_peers(profile, peer_class=peer_class, only=only, rounds=rounds, gil=_has_sampler())
    path = save_frame(frame, results.resolve() / env_id() / f"peers-{name}.csv")
    figure = _draw(frame)
    write_atomic(path.with_suffix(".png"), png_bytes(figure, dpi=120))
    lines = list(_describe_results(frame))
    write_atomic(path.with_suffix(".html"), _make_page(frame, title, lines, png_base64(figure)).encode())
    console.print(_make_rich_table(frame, title))
    for line in lines:
        _print_line(line)
    _print_line(f"wrote {path}, its .png and its .html")
    if append:
        _show_others(append_runs(frame, append), name)
        _print_line(f"added the runs to {append}")
    return frame


def _has_sampler() -> bool:
    with suppress(GilError):
        return bool(find_sampler())
    return False


def _show_others(collection: pd.DataFrame, name: str) -> None:
    """The same class on other machines, as tables of their own: rates of two machines are no comparison."""
    for machine, peer_class, runs in comparisons(collection):
        if peer_class == name and machine != env_id():
            console.print(_make_rich_table(runs, f"{name} on {machine}, not to be compared with this machine"))


def _draw(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, 1.9 + 0.28 * frame["variant"].nunique()), layout="constrained")
    plot_peers(frame, ax=figure.add_subplot())
    return figure


def _make_page(frame: pd.DataFrame, title: str, lines: Sequence[str], picture: str) -> str:
    """One file that needs no other."""
    table = peer_table(frame).drop(columns=["ci_low", "ci_high"])
    rows = table.to_html(float_format="{:,.2f}".format, na_rep="", escape=True, border=0)
    sentences = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    about = f"All loaders did the same work, in one run on {env_id()}, and were checked before."
    return _PAGE.format(title=html.escape(title), about=about, picture=picture, sentences=sentences, rows=rows)


def _make_rich_table(frame: pd.DataFrame, profile: str) -> Table:
    title = f"{profile}: all loaders do the same work, in one run; in brackets: 95 % intervals"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("loader", no_wrap=True)
    for name in ("images/s", "speed-up", "CPU s / 1000", "peak MB", "start s", "GIL us", "of limit"):
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
