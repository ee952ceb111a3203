"""Pages of words."""

import json
import re

import pytest

from labkit.lab.notebooks import Notebook
from labkit.lab.site import texts
from labkit.lab.site.addresses import Addresses
from tests.paths import REPO

NOWHERE = Addresses(frozenset(), frozenset())


@pytest.fixture
def glossary(tmp_path, monkeypatch):
    def write(text):
        monkeypatch.setattr(texts, "GLOSSARY", tmp_path / "glossary.md")
        texts.GLOSSARY.write_text(text)

    return write


def test_terms_are_read_from_definition_lines(glossary):
    glossary(
        "# Glossary\n\nSome words.\n\n**batch**: Samples in\none step.\n**shard**: A tar; see **batch**.\n\nEnd.\n"
    )
    assert texts.terms() == {"batch": "Samples in\none step.", "shard": "A tar; see **batch**."}
    assert texts.glossary_page(NOWHERE) == (
        "# Glossary\n\nbatch\n: Samples in one step.\n\nshard\n: A tar; see **batch**.\n"
    )


def test_without_a_glossary_the_page_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "GLOSSARY", tmp_path / "none.md")
    assert texts.glossary_page(NOWHERE) == "# Glossary\n"


class TestStoredGlossary:
    def test_it_is_sorted_and_each_line_is_a_term(self):
        found = list(texts.terms())
        assert found
        assert found == sorted(found, key=str.casefold)
        starts = re.findall(r"^\*\*", texts.GLOSSARY.read_text(), re.MULTILINE)
        assert len(found) == len(starts)

    def test_each_term_occurs_in_some_notebook(self):
        notebooks = [json.loads(path.read_text()) for path in (REPO / "notebooks").glob("*.ipynb")]
        said = " ".join("".join(cell["source"]) for node in notebooks for cell in node["cells"]).casefold()
        said = " ".join(said.split())
        assert [term for term in texts.terms() if re.sub(r"[`*]| \(.*\)", "", term).casefold() not in said] == []


def test_the_walk_has_each_notebook_with_its_question(tmp_path):
    page = texts.walk_page([Notebook(tmp_path / "10_mine.ipynb", "Why?", "3")])
    assert "| [10 mine](10_mine.ipynb) | Why? | 3 |" in page
    assert ":hidden:\n\n10_mine\n" in page


def test_the_home_page_leads_everywhere():
    page = texts.home_page()
    for name in ("plan", "pages/index"):
        assert f"\n{name}\n" in page
        assert f"]({name}.md)" in page


def test_the_guide_has_each_page():
    page = texts.guide_page(["commands", "storage"])
    assert "- {doc}`storage`" in page
    assert "\ncommands\nstorage\n" in page
