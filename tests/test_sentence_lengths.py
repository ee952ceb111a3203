"""The notebooks' sentences are short enough for readers whose first language is another."""

from statistics import mean

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebook_prose import NOTEBOOKS
from tests.sentence_lengths import MEAN_WORDS, MOST_WORDS, count_words, describe, find_lengths


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_sentence_is_long_and_most_are_short(path):
    lengths = find_lengths(path).values()
    assert max(lengths) <= MOST_WORDS, describe(path)
    assert mean(lengths) <= MEAN_WORDS, describe(path)


@pytest.mark.parametrize(
    ("sentence", "count"),
    [
        ("It is so.", 3),
        ("`a b c` and $x + y$ are two.", 5),
        ("- a *very* good `one`", 4),
        ("2.5 ms", 2),
        ("--- : |", 0),
    ],
)
def test_words_are_counted(sentence, count):
    assert count_words(sentence) == count


def test_headings_tables_and_code_are_left_out(tmp_path):
    path = tmp_path / "77_some.ipynb"
    prose = (
        "# A title of six long words\n\nOne two. Three.\n\n| a | b |\n|---|---|\n\n```\nnot this\n```\n- four five six"
    )
    nbformat.write(new_notebook(cells=[new_code_cell("'It is faster.'"), new_markdown_cell(prose)]), path)
    assert find_lengths(path) == {"One two.": 2, "Three.": 1, "four five six": 3}
    assert describe(path) == "77_some: 3 sentences, 2.0 words on average"
    nbformat.write(new_notebook(cells=[new_markdown_cell("word " * 40)]), path)
    assert "\n  40 words: word word" in describe(path)
