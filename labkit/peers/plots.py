"""The plot of compare_peers: every loader in its class, with the limit of what it reads."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from labkit.peers.peer import RAW_PIXELS
from labkit.peers.table import class_of, peer_table

_COLORS = sns.color_palette("colorblind")
_KINDS = {"labkit": _COLORS[0], "peer": _COLORS[2], "baseline": "0.4"}
_MARKERS = {"labkit": "D", "peer": "o", "baseline": "s"}
_LIMIT = _COLORS[3]


def plot_peers(frame: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Images per second of each loader, by class: every run as a small dot, the median as a large mark.

    The dashed line of a class is what nothing that does its whole work can exceed on these cores: decoding alone, or
    copying alone. The scale is logarithmic: equal distances are equal ratios.

    Args:
        frame: Runs, as `compare_peers` gives them.
        **kwargs: To the medians' `Axes.scatter`.

    Taught in: notebooks/13_peers.ipynb
    """
    table = peer_table(frame)
    loaders, limits = table[table["kind"] != "limit"], table[table["kind"] == "limit"]
    groups = grouped(loaders)
    n_lines = len(loaders) + len(groups)
    ax = ax or plt.subplots(figsize=(8.5, 0.8 + 0.3 * n_lines), layout="constrained")[1]
    row, names = 0, {}
    for title, members in groups.items():
        names[row] = title
        _draw_limit(ax, limits, members, row)
        for name in members.index:
            row += 1
            names[row] = name
            _draw_loader(ax, row, table.loc[name], frame[frame["variant"] == name], **kwargs)
        row += 1
    _label(ax, names, groups, row)
    return ax


def grouped(loaders: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Loaders of each class, the fastest first; JPEG before raw pixels."""
    classes = pd.Series([class_of(*pair) for pair in zip(loaders["source"], loaders["antialias"], strict=True)])
    return {title: loaders[(classes == title).to_numpy()] for title in sorted(classes.unique())}


def _draw_loader(ax: Axes, row: int, loader: pd.Series, runs: pd.DataFrame, **kwargs: Any) -> None:
    rates = runs.loc[~runs["is_warmup"].astype(bool), "images_per_s"]
    ax.scatter(rates, [row] * len(rates), s=14, color="0.65", zorder=2)
    kind = loader["kind"]
    style = {"marker": _MARKERS[kind], "s": 42, "color": _KINDS[kind], "zorder": 3}
    ax.scatter(loader["images_per_s"], row, **{**style, **kwargs})
    text = f"{loader['images_per_s']:,.0f}"
    ax.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize="small")


def _draw_limit(ax: Axes, limits: pd.DataFrame, members: pd.DataFrame, row: int) -> None:
    """The limit of the class that begins at `row`, over its rows."""
    raw = members["source"].iloc[0] == RAW_PIXELS
    own = limits[(limits["source"] == RAW_PIXELS) == raw]
    for name, limit in own.iterrows():
        rate = limit["images_per_s"]
        ax.plot([rate, rate], [row - 0.3, row + len(members) + 0.4], color=_LIMIT, linestyle="--", zorder=1)
        text = f"{name} {rate:,.0f} "
        ax.annotate(text, (rate, row), ha="right", va="center", color=_LIMIT, fontsize="small")


def _label(ax: Axes, names: dict[int, str], groups: dict[str, pd.DataFrame], n_rows: int) -> None:
    ax.set_yticks(list(names), list(names.values()))
    for label in ax.get_yticklabels():
        if label.get_text() in groups:
            label.set_fontweight("bold")
    ax.set(xscale="log", xlabel="images per second (logarithmic)", ylabel="", ylim=(n_rows - 0.4, -0.7))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.grid(axis="x", alpha=0.3)
    for kind, color in _KINDS.items():
        label = {"baseline": "naive baseline"}.get(kind, kind)
        ax.scatter([], [], marker=_MARKERS[kind], color=color, label=label)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / n_rows - 0.06), ncols=3, frameon=False, fontsize="small")
