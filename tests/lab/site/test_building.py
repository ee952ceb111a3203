"""The built site: complete, whole, without a dead link, and readable from a disk without a network."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit.lab.cli import app
from labkit.lab.notebooks import find_notebooks
from labkit.lab.site import api, building, records, texts
from tests.paths import REPO, contents
from tests.site_links import BuiltSite

SOME = ["00_measure", "07_cuda_prefetch"]
KINDS = ["index", "notebooks/index", *(f"notebooks/{name}" for name in SOME), "api/index", "api/measure", "claims",
         "peers", "robustness", "glossary", "genindex", "search"]  # fmt: skip


def build(folder, only=""):
    for module in ("sphinx", "myst_nb", "pydata_sphinx_theme"):
        pytest.importorskip(module, reason=f"{module} is missing: python -m pip install -e '.[site]'")
    return building.build_site(folder, only=only)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    built = build(tmp_path_factory.mktemp("small") / "site", ",".join(SOME))
    return built, BuiltSite(built.index.parent)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    built = build(tmp_path_factory.mktemp("whole") / "site")
    return built, BuiltSite(built.index.parent)


@pytest.mark.slow
class TestSmall:
    """Two notebooks."""

    def test_sphinx_warns_of_nothing(self, small):
        assert small[0].warnings == []

    def test_it_has_every_kind_of_page(self, small):
        built, pages = small
        names = {path.relative_to(pages.root).with_suffix("").as_posix() for path in pages.pages}
        rooms = {f"api/{room}" for room in api.public_names()}
        written = {f"pages/{name}" for name in [*texts.page_names(), "index"] if texts.page_names()}
        assert names - {"plan"} == set(KINDS) | rooms | written
        assert built.notebooks == SOME

    def test_every_public_name_has_its_entry_and_no_other(self, small):
        entries = [
            name for page in small[1].pages.values() for name in re.findall(r'<dt[^>]* id="lk\.(\w+)"', page.text)
        ]
        assert sorted(entries) == sorted(lk.__all__)

    def test_no_link_is_dead_and_nothing_is_fetched(self, small):
        assert small[1].broken == {}
        assert small[1].fetched == set()

    def test_each_picture_has_an_alternative_text(self, small):
        assert all(alt for page in small[1].pages.values() for alt in page.alts)

    def test_stored_outputs_are_shown_and_no_cell_ran(self, small):
        page = small[1].pages[small[1].root / "notebooks" / "00_measure.html"].text
        node = json.loads((REPO / "notebooks" / "00_measure.ipynb").read_text())
        outputs = [output for cell in node["cells"] for output in cell.get("outputs", [])]
        printed = [line for output in outputs for line in "".join(output.get("text", "")).splitlines()]
        assert [line for line in printed if not re.search(r"[<>&\"']", line) and line not in page] == []
        plots = sum("image/png" in output.get("data", {}) for output in outputs)
        assert len(re.findall(r'<img alt="Plot: ', page)) == plots > 0

    def test_notebooks_can_be_downloaded_as_they_are(self, small):
        for name in SOME:
            path = small[1].root / "files" / f"{name}.ipynb"
            assert path.read_bytes() == (REPO / "notebooks" / path.name).read_bytes()

    def test_it_holds_no_path_of_this_machine(self, small):
        found = contents(small[1].root)
        assert [name for name, data in found.items() if str(REPO).encode() in data] == []
        assert [name for name, data in found.items() if str(small[1].root.parent).encode() in data] == []

    def test_lk_is_no_module_afterwards(self, small):
        assert "lk" not in sys.modules


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "myst_nb", None)
    result = CliRunner().invoke(app, ["site", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "myst_nb" in result.stderr
    assert ".[site]" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_refused_before_the_build(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "_NEEDED", ())
    (tmp_path / "mine").write_text("mine")
    result = CliRunner().invoke(app, ["site", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no site, but 'mine'" in result.stderr
    assert contents(tmp_path) == {"mine": b"mine"}


@pytest.mark.exhaustive
class TestWhole:
    """All notebooks, and a browser."""

    def test_it_has_all_notebooks_and_no_dead_link(self, whole):
        built, pages = whole
        assert built.notebooks == [notebook.name for notebook in find_notebooks()]
        assert (built.warnings, pages.broken, pages.fetched) == ([], {}, set())
        assert all(alt for page in pages.pages.values() for alt in page.alts)
        print("\n".join(sorted(pages.external)))  # listed, not fetched

    def test_a_second_build_gives_the_same_bytes(self, small, tmp_path):
        again = build(tmp_path / "site", ",".join(SOME))
        first, second = contents(small[1].root), contents(again.index.parent)
        assert [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)] == []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1200, 390])
    def test_pages_open_from_the_disk_without_a_network(self, whole, open_page, width, scheme):
        page, errors = open_page(viewport={"width": width, "height": 800}, offline=True, color_scheme=scheme)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: errors.append(f"failed: {request.url[:80]}"))
        wide = {}
        for path in whole[1].pages:
            page.goto(path.as_uri())
            wide[path.stem] = page.evaluate("() => document.documentElement.scrollWidth")
        assert errors == []
        assert {url.split(":")[0] for url in asked} <= {"file", "data"}
        assert {name: found for name, found in wide.items() if found > width} == {}

    def test_the_search_finds_a_name_from_the_disk(self, whole, open_page):
        page, errors = open_page(viewport={"width": 1200, "height": 800}, offline=True)
        page.goto(f"{(whole[1].root / 'search.html').as_uri()}?q=plot_speedup")
        page.wait_for_selector("#search-results li a", timeout=30_000)
        assert page.locator("#search-results li a").count() > 1
        assert errors == []


@pytest.mark.exhaustive
def test_from_a_wheel_the_records_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "IS_CLONE", False)
    built = build(tmp_path / "site", "00")
    assert built.warnings == []
    assert "tests/hardening/records" in (tmp_path / "site" / "robustness.html").read_text()
