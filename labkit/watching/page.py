"""The page of a report, and the bars and the timeline on it, drawn as SVG by the standard library alone.

In come plain values: rows, spans, seconds and sentences; out goes HTML.
"""

import base64
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from labkit.util.arguments import REPORT_BEGINNINGS
from labkit.watching.lines import short_path

Rows = list[dict[str, Any]]  # of a table
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}img{max-width:100%;height:auto}"
    "td,th{padding:.2em .8em;text-align:right}pre{white-space:pre-wrap}"
)


def make_page(
    title: str, summary: str, details: Iterable[str], *, spans: Rows, lines: Mapping[str, Rows], tables: Iterable[Rows]
) -> str:
    """One page that needs no other file.

    Args:
        title: What was watched.
        summary: The result, as HTML.
        details: Sentences.
        spans: For the timeline.
        lines: Of code, by the part of the time that they belong to.
        tables: Shown below.
    """
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in details)
    return (
        f"{REPORT_BEGINNINGS['html']}<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"{summary}<h2>Details</h2>{said}{_draw_timeline(spans)}{_lines_html(lines)}"
        f"{''.join(map(_table_html, tables))}</html>"
    )


def _lines_html(lines: Mapping[str, Rows]) -> str:
    """The lines of each part."""
    found = ""
    for part, rows in lines.items():
        if rows:
            shown = [{**row, "path": short_path(row["path"])} for row in rows]
            found += f"<h2>What {part} is</h2>{_table_html(shown, without='part')}"
    return found


def _table_html(rows: Rows, without: str = "") -> str:
    columns = [column for column in columns_of(rows) if column != without]
    if not columns:
        return ""
    header = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(column))}</td>' for column in columns)}</tr>" for row in rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def columns_of(rows: Rows) -> list[str]:
    """The columns that any of the rows has, in order."""
    return [*dict.fromkeys(column for row in rows for column in row)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return escape(f"{value:.4g}") if math.isfinite(value) else ""
    return "" if value is None else escape(str(value))


# What is drawn.

_LEAST_SHOWN = 0.085  # share of a bar that a number fits into


def draw_costs(parts_s: Mapping[str, float], together_s: float, *, ceiling: str, words: str) -> str:
    """Where the time of a batch goes, compared with the step alone.

    Args:
        parts_s: Seconds per batch of the step, and then of each cause of waiting, by name.
        together_s: Of all.
        ceiling: How much faster training would be without waiting.
        words: What the picture shows, for those who do not see it.
    """
    boxes, end_s, (step, *_) = list[Box](), 0.0, parts_s
    for name, seconds in parts_s.items():
        share = seconds / together_s
        boxes.append(Box(name, end_s, end_s + seconds, f"{share:.0%}" * (share > _LEAST_SHOWN)))
        end_s += seconds
    rows = {"training": boxes, "without waiting": [Box(step, 0.0, parts_s[step])]}
    title = f"without waiting: {ceiling} as fast"
    return _draw_rows(rows, [*parts_s], title=title, label="seconds per batch", words=words)


def _draw_timeline(spans: Rows, n_batches: int = 12) -> str:
    """The last batches as rows, one for the host and one for each worker."""
    hosts, begin_s = [span for span in spans if span["lane"] == "host"], 0.0
    if hosts:
        first = max(span["batch"] for span in hosts) - n_batches + 1
        begin_s = min(span["start_s"] for span in hosts if span["batch"] >= first)
    rows = defaultdict[str, list[Box]](list)
    for span in spans:
        if span["end_s"] > begin_s:
            box = Box(span["kind"], max(0.0, span["start_s"] - begin_s), span["end_s"] - begin_s)
            rows[span["lane"]].append(box)
    total_s = max((box.end_s for boxes in rows.values() for box in boxes), default=0.0)
    steps_s = sum(box.end_s - box.start_s for box in rows["host"] if box.kind == "step")
    title = f"host: step {steps_s / total_s if total_s else 0:.0%} of {total_s:.3g} s"
    return _draw_rows(rows, ["load", "wait", "step"], title=title, label="time (s)", words="Timeline of the last steps")


class Box(NamedTuple):
    """A part of a row, from and until a time; `text` stands in it."""

    kind: str
    start_s: float
    end_s: float
    text: str = ""


# Without its colors a picture can still be read: whatever colors tell apart, hatches tell apart, too.
_COLORS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161")
_ANGLES = (None, 45, -45, 0, 90, 20)  # of the hatches
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP, _LEGEND = 700, 130, 20, 40, 30, 130  # pixels
_N_TICKS = 6


def _draw_rows(rows: Mapping[str, Sequence[Box]], kinds: Sequence[str], *, title: str, label: str, words: str) -> str:
    """Rows of boxes on one axis of seconds, as an `<img>`.

    Args:
        rows: By name, the first one on top.
        kinds: All kinds of boxes, in the order of the legend.
        title: What stands above.
        label: Of the axis.
        words: What it shows, for those who do not see it.
    """
    end_s = max((box.end_s for boxes in rows.values() for box in boxes), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    bottom = _TOP + _ROW * len(rows)
    drawn = [_text(6, 18, title, 14)]
    for number, (name, boxes) in enumerate(rows.items()):
        y = _TOP + _ROW * number
        drawn.append(_text(_LEFT - 8, y + _ROW / 2 + 4, name, anchor="end"))
        for kind, start_s, until_s, text in boxes:
            x, width = _LEFT + scale * start_s, scale * (until_s - start_s)
            drawn.append(_box(x, y + 5, width, _ROW - 10, kinds.index(kind)))
            if text:
                drawn.append(f'<rect x="{x + width / 2 - 16:.1f}" y="{y + 12}" width="32" height="16" fill="#fff"/>')
                drawn.append(_text(x + width / 2, y + _ROW / 2 + 4, text, anchor="middle"))
    drawn.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="#444"/>')
    for tick_s in _ticks(end_s):
        x = _LEFT + scale * tick_s
        drawn += [
            f'<path d="M{x:.1f} {bottom}v4" stroke="#444"/>',
            _text(x, bottom + 17, f"{tick_s:g}", anchor="middle"),
        ]
    drawn.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, label, anchor="middle"))
    for number, kind in enumerate(kinds):
        x, y = _LEFT + _LEGEND * (number % 4), bottom + 48 + 20 * (number // 4)
        drawn += [_box(x, y, 22, 12, number), _text(x + 28, y + 11, kind)]
    height = bottom + 52 + 20 * math.ceil(len(kinds) / 4)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>{_hatches(len(kinds))}'
        f"{''.join(drawn)}</svg>"
    )
    return f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, number: int) -> str:
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}"'
    return f'<rect {place} fill="url(#kind{number})" stroke="#fff" stroke-width="0.5"/>'


def _hatches(count: int) -> str:
    found = ""
    for number in range(count):
        angle = _ANGLES[number % len(_ANGLES)]
        line = "" if angle is None else '<path d="M0 0V6" stroke="#fff" stroke-width="1.5"/>'
        found += (
            f'<pattern id="kind{number}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({angle or 0})"><rect width="6" height="6" '
            f'fill="{_COLORS[number % len(_COLORS)]}"/>{line}</pattern>'
        )
    return f"<defs>{found}</defs>"


def _ticks(end_s: float) -> Iterable[float]:
    """Round numbers from 0 on, a few."""
    power = 10 ** math.floor(math.log10(end_s / _N_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= end_s / _N_TICKS)
    return [step * number for number in range(math.floor(end_s / step) + 1)]
