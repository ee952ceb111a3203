"""The site: built from the stored notebooks and the guide, without a dead link, readable from a disk."""

import re
import shutil
from html import unescape
from urllib.parse import unquote, urlsplit

import pytest

import labkit as lk
from labkit.app.cli import main
from labkit.app.site import build_site
from tests.paths import REPO, invoke

for module in ("sphinx", "myst_nb", "pydata_sphinx_theme"):
    pytest.importorskip(module, reason=f"{module} is missing: python -m pip install -e '.[site]'")

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """All notebooks and the guide, as in a clone, and what a reader may have beside them."""
    folder = tmp_path_factory.mktemp("source") / "notebooks"
    shutil.copytree(REPO / "notebooks", folder, ignore=shutil.ignore_patterns("*.csv", ".ipynb_checkpoints"))
    shutil.copy(folder / "00_measure.ipynb", folder / "Untitled.ipynb")
    (folder / "results").mkdir()
    (folder / "results" / "mine.md").write_text("# Mine\n\n[gone](gone.md)\n")
    return folder


@pytest.fixture(scope="module")
def site(notebooks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    build_site(folder, notebooks)
    return folder


def test_every_notebook_every_page_and_every_public_name_is_there(site, notebooks):
    wanted = [*notebooks.glob("[0-9]*.ipynb"), *notebooks.glob("guide/**/*.md")]
    assert len(wanted) > 20
    assert [path for path in wanted if not (site / path.relative_to(notebooks).with_suffix(".html")).is_file()] == []
    assert not [path for path in site.rglob("*.html") if path.stem in ("Untitled", "mine")]
    entries = re.findall(r'<dt[^>]* id="labkit\.(\w+)"', (site / "guide" / "api.html").read_text())
    assert set(entries) == set(lk.__all__)


def test_no_link_within_the_site_is_dead_and_nothing_is_fetched(site):
    for path in (path for path in site.rglob("*.html") if path.parent.name != "_static"):
        text = path.read_text()
        for target in re.findall(r'<(?:a|img|script|link)\b[^>]*?(?:href|src)="([^"]+)"', text):
            address = urlsplit(unescape(target))
            if not address.scheme and not address.netloc and address.path:
                assert (path.parent / unquote(address.path)).resolve().exists(), (path, target)
        assert re.findall(r'<(?:img|script)\b[^>]*?src="(https?:[^"]+)"', text) == []


def test_an_old_address_leads_to_the_page_that_has_its_contents(site):
    old = ["glossary", *(f"guide/{name}" for name in ("commands", "waiting", "training", "watch_json", "projects"))]
    for page in old:
        [target] = re.findall(r'content="0; url=([^"]+)"', (site / f"{page}.html").read_text())
        assert (site / page).parent.joinpath(target).resolve().is_file(), page


def test_a_rerun_replaces_the_site_and_a_dead_link_writes_nothing(site, notebooks, tmp_path):
    guide, own = tmp_path / "notebooks" / "guide", tmp_path / "site"
    shutil.copytree(site, own)
    shutil.copytree(notebooks / "guide", guide, ignore=shutil.ignore_patterns("*.md"))
    (guide / "commands.md").write_text("---\norphan: true\n---\n# Commands\n\nThe second.\n")
    for link in ("commands.md", "gone.md"):
        (guide / "index.md").write_text(f"# labkit\n\n[a page]({link})\n")
        if link == "gone.md":
            with pytest.raises(RuntimeError, match="nothing was written"):
                build_site(own, guide.parent)
        else:
            build_site(own, guide.parent)
        assert "The second." in (own / "guide" / "commands.html").read_text()
        assert not (own / "00_measure.html").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notebooks", "site"]


def test_a_file_that_a_reader_put_into_the_site_is_not_lost(site, notebooks, tmp_path):
    own = tmp_path / "site"
    shutil.copytree(site, own)
    (own / "guide" / "mine.html").write_text("important")
    with pytest.raises(ValueError, match=r"'guide/mine\.html', which is none of its files"):
        build_site(own, notebooks)
    assert (own / "guide" / "mine.html").read_text() == "important"


def test_a_missing_package_or_a_folder_with_something_else_is_told(monkeypatch, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    result = invoke(main, ["site", str(tmp_path)])
    assert result.exit_code == 2
    assert "thesis.tex" in result.output
    assert "name another folder" in result.output
    monkeypatch.setattr("labkit.app.site.find_spec", lambda name: None if name == "myst_nb" else name)
    result = invoke(main, ["site", str(tmp_path / "site")])
    assert result.exit_code == 2
    assert 'labkit site needs myst_nb: python -m pip install -e ".[site]"' in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
