"""`labkit lab`, reachable with its token only; notebooks in JupyterLab, in a browser; and the cell magic."""

import atexit
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from unittest.mock import Mock

import matplotlib
import nbformat
import psutil
import pytest
import torch
import urllib3
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython
from nbconvert.preprocessors import ClearOutputPreprocessor
from nbformat.v4 import new_code_cell, new_notebook

import labkit as lk
from labkit.app import jupyter
from labkit.app.notebooks import Notebook, execute
from labkit.errors import VariantError
from tests.lab_server import free_port, jupyterlab, running_server
from tests.paths import REPO

NAME = "00_measure.ipynb"


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
    assert "Warning" not in (tmp_path / "jupyterlab.log").read_text()


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
    variables["TQDM_DISABLE"] = "0"  # bars are shown, as to a reader
    variables["TORCH_LOGS"] = "-torch.utils.cpp_extension"  # as in a tour: no news of a GPU that is not there
    node = nbformat.read(REPO / "notebooks" / NAME, as_version=4)
    ClearOutputPreprocessor().preprocess(node, {})  # a stored plot is not one that was drawn here
    nbformat.write(node, root / NAME)
    shutil.copy(REPO / "notebooks/train.py", root)
    shutil.copytree(REPO / "notebooks/figures", root / "figures")
    for name, version in {"same.ipynb": platform.python_version(), "other.ipynb": "3.0.0"}.items():
        node.metadata["language_info"]["version"] = version
        nbformat.write(node, root / name)
    with jupyterlab(root, home, **variables) as address:
        opened = Opened(open_page, address(NAME))
        opened.folder, opened.again = root, lambda name: Opened(open_page, address(name))
        opened.page.evaluate(START_ALL)
        opened.page.wait_for_function("() => window.ranAll", timeout=240_000)
        yield opened
        opened.page.context.close()


START_ALL = "() => { jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ranAll = true }) }"
IS_SHOWN = """address => {
    const path = globalThis.jupyterapp?.shell.currentWidget?.context?.path
    return path && address.includes(path) && document.querySelector('.jp-Notebook .jp-CodeCell')
}"""


class Opened:
    """A notebook in JupyterLab, used as a reader does."""

    def __init__(self, open_page, address):
        self.page, self.errors = open_page(viewport={"width": 1300, "height": 1000})
        self.page.goto(address)
        # JupyterLab first shows what was open before.
        self.page.wait_for_function(IS_SHOWN, arg=address, timeout=60_000)
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.ready")

    def cells(self):
        """Code cells as JupyterLab holds them: source, execution count, outputs."""
        return self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.content.model.toJSON().cells.filter(c => c.cell_type == 'code')"
        )

    def save(self):
        self.page.evaluate("() => jupyterapp.shell.currentWidget.context.save()")


def complains(output):
    """On a busy machine two short rounds may scatter, and the notebook rightly says so."""
    return output.get("name") == "stderr" and "InstabilityWarning" not in "".join(output["text"])


def test_a_notebook_runs_whole_and_shows_its_plots_and_its_result(notebook):
    cells = [cell for cell in notebook.cells() if cell["source"]]
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


def test_saved_and_opened_again_it_looks_as_before_without_bars(notebook):
    assert [output for cell in notebook.cells() for output in cell["outputs"] if output.get("data") == {}], "no bar"
    shown = notebook.page.locator(".jp-OutputArea").all_inner_texts()
    notebook.save()
    again = notebook.again(NAME)
    again.page.wait_for_function(
        SHOWS, arg=json.dumps(shown, ensure_ascii=False, separators=(",", ":")), timeout=60_000
    )  # tables come later
    assert not [text for text in shown if "displaying widget" in text or "run/s" in text]
    assert "widget" not in (notebook.folder / NAME).read_text()
    again.page.context.close()


SHOWS = """shown => {
    const areas = [...document.querySelectorAll('.jp-OutputArea')]
    return JSON.stringify(areas.map(area => area.innerText)) == shown
}"""
INFORMED = """() => {
    const kernel = jupyterapp.shell.currentWidget.sessionContext.session?.kernel
    return kernel?.connectionStatus == 'connected' && kernel.requestKernelInfo()
}"""


@pytest.mark.parametrize("name", ["same.ipynb", "other.ipynb"])
def test_opened_and_saved_it_is_the_file_that_was_stored(notebook, name):
    """Also by another version of Python, which JupyterLab writes down."""
    stored = (notebook.folder / name).read_bytes()
    opened = notebook.again(name)
    opened.page.wait_for_function(INFORMED, timeout=60_000)
    assert opened.page.evaluate("() => jupyterapp.shell.currentWidget.context.model.dirty") == (name == "other.ipynb")
    opened.save()
    assert (notebook.folder / name).read_bytes() == stored
    opened.page.context.close()


