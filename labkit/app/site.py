"""`python -m labkit site`: the stored notebooks, the guide and the API as pages that open from the disk."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from labkit.app.commands import Argument, one_line_errors, say
from labkit.errors import ArgumentError, MissingLibraryError, OperationError
from labkit.util.files import ScratchFolder, foreign_names, read_record, write_record
from labkit.util.machine import NOTEBOOK_FOLDER, install_command

_RECORD = ".labkit-site.json"  # marks a folder that holds a site, which a rerun may replace
_ABOUT = {"made by": "labkit site"}
_FIRST_PAGE = '<!doctype html><meta http-equiv="refresh" content="0; url=guide/index.html"><title>labkit</title>\n'


def site(
    folder: Annotated[Path, Argument(help="Folder for the pages: new, or with an earlier site.")],
) -> None:
    """Write the stored notebooks, the guide and the API as static pages that open from the disk."""
    with one_line_errors("labkit", ImportError, OSError, ValueError, RuntimeError):
        build_site(folder)
    say(f"wrote {folder / 'index.html'}")


def build_site(folder: Path, notebooks: Path = NOTEBOOK_FOLDER) -> None:
    """Build the pages with Sphinx and MyST-NB; no cell runs. The folder is replaced when all pages are there.

    Args:
        folder: A new or an empty one, or one that holds an earlier site.
        notebooks: The folder of the notebooks, with `guide/conf.py` in it.

    Raises:
        ImportError: Sphinx, MyST-NB or the theme is missing; says how to install them.
        ValueError: the folder holds something else, or is a file.
        RuntimeError: Sphinx warned, as it does of a link that leads nowhere; its own lines are on stderr.
        OSError: the folder cannot be written to.
    """
    if missing := [name for name in ("sphinx", "myst_nb", "pydata_sphinx_theme") if find_spec(name) is None]:
        raise MissingLibraryError(f"labkit site needs {', '.join(missing)}: {install_command('site')}")
    _check(folder)
    from sphinx.cmd.build import build_main

    folder = folder.resolve()
    with ScratchFolder(folder.parent) as scratch:
        html = scratch / "html"
        options = ["-q", "-W", "--keep-going", "-d", scratch / "doctrees", "-c", notebooks / "guide"]
        if build_main([*map(str, options), str(notebooks), str(html)]):
            raise OperationError("Sphinx could not build the site, for the reasons above; nothing was written")
        (html / "index.html").write_text(_FIRST_PAGE)
        write_record(html / _RECORD, _ABOUT | {"files": _files_in(html)})
        if folder.exists():
            folder.rename(scratch / "before")
        html.rename(folder)


def _check(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{folder} is a file: name a folder for the site, a new one or one that a site is in")
    names = foreign_names(folder, lambda name: False)
    about = read_record(folder / _RECORD) or {}
    if names and about.get("made by") != _ABOUT["made by"]:
        raise ArgumentError(
            f"{folder} is not empty and holds no site, but {names[0]!r}: name another folder, or empty it"
        )
    found = _files_in(folder)
    own = {*about.get("files", found), _RECORD}
    if foreign := [name for name in found if name not in own]:
        raise ArgumentError(
            f"{folder} holds a site and {foreign[0]!r}, which is none of its files and would be lost: move it away, or "
            "name another folder"
        )


def _files_in(folder: Path) -> list[str]:
    """All files under a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
