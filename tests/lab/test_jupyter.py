"""`labkit lab`: reachable on the loopback interface with the token only; and notebooks in JupyterLab, in a browser."""

import base64
import io
import json
import re
import sys
from unittest.mock import Mock

import matplotlib
import nbformat
import numpy as np
import psutil
import pytest
import urllib3
from nbconvert.preprocessors import ClearOutputPreprocessor
from PIL import Image

from labkit.app import jupyter as lab_server
from tests.lab_server import free_port, jupyterlab, running_server
from tests.paths import REPO

NAMES = ["00_measure.ipynb", "02_read_image.ipynb"]
NOTEBOOKS = REPO / "notebooks"
GUESS = (222, 143, 5)  # color of a prediction's mark


@pytest.mark.exhaustive
def test_on_this_machine_and_with_its_token(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_server_config.py").write_text("c.ServerApp.ip = '0.0.0.0'\n")
    command = [sys.executable, "-m", "labkit", "lab", "--port", str(free_port())]
    with running_server(command, tmp_path) as (server, info):
        assert len(info["token"]) >= 32
        for query, status in {"": 403, "?token=wrong": 403, f"?token={info['token']}": 200}.items():
            assert urllib3.request("GET", f"{info['url']}api/contents{query}").status == status
        listening = [place for place in server.net_connections() if place.status == "LISTEN"]
        assert {place.laddr.ip for place in listening} == {"127.0.0.1"}
        assert info["token"] not in " ".join(server.cmdline())
        assert urllib3.request("POST", f"{info['url']}api/kernels?token={info['token']}", body="{}").status == 201
        children = server.children(recursive=True)
        commands = [child.cmdline() for child in children if child.status() != psutil.STATUS_ZOMBIE]
        [kernel] = [command for command in commands if "ipykernel_launcher" in command]
        assert kernel[-2:] == ["--ext", "labkit.app.recording"]


def test_without_a_token_it_does_not_start(monkeypatch):
    """As where a configuration has `token = ''`: what counts is what Jupyter made of all its settings."""
    from jupyterlab.labapp import LabApp

    server, asked = Mock(), []
    server.identity_provider.auth_enabled = False
    monkeypatch.setattr(LabApp, "initialize_server", lambda argv: asked.append(argv) or server)
    with pytest.raises(SystemExit, match="a Jupyter configuration turns the token off"):
        lab_server.main(["--port=1"])
    server.start.assert_not_called()
    server.identity_provider.auth_enabled = True
    lab_server.main(["--port=1"])
    server.start.assert_called_once_with()
    assert [arguments[0] for arguments in asked] == ["--port=1"] * 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def browser_lab(tmp_path_factory, open_page, results):
    """Number -> a notebook that ran as a whole in JupyterLab at ci scale; both at once."""
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    variables = {"LABKIT_SCALE": "ci", "LABKIT_HOME": home, "LABKIT_RESULTS": results / "frames"}
    variables["MPLCONFIGDIR"] = matplotlib.get_cachedir()  # else every kernel of a new home looks for all fonts
    variables["TORCH_LOGS"] = "-torch.utils.cpp_extension"  # as in a tour: no news of a GPU that is not there
    for name in NAMES:
        node = nbformat.read(NOTEBOOKS / name, as_version=4)
        ClearOutputPreprocessor().preprocess(node, {})  # a stored plot is not one that was drawn here
        nbformat.write(node, root / name)
    with jupyterlab(root, home, **variables) as address:
        opened = {name[:2]: Opened(open_page, address(name)) for name in NAMES}
        for notebook in opened.values():
            notebook.page.evaluate(START_ALL)
        for notebook in opened.values():
            notebook.page.wait_for_function("() => window.ranAll", timeout=240_000)
            notebook.as_run = notebook.cells()  # tests run some of them again, in any order
        yield opened
        for notebook in opened.values():
            notebook.page.context.close()


class Opened:
    """A notebook in JupyterLab, used as a reader does."""

    def __init__(self, open_page, address):
        self.page, self.errors = open_page(viewport={"width": 1300, "height": 1000})
        self.page.goto(address)
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.ready")
        assert self.page.evaluate("() => jupyterapp.shell.currentWidget.context.path") in address

    def cells(self):
        """Code cells as JupyterLab holds them: source, execution count, outputs."""
        return self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.content.model.toJSON().cells.filter(c => c.cell_type == 'code')"
        )

    def cell(self, beginning):
        """The one code cell on the page whose source begins so."""
        shown = re.compile(rf"\[\s*(\d+|\*| )?\s*\]:\s*{re.escape(beginning)}")
        cell = self.page.locator(".jp-CodeCell").filter(has_text=shown)
        assert cell.count() == 1
        return cell

    def run(self, beginning, source=None):
        """Click into a cell, type, and run it."""
        editor = self.cell(beginning).locator(".cm-content")
        editor.click()
        if source:
            self.page.keyboard.press("Control+A")
            self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_function(IDLE, timeout=60_000)

    def picture(self, beginning):
        """The plot under a cell, as it is shown."""
        source = self.cell(beginning).locator(".jp-OutputArea-output img").get_attribute("src")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).convert("RGB")).astype(int)


