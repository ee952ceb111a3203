"""Plots of runs, `f(data, *, ax=None, **kwargs) -> Axes`: raw runs lie under the estimates, the title says the result.

All figures look alike: one width, text that can be read at 600 pixels, one set of colors, marks, titles and legends.
"""

from collections.abc import Iterable
from contextlib import suppress
from textwrap import fill, wrap
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

from labkit.errors import ArgumentError
from labkit.measure.frames import measured_runs
from labkit.measure.recorder import guesses, keep_outcome
from labkit.measure.statistics import (
    are_interleaved,
    conclude,
    format_ratio,
    most_telling,
    paired_ratios,
    quiet_summary,
    simulated_storage,
    tell_doubt,
    tell_ratio,
)
from labkit.util.arguments import require_choice

WIDTH_IN = 7.0  # of every figure: on a page 600 pixels wide the smallest text is then 10.7 pixels high
SMALL_PT = 9.0  # the smallest text

# Without its colors a plot can still be read: whatever colors tell apart, marks or hatches tell apart, too.
COLORS = sns.color_palette("colorblind")
HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++", "oo", "||", "**")
MARKERS = ("D", "o", "s", "^", "v", "P", "X", "*")
RUNS, ESTIMATE, GUESS, LIMIT = "0.6", COLORS[0], COLORS[1], COLORS[3]
PREDICTED = "mediumpurple"  # bars of what was not measured
_NOT_MEASURED = "#f3eefb"  # its background
_NOT_MEASURED_INK = "rebeccapurple"

_TITLE_PT = 10.0
_NAME_WIDTH = 28  # characters in a line
_CHARACTERS_PER_IN = 126  # of text of one point: so many of a usual sentence fit into an inch


def make_axes(height_in: float) -> Axes:
    """The axes of a new figure of the usual width."""
    return plt.subplots(figsize=(WIDTH_IN, height_in), layout="constrained")[1]


def name_rows(ax: Axes, labels: Iterable[str]) -> None:
    """Label the rows of an axis; a long label is broken, so that the plot itself keeps most of the width."""
    lines = ["\n".join(fill(line, _NAME_WIDTH) for line in str(label).split("\n")) for label in labels]
    ax.set_yticks(range(len(lines)), lines)


def characters_per_line(width_in: float, points: float) -> int:
    """How many characters of text of a size fit into a width."""
    return max(12, int(width_in * _CHARACTERS_PER_IN / points))


def write_title(target: Axes | Figure, text: str) -> Text:
    """Write what a plot shows above it, from the left edge of the figure, in as many lines as it takes.

    Args:
        target: Axes, or a figure whose axes share the title. Axes beside others have their title to themselves.
        text: A sentence computed from what is drawn. An empty one removes the title.
    """
    words = " ".join(text.split())
    if isinstance(target, Figure):
        lines = wrap(words, characters_per_line(target.get_figwidth(), _TITLE_PT))
        return target.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=_TITLE_PT)
    figure = target.figure
    all_in = figure.bbox.width / figure.dpi
    in_column = len({round(ax.get_position().x0, 2) for ax in figure.axes}) == 1
    width = all_in * (1 if in_column else target.get_position().width)
    taken = len(target.get_title("right"))
    lines = wrap(words, characters_per_line(width, _TITLE_PT) - (taken and taken + 2), break_on_hyphens=False)
    title = target.set_title("\n".join(lines), loc="left", fontsize=_TITLE_PT, pad=6 + _height_above(target))
    if in_column:
        title.set_transform(blended_transform_factory(figure.transSubfigure, title.get_transform()))
        title.set_x(0.01)
    return title


def _height_above(ax: Axes) -> float:
    """Points that labels of lines take above the axes."""
    heights = [
        float(text.xyann[1]) * (text.anncoords == "offset points") + 1.2 * float(text.get_fontsize())
        for text in ax.texts
        if isinstance(text, Annotation) and text.xycoords == ("data", "axes fraction") and text.xy[1] >= 1
    ]
    return max(heights, default=0.0)


