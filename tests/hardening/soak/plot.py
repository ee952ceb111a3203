"""Draw a soak: memory over epochs with its slope, and below it the open files, for every loader."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.hardening.soak.slope import LIMIT_KB, Slope, slopes_of, warm_up
from tests.hardening.soak.subjects import PLANTED

_COLUMNS = 5
_SPAN_MB = 6.0  # of every memory axis, so that a leak looks the same in all of them
_FINE, _LEAK = sns.color_palette("colorblind")[0], sns.color_palette("colorblind")[3]
_FLAT = {"flat", "zero"}
_FILES = sns.color_palette("colorblind")[2]


def draw(record: Path) -> Path:
    """Write the picture beside the record."""
    frame = pd.read_csv(record)
    names = list(frame["loader"].unique())
    n_rows = -(-len(names) // _COLUMNS)
    ratios = [3, 1] * n_rows
    figure, axes = plt.subplots(
        2 * n_rows, _COLUMNS, figsize=(3.4 * _COLUMNS, 2.9 * n_rows), height_ratios=ratios, sharex=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    slopes = {}
    for number, name in enumerate(names):
        row, column = divmod(number, _COLUMNS)
        runs = frame[frame["loader"] == name]
        slopes[name] = _memory(axes[2 * row, column], name, runs)
        _files(axes[2 * row + 1, column], runs)
    _label(figure, axes, len(names), slopes)
    path = record.with_name(record.name.partition(".")[0] + ".png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _memory(ax: Axes, name: str, runs: pd.DataFrame) -> Slope:
    epochs, kb = runs["epoch"].to_numpy(), runs["own_kb"].to_numpy()
    slope, written = slopes_of(runs)
    color = _FINE if {slope.verdict, written.verdict} <= _FLAT else _LEAK
    first, last = warm_up(epochs), epochs[-1]
    middle, start = (first + last) / 2, slope.start_kb + slope.kb_per_epoch * first
    ax.plot(epochs, (kb - start) / 1e3, ".", color="0.6", markersize=2, zorder=1)
    ends = pd.Series([first, last])
    at_middle = slope.kb_per_epoch * (middle - first)
    ax.plot(ends, slope.kb_per_epoch * (ends - first) / 1e3, color=color, linewidth=1.8, zorder=3)
    low, high = ((at_middle + rate * (ends - middle)) / 1e3 for rate in (slope.low, slope.high))
    ax.fill_between(ends, low, high, color=color, alpha=0.3, linewidth=0, zorder=2)
    ax.axvspan(0, first, color="0.93", linewidth=0, zorder=0)
    ax.set_ylim(-_SPAN_MB / 2, _SPAN_MB / 2)
    ax.set_title(name, fontsize=10, fontweight="bold", color=_LEAK if name == PLANTED else "black", loc="left")
    text = f"{slope.kb_per_epoch:+.2f} kB/epoch\n[{slope.low:+.2f}, {slope.high:+.2f}]: {slope.verdict}"
    ax.text(0.98, 0.03, text, transform=ax.transAxes, ha="right", va="bottom", fontsize=8, color=color)
    return slope


def _files(ax: Axes, runs: pd.DataFrame) -> None:
    for column, style in (("fds_main", "-"), ("fds_children", "--")):
        ax.plot(runs["epoch"], runs[column], style, color=_FILES, linewidth=1.4)
    most = runs[["fds_main", "fds_children"]].to_numpy().max()
    ax.set_ylim(-0.15 * most, 1.35 * most)
    ax.yaxis.set_major_locator(plt.MaxNLocator(2, integer=True))


def _label(figure: Figure, axes: list, n_loaders: int, slopes: dict[str, Slope]) -> None:
    sns.despine(figure)
    for number, (memory, files) in enumerate(zip(axes[::2].flat, axes[1::2].flat, strict=True)):
        if number >= n_loaders:
            memory.axis("off")
            files.axis("off")
        elif number % _COLUMNS == 0:
            memory.set_ylabel("memory, MB\nsince warm-up")
            files.set_ylabel("open\nfiles")
        if n_loaders - _COLUMNS <= number < n_loaders:
            files.set_xlabel("epoch")
            files.tick_params(labelbottom=True)
    flat = [name for name, slope in slopes.items() if slope.verdict in _FLAT]
    honest = len(slopes) - (PLANTED in slopes)
    figure.suptitle(
        f"{len(set(flat) - {PLANTED})} of {honest} loaders: memory flat to within a page ({LIMIT_KB:.1f} kB) an epoch "
        "and process; the leak that was planted is found\n"
        "line: slope with its 95 % interval; gray: warm-up; open files: solid main process, dashed its children",
        fontsize=12,
    )
