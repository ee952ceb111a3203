"""README.md and the pages of the guide: their code blocks, and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.paths import REPO

_WITHOUT_CODE = ("index", "api", "symptoms")
README, GUIDE = REPO / "README.md", REPO / "notebooks" / "guide"
PAGES = sorted(set(GUIDE.glob("*.md")) - {GUIDE / f"{name}.md" for name in _WITHOUT_CODE})
TEXTS = {path.stem: path for path in [README, *PAGES]}
FRAMEWORKS = TEXTS["trainers"]  # whose blocks tests/frameworks runs
SYMPTOM_INDEX = GUIDE / "symptoms.md"
SYMPTOMS = {path.stem: path for path in sorted(SYMPTOM_INDEX.with_suffix("").glob("*.md"))}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block: its page, its first line's number, its language ("" for commands) and its text."""

    page: str
    line: int
    language: str
    text: str


def blocks(path: Path, language: str) -> list[Block]:
    """The blocks of a page in this language, in order."""
    text = path.read_text()
    found = [
        Block(path.stem, text[: match.start(2)].count("\n") + 1, match[1], match[2]) for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def commands(path: Path) -> list[str]:
    """The commands of a page, without comments: lines of its blocks, split at `&&`, and those within its sentences."""
    text = path.read_text()
    lines = [line for block in blocks(path, "") for line in block.text.splitlines()]
    within = re.findall(r"`((?:python -m )\S[^`]*)`", _BLOCK.sub("", text))
    parts = [part for line in [*lines, *within] for part in line.partition(" #")[0].split("&&")]
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def scripts() -> list[Block]:
    """Whole scripts: Python blocks that import what they use, and no framework that is not installed for tests."""
    found = [
        block
        for path in sorted({*TEXTS.values(), *SYMPTOMS.values()} - {FRAMEWORKS})
        for block in blocks(path, "python")
    ]
    return [block for block in found if "import labkit as lk" in block.text]
