"""`labkit lab`, reachable with its token only; notebooks in JupyterLab, in a browser; and the cell magic."""

import atexit
import base64
import io
import re
import sys
import tempfile
from unittest.mock import Mock

import matplotlib
import nbformat
import numpy as np
import psutil
import pytest
import urllib3
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython
from nbconvert.preprocessors import ClearOutputPreprocessor
from PIL import Image

import labkit as lk
from labkit.app import jupyter
from labkit.errors import VariantError
from tests.lab_server import free_port, jupyterlab, running_server
from tests.paths import REPO

NAME = "00_measure.ipynb"
GUESS = (222, 143, 5)  # color of a prediction's mark


@pytest.mark.exhaustive
def test_it_listens_on_this_machine_only_and_asks_for_its_token(tmp_path):
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
    monkeypatch.setattr(LabApp, "initialize_server", lambda argv: asked.append(argv[0]) or server)
    with pytest.raises(SystemExit, match="a Jupyter configuration turns the token off"):
        jupyter.main(["--port=1"])
    server.start.assert_not_called()
    server.identity_provider.auth_enabled = True
    jupyter.main(["--port=1"])
    server.start.assert_called_once_with()
    assert asked == ["--port=1"] * 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, open_page, results):
    """A notebook that ran as a whole in JupyterLab at ci scale."""
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    variables = {"LABKIT_SCALE": "ci", "LABKIT_HOME": home, "LABKIT_RESULTS": results / "frames"}
    variables["MPLCONFIGDIR"] = matplotlib.get_cachedir()  # else every kernel of a new home looks for all fonts
    variables["TORCH_LOGS"] = "-torch.utils.cpp_extension"  # as in a tour: no news of a GPU that is not there
    node = nbformat.read(REPO / "notebooks" / NAME, as_version=4)
    ClearOutputPreprocessor().preprocess(node, {})  # a stored plot is not one that was drawn here
    nbformat.write(node, root / NAME)
    with jupyterlab(root, home, **variables) as address:
        opened = Opened(open_page, address(NAME))
        opened.page.evaluate(START_ALL)
        opened.page.wait_for_function("() => window.ranAll", timeout=240_000)
        opened.as_run = opened.cells()  # tests run some of them again, in any order
        yield opened
        opened.page.context.close()


START_ALL = "() => { jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ranAll = true }) }"
IDLE = "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.textContent.includes('*'))"


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
        self.cell(beginning).locator(".cm-content").click()
        if source:
            self.page.keyboard.press("Control+A")
            self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_function(IDLE, timeout=60_000)

    def picture(self, beginning):
        """The plot under a cell, as it is shown."""
        source = self.cell(beginning).locator(".jp-OutputArea-output img").get_attribute("src")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).convert("RGB")).astype(int)


def complains(output):
    """On a busy machine two short rounds may scatter, and the notebook rightly says so."""
    return output.get("name") == "stderr" and "InstabilityWarning" not in "".join(output["text"])


def test_a_notebook_runs_whole_and_shows_its_plots_and_its_result(notebook):
    cells = [cell for cell in notebook.as_run if cell["source"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error" or complains(output)] == []
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    sizes = notebook.page.eval_on_selector_all(
        ".jp-OutputArea-output img", "all => all.map(image => [image.naturalWidth, image.naturalHeight])"
    )
    assert len(sizes) == len(drawn) >= 2
    assert all(width > 100 and height > 100 for width, height in sizes)
    assert notebook.errors == []
    assert "Result of this run." in str(cells[-1]["outputs"])
    assert [cell for cell in cells if "%timeit" in cell["source"]]


def mark_of_guess(picture):
    """Column of the prediction's mark: the upper of the two triangles, since the other explains it."""
    rows, columns = np.nonzero((np.abs(picture - GUESS) <= 2).all(axis=2))
    return columns[rows < rows.min() + 14].mean()


# Two rounds scatter so much that an axis may reach from a hundredth to a hundred: then no mark moves far.
EVEN = 'runs["images_per_s"] = runs.variant.map({"no workers": 100.0, "2 workers": 90.0})'


def test_a_changed_prediction_moves_its_mark(notebook):
    plot = 'found = lk.summarize(runs).loc["2 workers"]'
    notebook.run("course.predict(", f'course.predict("2 workers", 1.5)\n{EVEN}')
    notebook.run(plot)
    before = notebook.picture(plot)
    notebook.run("course.predict(", 'course.predict("2 workers", 0.25)')
    assert np.array_equal(notebook.picture(plot), before)  # nothing was drawn yet
    notebook.run(plot)
    assert mark_of_guess(notebook.picture(plot)) < mark_of_guess(before) - 100
    assert notebook.errors == []


class TestMagic:
    """`%%variant` in a real IPython shell."""

    @pytest.fixture
    def shell(self, monkeypatch, tmp_path_factory):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("shell")))  # of its history
        shell = start_ipython() or get_ipython()  # noqa: F821 - the one shell of this process
        atexit.unregister(shell.atexit_operations)  # they would end the history, whose file is gone by then
        shell.run_line_magic("load_ext", "labkit")
        shell.user_ns.pop("runs", None)
        return shell

    @pytest.mark.exhaustive
    def test_cells_become_variants_of_one_frame_and_a_label_again_replaces_its_runs(self, shell, capsys):
        shell.run_cell_magic("variant", "'a b' -n 10 -r 3", "%env LABKIT_TEST=1\nx = sum(range(1000))")
        shell.run_cell_magic("variant", "c --images 20 --rounds 2 --warmups 0", "y = 2")
        runs = shell.user_ns["runs"]
        assert runs.groupby("variant").size().to_dict() == {"a b": 4, "c": 2}
        assert runs.groupby("variant").n_images.first().to_dict() == {"a b": 10, "c": 20}
        assert shell.user_ns["x"] == 499500
        assert "not interleaved" in lk.summarize(runs).loc["c", "note"]
        assert "a b: median" in capsys.readouterr().out
        shell.run_cell_magic("variant", "'a b' -n 1 -r 3 -w 0", "pass")
        runs = shell.user_ns["runs"]
        assert set(runs.baseline) == {"a b"}
        assert list(runs.variant) == ["a b"] * 3 + ["c"] * 2

    def test_mistakes_are_usage_errors_and_an_error_in_the_cell_names_the_variant(self, shell):
        with pytest.raises(UsageError, match="images"):
            shell.run_cell_magic("variant", "a", "pass")
        with pytest.raises(VariantError, match="variant 'a' raised ZeroDivisionError"):
            shell.run_cell_magic("variant", "a -n 1", "1 / 0")
        shell.user_ns["runs"] = 3
        with pytest.raises(UsageError, match="holds a int, not a frame"):
            shell.run_cell_magic("variant", "a -n 1", "pass")