def test_a_warning_is_shown_once_in_a_run_of_a_cell(tmp_path):
    """Python's own record of what was said is lost whenever a filter changes, and each line has its own."""
    cell = (
        "import warnings, torch, labkit as lk\nfor n in range(2):\n    with warnings.catch_warnings():\n        pass\n"
        "    loader = lk.make_loader(torch.zeros(4, 3, 8, 8), num_workers=0, prefetch_factor=3)\n"
        "lk.make_loader(torch.zeros(4, 3, 8, 8), num_workers=0, prefetch_factor=3);"
    )
    node = new_notebook(cells=[new_code_cell(cell) for _ in range(2)])
    nbformat.write(node, tmp_path / "10_own.ipynb")
    ran = execute(Notebook(tmp_path / "10_own.ipynb", "", ""))
    assert ran.error == ""
    for cell in ran.node.cells:
        assert str(cell.outputs).count("LoaderWarning: prefetch_factor=3 left out") == 1


class TestMagic:
    """`%%variant` in a real IPython shell."""

    @pytest.fixture
    def shell(self, monkeypatch, tmp_path_factory):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("shell")))  # of its history
        shell = start_ipython() or get_ipython()  # noqa: F821 - the one shell of this process
        atexit.unregister(shell.atexit_operations)  # they would end the history, whose file is gone by then
        shell.run_line_magic("load_ext", "labkit")
        shell.user_ns.pop("runs", None)
        shell.user_ns["torch"] = torch
        return shell

    @pytest.mark.exhaustive
    def test_cells_become_variants_and_a_label_again_replaces_its_runs(self, shell, capsys):
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

    def test_mistakes_are_usage_errors_and_a_cells_error_names_the_variant(self, shell):
        with pytest.raises(UsageError, match="images"):
            shell.run_cell_magic("variant", "a", "pass")
        with pytest.raises(VariantError, match="variant 'a' raised ZeroDivisionError"):
            shell.run_cell_magic("variant", "a -n 1", "1 / 0")
        shell.user_ns["runs"] = 3
        with pytest.raises(UsageError, match="holds a int, not a frame"):
            shell.run_cell_magic("variant", "a -n 1", "pass")

    def test_a_watched_cell_gives_the_value_of_its_last_line_and_the_report(self, shell):
        shell.run_cell("%load_ext labkit\n%reload_ext labkit")  # as the message about a loaded extension advises
        assert shell.run_cell(f"%%watch\n{LOOP}\nn + 1").result == 32
        assert shell.run_cell(f"%%watch other\n{LOOP}\nn + 1;").result is None
        assert [type(shell.user_ns[name]).__name__ for name in ("watched", "other")] == ["WatchReport"] * 2

    @pytest.mark.parametrize("error", ["KeyboardInterrupt", "ZeroDivisionError"])
    def test_a_watched_cell_that_does_not_end_is_reported_on(self, shell, capsys, error):
        shell.run_cell(f"%%watch\n{LOOP}")
        earlier = shell.user_ns["watched"]
        capsys.readouterr()
        done = shell.run_cell(f"%%watch\n{LOOP}\n    if n == 20: raise {error}")
        assert type(done.error_in_exec).__name__ == error
        said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        assert re.search(rf"waiting for data .*\n-+> *3 +if n == 20: raise {error}", said, re.DOTALL)
        assert shell.user_ns["watched"] is not earlier

    def test_a_cell_in_which_nothing_is_watched_leaves_no_earlier_report(self, shell, capsys):
        shell.run_cell(f"%%watch\n{LOOP}")
        for source, told in {"3": "no torch.utils.data.DataLoader", "1 / 0": "ZeroDivisionError"}.items():
            shell.run_cell(f"%%watch\n{source}")
            assert told in "".join(capsys.readouterr())
            assert "watched" not in shell.user_ns

    def test_options_are_those_of_the_command(self, shell, capsys):
        shell.run_cell("%%watch --steps 20\n1")
        assert "takes a name for its report, and no options: `labkit watch` has them" in "".join(capsys.readouterr())


LOOP = """for n, batch in enumerate(torch.utils.data.DataLoader(list(range(64)), batch_size=2)):
    batch + 1"""


CLASS = """import torch
class Mine(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(3, 4, 4)
"""
LOADED = """
import labkit as lk
def tried():
    loader = torch.utils.data.DataLoader(Mine(), num_workers=1, multiprocessing_context="spawn")
    try:
        print(len(lk.compare({"a": lambda: loader}, baseline="a", rounds=1, warmups=0, progress=False)))
    except lk.LabkitError as error:
        print(error)
tried()
with open("my_data.py", "w") as file: file.write(CLASS)
from my_data import Mine
tried()
"""


@pytest.mark.exhaustive
def test_workers_that_cannot_import_a_class_of_a_cell_give_a_hint(tmp_path):
    code = f"CLASS = {CLASS!r}\n{CLASS}{LOADED}"
    command = [sys.executable, "-c", code]  # as in a notebook, __main__ is no file
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *hint, n_runs = done.stdout.splitlines()
    assert re.search(
        "exited unexpectedly.* import Mine, .*%%writefile my_data.py.*from my_data import Mine", " ".join(hint)
    )
    assert n_runs == "1", done.stderr