def mark_simulated(ax: Axes, word: str = "simulated") -> None:
    """Say on a plot that nothing in it was measured: the word, and a background that no other plot has."""
    ax.set_facecolor(_NOT_MEASURED)
    ax.set_title(word, loc="right", fontsize=_TITLE_PT, color=_NOT_MEASURED_INK, pad=6 + _height_above(ax))
    if title := ax.get_title("left"):
        write_title(ax, title)


def put_legend_below(ax: Axes, *, columns: int = 3, **options: Any) -> None:
    """Put the legend under the axis label, where no data are.

    Args:
        columns: Entries side by side.
        **options: Passed to `Axes.legend`.
    """
    style: dict[str, Any] = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, 0),
        "borderaxespad": 4.2,  # in font sizes: below the axis label, whatever the height of the axes
        "frameon": False,
        "fontsize": SMALL_PT,
        "ncols": columns,
        "labelspacing": 0.25,
    }
    handles, labels = ax.get_legend_handles_labels()
    marks = dict(zip(labels, handles, strict=True))  # each once
    ax.legend(marks.values(), marks.keys(), **{**style, **options})


def ink_on(color: Any) -> str:
    """Black or white, whichever has the larger contrast with a background (WCAG 2.2, relative luminance).

    Source: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance
    """
    parts = np.asarray(to_rgb(color))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "white"


_LEGEND_ROWS = 2.1  # its height, in rows of variants
_SENTENCE_ROWS = 0.7

_ENDLESS = 1e100  # an infinite end could not be drawn as a line that leaves the picture
_LOG_REACH = 10  # how far an interval is drawn beyond the outermost estimates, as a ratio

_SPAN_KINDS = ("load", "wait", "copy", "step", "compute")
_WORK = ("compute", "step")  # kinds of spans that training is for
_AXIS_LABELS = {
    "images_per_s": "images per second",
    "cpu_s_per_1000": "CPU seconds per 1000 images",
    "peak_mem_mb": "peak memory (MB)",
}


def plot_throughput(
    data: pd.DataFrame, *, ax: Axes | None = None, about: str = "", ceiling: float | None = None, **kwargs: Any
) -> Axes:
    """Images per second of each variant: every run as a dot, the median as a bar. The title says the highest.

    Args:
        data: Runs, as `compare` gives them.
        about: What was measured; the title begins with it.
        ceiling: Images/s that no loader can exceed here (a `ReplayLoader`'s rate), drawn as a dashed line.
        **kwargs: To `seaborn.stripplot`.
    """
    runs = measured_runs(data)
    ax = ax or _make_axes(runs["variant"].nunique())
    medians = runs.groupby("variant", sort=False)["images_per_s"].median()
    ax.barh(range(len(medians)), medians, height=0.62, color=ESTIMATE, alpha=0.35, zorder=1)
    ax.scatter(medians, range(len(medians)), marker="|", s=500, linewidth=3, color=ESTIMATE, zorder=3)
    sns.stripplot(
        runs, x="images_per_s", y="variant", order=list(medians.index), ax=ax, **{"color": RUNS, "size": 4, **kwargs}
    )
    name_rows(ax, [_title(label, runs) for label in medians.index])
    for row, value in enumerate(medians):
        ax.annotate(f"{value:,.0f}", (1.01, row), xycoords=("axes fraction", "data"), va="center")
    if ceiling is not None:
        _draw_line(ax, ceiling, f"ceiling {ceiling:,.0f}")
    ax.set(xlabel="images per second", ylabel="", xlim=(0, None))
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter("{x:,.6g}")
    best, worst = str(medians.idxmax()), str(medians[::-1].idxmin())  # two variants, even if all are equal
    told = f"{best}: {medians.max():,.0f} per second"
    if best != worst:
        told += f", {format_ratio(medians.max() / medians.min())}x of {worst}"
        with suppress(ValueError):  # runs of several machines have no verdict
            is_doubtful = quiet_summary(data, worst).loc[best, "verdict"] == "inconclusive"
            told += ", inconclusive" if is_doubtful else ""
    write_title(ax, _join(about, told))
    return ax


