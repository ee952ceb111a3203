"""Sentences of the notebooks that hold a measured-looking number or a comparison, and which of them were reviewed.

`python -m tests.notebook_prose [06 12 ...]` prints those that were not, with what to do.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from tests.paths import REPO

NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
REVIEWED = Path(__file__).with_name("reviewed_sentences.txt")
REASONS = {
    "always": "true on every machine, by how things work or by arithmetic",
    "sourced": "a figure of others; its source is linked in the same cell",
    "checked": "asserted by a cell marked NBVAL_CHECK_OUTPUT, or by a test",
    "definition": "a term, a setting, a task with its figures, or a claim that is put to the test: no result",
}

_FENCED = re.compile(r"^ {0,3}(```|~~~).*?(?:^ {0,3}\1|\Z)|<!--.*?-->", re.DOTALL | re.MULTILINE)
_MATH = r"\$\$.+?\$\$|(?<![\\$])\$[^\s$](?:[^$\n]*[^\s$])?\$(?!\d)"
_LITERAL = re.compile(rf"(`+).+?\1|{_MATH}", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*(?:\s+\"[^\"]*\")?\)")
_OWN_LINE = re.compile(r" {0,3}#{1,6} |\s*\|")  # headings, rows of tables
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_RULE = re.compile(r"[\s|:*_-]*")  # under a table's head, or between paragraphs
_END = re.compile(r"(?<!\.)[.!?][\"')\]*_”]*(?=\s)")
_ABBREVIATION = re.compile(r"(?:^|[\s(])(?:e\.g|i\.e|etc|vs|cf|approx|resp|incl|no|fig|ca)\.$", re.IGNORECASE)

_AMOUNT = r"\d[\d,.]*"
_UNIT = (
    r"%|percent\b|x(?![\w-])(?!\s*\d)|times\b|-?fold\b|[mµun]?s\b|min\b|h\b|[kKMGT]i?B\b"
    r"|(?:seconds?|minutes?|hours?|days?|bytes?|(?:images|img|photos|files|samples|requests)(?:/s\b| an? | per ))\b"
)
_FIGURE = re.compile(
    rf"(?<![\w.-]){_AMOUNT}\s*(?:{_UNIT})|(?<![\w.-])\d+\.\d+(?![\w.])|\b(?:milli|micro|nano)seconds?\b"
    r"|\b(?:an|one|two|three|four|five|some|few|several|many) (?:minutes?|hours?|days?)\b"
)
_COMPARISON = re.compile(
    r"\b(?:than|twice|thrice|half|halve[sd]?|doubles?d?|triples?d?|quarters?|thirds?|tenths?|\w+fold"
    r"|more|most|less|least|fewer|fewest|better|best|worse|worst|hardly|barely|scarcely|nearly|almost|little"
    r"|seldom|rarely|mostly|usually|negligible|free|as \w+ as|times as|up to"
    r"|(?:fast|slow|quick|cheap|larg|small|bigg|high|low|long|short|great|heavi|few|late|earli)(?:er|est)"
    r"|saves?|saved|gains?|gained|wins?|won|los[et]s?|beats?|dominates?|outweighs?|bottlenecks?|hides?|hidden"
    r"|costs?|climbs?|grows?|proportion\w*|disappears?|no (?:difference|effect|gain)|same (?:speed|rate|time))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Sentence:
    """A sentence of a notebook: its stem, the number of its cell from 0, and its text as it is listed."""

    notebook: str
    cell: int
    text: str


def split_sentences(markdown: str) -> list[str]:
    """The sentences of a cell as they are listed: links without their address, and in one line each.

    A heading and a row of a table are a sentence each. Fenced code is left out; inline code and math are kept, and
    split nothing.
    """
    literals: list[str] = []

    def hide(found: re.Match) -> str:
        literals.append(found[0])
        return f"\ue000{len(literals) - 1}\ue001"

    text = _LINK.sub(r"\1", _LITERAL.sub(hide, _FENCED.sub("\n", markdown)))
    found = [" ".join(sentence.split()) for sentence in _split_text(text)]
    return [re.sub("\ue000(\\d+)\ue001", lambda hidden: literals[int(hidden[1])], one) for one in found if one]


def _split_text(text: str) -> Iterator[str]:
    """Headings and rows of tables whole; paragraphs and items of lists by sentences."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        line = re.sub(r"^\s*(?:>\s?)+", "", line)
        is_whole = _OWN_LINE.match(line) is not None
        is_rule = _RULE.fullmatch(line) is not None
        if is_whole or is_rule or _ITEM.match(line):
            yield from _split_block(" ".join(lines))
            lines = []
        if is_whole and not is_rule:
            yield line.strip().strip("#|")
        elif not is_rule:
            lines.append(_ITEM.sub("", line, count=1))