START_ALL = "() => { jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ranAll = true }) }"
IDLE = "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.textContent.includes('*'))"


def _complains(output):
    """On a busy machine two short rounds may scatter, and the notebook rightly says so."""
    return output.get("name") == "stderr" and "InstabilityWarning" not in "".join(output["text"])


@pytest.mark.parametrize("number", ["00", "02"])
def test_a_notebook_runs_whole_and_shows_its_plots(browser_lab, number):
    cells = [cell for cell in browser_lab[number].as_run if cell["source"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error" or _complains(output)] == []
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    sizes = browser_lab[number].page.eval_on_selector_all(
        ".jp-OutputArea-output img", "all => all.map(image => [image.naturalWidth, image.naturalHeight])"
    )
    assert len(sizes) == len(drawn) >= 4
    assert all(width > 100 and height > 100 for width, height in sizes)
    assert browser_lab[number].errors == []


def test_the_magics_are_shown(browser_lab):
    cells = browser_lab["00"].cells()
    timed = [cell for cell in cells if cell["source"].startswith("%%variant")]
    assert len(timed) == 2
    assert all("images/s over 5 runs" in str(cell["outputs"]) for cell in timed)
    assert [cell for cell in cells if "%timeit -o" in cell["source"] and cell["execution_count"]]


def _mark_of_guess(picture):
    """Column of the prediction's mark: the upper of the two triangles, since the other explains it."""
    rows, columns = np.nonzero((np.abs(picture - GUESS) <= 2).all(axis=2))
    return columns[rows < rows.min() + 14].mean()


# Two rounds scatter so much that an axis may reach from a hundredth to a hundred: then no mark moves far.
EVEN = 'runs["images_per_s"] = runs.variant.map({"no workers": 100.0, "2 workers": 90.0})'


def test_a_changed_prediction_moves_its_mark(browser_lab, results):
    plot, notebook = "lk.plot_speedup(runs)", browser_lab["00"]
    notebook.run("course.predict(", f'course.predict("2 workers", 1.5)\n{EVEN}')
    notebook.run(plot)
    before = notebook.picture(plot)
    notebook.run("course.predict(", 'course.predict("2 workers", 0.25)')
    assert np.array_equal(notebook.picture(plot), before)  # nothing was drawn yet
    notebook.run(plot)
    assert _mark_of_guess(notebook.picture(plot)) < _mark_of_guess(before) - 100
    notebook.run("course.score(")
    assert "2 workers (00 two workers): 0.25x guessed" in notebook.cell("course.score(").inner_text()
    (kept,) = (results / "predictions").glob("00*.json")
    assert json.loads(kept.read_text())[0]["guess"] == 0.25
    assert notebook.errors == []
