"""How all figures look: one width, text that can be read at 600 pixels, colors, marks, titles and legends."""

from collections.abc import Iterable
from textwrap import fill, wrap
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import blended_transform_factory

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
    # The pad, in font sizes, keeps the legend below the axis label whatever the height of the axes.
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4.2}
    style: dict[str, Any] = {"frameon": False, "fontsize": SMALL_PT, "ncols": columns, "labelspacing": 0.25}
    handles, labels = ax.get_legend_handles_labels()
    marks = dict(zip(labels, handles, strict=True))  # each once
    ax.legend(marks.values(), marks.keys(), **{**place, **style, **options})


def ink_on(color: Any) -> str:
    """Black or white, whichever has the larger contrast with a background (WCAG 2.2, relative luminance).

    Source: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance
    """
    parts = np.asarray(to_rgb(color))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "white"
