"""The plot of compare_peers: every loader in its class, with the limit for what it reads."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.measure import measured_runs
from labkit.peers.peer import RAW_PIXELS
from labkit.peers.table import class_of, peer_table

_COLORS = sns.color_palette("colorblind")
_STYLES = {
    "labkit": {"marker": "D", "color": _COLORS[0]},
    "peer": {"marker": "o", "color": _COLORS[2]},
    "baseline": {"marker": "s", "color": "0.4"},
}
_LIMIT_COLOR = _COLORS[3]


def plot_peers(frame: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Images per second of each loader, by class: each run as a small dot, the median as a large marker.

    The dashed lines of a class are limits of these cores: decoding whole images alone, reading their Huffman codes
    alone, copying or writing the batches alone.
    The scale is logarithmic: equal distances are equal ratios.

    Args:
        frame: Runs as `compare_peers` returns them.
        **kwargs: Passed to `Axes.scatter` for the medians.

    Taught in: notebooks/13_peers.ipynb
    """
    return draw_table(peer_table(frame), frame, ax=ax, **kwargs)


def draw_table(table: pd.DataFrame, frame: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """`plot_peers` for whoever has the table of `peer_table` already, which takes its time."""
    loaders, limits = table[table["kind"] != "limit"], table[table["kind"] == "limit"]
    groups = group_by_class(loaders)
    n_rows = len(loaders) + len(groups)
    ax = ax or plt.subplots(figsize=(8.5, 0.8 + 0.3 * n_rows), layout="constrained")[1]
    labels: list[str] = []
    for title, members in groups.items():
        _draw_limit(ax, limits, members, len(labels))
        labels.append(title)
        for name, loader in members.iterrows():
            _draw_loader(ax, len(labels), loader, frame[frame["variant"] == name], **kwargs)
            labels.append(name)
    _label_axes(ax, labels, groups)
    return ax


def group_by_class(loaders: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each class, in the order of `loaders`; JPEG before raw pixels."""
    classes = [class_of(*pair) for pair in zip(loaders["source"], loaders["antialias"], strict=True)]
    return dict(list(loaders.groupby(classes)))


def _draw_loader(ax: Axes, row: int, loader: pd.Series, runs: pd.DataFrame, **kwargs: Any) -> None:
    rates = measured_runs(runs)["images_per_s"]
    ax.scatter(rates, [row] * len(rates), s=14, color="0.65", zorder=2)
    ax.scatter(loader["images_per_s"], row, **{"s": 42, "zorder": 3, **_STYLES[loader["kind"]], **kwargs})
    text = f"{loader['images_per_s']:,.0f}"
    ax.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize="small")


def _draw_limit(ax: Axes, limits: pd.DataFrame, members: pd.DataFrame, row: int) -> None:
    """The limit of the class whose rows begin at `row`."""
    is_raw = members["source"].iloc[0] == RAW_PIXELS
    rates = limits.loc[(limits["source"] == RAW_PIXELS) == is_raw, "images_per_s"].sort_values()
    for number, (name, rate) in enumerate(rates.items()):
        ax.plot([rate, rate], [row - 0.3, row + len(members) + 0.4], color=_LIMIT_COLOR, linestyle="--", zorder=1)
        side = "left" if number else "right"  # a higher limit may stand close by
        ax.annotate(f" {name} {rate:,.0f} ", (rate, row), ha=side, va="center", color=_LIMIT_COLOR, fontsize="small")


def _label_axes(ax: Axes, labels: list[str], groups: dict[str, pd.DataFrame]) -> None:
    ax.set_yticks(range(len(labels)), labels)
    for label in ax.get_yticklabels():
        if label.get_text() in groups:
            label.set_fontweight("bold")
    ax.set(xscale="log", xlabel="images per second (logarithmic)", ylabel="", ylim=(len(labels) - 0.4, -0.7))
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * (right / left) ** 0.2)  # room for the name of the highest limit
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right / left < 100 else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="x", alpha=0.3)
    for kind, style in _STYLES.items():
        ax.scatter([], [], label={"baseline": "naive baseline"}.get(kind, kind), **style)
    below = (0.5, -1.5 / len(labels) - 0.02)
    ax.legend(loc="upper center", bbox_to_anchor=below, ncols=3, frameon=False, fontsize="small")
