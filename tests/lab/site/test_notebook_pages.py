"""Stored notebooks as sources of pages."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.lab.notebooks import Notebook
from labkit.lab.site.addresses import Addresses
from labkit.lab.site.notebook_pages import MOVES, alternative_text, write_notebook

PNG = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}
WORDS = {"text/html": "<table></table>", "text/plain": "a table"}


@pytest.fixture
def written(tmp_path):
    """Writes a notebook of these cells for its page, and gives the cells of that."""

    def write(*cells):
        source = tmp_path / "source"
        source.mkdir()
        path = source / "10_mine.ipynb"
        nbformat.write(new_notebook(cells=[new_markdown_cell("# 10 · Mine"), *cells]), path)
        write_notebook(Notebook(path, "Why?", "3"), tmp_path, Addresses(frozenset({"10_mine"}), frozenset()))
        return nbformat.read(tmp_path / "10_mine.ipynb", as_version=4).cells

    return write


def test_the_note_on_hosted_gpus_comes_under_the_title(written):
    title, note, text = written(new_markdown_cell("Text"))
    assert (title.source, text.source) == ("# 10 · Mine", "Text")
    assert "hosted GPU" in note.source


def test_outputs_and_code_are_kept(written):
    cell = new_code_cell("1 + 1", outputs=[new_output("execute_result", WORDS, execution_count=1)], execution_count=1)
    kept = written(cell)[-1]
    assert (kept.source, kept.outputs) == (cell.source, cell.outputs)


def test_a_plot_has_an_alternative_text(written):
    plot = new_code_cell("lk.plot_speedup(runs)", outputs=[new_output("display_data", PNG)])
    assert written(new_markdown_cell("## Look\n\nAt it."), plot)[-1].metadata.mystnb.image.alt == (
        "Plot: Look, drawn by plot_speedup"
    )


def test_a_stored_widget_says_that_it_moves(written):
    widget = new_code_cell("lk.explore(runs)", outputs=[new_output("execute_result", PNG, execution_count=1)])
    assert [cell.source for cell in written(widget)[-2:]] == ["lk.explore(runs)", MOVES]


def test_links_to_notebooks_without_a_page_become_words(written):
    assert written(new_markdown_cell("Next: [11](11_other.ipynb), [10](10_mine.ipynb)"))[-1].source == (
        "Next: 11, [10](/notebooks/10_mine.ipynb)"
    )


def test_links_in_an_output_are_changed_like_those_in_a_text(written):
    text = {"text/markdown": "[there](99_none.ipynb)"}
    [*_, cell] = written(new_markdown_cell("# A"), new_code_cell("1", outputs=[new_output("display_data", text)]))
    assert cell.outputs[0].data["text/markdown"] == "there"


def test_a_diagram_is_shown_as_text_and_says_who_draws_it(written):
    assert written(new_markdown_cell("```mermaid\ngraph TD\n```"))[-1].source == (
        "JupyterLab draws this diagram:\n\n```text\ngraph TD\n```"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('ax.set_title("500 x 375", loc="left")', "Plot: 500 x 375"),
        ("""lk.plot_peers(runs).set_title(f"stored run: {name}")""", "Plot: stored run: …, drawn by plot_peers"),
        ("ladder.plot_rungs(far);", "Plot: The `ladder`, drawn by plot_rungs"),
        ("print(1)", "Plot: The `ladder`"),
    ],
)
def test_alternative_texts_come_from_titles_and_headings(source, text):
    assert alternative_text(source, "The `ladder`") == text.replace("`", "")
