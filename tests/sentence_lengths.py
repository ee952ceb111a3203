"""How long the sentences of the notebooks are, in words.

`python -m tests.sentence_lengths [06 12 ...]` prints each notebook's mean, and every sentence that is too long.
"""

import re
import sys
from pathlib import Path
from statistics import mean

import nbformat

from tests.notebook_prose import NOTEBOOKS, split_sentences

MOST_WORDS, MEAN_WORDS = 32, 16

_NO_SENTENCE = re.compile(r"^ {0,3}#{1,6} .*$|^\s*(?:>\s*)?\|.*$", re.MULTILINE)  # headings, rows of tables
_CODE_OR_MATH = re.compile(r"`+[^`]+`+|\$\$?[^$]+\$\$?")


def count_words(sentence: str) -> int:
    """Code and formulas count as one word each, as a reader's eye takes them."""
    return len(re.findall(r"[^\W_][^\s]*", _CODE_OR_MATH.sub("code", sentence)))


def find_lengths(path: Path) -> dict[str, int]:
    """Sentence -> its words, in a notebook's prose; headings, tables and code are left out."""
    cells = nbformat.read(path, as_version=4).cells
    prose = [_NO_SENTENCE.sub("\n", cell.source) for cell in cells if cell.cell_type == "markdown"]
    lengths = {sentence: count_words(sentence) for source in prose for sentence in split_sentences(source)}
    return {sentence: length for sentence, length in lengths.items() if length}


def describe(path: Path) -> str:
    """A notebook's mean, and its sentences that are too long."""
    lengths = find_lengths(path)
    too_long = [f"  {length} words: {sentence}" for sentence, length in lengths.items() if length > MOST_WORDS]
    summary = f"{path.stem}: {len(lengths)} sentences, {mean(lengths.values()):.1f} words on average"
    return "\n".join([summary, *too_long])


if __name__ == "__main__":
    starts = tuple(sys.argv[1:]) or ("",)
    print(*(describe(path) for path in NOTEBOOKS if path.name.startswith(starts)), sep="\n")
