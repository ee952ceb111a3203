"""A flame graph of the stacks that a training was seen in: an SVG without scripts, drawn from the top down.

Each call is as wide as its share of the time, and stands below the call that it came from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from labkit.watching.lines import Call, Stack, is_own, short_path

WIDTH = 900
_ROW, _FONT, _LETTER = 18, 11, 6.7  # pixels: of a row, a letter's height, and its width
_LEAST_SHARE = 0.005  # narrower ones are left out
_COLORS = {"own": "#f9b97a", "library": "#c9d6e8", "transform": "#b9dfb0", "part": "#e4e4e4"}


@dataclass
class _Node:
    call: Call
    seconds: float = 0.0
    below: dict[Call, "_Node"] = field(default_factory=dict)


def flame_graph(seconds: Mapping[Stack, float], part: str) -> str:
    """An SVG of 900 pixels width; empty if nothing of this part was seen.

    Args:
        seconds: Of each stack.
        part: Which stacks to draw: the name of the top row.
    """
    root = _Node((part, "", 0))
    for stack, each in seconds.items():
        if stack.part == part:
            root.seconds, node = root.seconds + each, root
            for call in stack.calls:
                node = node.below.setdefault(call, _Node(call))
                node.seconds += each
    if not root.seconds:
        return ""
    drawn = list(_drawn(root, root.seconds, 0.0, 0))
    height = _ROW * (1 + max(row for row, _ in drawn))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(part)}" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" font-family="monospace" font-size="{_FONT}">'
        f"{''.join(text for _, text in drawn)}</svg>"
    )


def _drawn(node: _Node, total_s: float, begin_s: float, row: int) -> Iterator[tuple[int, str]]:
    """The rectangles of a call and of those below it, with their rows."""
    left, right = (round(WIDTH * seconds / total_s, 2) for seconds in (begin_s, begin_s + node.seconds))
    yield row, _rectangle(node, node.seconds / total_s, left, right - left, _ROW * row)
    for below in sorted(node.below.values(), key=lambda each: -each.seconds):
        if below.seconds >= _LEAST_SHARE * total_s:
            yield from _drawn(below, total_s, begin_s, row + 1)
            begin_s += below.seconds


def _rectangle(node: _Node, share: float, left: float, width: float, top: int) -> str:
    name, path, number = node.call
    kind = "own" if is_own(path) else "library" if path else "transform" if top else "part"
    name = name.replace(".<locals>", "")
    label = f"{short_path(path)}:{number} {name}" if kind == "own" else name
    full = f"{name}, {path}:{number}" if path else name
    most = int((width - 4) / _LETTER)
    shown = label if len(label) <= most else f"{label[: most - 1]}…" if most > 2 else ""
    text = f'<text x="{left + 2:.2f}" y="{top + 13}">{escape(shown)}</text>' if shown else ""
    return (
        f"<g><title>{escape(full)}: {share:.1%}, {node.seconds:.2f} s</title>"
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 1}" fill="{_COLORS[kind]}"/>{text}</g>\n'
    )