def _split_block(block: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(block):
        if not _ABBREVIATION.search(block[: end.start() + 1]):
            yield block[start : end.end()]
            start = end.end()
    yield block[start:]


def needs_review(sentence: str) -> bool:
    """Whether it holds a measured-looking number or a comparison, and is no question. Code counts only as a figure."""
    text = re.sub(r"(`+)(.+?)\1", lambda code: code[2] if _FIGURE.fullmatch(code[2]) else "code", sentence)
    text = re.sub(_MATH, "math", text)
    is_question = re.search(r"\?[\"')\]*_”]*$", text)
    return not is_question and bool(_FIGURE.search(text) or _COMPARISON.search(text))


def sentences_to_review(path: Path) -> list[Sentence]:
    """All sentences of a notebook's prose that need a review, in order."""
    cells = nbformat.read(path, as_version=4).cells
    prose = [(number, cell.source) for number, cell in enumerate(cells) if cell.cell_type == "markdown"]
    found = [Sentence(path.stem, number, text) for number, source in prose for text in split_sentences(source)]
    return [sentence for sentence in found if needs_review(sentence.text)]


def read_reviewed(path: Path = REVIEWED) -> dict[str, dict[str, str]]:
    """Notebook's stem -> sentence -> reason.

    Raises:
        ValueError: a line is neither `[notebook]` nor `reason: sentence`, or a sentence is listed twice.
    """
    reviewed: dict[str, dict[str, str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("[") and line.endswith("]"):
            listed = reviewed.setdefault(line[1:-1], {})
            continue
        if not line or line.startswith("#"):
            continue
        reason, _, sentence = line.partition(": ")
        if reason not in REASONS or not sentence or not reviewed or sentence in listed:
            raise ValueError(
                f"{path.name}:{number}: {line!r} must be `[notebook]`, or a new sentence as `reason: sentence` "
                f"with a reason of {', '.join(REASONS)}"
            )
        listed[sentence] = reason
    return reviewed


def unreviewed(path: Path, reviewed: dict[str, dict[str, str]]) -> list[Sentence]:
    """A notebook's sentences that are not listed."""
    return [one for one in sentences_to_review(path) if one.text not in reviewed.get(path.stem, {})]


def outdated(path: Path, reviewed: dict[str, dict[str, str]]) -> list[str]:
    """What the list says of a notebook and no longer holds, with the remedy."""
    present = {one.text: one.cell for one in sentences_to_review(path)}
    cells = nbformat.read(path, as_version=4).cells
    problems = []
    for text, reason in reviewed.get(path.stem, {}).items():
        if text not in present:
            problems.append(f"not in the notebook, delete the line: {text}")
        elif reason == "sourced" and "](http" not in cells[present[text]].source:
            problems.append(f"no link in its cell, add the source: {text}")
    return problems


def describe(found: list[Sentence]) -> str:
    """The sentences with their places, and how to mark them."""
    if not found:
        return "Every sentence was reviewed."
    reasons = "\n".join(f"  {reason}: {meaning}" for reason, meaning in REASONS.items())
    places = "\n".join(f"{one.notebook}, cell {one.cell}:\n  {one.text}" for one in found)
    return (
        f"{places}\n\n{len(found)} sentences hold a number or a comparison and were not reviewed. Read each beside its "
        "code. Does it say how runs came out on some machine? Then compute it, print(lk.conclude(runs)), or reword it. "
        f"Otherwise add it to tests/{REVIEWED.name}, under its [notebook], with the reason why it may stand:\n{reasons}"
    )


if __name__ == "__main__":
    starts = tuple(sys.argv[1:]) or ("",)
    paths = [path for path in NOTEBOOKS if path.name.startswith(starts)]
    listed_by_notebook = read_reviewed()
    print(describe([one for path in paths for one in unreviewed(path, listed_by_notebook)]))