def plot_speedup(
    data: pd.DataFrame,
    *,
    ax: Axes | None = None,
    about: str = "",
    baseline: str | None = None,
    ceiling: float | None = None,
    xscale: str = "linear",
    **kwargs: Any,
) -> Axes:
    """Speed-up of each variant over the baseline: the ratio of every round as a dot, its mean with a 95 % interval.

    The title is the ratio to speak of, and the sentence of `conclude` stands below. An open square means that the
    verdict is inconclusive, a diamond that there is none: the legend says so. Where an interval is much wider than the
    rounds are apart, as that of two rounds can be, the rounds set the axis, and an arrow says that the interval goes
    on. Guesses made with `course.predict` are drawn as triangles and compared with the measurement: `course.score`
    tells how good they were.

    Args:
        data: Runs, as `compare` gives them.
        about: What was measured; the title begins with it.
        baseline: Default: the frame's own.
        ceiling: Speed-up that no loader can exceed here, drawn as a dashed line.
        xscale: "linear" or "log", for ratios of several orders of magnitude.
        **kwargs: To the estimate's `Axes.errorbar`.
    """
    summary = quiet_summary(data, baseline)
    base = summary.index[summary["verdict"] == "baseline"][0]
    others = summary.drop(index=base)
    sentence = conclude(data, baseline=base)
    ax = ax or _make_axes(len(others) + _SENTENCE_ROWS + _LEGEND_ROWS)
    runs, marks = measured_runs(data), [1.0, *others["speedup"], *([] if ceiling is None else [ceiling])]
    for row, (label, estimate) in enumerate(others.iterrows()):
        marks.extend(_draw_comparison(ax, row, runs, (label, base), estimate, **kwargs))
        if guess := guesses.get(label):
            style: dict[str, Any] = {"marker": "v", "s": 70, "color": GUESS, "zorder": 4, "label": "your prediction"}
            ax.scatter(guess.speedup, row - 0.28, **style)
            marks.append(guess.speedup)
        if label in guesses:
            keep_outcome(runs, label, estimate)
    titles = {label: _title(label, runs) for label in summary.index}
    _label_ratios(ax, [titles[label] for label in others.index], f"speed-up over {titles[base]} (x)")
    if ceiling is not None:
        _draw_line(ax, ceiling, f"ceiling {format_ratio(ceiling)}x", side="left")
    if require_choice("xscale", xscale, ("linear", "log")) == "log":
        _use_log_ratios(ax, others)
    else:  # wide enough for all marks and for all but very long intervals
        reach = max(max(marks) - min(marks), 0.05)
        high = max(marks) + reach
        _limit_axis(ax, others, max(min(marks) - reach, -0.03 * high), high)  # no ratio is below 0

    # The sentence stands under the x axis, across the figure, or across the axes if there are others.
    is_alone = len(ax.figure.axes) == 1
    room = ax.figure.bbox if is_alone else ax.bbox
    lines = wrap(sentence, characters_per_line(room.width / ax.figure.dpi, SMALL_PT))
    left, across = (0.01, "figure fraction") if is_alone else (0, "axes fraction")
    place: dict[str, Any] = {"xycoords": (across, ax.xaxis.label), "textcoords": "offset points"}
    ax.annotate("\n".join(lines), (left, 0), (0, -6), **place, va="top", fontsize=SMALL_PT)
    _explain_marks(ax, len(lines))
    best = most_telling(others)
    told = tell_ratio(titles[best], titles[base], others.loc[best]) + tell_doubt(others["verdict"], best)
    write_title(ax, _join(about, told))
    return ax


