"""Notebooks are stored whole, follow the skeleton, and nbval turns red when one breaks. nbval itself runs them."""

import json
import re
from functools import cache

import nbformat
import pytest

from labkit.app.notebooks import find_notebooks
from labkit.app.storing import stated, walk_table
from labkit.course.results import STORED, stored_results
from labkit.measure.frames import MEASURE_VERSION
from tests.paths import REPO

PATHS = sorted((REPO / "notebooks").glob("*.ipynb"))
PARTS = ("Question", "Result", "Do this", "Not if", "Prerequisites", "Minutes")  # of the first cell, in this order
MAX_CELLS, MAX_WORDS = 35, 900
MAX_LINES, MAX_COLUMNS = 20, 95  # of a cell; a window of 1280 pixels cuts off what is longer
FOLDER = re.compile(r"(?<![\w.])/(home|root|tmp|usr|work|Users|mnt|opt|var)/")
PLOT = re.compile(r"^(ax = )?(?:lk|course)\.plot_\w+\(", re.MULTILINE)


@cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_of(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code" and cell.source.strip()]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_is_stored_whole_without_noise(path):
    cells = code_of(path)
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not one whole run in order"
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    for cell in cells:
        text = json.dumps(cell.outputs)
        assert not FOLDER.search(text), "an absolute path"
        assert "it/s]" not in text, "a progress bar"
        assert "run/s]" not in text, "a progress bar"
        assert "image/png" in text or not PLOT.search(cell.source), "no plot under a plotting call"
        assert cell.outputs or "NBVAL_CHECK_OUTPUT" not in cell.source, "a checked cell without output"
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_answers_first_and_is_short(path):
    node = read(path)
    words = " ".join(cell.source for cell in node.cells if cell.cell_type == "markdown").split()
    lines = [[line for line in cell.source.splitlines() if line.strip() and line[0] != "#"] for cell in code_of(path)]
    assert re.findall(r"\*\*([A-Z][\w ]+)\.\*\*", node.cells[0].source) == list(PARTS)
    assert "```python" in node.cells[0].source.partition("**Do this.**")[2].partition("**Not if.**")[0]
    assert len(node.cells) <= MAX_CELLS
    assert len(words) <= MAX_WORDS
    assert max(map(len, lines)) <= MAX_LINES
    assert [line for cell in code_of(path) for line in cell.source.splitlines() if len(line) > MAX_COLUMNS] == []
    assert "NBVAL_CHECK_OUTPUT" in str(node)
    assert re.search(rf'course\.result\(\s*"{path.stem}"', node.cells[-1].source)
    assert "Next:" in str(node) or path == PATHS[-1]
    imported = re.findall(
        r"(?:from|import) (labkit(?:\.\w+)*)(?: import (\w+))?", "\n".join(cell.source for cell in code_of(path))
    )
    assert {name for name, part in imported if (name, part) != ("labkit", "course")} <= {"labkit"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_its_result_is_read_at_a_glance(path):
    told = " ".join(stored_results()[path.stem].sentences)
    figures = re.findall(r"(?<![\w.-])\d[\d,.]*", re.sub(r"`[^`]*`", "", told))
    assert len(told.split()) <= 60
    assert len(figures) <= 3, figures


def test_readme_notebooks_and_results_say_the_same():
    """All three are written by `labkit tour --store`."""
    stored = stored_results()
    assert list(stored) == [path.stem for path in PATHS]
    readme, content = (REPO / "README.md").read_text(), json.loads(STORED.read_text())
    notebooks = find_notebooks(folder=REPO / "notebooks")
    table = walk_table(((notebook, stored[notebook.name]) for notebook in notebooks), content["machine"])
    assert table in readme
    for path in PATHS:
        assert stated(stored[path.stem]) in read(path).cells[0].source
    assert {content["run"]} == {read(path).metadata["labkit"]["run"] for path in PATHS}


def test_all_come_from_one_run_of_todays_measuring():
    runs = {path.name: read(path).metadata.get("labkit", {}) for path in PATHS}
    again = "store all again: python -m labkit tour --store"
    assert [name for name, run in runs.items() if not {"run", "measure"} <= run.keys()] == [], again
    assert len({run["run"] for run in runs.values()}) == 1, again
    assert [name for name, run in runs.items() if run["measure"] < MEASURE_VERSION] == [], again
