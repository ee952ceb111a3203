"""Sphinx's settings for the site: no conf.py, and nothing that a browser would fetch from a network."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.core import DISTRIBUTION, package_version
from labkit.lab.site.api import rewrite_docstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

STATIC = Path(__file__).with_name("static")
_EXTENSIONS = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.githubpages"]
_WITHOUT = ("index", "plan", "claims", "peers", "robustness", "glossary", "genindex", "search")  # pages of their own
_SIDEBARS: dict[str, list[str]] = {
    **{f"{folder}/*": ["sidebar-nav-bs"] for folder in ("notebooks", "api", "pages")},
    **{page: [] for page in _WITHOUT},
}
_DOCSTRINGS_FIRST = 400  # before napoleon, at 500, which reads sections


def make_settings(files: Path, repository: str | None) -> dict[str, Any]:
    """What a conf.py would say.

    Args:
        files: Folder whose contents go to the site's top as they are: notebooks to download.
        repository: Address of the project, or None.
    """
    theme = {
        "logo": {"text": "labkit"}, "navbar_center": ["navbar-nav"], "navbar_end": ["theme-switcher"],
        "navbar_align": "left", "header_links_before_dropdown": 8, "navigation_with_keys": False,
        "secondary_sidebar_items": ["page-toc"], "footer_start": [], "footer_end": [], "show_toc_level": 2,
        "pygments_light_style": "a11y-high-contrast-light", "pygments_dark_style": "a11y-high-contrast-dark",
        "back_to_top_button": False,
    }  # fmt: skip
    if repository:
        icon = {"name": "Repository", "url": repository, "icon": "fa-solid fa-code-branch"}
        theme |= {"navbar_end": ["theme-switcher", "navbar-icon-links"], "icon_links": [icon]}
    version = package_version(DISTRIBUTION) or ""
    return {
        "project": "labkit", "version": version, "release": version,
        "language": "en", "highlight_language": "none", "extensions": _EXTENSIONS, "root_doc": "index",
        "html_theme": "pydata_sphinx_theme", "html_theme_options": theme, "html_title": "labkit",
        "html_static_path": [str(STATIC)], "html_css_files": ["site.css"], "html_js_files": ["site.js"],
        "html_extra_path": [str(files)], "html_copy_source": False, "html_show_sourcelink": False,
        "html_context": {"default_mode": "auto"}, "html_sidebars": _SIDEBARS,
        "nb_execution_mode": "off", "nb_merge_streams": True, "nb_render_markdown_format": "myst",
        "myst_enable_extensions": ["deflist"], "myst_heading_anchors": 4,
        "autodoc_member_order": "bysource", "autodoc_typehints_format": "short",
        "autodoc_preserve_defaults": True, "python_use_unqualified_type_names": True,
        "napoleon_numpy_docstring": False, "napoleon_custom_sections": [("Items", "params_style")],
        "toc_object_entries_show_parents": "hide",
    }  # fmt: skip


def connect(app: "Sphinx", notebooks: frozenset[str]) -> None:
    """Add the handlers that the site needs.

    Args:
        notebooks: Names of the notebooks that have a page.
    """
    handler = partial(rewrite_docstring, notebooks=notebooks)
    app.connect("autodoc-process-docstring", handler, priority=_DOCSTRINGS_FIRST)
    app.connect("doctree-read", _number_pictures)


def _number_pictures(app: "Sphinx", doctree: Any) -> None:
    """Tell the pictures of a cell apart in their alternative texts."""
    from docutils import nodes

    for output in doctree.findall(lambda node: "cell_output" in node.get("classes", []) if node.children else False):
        pictures = list(output.findall(nodes.image))
        for number, picture in enumerate(pictures, 1):
            if len(pictures) > 1:
                picture["alt"] = f"{picture.get('alt', 'Plot')} ({number} of {len(pictures)})"