def plot_ladder(
    data: pd.DataFrame, *, ax: Axes | None = None, rungs: pd.DataFrame | None = None, **kwargs: Any
) -> Axes:
    """The speed-ups measured so far, one rung per experiment: its fastest variant over its own baseline.

    The axis is logarithmic. An interval that ends far from all estimates runs out of the picture, with an arrow.

    Args:
        data: Runs of one or more experiments of one machine, concatenated.
        rungs: `ladder_rungs(data)`, if it is known already.
        **kwargs: To the estimates' `Axes.errorbar`.

    Raises:
        ValueError: no experiment has a variant besides its baseline.
    """
    rungs = ladder_rungs(data) if rungs is None else rungs
    if rungs.empty:
        raise ArgumentError("no experiment has a variant besides its baseline: there is no rung to draw")
    ax = ax or _make_axes(len(rungs) + _LEGEND_ROWS)
    runs = measured_runs(data)
    for row, (_, rung) in enumerate(rungs.iterrows()):
        own = runs[runs["experiment"] == rung["experiment"]]
        _draw_comparison(ax, row, own, (rung["variant"], rung["baseline"]), rung, **kwargs)
    pairs = set(zip(rungs["label"], rungs["baseline_label"], strict=True))
    if len(pairs) == 1 and len(rungs) > 1:  # all compare the same two: the axis names them
        variant, baseline = pairs.pop()
        _label_ratios(ax, list(rungs["experiment"]), f"speed-up of {variant} over {baseline} (x)")
    else:
        labels = [f"{rung.experiment}: {rung.label}\nover {rung.baseline_label}" for rung in rungs.itertuples()]
        _label_ratios(ax, labels, "speed-up over the experiment's own baseline (x)")
    _use_log_ratios(ax, rungs)
    _explain_marks(ax)
    rungs = rungs.reset_index(drop=True)
    best = most_telling(rungs)
    rung = rungs.loc[best]
    told = f"{rung['experiment']}: {tell_ratio(rung['label'], rung['baseline_label'], rung)}"
    write_title(ax, told + tell_doubt(rungs["verdict"], best))
    return ax


def ladder_rungs(data: pd.DataFrame) -> pd.DataFrame:
    """What `plot_ladder` draws: one row per experiment, with its fastest variant's row of `summarize`."""
    rungs = []
    for experiment, runs in data.groupby("experiment", sort=True):
        summary = quiet_summary(runs, None)
        others = summary[summary["verdict"] != "baseline"]
        if len(others):
            best = others.loc[others["speedup"].idxmax()]
            base = summary.index[summary["verdict"] == "baseline"][0]
            labels = {"label": _title(best.name, runs), "baseline_label": _title(base, runs)}
            rungs.append({"experiment": experiment, "variant": best.name, "baseline": base, **labels, **best})
    return pd.DataFrame(rungs)


def plot_timeline(data: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any) -> Axes:
    """Spans on a time axis, one row per lane: who worked when. The title says how much of the time training computes.

    Args:
        data: One row per span: `lane`, `start_s`, `end_s`; optional `kind` colours them, and `simulated` is said.
        about: What was traced; the title begins with it.
        **kwargs: To `Axes.broken_barh`.
    """
    data = data.reset_index(drop=True)
    lanes = list(dict.fromkeys(data["lane"]))
    kinds = data["kind"] if "kind" in data else pd.Series("busy", index=data.index)
    # Each kind has the same color and hatch in every timeline.
    known = [*_SPAN_KINDS, *(kind for kind in dict.fromkeys(kinds) if kind not in _SPAN_KINDS)]
    ax = ax or _make_axes(len(lanes))
    for row, lane in enumerate(lanes):
        for number, kind in enumerate(known if "kind" in data else ["busy"]):
            if kind in set(kinds):
                spans = data[(data["lane"] == lane) & (kinds == kind)]
                bars = list(zip(spans["start_s"], spans["end_s"] - spans["start_s"], strict=True))
                style: dict[str, Any] = {"facecolors": COLORS[number % 10], "hatch": HATCHES[number % 10]}
                style |= {"edgecolor": "white", "label": kind if row == 0 else None, **kwargs}
                ax.broken_barh(bars, (row - 0.35, 0.7), **style)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(xlabel="time (s)", ylim=(len(lanes) - 0.4, -0.6), xlim=(0, None))
    if "kind" in data:
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    if "simulated" in data and data["simulated"].any():
        mark_simulated(ax)

    # The lane to speak of does the work that training is for; without such spans it is the busiest.
    work = next((kind for kind in _WORK if kind in set(kinds)), None)
    busiest = max(lanes, key=lambda lane: _covered_s(data[data["lane"] == lane]))
    lane = data.loc[kinds == work, "lane"].iloc[-1] if work else busiest
    own = data[data["lane"] == lane]
    total_s = data["end_s"].max() - data["start_s"].min()
    seconds = {kind: _covered_s(spans) for kind, spans in own.groupby(kinds[own.index], sort=False)}
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:2]
    shares = ", ".join(f"{kind} {_share(s, total_s)}" for kind, s in largest)
    write_title(ax, _join(about, f"{lane}: {shares} of {total_s:.3g} s"))
    return ax


