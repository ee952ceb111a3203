"""Stored notebooks as sources of pages: their own cells and outputs, with what only a page needs."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.lab.notebooks import Notebook
from labkit.lab.site.addresses import Addresses
from labkit.lab.site.hosted import hosted_note

if TYPE_CHECKING:
    from nbformat import NotebookNode

MOVES = "This is the stored picture. In JupyterLab it has sliders or menus, and moves: `python -m labkit lab`."

_DIAGRAM, _DRAWN_THERE = re.compile(r"^```mermaid\b", re.MULTILINE), "JupyterLab draws this diagram:\n\n```text"
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
_TITLE = re.compile(r"""(?:set_title|suptitle)\(f?(["'])(.+?)\1""")
_CALL = re.compile(r"\b(?:lk\.)?((?:plot|explore|FeedingExplorer|trace)\w*)\(")


def write_notebook(notebook: Notebook, folder: Path, addresses: Addresses) -> None:
    """Write a notebook to `folder` as the source of its page; no cell runs.

    Links lead to pages, plots have an alternative text, a widget's stored picture says that it moves in JupyterLab,
    and a box under the title says how to run the notebook on a hosted GPU.
    """
    import nbformat
    from nbformat.v4 import new_markdown_cell

    node = nbformat.read(notebook.path, as_version=4)
    heading, cells = "", []
    for cell in node.cells:
        if cell.cell_type == "markdown":
            heading = (_HEADING.findall(cell.source) or [heading])[-1]
            cell.source = _DIAGRAM.sub(_DRAWN_THERE, addresses.localized(cell.source, "notebooks"))
        cells.append(cell)
        for output in cell.get("outputs", []):
            if text := output.get("data", {}).get("text/markdown"):
                output.data["text/markdown"] = addresses.localized(text, "notebooks")
        if pictures := [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]:
            cell.metadata["mystnb"] = {"image": {"alt": alternative_text(cell.source, heading)}}
            if any(map(_is_widget, pictures)):
                cells.append(new_markdown_cell(MOVES, id=f"{cell.id}-moves"))
    cells.insert(1, new_markdown_cell(hosted_note(notebook.name, addresses.repository), id="hosted-gpu"))
    node.cells = cells
    nbformat.write(node, folder / f"{notebook.name}.ipynb")


def alternative_text(source: str, heading: str) -> str:
    """What a plot shows, for those who do not see it: its title if the code names one, else its section and its call.

    What it found stands in the text and the tables beside it; the words here are those that the code gives.
    """
    said = re.sub(r"\{[^}]*\}", "…", title[2]) if (title := _TITLE.search(source)) else heading.strip("*# ")
    call = f", drawn by {name[1]}" if (name := _CALL.search(source)) else ""
    return f"Plot: {said.replace('`', '')}{call}"


def _is_widget(output: "NotebookNode") -> bool:
    """Only an object that shows itself, with sliders or menus, is a cell's result as a picture: plots are displayed."""
    return bool(output.output_type == "execute_result")
