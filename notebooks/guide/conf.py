"""Sphinx's settings for the site: `python -m labkit site FOLDER`.

Sphinx makes plain files whose search, links and API reference work from a disk without a network. MyST-NB shows the
stored outputs of the notebooks; no cell runs.
"""

import inspect
from pathlib import Path

import labkit as lk

project = "labkit"
version = release = lk.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "guide/index"
include_patterns = ["[0-9][0-9]*.ipynb", "guide/**.md"]  # not what a reader made next to them

html_theme = "pydata_sphinx_theme"
html_title = "labkit"
html_theme_options = {"secondary_sidebar_items": ["page-toc"], "navigation_with_keys": False, "footer_end": []}
html_copy_source = False

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_heading_anchors = 4
default_role = "code"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Items", "params_style")]
linkcheck_timeout = 20  # seconds
suppress_warnings = ["misc.highlighting_failure"]  # `%timeit` and `!pip` are no Python


# Addresses of pages that are no more, and where their contents are.
MOVED = {
    "glossary": "guide/reference", "guide/commands": "guide/reference", "guide/comparing": "guide/compare_and_plan",
    "guide/frameworks": "guide/trainers", "guide/peers": "guide/faster_loaders", "guide/photos": "guide/reference",
    "guide/planning": "guide/compare_and_plan", "guide/projects": "guide/recipes", "guide/records": "guide/reference",
    "guide/reliability": "guide/reference", "guide/training": "guide/faster_loaders", "guide/waiting": "guide/start",
    "guide/watch_json": "guide/reference",
}  # fmt: skip


def _lead_on(app, error: Exception | None) -> None:
    """Write a page at each old address that leads to the new one."""
    for old, new in MOVED.items() if error is None else ():
        target = f"{'../' * old.count('/')}{new}.html"
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}"><a href="{target}">Moved</a>\n'
        path = Path(app.outdir) / f"{old}.html"
        if not path.exists():
            path.write_text(page)


def _api_page() -> str:
    """Directives of autodoc for every name of `lk.`, as Markdown."""
    entries = []
    for name in lk.__all__:
        value = getattr(lk, name)
        if inspect.isclass(value):
            entries.append(f".. autoclass:: labkit.{name}\n   :members:")
        elif inspect.isroutine(value):
            entries.append(f".. autofunction:: labkit.{name}")
        else:  # what a mapping or tuple inherits its docstring from says nothing of it
            entries.append(f".. py:data:: labkit.{name}\n\n   {', '.join(f'``{each}``' for each in value)}")
    return "# API\n\n```{eval-rst}\n" + "\n\n".join(entries) + "\n```\n"


def _read_source(app: object, page: str, source: list[str]) -> None:
    if page == "guide/api":
        source[0] = _api_page()


def setup(app) -> None:
    app.connect("source-read", _read_source)
    app.connect("build-finished", _lead_on)