def _covered_s(spans: pd.DataFrame) -> float:
    """Seconds in which at least one of the spans runs."""
    covered, end = 0.0, float("-inf")
    for span in spans.sort_values("start_s").itertuples():
        covered += max(0.0, span.end_s - max(span.start_s, end))
        end = max(end, span.end_s)
    return covered


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole > 0 else "0 %"


def plot_pareto(
    data: pd.DataFrame, *, cost: str, ax: Axes | None = None, rate: str = "images_per_s", **kwargs: Any
) -> Axes:
    """Rate against cost; the line joins the variants that no other variant beats in both.

    Args:
        data: One row per variant, with the columns `variant`, `cost` and `rate` (or `variant` as the index).
        cost: Column on the x axis; less is better. Its name, with its unit, labels the axis.
        rate: Column on the y axis; more is better.
        **kwargs: To `Axes.scatter`.
    """
    table = data if "variant" in data else data.reset_index(names="variant")
    x_label, y_label = (_AXIS_LABELS.get(column, column.replace("_", " ")) for column in (cost, rate))
    ax = ax or make_axes(4.4)
    ax.scatter(table[cost], table[rate], **{"s": 50, "color": ESTIMATE, "zorder": 3, **kwargs})
    named: list[tuple[float, float]] = []  # names stand beside their points; those of nearby points go downwards
    for row in table.sort_values(rate, ascending=False).to_dict("records"):
        x, y = row[cost] / table[cost].max(), 220 * row[rate] / table[rate].max()  # a usual figure is 220 points high
        level = min([y + 4, *(other - 12 for other_x, other in named if abs(x - other_x) < 0.3)])
        aside, align = (-8, "right") if x > 0.7 else (8, "left")
        place = (aside, level - y)
        ax.annotate(row["variant"], (row[cost], row[rate]), xytext=place, textcoords="offset points", ha=align)
        named.append((x, level))
    front = pareto_front(table, cost, rate)
    ax.step(front[cost], front[rate], where="post", color=RUNS, zorder=1)
    ax.set(xlabel=x_label, ylabel=y_label)
    ax.set(xlim=(0, 1.1 * table[cost].max()), ylim=(0, 1.1 * table[rate].max()))
    ax.yaxis.set_major_formatter("{x:,.6g}")
    cheapest, others = front.iloc[0], len(front) - 1
    shown = f"{cheapest[rate]:,.0f}" if cheapest[rate] >= 100 else f"{cheapest[rate]:.3g}"
    told = f"{cheapest['variant']}: {shown} {y_label} at the least cost"
    if others:
        told += f"; {others} {'costs more and is' if others == 1 else 'cost more and are'} faster"
    write_title(ax, f"{told}; {len(table) - len(front)} of {len(table)} are beaten in both")
    return ax


def pareto_front(table: pd.DataFrame, cost: str, rate: str) -> pd.DataFrame:
    """Rows that no other row beats in both `cost` (less) and `rate` (more), by rising cost."""
    ordered = table.sort_values([cost, rate], ascending=[True, False])
    return ordered[ordered[rate] > ordered[rate].astype(float).cummax().shift(fill_value=-np.inf)]


