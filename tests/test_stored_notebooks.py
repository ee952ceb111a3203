"""Notebooks are stored whole, follow the skeleton, and nbval turns red when one breaks. nbval itself runs them."""

import base64
import copy
import json
import re
import subprocess
import sys
from io import BytesIO

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from labkit.app.storing import in_few_colors
from labkit.measure.frames import MEASURE_VERSION
from labkit.util.pictures import png_base64
from tests.paths import REPO

PATHS = sorted((REPO / "notebooks").glob("*.ipynb"))
SECTIONS = [
    "The idea", "By hand", "Predict", "Correct before fast", "Measure", "Look", "Explain", "labkit's version",
    "When this does not help", "Exercises", "Summary",
]  # fmt: skip


def _code(node):
    return [cell for cell in node.cells if cell.cell_type == "code" and cell.source.strip()]


def problems(node) -> list[str]:
    """What is wrong with a notebook's stored run."""
    cells = _code(node)
    outputs = [output for cell in cells for output in cell.outputs]
    text = json.dumps(outputs)
    plots = [cell for cell in cells if re.search(r"^(ax = )?(?:lk|course)\.plot_\w+\(", cell.source, re.MULTILINE)]
    checked = [cell for cell in cells if "NBVAL_CHECK_OUTPUT" in cell.source]
    found = {
        "not one whole run in order": [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)),
        "a stored error": any(output.output_type == "error" for output in outputs),
        "stderr noise": any(output.get("name") == "stderr" for output in outputs),
        "an absolute path": re.search(r"(?<![\w.])/(home|root|tmp|usr|work|Users|mnt|opt|var)/", text),
        "a progress bar": "it/s]" in text or "run/s]" in text,
        "no plot under a plotting call": not all("image/png" in json.dumps(cell.outputs) for cell in plots),
        "a checked cell without output": not all(cell.outputs for cell in checked),
    }
    return [problem for problem, is_there in found.items() if is_there]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_stored_whole(path):
    assert problems(nbformat.read(path, as_version=4)) == []
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_follows_the_skeleton(path):
    node = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in node.cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## ([^:\n]+)", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS
    for part in ("**Question.**", "**Prerequisites.**", "**Minutes.**"):
        assert part in node.cells[0].source
    assert len(_code(node)[0].source.splitlines()) <= 6
    assert len(re.search(r"## The idea\n(.*?)(?=\n## |\Z)", text, re.DOTALL)[1].split()) <= 150
    assert max(len(cell.source.splitlines()) for cell in _code(node)) <= 25
    assert len(re.findall(r"course\.check\(", str(node))) in range(3, 6)
    assert "NBVAL_CHECK_OUTPUT" in str(node)
    assert "Next:" in node.cells[-1].source


def run_problems(stored: dict[str, dict]) -> list[str]:
    """What is wrong with the runs that notebooks come from; `stored` maps their names to their `metadata["labkit"]`."""
    lacking = [name for name, about in stored.items() if not {"run", "measure"} <= about.keys()]
    runs = {about["run"] for name, about in stored.items() if name not in lacking}
    old = [name for name, about in stored.items() if about.get("measure", MEASURE_VERSION) < MEASURE_VERSION]
    found = {
        f"they name no run: {', '.join(lacking)}": lacking,
        f"they come from {len(runs)} runs: {', '.join(sorted(runs))}": len(runs) > 1,
        f"they were measured before version {MEASURE_VERSION}: {', '.join(old)}": old,
    }
    return [
        f"{problem}. Store all again: python -m labkit tour --store" for problem, is_there in found.items() if is_there
    ]


def test_all_come_from_one_run_of_todays_measuring():
    stored = {path.name: nbformat.read(path, as_version=4).metadata.get("labkit", {}) for path in PATHS}
    assert run_problems(stored) == []


ABOUT = {"run": "one", "measure": MEASURE_VERSION}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (ABOUT, ""),
        ({**ABOUT, "measure": MEASURE_VERSION + 1}, ""),  # an older commit's tests, on newer notebooks
        ({}, "name no run: b.ipynb"),
        ({"measure": MEASURE_VERSION}, "name no run: b.ipynb"),
        ({**ABOUT, "run": "other"}, "come from 2 runs: one, other"),
        ({**ABOUT, "measure": MEASURE_VERSION - 1}, f"before version {MEASURE_VERSION}: b.ipynb"),
    ],
)
def test_the_checks_of_runs_can_fail(changed, problem):
    found = run_problems({"a.ipynb": ABOUT, "b.ipynb": changed})
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def _stored(*cells):
    node = new_notebook(cells=[new_code_cell(source, outputs=outputs) for source, outputs in cells])
    for count, cell in enumerate(node.cells, 1):
        cell.execution_count = count
    return node


PLOT = new_output("display_data", {"image/png": "aGk="})
GOOD = _stored(("1 + 1", [new_output("execute_result", {"text/plain": "2"})]), ("lk.plot_speedup(runs);", [PLOT]))


def _add_output(cells, kind, **fields):
    cells[0].outputs.append(new_output(kind, **fields))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda cells: cells.reverse(), "order"),
        (lambda cells: _add_output(cells, "error", ename="E", evalue="", traceback=[]), "stored error"),
        (lambda cells: _add_output(cells, "stream", name="stderr", text="hm"), "stderr"),
        (lambda cells: _add_output(cells, "stream", text="see /home/me/x"), "absolute path"),
        (lambda cells: _add_output(cells, "stream", text="0/16 [00:00<?, ?run/s]"), "progress bar"),
        (lambda cells: cells[1].outputs.clear(), "no plot under"),
    ],
)
def test_the_checks_can_fail(change, problem):
    assert problems(GOOD) == []
    node = copy.deepcopy(GOOD)
    change(node.cells)
    assert problem in " ".join(problems(node))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("source", "stored", "code"),
    [
        ("# NBVAL_CHECK_OUTPUT\nprint('same')", "same\n", 0),
        ("# NBVAL_CHECK_OUTPUT\nprint('new')", "old\n", 1),
        ("print('new')", "old\n", 0),
        ("raise ValueError('broken')", "", 1),
    ],
    ids=["unchanged", "a changed checked output", "a changed free output", "a broken cell"],
)
def test_nbval_turns_red(tmp_path, source, stored, code):
    outputs = [new_output("stream", name="stdout", text=stored)] if stored else []
    nbformat.write(_stored((source, outputs)), tmp_path / "some.ipynb")
    options = ["-q", "-c", str(REPO / "pyproject.toml"), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "some.ipynb"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == code, ran.stdout


def test_a_plot_in_few_colors_is_the_same_plot_in_fewer_bytes():
    figure = Figure()
    figure.add_subplot().plot([1, 2, 3], color="firebrick")
    png = png_base64(figure)
    few = in_few_colors(png)
    before, after = (Image.open(BytesIO(base64.b64decode(one))).convert("RGB") for one in (png, few))
    assert len(few) < len(png)
    assert np.abs(np.asarray(before, int) - np.asarray(after, int)).mean() < 1
