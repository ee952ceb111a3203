"""Notebooks, a browser, and a lab of the tests' own."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.app import notebooks
from tests.lab_server import FLAGS, find_chromium

TITLE = "# {name}\n\n**Question.** Why {name}?\n\n**Result.** (to be stored)\n\n**Minutes.** 3"
MEASURING = """
import labkit as lk
runs = lk.compare({"slow": lambda: [1, 1], "quick": lambda: [1, 1]}, baseline="slow", rounds=3, experiment="10 small")
"""
RESULT = 'from labkit import course\ncourse.result("{}", "It works.")'


@pytest.fixture
def write_notebook(tmp_path):
    """Writes a notebook of a few cells and a picture into `tmp_path / "notebooks"`."""
    folder = tmp_path / "notebooks"
    (folder / "figures").mkdir(parents=True)
    (folder / "figures/way.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')

    def write(name, *sources):
        cells = [new_markdown_cell(TITLE.format(name=name)), *map(new_code_cell, sources)]
        cells.append(new_markdown_cell("![The way of a photo](figures/way.svg)"))
        nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
        return folder / f"{name}.ipynb"

    return write


@pytest.fixture
def lab(tmp_path, monkeypatch, write_notebook):
    """A lab with a working, a failing and a noisy notebook; photos and results under tmp_path."""
    write_notebook("10_works", MEASURING, RESULT.format("10_works"))
    write_notebook("11_fails", "print('before')", "raise KeyError('[/lost]')", "print('after')")
    write_notebook("12_noisy", "import sys; print('hm', file=sys.stderr)", RESULT.format("12_noisy"))
    monkeypatch.setattr(notebooks, "NOTEBOOK_FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(notebooks.find_notebooks, "__defaults__", ("", tmp_path / "notebooks"))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[test]'")
    with sync_api.sync_playwright() as playwright:
        path = find_chromium(playwright)
        if path is None:
            pytest.skip("no Chromium: apt-get install chromium, or name one in the variable CHROMIUM")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(chromium):
    """Opens an empty page; gives it, and the list of errors that its console will show."""

    def open_page(**options):
        page, errors = chromium.new_context(**options).new_page(), []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        return page, errors

    return open_page
