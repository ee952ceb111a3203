"""Build the site with Sphinx, MyST-NB and the PyData theme.

Sphinx makes plain files whose search, links and API reference work from a disk without a network; MkDocs' search and
Jupyter Book 2 need a server, and mkdocstrings and mkdocs-jupyter are two projects more. MyST-NB shows stored outputs
without running a cell, and the theme is tested for accessibility in light and dark by those who make it.
"""

import shutil
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path

from labkit.core import NOTEBOOK_FOLDER, install_command
from labkit.lab.notebooks import Notebook, find_notebooks
from labkit.lab.site import records, texts
from labkit.lab.site.addresses import Addresses
from labkit.lab.site.api import documented_as_lk, write_reference
from labkit.lab.site.hosted import repository
from labkit.lab.site.notebook_pages import write_notebook
from labkit.lab.site.plan_form import plan_form_html
from labkit.lab.site.target import check_target, replaced_whole

_NEEDED = ("sphinx", "myst_nb", "pydata_sphinx_theme")


@dataclass(frozen=True)
class Site:
    """A built site: its first page, the notebooks in it, and what Sphinx warned of."""

    index: Path
    notebooks: list[str]
    warnings: list[str]


def build_site(folder: Path, *, only: str = "") -> Site:
    """Build the site from the stored notebooks, which are not run, and from the package itself.

    The folder is replaced whole, when all pages are there.

    Args:
        folder: A new or an empty one, or one that holds an earlier site.
        only: Notebooks to have pages, by the start of their names: `"00,02"`. Default: all.

    Raises:
        ImportError: Sphinx, MyST-NB or the theme is missing; says how to install them.
        ValueError: the folder holds something else.
        FileNotFoundError: `only` matches no notebook.
        OSError: the folder cannot be written to.
    """
    for module in _NEEDED:
        try:
            import_module(module)
        except ImportError as error:
            raise ImportError(f"labkit site needs {error.name or module}: {install_command('site')}") from error
    check_target(folder)
    notebooks = find_notebooks(only)
    with replaced_whole(folder) as scratch:
        names = [notebook.name for notebook in notebooks]
        _write_sources(scratch / "source", scratch / "files", notebooks)
        warnings = _run_sphinx(scratch, frozenset(names))
    return Site(folder / "index.html", names, warnings)


def _write_sources(source: Path, files: Path, notebooks: list[Notebook]) -> None:
    pages = texts.page_names()
    addresses = Addresses(frozenset(notebook.name for notebook in notebooks), frozenset(pages), repository())
    for name in ("notebooks", "api", "pages"):
        (source / name).mkdir(parents=True)
    (files / "files").mkdir(parents=True)
    for notebook in notebooks:
        write_notebook(notebook, source / "notebooks", addresses)
        shutil.copy(notebook.path, files / "files")
    write_reference(source / "api")
    for name in pages:
        text = (texts.PAGES / f"{name}.md").read_text()
        (source / "pages" / f"{name}.md").write_text(addresses.localized(text, "pages"))
    shutil.copy(NOTEBOOK_FOLDER / texts.LADDER, source)
    written = {
        "index": texts.home_page(), "pages/index": texts.guide_page(pages), "plan": texts.plan_page(plan_form_html()),
        "notebooks/index": texts.walk_page(notebooks),
        "glossary": texts.glossary_page(addresses), "claims": records.claims_page(source, addresses),
        "peers": records.peers_page(source, addresses), "robustness": records.records_page(source, addresses),
    }  # fmt: skip
    for name, text in written.items():
        (source / f"{name}.md").write_text(text)


def _run_sphinx(scratch: Path, notebooks: frozenset[str]) -> list[str]:
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    from labkit.lab.site.settings import connect, make_settings

    source, warnings = scratch / "source", StringIO()
    with documented_as_lk(), patch_docutils(), docutils_namespace():
        app = Sphinx(
            source, None, scratch / "html", scratch / "doctrees", "html", status=None, warning=warnings,
            confoverrides=make_settings(scratch / "files", repository()),
        )  # fmt: skip
        connect(app, notebooks)
        app.build(force_all=True)
    html = scratch / "html"
    shutil.rmtree(html / "_sources", ignore_errors=True)  # empty
    for name in (".buildinfo", "_static/webpack-macros.html"):  # a digest of temporary paths; the theme's own, no page
        (html / name).unlink(missing_ok=True)
    return [line for line in warnings.getvalue().replace(f"{source}/", "").splitlines() if line.strip()]
