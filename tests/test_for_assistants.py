"""Pages that show what the stored run found: the one for assistants is short, and its verdicts are the ledger's."""

import re

from labkit.app import storing
from labkit.course import ledger
from labkit.course.results import STORED, stored_results
from tests.pages import TEXTS

PAGE = TEXTS["for-assistants"]


def test_it_is_short():
    assert len(PAGE.read_text().splitlines()) <= 150


def test_its_verdicts_are_those_of_the_ledger(monkeypatch):
    """Of the stored run, not of this machine's: where a new one says otherwise, correct the page."""
    monkeypatch.setattr(ledger, "known_results", lambda: stored_results(STORED))
    known = {row["claim"]: (row["verdict"], row["notebooks"].split(", ")) for _, row in ledger.claims().iterrows()}
    rows = re.findall(r"^\| (.*) \| \*\*(.*?)\*\*.* \| \[(\w+)\]\(.*\) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 10
    wrong = {claim: known[claim] for claim, verdict, _ in rows if known[claim][0] != verdict}
    assert wrong == {}
    assert [row for row in rows if known[row[0]][1] != [""] and row[2] not in known[row[0]][1]] == []


def test_the_gains_of_a_page_are_those_of_the_stored_run():
    page = TEXTS["bottleneck"].read_text()
    assert page == storing.with_figures(page, stored_results(STORED))
    assert page.count(" -->") > 15
