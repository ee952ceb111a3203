"""Plots of runs, `f(data, *, ax=None) -> Axes`: raw runs lie under the estimates, the title says the result.

All figures look alike: one width, text that can be read at 600 pixels, one set of colors, marks, titles and legends.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import fill, wrap
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import blended_transform_factory

from labkit.measure.frames import measured_runs
from labkit.measure.intervals import format_ratio
from labkit.measure.recorder import guesses, unmarked
from labkit.measure.statistics import (
    are_interleaved,
    describe,
    paired_ratios,
    quiet_summary,
)
from labkit.util.arguments import require_a
from labkit.util.machine import told_of_own_photos
from labkit.util.process import warn_caller

WIDTH_IN = 7.0  # of every figure: on a page 600 pixels wide the smallest text is then 10.7 pixels high
SMALL_PT = 9.0  # the smallest text

# Without its colors a plot can still be read: whatever colors tell apart, hatches tell apart, too.
COLORS = sns.color_palette("colorblind")
HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++", "oo", "||", "**")
RUNS, ESTIMATE, GUESS, LIMIT = "0.6", COLORS[0], COLORS[1], COLORS[3]

_TITLE_PT = 10.0
_NAME_WIDTH = 28  # characters in a line
_CHARACTERS_PER_IN = 126  # of text of one point that fit into an inch, in a usual sentence


def make_axes(height_in: float = 1.4, *, rows: float = 0) -> Axes:
    """The axes of a new figure of the usual width, with room for `rows` rows."""
    return plt.subplots(figsize=(WIDTH_IN, height_in + 0.5 * rows), layout="constrained")[1]


def name_rows(ax: Axes, labels: Iterable[str]) -> None:
    """Label the rows of an axis, the first one on top; long labels are broken, so that the plot keeps its width."""
    lines = ["\n".join(fill(line, _NAME_WIDTH) for line in str(label).split("\n")) for label in labels]
    ax.set_yticks(range(len(lines)), lines)
    ax.set(ylabel="", ylim=(len(lines) - 0.4, -0.6))


def characters_per_line(width_in: float, points: float) -> int:
    """How many characters of text of a size fit into a width."""
    return max(12, int(width_in * _CHARACTERS_PER_IN / points))


def write_title(target: Axes | Figure, text: str, *, of_photos: bool = True) -> Text:
    """Write what a plot shows above it, from the left edge of the figure, in as many lines as it takes.

    Args:
        target: Axes, or a figure whose axes share the title.
        text: A sentence computed from what is drawn. An empty one removes the title.
        of_photos: Whether it was measured with photos, which are the reader's own where `LABKIT_PHOTOS` names some.
    """
    told = told_of_own_photos()
    words = " ".join([*text.split(), *([f"({told})"] if text and of_photos and told else [])])
    if isinstance(target, Figure):
        lines = wrap(words, characters_per_line(target.get_figwidth(), _TITLE_PT), break_on_hyphens=False)
        return target.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=_TITLE_PT)
    figure = target.figure
    in_column = len({round(ax.get_position().x0, 2) for ax in figure.axes}) == 1
    width_in = figure.bbox.width / figure.dpi * (1 if in_column else target.get_position().width)
    aside = target.get_title("right")  # of `mark_simulated`
    n_characters = characters_per_line(width_in, _TITLE_PT) - len(f"{aside}  " if aside else "")
    lines = wrap(words, n_characters, break_on_hyphens=False)
    right = _write_aside(target, aside)
    title = target.set_title("\n".join(lines), loc="left", fontsize=_TITLE_PT, pad=6 + _height_above(target))
    if in_column:
        for each, x in ((title, 0.01), (right, 0.99)):
            each.set_transform(blended_transform_factory(figure.transSubfigure, each.get_transform()))
            each.set_x(x)
    return title


def _height_above(ax: Axes) -> float:
    """Points that labels of lines take above the axes."""
    labels = [text for text in ax.texts if isinstance(text, Annotation) and text.xycoords == ("data", "axes fraction")]
    return max([text.xyann[1] * (text.anncoords == "offset points") + 1.2 * SMALL_PT for text in labels], default=0.0)


def mark_simulated(ax: Axes) -> None:
    """Say on a plot, before its title is written, that its device is simulated: by a word and a background."""
    ax.set_facecolor("#f3eefb")
    _write_aside(ax, "simulated")


def _write_aside(ax: Axes, word: str) -> Text:
    return ax.set_title(word, loc="right", fontsize=_TITLE_PT, color="rebeccapurple", pad=6 + _height_above(ax))


def put_legend_below(ax: Axes, *, columns: int = 3, side: str = "center") -> None:
    """Put the legend under the axis label, where no data are.

    Args:
        columns: Entries side by side.
        side: "center", or "right": it then grows leftwards, under the labels of the rows.
    """
    style: dict[str, Any] = {"loc": f"upper {side}", "bbox_to_anchor": (1 if side == "right" else 0.5, 0)}
    style |= {"frameon": False, "fontsize": SMALL_PT, "ncols": columns, "labelspacing": 0.25}
    style["borderaxespad"] = 4.4  # in font sizes: below the axis label, however high the axes are
    handles, labels = ax.get_legend_handles_labels()
    marks = dict(zip(labels, handles, strict=True))  # each once
    ax.legend(marks.values(), marks.keys(), **style)


def plot_speedup(
    data: pd.DataFrame,
    *,
    ax: Axes | None = None,
    title: str = "",
    baseline: str | None = None,
    ceiling: float | None = None,
) -> Axes:
    """Speed-up of each variant over the baseline: the ratio of every round as a dot, its mean with a 95 % interval.

    An open square means that the interval contains 1. An interval that is much wider than the rounds are apart, as that
    of two rounds can be, runs out of the picture. Guesses made with `course.predict` are drawn as triangles.

    Args:
        data: Runs, as `compare` gives them.
        title: Default: how many times as fast a variant is, and of which it is.
        baseline: Default: the frame's own.
        ceiling: Speed-up that no loader can exceed here, drawn as a dashed line.

    >>> lk.plot_speedup(runs)  # doctest: +SKIP
    """
    summary, runs = quiet_summary(data, baseline), measured_runs(data)
    base = summary.index[summary["verdict"] == "baseline"][0]
    others = summary.drop(index=base)
    ax = ax or make_axes(rows=len(others) + 1.6)  # with the legend
    marks = [1.0, *others["speedup"], *([] if ceiling is None else [ceiling])]
    for row, (label, estimate) in enumerate(others.iterrows()):
        marks.extend(_draw_comparison(ax, row, runs, (label, base), estimate))
        if guess := guesses.get(label):
            style: dict[str, Any] = {"marker": "v", "s": 70, "color": GUESS, "zorder": 4, "label": "your prediction"}
            ax.scatter(guess.speedup, row - 0.28, **style)
            marks.append(guess.speedup)
            unmarked.discard(label)
    _warn_of_misspelt(list(others.index))
    name_rows(ax, others.index)
    ax.set(xlabel=f"speed-up over {base} (x)")
    _draw_line(ax, 1, "1x", color="0.3", linestyle="-", side="right")
    if ceiling is not None:
        _draw_line(ax, ceiling, f"ceiling {format_ratio(ceiling)}x", color=LIMIT, linestyle="--", side="left")
    reach = max(max(marks) - min(marks), 0.05)  # wide enough for all marks and for all but very long intervals
    low, high = ax.get_xlim()
    ax.set_xlim(max(low, min(marks) - reach, -0.03 * (max(marks) + reach)), min(high, max(marks) + reach))

    put_legend_below(ax, columns=2, side="right")
    write_title(ax, title or describe(others, base))
    return ax


def _warn_of_misspelt(labels: list[str]) -> None:
    """Warn of predictions that no plot has shown and whose label is almost that of a variant here."""
    for label in sorted(name for name in unmarked if guesses.get(name) and name not in labels):
        if similar := get_close_matches(label, labels, n=1):
            unmarked.discard(label)
            warn_caller(
                f"you predicted {label!r}, and no variant has that name: if {similar[0]!r} is meant, pass it to "
                "course.predict",
                UserWarning,
            )


_SPAN_KINDS = ("load", "wait", "copy", "step", "compute")
_WORK = ("compute", "step")  # kinds of spans that training is for


def plot_timeline(data: pd.DataFrame, *, ax: Axes | None = None, title: str = "", **kwargs: Any) -> Axes:
    """Spans on a time axis, one row per lane: who worked when. The title says how much of the time training computes.

    Args:
        data: One row per span: `lane`, `kind`, `start_s`, `end_s`; if it says `simulated`, so does the plot.
        title: Default: the share of the time for which the last lane works.
        **kwargs: To `Axes.broken_barh`.
    """
    lanes = list(dict.fromkeys(data["lane"]))
    ax = ax or make_axes(rows=len(lanes))
    # Each kind has the same color and hatch in every timeline.
    for number, kind in enumerate(dict.fromkeys([*_SPAN_KINDS, *data["kind"]])):
        style: dict[str, Any] = {"facecolors": COLORS[number % 10], "hatch": HATCHES[number % 10]}
        style |= {"edgecolor": "white", "label": kind, **kwargs}
        for lane, spans in data[data["kind"] == kind].groupby("lane", sort=False):
            bars = list(zip(spans["start_s"], spans["end_s"] - spans["start_s"], strict=True))
            ax.broken_barh(bars, (lanes.index(lane) - 0.35, 0.7), **style)
            style["label"] = None  # one entry of the legend
    name_rows(ax, lanes)
    ax.set(xlabel="time (s)", xlim=(0, None))
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    if "simulated" in data and data["simulated"].any():
        mark_simulated(ax)

    # The lane to speak of does the work that training is for, if there is one.
    spans = next((found for kind in _WORK if len(found := data[data["kind"] == kind])), data)
    lane, kind = spans[["lane", "kind"]].iloc[-1]
    spans = spans[(spans["lane"] == lane) & (spans["kind"] == kind)].sort_values("start_s")
    covered_to = spans["end_s"].astype(float).cummax().shift(fill_value=-np.inf)  # spans may overlap
    working_s = (spans["end_s"] - np.maximum(spans["start_s"], covered_to)).clip(lower=0).sum()
    total_s = data["end_s"].max() - data["start_s"].min()
    told = f"{lane}: {kind} {working_s / total_s if total_s else 0:.0%} of {total_s:.3g} s"
    write_title(ax, title or told, of_photos="simulated" not in data or not data["simulated"].any())
    return ax


def plot_stalls(data: pd.DataFrame, *, ax: Axes | None = None, title: str = "") -> Axes:
    """Where the time goes: one stacked bar per variant, with its stages in order. The title says the largest stage.

    Args:
        data: One row per stage: `variant`, `stage`, `seconds`.
        title: Default: the largest stage.

    >>> clock = lk.StageClock()  # doctest: +SKIP
    >>> lk.plot_stalls(clock.frame("naive"))  # doctest: +SKIP
    """
    require_a(pd.DataFrame, "data", data, "a frame of stages, as lk.StageClock().frame() gives it")
    table = data.pivot_table(index="variant", columns="stage", values="seconds", aggfunc="sum", sort=False).fillna(0)
    totals = table.sum(axis=1)
    ax = ax or make_axes(rows=len(table) + 0.5 * -(-len(table.columns) // 4))  # four stages in a line of the legend
    left = np.zeros(len(table))
    # Shares stand inside the bars on a plain background: numbers on hatches are hard to read.
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}
    text["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for number, stage in enumerate(table.columns):
        width = table[stage].to_numpy()
        style = {"color": COLORS[number % 10], "hatch": HATCHES[number % 10], "edgecolor": "white"}
        ax.barh(range(len(table)), width, left=left, height=0.6, label=stage, **style)
        for row in map(int, np.flatnonzero(width > 0.085 * totals.max())):  # in others a number would be too wide
            ax.text(left[row] + width[row] / 2, row, f"{width[row] / totals.iloc[row]:.0%}", **text)
        left += width
    name_rows(ax, table.index)
    ax.set(xlabel="seconds", xlim=(0, 1.05 * left.max() or None))
    put_legend_below(ax, columns=4)
    longest = totals.idxmax()
    stages = table.loc[longest]
    told = f"{longest}: {stages.idxmax()} {stages.max() / (totals.max() or 1):.0%} of the time"
    write_title(ax, title or told)
    return ax


def _draw_comparison(ax: Axes, row: int, runs: pd.DataFrame, pair: tuple, estimate: pd.Series) -> pd.Series:
    """Draw the ratio of each round of a variant and its baseline, and the estimate with its interval, as one row.

    Returns:
        The ratios.
    """
    own, base = (runs[runs["variant"] == label] for label in pair)
    is_paired = are_interleaved(own, base)
    ratios = paired_ratios(own, base)["speedup"] if is_paired else own["images_per_s"] / base["images_per_s"].median()
    jitter = np.linspace(-0.12, 0.12, len(ratios)) if len(ratios) > 1 else np.zeros(1)
    meaning = "one round" if is_paired else "one run, over the median of the baseline's"
    ax.scatter(ratios, row + jitter, s=16, color=RUNS, zorder=2, label=meaning)
    speedup, low, high, verdict = estimate[["speedup", "ci_low", "ci_high", "verdict"]]
    has_interval = not np.isnan([low, high]).any()
    # An infinite end could not be drawn as a line that leaves the picture.
    reach = [[max(0, speedup - low)], [max(0, min(high, 1e100) - speedup)]] if has_interval else None
    doubt = "it contains 1" if has_interval else "one round has none"
    is_open = verdict == "inconclusive"
    marker, face, meaning = ("s", "white", f'"?": inconclusive, {doubt}') if is_open else ("o", ESTIMATE, "_nolegend_")
    style: dict[str, Any] = {"color": ESTIMATE, "markerfacecolor": face, "markersize": 8, "capsize": 4}
    drawn = ax.errorbar(speedup, row, xerr=reach, fmt=marker, zorder=3, **style)
    drawn.lines[0].set_label(meaning)
    for bar in drawn.lines[2]:
        bar.set_label("95 % interval of this session")
    beside = f"{speedup:.2f}x ?" if is_open else f"{format_ratio(speedup)}x"
    ax.annotate(beside, (1.01, row), xycoords=("axes fraction", "data"), va="center")
    return ratios


def _draw_line(ax: Axes, x: float, label: str, *, color: Any, linestyle: str, side: str) -> None:
    """Draw a line whose label stands with its `side` at the line, since labels of two close lines must not meet."""
    ax.axvline(x, color=color, linestyle=linestyle, linewidth=1.2, zorder=1)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": side, "va": "bottom"}
    ax.annotate(label, (x, 1.0), **place, color=color, fontsize=SMALL_PT)