def plot_stalls(
    data: pd.DataFrame,
    *,
    ax: Axes | None = None,
    about: str = "",
    wall_s: dict[str, float] | None = None,
    **kwargs: Any,
) -> Axes:
    """Where the time goes: one stacked bar per variant, with its stages in order. The title says the largest stage.

    Args:
        data: One row per stage: `variant`, `stage`, `seconds`.
        about: What was measured; the title begins with it.
        wall_s: Measured wall time of each variant, drawn as a tick: the bar should end there.
        **kwargs: To `Axes.barh`.
    """
    table = data.pivot_table(index="variant", columns="stage", values="seconds", aggfunc="sum", sort=False).fillna(0)
    totals = table.sum(axis=1)
    ax = ax or _make_axes(len(table) + 0.5 * -(-len(table.columns) // 4))  # four stages in a line of the legend
    left = np.zeros(len(table))
    for number, stage in enumerate(table.columns):
        color, width = COLORS[number % 10], table[stage].to_numpy()
        style = {"height": 0.6, "color": color, "hatch": HATCHES[number % 10], "edgecolor": "white"}
        ax.barh(range(len(table)), width, left=left, label=stage, **{**style, **kwargs})
        # Shares stand inside the bars on a plain background: numbers on hatches are hard to read.
        background = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
        text: dict[str, Any] = {"ha": "center", "va": "center", "color": ink_on(color), "fontsize": SMALL_PT}
        for row, share in enumerate(width / np.where(totals > 0, totals, 1)):
            if share >= 0.07 and width[row] >= 0.085 * totals.max():  # otherwise the number is wider than its bar
                ax.text(left[row] + width[row] / 2, row, f"{share:.0%}", **text, bbox=background)
        left += width
    if wall_s:
        rows = table.index.get_indexer(wall_s)
        ax.vlines(list(wall_s.values()), rows - 0.4, rows + 0.4, color="black", linewidth=2, label="wall time")
    name_rows(ax, table.index)
    longest_s = max(left.max(), *(wall_s or {"": 0}).values())
    ax.set(xlabel="seconds", ylim=(len(table) - 0.4, -0.6), xlim=(0, 1.05 * longest_s or None))
    put_legend_below(ax, columns=4)
    longest, shortest = totals.idxmax(), totals.idxmin()
    stages = table.loc[longest]
    told = f"{longest}: {stages.idxmax()} {_share(stages.max(), totals.max())} of the time"
    if longest != shortest and totals.min() > 0:
        told += f"; {format_ratio(totals.max() / totals.min())}x as long in all as {shortest}"
    write_title(ax, _join(about, told))
    return ax


def _make_axes(n_rows: float) -> Axes:
    return make_axes(1.4 + 0.5 * n_rows)


def _join(about: str, message: str) -> str:
    return f"{about}: {message}" if about else message


def _title(label: str, runs: pd.DataFrame) -> str:
    """A variant's label, marked as simulated if its `storage` is."""
    return f"{label} (simulated)" if simulated_storage(runs, label) and "simulated" not in label else label


def _draw_comparison(
    ax: Axes, row: int, runs: pd.DataFrame, pair: tuple, estimate: pd.Series, **kwargs: Any
) -> pd.Series:
    """Draw the ratio of each round of a variant and its baseline, and the estimate with its interval, as one row.

    Returns:
        The ratios.
    """
    own, base = (runs[runs["variant"] == label] for label in pair)
    is_paired = are_interleaved(own, base)
    ratios = paired_ratios(own, base)["speedup"] if is_paired else own["images_per_s"] / base["images_per_s"].median()
    jitter = np.linspace(-0.12, 0.12, len(ratios)) if len(ratios) > 1 else [0.0]
    what = "one round" if is_paired else "one run, over the median of the baseline's"
    ax.scatter(ratios, row + np.asarray(jitter), s=16, color=RUNS, zorder=2, label=what)
    speedup, low, high = estimate["speedup"], estimate["ci_low"], estimate["ci_high"]
    has_interval = not np.isnan([low, high]).any()
    reach = [[max(0, speedup - low)], [max(0, min(high, _ENDLESS) - speedup)]] if has_interval else None
    verdict = estimate["verdict"]
    marker, face = {"inconclusive": ("s", "white"), "": ("D", ESTIMATE)}.get(verdict, ("o", ESTIMATE))
    style = {"color": ESTIMATE, "markerfacecolor": face, "markersize": 8, "capsize": 4}
    drawn = ax.errorbar(speedup, row, xerr=reach, fmt=marker, zorder=3, **{**style, **kwargs})
    doubt = "the 99 % interval contains 1" if has_interval else "one round has no interval"
    meaning = {"inconclusive": f'"?": inconclusive: {doubt}', "": "no verdict"}
    drawn.lines[0].set_label(meaning.get(verdict, "_nolegend_"))
    for bar in drawn.lines[2]:
        bar.set_label("95 % interval, over the rounds of this session")
    text = f"{format_ratio(speedup)}x" + (" ?" if verdict == "inconclusive" else "")
    ax.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center")
    return ratios


def _explain_marks(ax: Axes, lines_above: int = 0) -> None:
    """Explain the marks below the axis label and the lines of text there; the legend grows leftwards, under labels."""
    put_legend_below(ax, columns=1, loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=4.5 + 1.4 * lines_above)


def _label_ratios(ax: Axes, labels: list[str], xlabel: str) -> None:
    """Label the rows and the axis of speed-ups, and draw the line at 1x."""
    name_rows(ax, labels)
    ax.set(xlabel=xlabel, ylim=(len(labels) - 0.4, -0.6))
    _draw_line(ax, 1, "1x", color="0.3", linestyle="-", side="right")


def _draw_line(ax: Axes, x: float, label: str, color: Any = LIMIT, linestyle: str = "--", side: str = "center") -> None:
    """Args: side: Which side of the label stands at the line: those of two lines close together must not meet."""
    ax.axvline(x, color=color, linestyle=linestyle, linewidth=1.2, zorder=1)
    ax.annotate(
        label, (x, 1.0), xycoords=("data", "axes fraction"), ha=side, va="bottom", color=color, fontsize=SMALL_PT
    )


def _limit_axis(ax: Axes, estimates: pd.DataFrame, low: float, high: float) -> None:
    """Cut the axis of speed-ups at two limits, if it goes beyond them, and draw an arrow where an interval is cut."""
    shown = ax.get_xlim()
    low, high = max(shown[0], low), min(shown[1], high)
    if (low, high) == shown:  # limits that are set would stay when the caller makes the axis logarithmic
        return
    ax.set_xlim(low, high)
    arrow = {"arrowstyle": "-|>", "color": ESTIMATE, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "arrowprops": arrow}
    for row, (ci_low, ci_high) in enumerate(zip(estimates["ci_low"], estimates["ci_high"], strict=True)):
        for is_cut, edge, inwards in ((ci_low < low, 0, 14), (ci_high > high, 1, -14)):
            if is_cut:
                ax.annotate("", (edge, row), (inwards, 0), **style)
                ax.plot([], [], color=ESTIMATE, marker=">", label="the interval goes on")


def _use_log_ratios(ax: Axes, estimates: pd.DataFrame) -> None:
    """Make the axis of speed-ups logarithmic, wide enough for all estimates and for all but very long intervals."""
    ax.set(xscale="log")
    first, last = estimates["speedup"].min(), estimates["speedup"].max()
    _limit_axis(ax, estimates, min(first, 1) / _LOG_REACH, max(last, 1) * _LOG_REACH)
    low, high = ax.get_xlim()  # a few ticks with short labels, whatever the limits
    ticks: Locator = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=10)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]) if high < 3 * low else ticks)
    ax.xaxis.set_major_formatter("{x:g}x")
    ax.xaxis.set_minor_formatter(NullFormatter())
