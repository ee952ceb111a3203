"""Sentences of the notebooks that hold a number or a comparison were read by someone, who says why they may stand."""

import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests import notebook_prose
from tests.notebook_prose import NOTEBOOKS, describe, needs_review, outdated, read_reviewed, split_sentences, unreviewed
from tests.paths import REPO


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_and_comparison_was_reviewed(path):
    found = unreviewed(path, read_reviewed())
    assert found == [], describe(found)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_list_holds_nothing_that_is_gone(path):
    assert outdated(path, read_reviewed()) == []


def test_the_list_names_notebooks():
    assert set(read_reviewed()) - {path.stem for path in NOTEBOOKS} == set()


@pytest.mark.parametrize(
    ("markdown", "sentences"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ("It takes 1.5 s. Then\nit ends.", ["It takes 1.5 s.", "Then it ends."]),
        ("Some, e.g. two, i.e. few, vs. many. The end (really.) Done.", [
            "Some, e.g. two, i.e. few, vs. many.", "The end (really.)", "Done."]),
        ("Wait ... for it. labkit does.", ["Wait ... for it.", "labkit does."]),
        ("**Question.** How *fast?* So.", ["**Question.**", "How *fast?*", "So."]),
        ("Use `a. b` and ``c! `d` e``. Next.", ["Use `a. b` and ``c! `d` e``.", "Next."]),
        ("See [the notes](http://x.y/a.%20b \"A. B.\"), and ![p](q.png). On.", ["See the notes, and p.", "On."]),
        ("Take $a. b$ and $$x! \n y$$ here. End.", ["Take $a. b$ and $$x! \n y$$ here.", "End."]),
        ("It is $3 or $5. End.", ["It is $3 or $5.", "End."]),
        ("# A title. Twice\nText\nmore.\n\nLast", ["A title. Twice", "Text more.", "Last"]),
        ("Text:\n- one\n  goes on\n- two. three\n\n1. four\n2) five", [
            "Text:", "one goes on", "two.", "three", "four", "five"]),
        ("| a | b |\n|:--|--:|\n| 1.5x. C | 2 |\n\nAfter", ["a | b", "1.5x. C | 2", "After"]),
        ("Before\n```python\nx = 1. # Faster!\n```\nafter <!-- hidden. -->.", ["Before", "after ."]),
        ("> quoted one.\n> Quoted two.", ["quoted one.", "Quoted two."]),
        ("---\n\n", []),
    ],
)  # fmt: skip
def test_markdown_is_split_into_sentences(markdown, sentences):
    assert split_sentences(markdown) == sentences


@pytest.mark.parametrize("sentence", [
    "It takes 20 ms.", "About 1.58 of it.", "1.5x as much", "It is 3 x as much.", "It reads 250 MB/s.",
    "It is 15 % of it.", "It needs 900 images a second.", "PIL is slower.", "The fastest is tar.",
    "Hardly any", "Twice.", "At most one.",
    "As long as before", "It costs time.", "It grows in proportion to it.", "That is `1.5x`.", "Tenfold",
    "a | 12 s", "Some microseconds each.", "No difference was found.",
])  # fmt: skip
def test_numbers_and_comparisons_need_a_review(sentence):
    assert needs_review(sentence)


@pytest.mark.parametrize("sentence", [
    "Photos are resized to 224 x 224.", "See notebook 02.", "ResNet-18 on CIFAR-10.", "`x = 1.5 * s`", "$1.5$ is math.",
    "It has 2 workers.", "Is it faster?", "*Is it faster?*", "albumentations 2.0.8 does.",
    "S3 and uint8.", "The order is random.",
])  # fmt: skip
def test_settings_names_and_questions_do_not(sentence):
    assert not needs_review(sentence)


@pytest.fixture
def notebook(tmp_path):
    path = tmp_path / "77_some.ipynb"
    prose = new_markdown_cell("Plain. PIL is slower. Theirs is [2x](http://a.b).")
    nbformat.write(new_notebook(cells=[new_code_cell("'It is faster.'"), prose, new_markdown_cell("It wins.")]), path)
    return path


def test_an_unlisted_sentence_is_told_with_its_place_and_the_remedy(notebook):
    listed = {"77_some": {"Theirs is 2x.": "sourced", "It wins.": "always"}}
    [found] = unreviewed(notebook, listed)
    assert (found.notebook, found.cell, found.text) == ("77_some", 1, "PIL is slower.")
    assert len(unreviewed(notebook, {})) == 3
    told = describe([found])
    assert told.startswith("77_some, cell 1:\n  PIL is slower.\n")
    assert all(f"  {reason}: " in told for reason in notebook_prose.REASONS)
    assert describe([]) == "Every sentence was reviewed."


def test_what_is_gone_or_has_no_source_is_told(notebook):
    listed = {"Theirs is 2x.": "sourced", "It wins.": "sourced", "It lost.": "always"}
    assert outdated(notebook, {"77_some": listed}) == [
        "no link in its cell, add the source: It wins.", "not in the notebook, delete the line: It lost.",
    ]  # fmt: skip


def test_the_list_is_read_and_a_wrong_line_is_named(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# why\n[01_a]\nalways: It is: faster.\n\n[02_b]\nsourced: 2x.\n")
    assert read_reviewed(path) == {"01_a": {"It is: faster.": "always"}, "02_b": {"2x.": "sourced"}}
    for text in (
        "[01_a]\nmaybe: 2x.",
        "always: 2x.",
        "[01_a]\nalways: ",
        "[01_a]\n2x.",
        "[01_a]\nalways: A\nalways: A",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^list\.txt:\d: .* with a reason of always, sourced"):
            read_reviewed(path)


def test_the_command_tells_what_is_left():
    command = [sys.executable, "-m", "tests.notebook_prose", "no such notebook"]
    assert subprocess.check_output(command, cwd=REPO, text=True) == "Every sentence was reviewed.\n"
