"""Notebooks are stored whole, follow the skeleton, and nbval turns red when one breaks. nbval itself runs them."""

import json
import re
import subprocess
import sys
from functools import cache

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit.measure.frames import MEASURE_VERSION
from tests.paths import REPO

PATHS = sorted((REPO / "notebooks").glob("*.ipynb"))
SECTIONS = [
    "The idea", "By hand", "Predict", "Correct before fast", "Measure", "Look", "Explain", "labkit's version",
    "When this does not help", "Exercises", "Summary",
]  # fmt: skip
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
def test_it_follows_the_skeleton(path):
    node = read(path)
    text = "\n".join(cell.source for cell in node.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## ([^:\n]+)", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS
    for part in ("**Question.**", "**Prerequisites.**", "**Minutes.**"):
        assert part in node.cells[0].source
    assert len(code_of(path)[0].source.splitlines()) <= 6
    assert max(len(cell.source.splitlines()) for cell in code_of(path)) <= 25
    assert len(re.findall(r"course\.check\(", str(node))) in range(3, 6)
    assert "NBVAL_CHECK_OUTPUT" in str(node)
    assert "Next:" in node.cells[-1].source


def test_all_come_from_one_run_of_todays_measuring():
    runs = {path.name: read(path).metadata.get("labkit", {}) for path in PATHS}
    again = "store all again: python -m labkit tour --store"
    assert [name for name, run in runs.items() if not {"run", "measure"} <= run.keys()] == [], again
    assert len({run["run"] for run in runs.values()}) == 1, again
    assert [name for name, run in runs.items() if run["measure"] < MEASURE_VERSION] == [], again


@pytest.mark.exhaustive
def test_nbval_turns_red_where_a_cell_breaks_or_a_checked_output_changes(tmp_path):
    notebooks = {
        "unchanged": ("# NBVAL_CHECK_OUTPUT\nprint('same')", "same\n", "PASSED"),
        "checked": ("# NBVAL_CHECK_OUTPUT\nprint('new')", "old\n", "FAILED"),
        "free": ("print('new')", "old\n", "PASSED"),
        "broken": ("raise ValueError('broken')", "", "FAILED"),
    }
    for name, (source, text, _) in notebooks.items():
        outputs = [new_output("stream", name="stdout", text=text)] if text else []
        node = new_notebook(cells=[new_code_cell(source, outputs=outputs, execution_count=1)])
        nbformat.write(node, tmp_path / f"{name}.ipynb")
    options = ["-v", "-n", "0", "-c", str(REPO / "pyproject.toml"), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"{name}.ipynb" for name in notebooks)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    outcomes = re.findall(r"::Cell 0 (PASSED|FAILED) ", said)  # in the order of the command line
    assert outcomes == [outcome for *_, outcome in notebooks.values()], said
