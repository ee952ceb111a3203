"""The factors of a frame of runs, and their plot."""

import textwrap
from itertools import cycle, islice
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

METRICS = {
    "images_per_s": "images per second",
    "first_batch_s": "wait for the first batch (s)",
    "steady_s": "wait for the other batches (s)",
    "startup_s": "start-up (s)",
    "cpu_s": "CPU seconds",
    "peak_mem_mb": "peak memory (MB)",
}

# Columns that describe a run, not what was done in it.
_NO_FACTORS = {*METRICS, "baseline", "round", "order", "is_warmup", "n_images", "seed", "env_id", "rung"}

_MOST_LEVELS = 24
_MARKERS = ("D", "o", "s", "^", "v", "P", "X", "*")


def factors_of(runs: pd.DataFrame) -> list[str]:
    """Columns with at least two levels, and few enough to tell apart."""
    found = [name for name in runs if name not in _NO_FACTORS]
    if "cold" not in set(runs["page_cache"]):
        found.remove("page_cache")  # warm in one run and unknown in another: nobody chose it
    return [name for name in found if 2 <= runs[name].nunique(dropna=False) <= min(_MOST_LEVELS, len(runs) - 1)]


def levels_of(runs: pd.DataFrame, factor: str) -> list[Any]:
    """A factor's levels: numbers by size, names in order of appearance."""
    levels = list(dict.fromkeys(runs[factor]))
    numbers = all(isinstance(level, (int, float)) for level in levels)
    return sorted(levels) if numbers else levels


def varies_within(runs: pd.DataFrame, factor: str, other: str) -> bool:
    """Whether `factor` has more than one level where `other` has one."""
    return factor != other and bool(runs.groupby(other, dropna=False)[factor].nunique(dropna=False).max() > 1)


def pooled_over(runs: pd.DataFrame, drawn: list[str | None]) -> list[str]:
    """Factors that vary within the groups that are drawn."""
    groups = runs.groupby(list(dict.fromkeys(name for name in drawn if name)))
    others = [name for name in factors_of(runs) if name not in drawn]
    return [name for name in others if runs.empty or groups[name].nunique().max() > 1]


def plot_runs(
    data: pd.DataFrame,
    *,
    x: str,
    hue: str | None = None,
    metric: str = "images_per_s",
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """A measured column by one or two factors: every run as a dot, the median of each group as a marker.

    Args:
        data: Runs, as `compare` gives them.
        x: Factor along the axis.
        hue: Factor in colors and markers.
        metric: Measured column. Where it spans more than a factor of 20, the axis is logarithmic.
        **kwargs: To `seaborn.stripplot`.
    """
    ax = ax or plt.subplots(figsize=(7.5, 4), layout="constrained")[1]
    if data.empty:
        ax.text(0.5, 0.5, "no run has these levels", ha="center", transform=ax.transAxes)
        ax.set(xticks=[], yticks=[])
        return ax
    hue = None if hue == x else hue
    names = levels_of(data, x)
    groups = {"data": data, "x": x, "y": metric, "order": names, "ax": ax, **_colors(data, hue)}
    sns.stripplot(**groups, dodge=hue is not None, legend=False, **{"size": 4, "alpha": 0.45, **kwargs})
    _medians(groups, data, hue)
    spans = data[metric].max() > 20 * data[metric].min() > 0
    ax.set(yscale="log") if spans else ax.set_ylim(0, None)
    ax.set_xticks(range(len(names)), [textwrap.fill(str(name), 13) for name in names], fontsize="small")
    ax.set(xlabel=x, ylabel=METRICS[metric] + (", logarithmic" if spans else ""))
    return ax


def _colors(data: pd.DataFrame, hue: str | None) -> dict[str, Any]:
    if hue is None:
        return {"color": sns.color_palette("colorblind")[0]}
    levels = levels_of(data, hue)
    return {
        "hue": hue,
        "hue_order": levels,
        "palette": list(islice(cycle(sns.color_palette("colorblind")), len(levels))),
    }


def _medians(groups: dict[str, Any], data: pd.DataFrame, hue: str | None) -> None:
    n = len(groups["hue_order"]) if hue else 1
    style = {"estimator": "median", "errorbar": None, "linestyle": "none", "markersize": 7}
    markers = list(islice(cycle(_MARKERS), n)) if hue else _MARKERS[0]
    sns.pointplot(**groups, dodge=0.8 - 0.8 / n if n > 1 else False, markers=markers, **style)
    if hue:
        sns.move_legend(groups["ax"], "center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
