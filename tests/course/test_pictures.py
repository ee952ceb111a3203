"""The pictures of notebooks are there, can be read in any theme and size, and need no network."""

import re
from xml.etree import ElementTree

import nbformat
import pytest

from tests.paths import REPO

NOTEBOOKS = REPO / "notebooks"
PICTURES = sorted((NOTEBOOKS / "figures").glob("*.svg"))
SHOWN = {
    (path.stem, name): alt
    for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    for cell in nbformat.read(path, as_version=4).cells
    if cell.cell_type == "markdown"
    for alt, name in re.findall(r"!\[([^\]]*)\]\((?!https:)([^)]+)\)", cell.source)
}


def test_notebooks_about_what_runs_where_have_a_picture():
    shown = {stem.split("_")[0] for stem, _ in SHOWN}
    assert {"00", "03", "03c", "07", "08", "08b", "12"} <= shown


def test_each_picture_is_shown_and_each_shown_one_is_there_with_words_for_it():
    names = {f"figures/{path.name}" for path in PICTURES}
    assert {name for _, name in SHOWN} == names
    assert [shown for shown, alt in SHOWN.items() if len(alt.split()) < 5] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_can_be_read(path):
    text = path.read_text()
    root = ElementTree.fromstring(text)  # noqa: S314 - our own
    _, _, width, height = map(float, root.get("viewBox").split())
    assert width <= 960
    assert height <= 260
    assert root.find("{http://www.w3.org/2000/svg}title").text.strip()
    # On a ground of its own, it does not depend on what is behind it.
    ground = next(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert ground.get("class") == "paper"
    assert (float(ground.get("width")), float(ground.get("height"))) == (width, height)
    assert "prefers-color-scheme: dark" in text
    assert text.count(".paper") == 2
    assert min(map(float, re.findall(r"(?:font:|font-size:)\s*([\d.]+)px", text))) >= 13
    assert re.findall(r"<script|<image|@import|href=|url\(", text) == []
