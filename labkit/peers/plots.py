"""The plot of compare_peers: every loader in its class, with the limit for what it reads."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.measure import (
    COLORS,
    LIMIT,
    SMALL_PT,
    format_ratio,
    make_axes,
    measured_runs,
    put_legend_below,
    quiet_summary,
    write_title,
)  # fmt: skip
from labkit.peers.peer import RAW_PIXELS
from labkit.peers.table import class_of, peer_table

_STYLES = {
    "labkit": {"marker": "D", "color": COLORS[0]},
    "peer": {"marker": "o", "color": COLORS[2]},
    "baseline": {"marker": "s", "color": "0.4"},
}


def plot_peers(frame: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any) -> Axes:
    """Images per second of each loader, by class: each run as a small dot, the median as a large marker.

    The title compares the fastest two of the largest class.

    The dashed lines of a class are limits of these cores: decoding whole images alone, reading their Huffman codes
    alone, copying or writing the batches alone.
    The scale is logarithmic: equal distances are equal ratios.

    Args:
        frame: Runs as `compare_peers` returns them.
        about: What was compared; the title begins with it.
        **kwargs: Passed to `Axes.scatter` for the medians.

    Taught in: notebooks/13_peers.ipynb
    """
    return draw_table(peer_table(frame), frame, ax=ax, about=about, **kwargs)


def draw_table(
    table: pd.DataFrame, frame: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any
) -> Axes:
    """`plot_peers` for whoever has the table of `peer_table` already, which takes its time."""
    loaders, limits = table[table["kind"] != "limit"], table[table["kind"] == "limit"]
    groups = group_by_class(loaders)
    n_rows = len(loaders) + len(groups)
    ax = ax or make_axes(1.1 + 0.28 * n_rows)
    labels: list[str] = []
    for title, members in groups.items():
        _draw_limit(ax, limits, members, len(labels))
        labels.append(title)
        for name, loader in members.iterrows():
            _draw_loader(ax, len(labels), loader, frame[frame["variant"] == name], **kwargs)
            labels.append(name)
    _label_axes(ax, labels, groups)
    message = _tell_fastest(frame, max(groups.values(), key=len))
    write_title(ax, f"{about}: {message}" if about else message)
    return ax


def _tell_fastest(frame: pd.DataFrame, members: pd.DataFrame) -> str:
    """The fastest loader of a class, beside the next; inconclusive if its runs cannot tell them apart."""
    ordered = members.sort_values("images_per_s", ascending=False).index
    if len(ordered) == 1:
        return f"{ordered[0]}: {members.loc[ordered[0], 'images_per_s']:,.0f} images per second"
    row = quiet_summary(frame, ordered[1]).loc[ordered[0]]
    doubt = ", inconclusive" if row["ci_low"] <= 1 <= row["ci_high"] else ""  # frames of peers carry no verdict
    return f"{ordered[0]}: {format_ratio(row['speedup'])}x of {ordered[1]}{doubt}"


def group_by_class(loaders: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows of each class, in the order of `loaders`; JPEG before raw pixels."""
    classes = [class_of(*pair) for pair in zip(loaders["source"], loaders["antialias"], strict=True)]
    return dict(list(loaders.groupby(classes)))


def _draw_loader(ax: Axes, row: int, loader: pd.Series, runs: pd.DataFrame, **kwargs: Any) -> None:
    rates = measured_runs(runs)["images_per_s"]
    ax.scatter(rates, [row] * len(rates), s=14, color="0.65", zorder=2)
    ax.scatter(loader["images_per_s"], row, **{"s": 42, "zorder": 3, **_STYLES[loader["kind"]], **kwargs})
    text = f"{loader['images_per_s']:,.0f}"
    ax.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL_PT)


def _draw_limit(ax: Axes, limits: pd.DataFrame, members: pd.DataFrame, row: int) -> None:
    """The limit of the class whose rows begin at `row`."""
    is_raw = members["source"].iloc[0] == RAW_PIXELS
    rates = limits.loc[(limits["source"] == RAW_PIXELS) == is_raw, "images_per_s"].sort_values()
    for number, (name, rate) in enumerate(rates.items()):
        ax.plot([rate, rate], [row - 0.3, row + len(members) + 0.4], color=LIMIT, linestyle="--", zorder=1)
        side = "left" if number else "right"  # a higher limit may stand close by
        ax.annotate(f" {name} {rate:,.0f} ", (rate, row), ha=side, va="center", color=LIMIT, fontsize=SMALL_PT)


def _label_axes(ax: Axes, labels: list[str], groups: dict[str, pd.DataFrame]) -> None:
    ax.set_yticks(range(len(labels)), labels)
    for label in ax.get_yticklabels():
        if label.get_text() in groups:
            label.set_fontweight("bold")
    ax.set(xscale="log", xlabel="images per second (logarithmic)", ylabel="", ylim=(len(labels) - 0.4, -0.7))
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * (right / left) ** 0.45)  # room for the name of the highest limit
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right / left < 100 else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="x", alpha=0.3)
    for kind, style in _STYLES.items():
        ax.scatter([], [], label={"baseline": "naive baseline"}.get(kind, kind), **style)
    put_legend_below(ax)
