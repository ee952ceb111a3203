"""The decision tree as a picture: boxes in two columns, legible at a width of 600 pixels, on light and dark pages."""

import textwrap
from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from labkit.measure import format_ratio
from labkit.teach.start_tree import ASK, QUESTION, SECOND_QUESTION, SPLIT, TAUGHT, Part

DPI = 110
_WIDTH, _GAP = 6.0, 0.09  # inches
_PART_WIDTH, _SPINE = 1.62, 0.16  # the left column, and the line before it
_LINE, _PADDING = 0.155, 0.075  # of a line of text, and around a box's text
_QUESTION, _PART, _CHOICE = "#cfe3f3", "#f6e3c5", "#e4efe1"  # boxes; all text is dark and stands in one
_TEXT, _EDGE, _MEASURED = "#1a1a1a", "#8a8a8a", "#0b5c31"
_SIZE = 8.0  # points: 11 pixels at 600 pixels

Branches = Iterable[tuple[Part, list[Any]]]
_Line = tuple[str, dict[str, Any]]


def size_of(branches: Branches) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    return _WIDTH, _Sketch(branches).height


def draw_tree(branches: Branches, *, ax: Axes | None = None) -> Axes:
    """Draw the tree: the questions, under them a row of boxes for each part.

    Args:
        branches: Parts with the rows of `where_to_start`.
        ax: Axes to draw on; default: a new figure.
    """
    sketch = _Sketch(branches)
    if ax is None:
        ax = plt.figure(figsize=(_WIDTH, sketch.height)).add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, _WIDTH), ylim=(sketch.height, 0))
    ax.set_axis_off()
    ax.figure.set_facecolor("white")
    for x, y in sketch.lines:
        ax.plot(x, y, color=_EDGE, linewidth=1.3, zorder=1, solid_capstyle="butt")
    for box in sketch.boxes:
        _draw_box(ax, *box)
    return ax


class _Sketch:
    """Where the boxes and the lines between them lie, in inches from the upper left corner."""

    def __init__(self, branches: Branches):
        self.boxes: list[tuple[float, float, float, float, str, list[_Line]]] = []
        self.lines: list[tuple[list[float], list[float]]] = []
        self._y = _GAP
        (no, no_rows), *parts = branches
        self._add_question([(QUESTION, _bold(1.25)), (ASK[0], _code()), (f"{ASK[1]}; notebook {_number(TAUGHT)}", {})])
        self._add_part(no, no_rows)
        down_from = self._y
        self._connect(self.boxes[0][1] + self.boxes[0][3], down_from)
        self._add_question([(f"yes: {SECOND_QUESTION[0].lower()}{SECOND_QUESTION[1:]}", _bold(1.1)), (SPLIT, {})])
        spine_from = self._y - _GAP
        for part, rows in parts:
            self._add_part(part, rows)
        self._connect(spine_from, self._last_part_y)
        self.height = self._y

    def _add_question(self, lines: list[_Line]) -> None:
        height = _height(lines)
        self.boxes.append((_GAP, self._y, _WIDTH - 2 * _GAP, height, _QUESTION, lines))
        self._y += height + _GAP

    def _add_part(self, part: Part, rows: list[Any]) -> None:
        """A part's box, as high as those of its choices, and the lines to them."""
        left = _GAP + _SPINE + 0.1
        right = left + _PART_WIDTH + 0.2
        top = self._y
        for row in rows:
            choice = _choice_lines(row)
            self.boxes.append((right, self._y, _WIDTH - _GAP - right, _height(choice), _CHOICE, choice))
            self.lines.append(([left + _PART_WIDTH, right], [self._y + _height(choice) / 2] * 2))
            self._y += _height(choice) + _GAP / 2
        wrapped = textwrap.wrap(part.sign, 25)
        lines: list[_Line] = [(part.name, _bold(1.1)), *((line, {}) for line in wrapped)]
        height = max(self._y - top - _GAP / 2, _height(lines))
        self._last_part_y = top + height / 2
        self.boxes.append((left, top, _PART_WIDTH, height, _PART, lines))
        self.lines.append(([_GAP + _SPINE / 2, left], [top + height / 2] * 2))
        self._y = top + height + _GAP

    def _connect(self, top: float, bottom: float) -> None:
        """The line from a question down to its answers."""
        self.lines.append(([_GAP + _SPINE / 2] * 2, [top, bottom]))


def _choice_lines(row: Any) -> list[_Line]:
    taught = ", ".join(map(_number, row.notebooks))
    lines: list[_Line] = [(f"{row.call}", _code() | {"beside": f"notebook {taught}"}), (row.does, {})]
    if row.compared:
        lines.append((f"{row.compared}: {_gain(row)}", {"color": _TEXT if pd.isna(row.gain) else _MEASURED}))
    return lines


def _gain(row: Any) -> str:
    """The gain in few words: the list below the picture says whose runs they are."""
    if pd.isna(row.gain):
        return row.origin.partition(":")[0]
    return f"{format_ratio(row.gain)}x, {row.origin.partition(' on ')[0]}{' (in doubt)' if row.doubt else ''}"


def _number(notebook: str) -> str:
    return notebook.partition("_")[0]


def _bold(times: float) -> dict[str, Any]:
    return {"weight": "bold", "size": _SIZE * times}


def _code() -> dict[str, Any]:
    return {"family": "monospace", "weight": "bold"}


def _height(lines: list[_Line]) -> float:
    return 2 * _PADDING + _LINE * len(lines)


def _draw_box(ax: Axes, x: float, y: float, width: float, height: float, color: str, lines: list[_Line]) -> None:
    """A box with its lines of text in its middle; a line may have a second text at the right edge."""
    style = f"round,pad=0,rounding_size={_PADDING}"
    ax.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=color, edgecolor=_EDGE, linewidth=0.8))
    top = y + (height - _LINE * len(lines)) / 2
    for number, (text, look) in enumerate(lines):
        look = {"size": _SIZE, "color": _TEXT, **look}
        beside = look.pop("beside", "")
        middle = top + _LINE * (number + 0.5)
        ax.text(x + _PADDING, middle, text, va="center_baseline", **look)
        if beside:
            ax.text(x + width - _PADDING, middle, beside, va="center_baseline", ha="right", size=_SIZE, color=_TEXT)
