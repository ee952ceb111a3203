"""Pages of measured results."""

import json
import re

import pytest

from labkit.lab.site import records
from labkit.lab.site.addresses import Addresses
from labkit.peers import comparisons, stored_runs
from labkit.teach.claims import LEDGER
from tests.paths import REPO

NOWHERE = Addresses(frozenset(), frozenset())
ALL = Addresses(frozenset(path.stem for path in (REPO / "notebooks").glob("*.ipynb")), frozenset())


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    return records.peers_page(folder, ALL), folder


@pytest.mark.exhaustive
def test_every_stored_comparison_has_its_table_and_its_plot(peers):
    page, folder = peers
    found = list(comparisons(stored_runs()))
    assert len(list(folder.glob("*.png"))) == len(found) == page.count("<table")
    for _, _, runs in found:
        for name, rate in runs[~runs["is_warmup"]].groupby("variant")["images_per_s"].median().items():
            assert f"<td>{name}</td>" in page
            assert f"<td>{rate:,.0f}</td>" in page


def test_the_claims_page_has_each_claim_and_the_stored_verdicts(tmp_path):
    page = records.claims_page(tmp_path, ALL)
    assert re.findall(r"^### (.+)$", page, re.M) == [claim.id for claim in LEDGER]
    node = json.loads((REPO / "notebooks" / "14_claims.ipynb").read_text())
    [table] = [
        rows for cell in node["cells"] for output in cell.get("outputs", [])
        if "<th>condition</th>" in (rows := "".join(output.get("data", {}).get("text/html", "")))
    ]  # fmt: skip
    verdicts = re.findall(r"<td>(holds[^<]*|[a-z ]+ here|inconclusive|needs a GPU|does not hold)</td>", table)
    assert len(verdicts) == len(LEDGER)
    assert re.findall(r"<td>(holds[^<]*|[a-z ]+ here|inconclusive|needs a GPU|does not hold)</td>", page) == verdicts
    assert "[02](/notebooks/02_read_image.ipynb)" in page
    assert (tmp_path / "claims.png").read_bytes().startswith(b"\x89PNG")


def test_the_claims_page_has_the_sources_of_the_notebooks(tmp_path):
    page = records.claims_page(tmp_path, ALL).partition("## Sources")[2]
    listed = re.findall(r"^- \[(\d\w+)\]\(/notebooks/", page, re.M)
    assert listed == sorted(set(listed))
    assert "14" in listed
    assert "https://github.com/prs-eth/Marigold" in page


def test_claims_without_pages_of_notebooks_name_their_numbers(tmp_path):
    assert "notebook 02" in records.claims_page(tmp_path, NOWHERE)


def test_the_records_have_each_table(tmp_path):
    page = records.records_page(tmp_path, NOWHERE)
    names = {path.name for path in (REPO / "tests" / "hardening" / "records").glob("*.csv")}
    assert {path.name for path in (tmp_path / "records").iterdir()} == names
    assert set(re.findall(r"\]\(/records/(\w+\.csv)\)", page)) == names
    assert page.count("<table") == len(names)


@pytest.mark.parametrize(
    ("repository", "place"),
    [
        (None, "`tests/hardening/records`"),
        (
            "https://github.com/x/y",
            "[tests/hardening/records](https://github.com/x/y/tree/main/tests/hardening/records)",
        ),
    ],
)
def test_a_wheel_says_where_the_records_are(tmp_path, monkeypatch, repository, place):
    monkeypatch.setattr(records, "IS_CLONE", False)
    assert place in records.records_page(tmp_path, Addresses(frozenset(), frozenset(), repository))
