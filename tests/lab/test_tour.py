"""The tour and the command line, on small notebooks of the test's own."""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import time
import types

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from typer.testing import CliRunner

import labkit as lk
from labkit.lab import cli, doctor, notebooks, report, tour

TITLE = "# {name}\n\n**Question.** Why {name}?\n\n**Prerequisites.** None\n\n**Minutes.** 3"
MEASURING = """
import labkit as lk
runs = lk.compare({"slow": lambda: [1, 1], "quick": lambda: [1, 1]}, baseline="slow", rounds=3, experiment="10 small")
"""


def _write(folder, name, *sources):
    cells = [new_markdown_cell(TITLE.format(name=name)), *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A lab with a working, a failing and a noisy notebook; photos and results under tmp_path."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    _write(folder, "10_works", MEASURING, "print('scale', lk.scale().name)")
    _write(folder, "11_fails", "print('before')", "raise KeyError('[/lost]')", "print('after')")
    _write(folder, "12_noisy", "import sys; print('hm', file=sys.stderr)")
    monkeypatch.setattr(notebooks, "NOTEBOOK_FOLDER", folder)
    monkeypatch.setattr(notebooks.find_notebooks, "__defaults__", ("", folder))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_tour_keeps_going_and_says_what_failed(lab):
    result = CliRunner().invoke(cli.app, ["tour", "--scale", "ci"])
    assert result.exit_code == 1
    folder = lab / "results" / lk.env_id()
    page = (folder / "index.html").read_text()
    assert sorted(path.name for path in folder.glob("*.html")) == [
        "10_works.html", "11_fails.html", "12_noisy.html", "index.html",
    ]  # fmt: skip
    assert "KeyError" in page
    assert "10 small" in page
    assert "data:image/png;base64," in page
    assert lk.load_frame(folder / "frames" / "10_small.csv").scale.unique() == ["ci"]
    assert "before" in (folder / "11_fails.html").read_text()
    assert "scale ci" in (folder / "10_works.html").read_text()


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, {1, 130, -2}), (signal.SIGTERM, {-15})])
def test_a_signal_ends_the_tour_and_its_kernel(lab, number, codes):
    """nbclient would end the kernel alone, and the tour would go on with the next notebook."""
    sleeping = """
import os, pathlib, tempfile, time
kept = tempfile.TemporaryDirectory(dir=".")
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(60)
"""
    _write(lab / "notebooks", "13_sleeps", sleeping)
    code = f"""
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from labkit.lab import cli
from labkit.lab import notebooks
from labkit.lab import tour
notebooks.find_notebooks.__defaults__ = ("", pathlib.Path({str(lab / "notebooks")!r}))
tour.make_scale_photos = lambda: None
sys.argv = ["labkit", "tour", "--only", "13,10"]
cli.app()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = lab / "notebooks" / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    kernel = psutil.Process(int(pid.read_text()))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode in codes
    assert "Traceback" not in err
    assert "notebooks ran" not in out
    assert psutil.wait_procs([kernel], timeout=30)[1] == []
    if number == signal.SIGINT:
        assert not [path for path in pid.parent.iterdir() if path.is_dir()], "the kernel could not clean up"


def test_a_kernel_that_was_ended_is_not_ended_again_at_exit(tmp_path, monkeypatch):
    """As nbclient leaves it where a Ctrl-C comes while it ends the kernel."""

    class Client:
        km = None

        def create_kernel_manager(self):
            return types.SimpleNamespace()

        def _cleanup_kernel(self):
            raise AssertionError("the kernel is gone")

        async def async_execute(self, env):
            raise KeyboardInterrupt

    client, dropped = Client(), []
    monkeypatch.setattr(atexit, "unregister", dropped.append)
    with pytest.raises(KeyboardInterrupt):
        notebooks._run(client, tmp_path)
    assert dropped == [client._cleanup_kernel]


def test_the_page_needs_no_network(lab):
    CliRunner().invoke(cli.app, ["tour", "--only", "10"])
    page = (lab / "results" / lk.env_id() / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(https?:)?//', page) == []
    links = re.findall(r'href="([^"#]+\.(?:html|csv))"', page)
    assert len(links) == 2
    assert all((lab / "results" / lk.env_id() / link).is_file() for link in links)


def test_only_and_photos(lab, capsys):
    assert tour.run_tour(only="10") == 0
    assert "1 of 1 notebooks ran" in capsys.readouterr().out
    assert len(lk.FolderStore(lk.photo_root("imagenet"))) == lk.scale().n_photos


def test_store_writes_back_whole_and_quiet_runs_only(lab):
    before = {path.name: path.read_bytes() for path in notebooks.NOTEBOOK_FOLDER.iterdir()}
    assert tour.run_tour(store_outputs=True) == 2
    after = {path.name: path.read_bytes() for path in notebooks.NOTEBOOK_FOLDER.iterdir()}
    assert set(after) == set(before)
    assert [name for name in before if before[name] != after[name]] == ["10_works.ipynb"]
    stored = json.loads(after["10_works.ipynb"])
    assert [cell["execution_count"] for cell in stored["cells"][1:]] == [1, 2]
    assert "version" not in stored["metadata"]["language_info"]


def test_the_environment_is_left_as_it_was(lab, monkeypatch):
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "0")
    tour.run_tour(only="10")
    assert "LABKIT_RESULTS" not in os.environ
    assert os.environ["TQDM_DISABLE"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tour", "--only", "77"], "no notebook begins with '77': there are 10_works, 11_fails, 12_noisy"),
        (["tour", "--scale", "huge"], "one of ci, laptop, gpu"),
        (["doctor", "--scale", "huge"], "one of ci, laptop, gpu"),
    ],
)
def test_mistakes_on_the_command_line(lab, arguments, message):
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_no_notebooks_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="runs from a clone"):
        notebooks.find_notebooks(folder=tmp_path)


def test_list(lab):
    lines = CliRunner().invoke(cli.app, ["list"]).output.splitlines()
    assert lines[0].split() == ["10_works", "3", "min", "Why", "10_works?"]
    assert len(lines) == 3


def test_list_starts_without_torch():
    code = "import sys, labkit.lab.cli as cli; cli.list_notebooks(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_an_index_without_frames(tmp_path):
    assert "No experiment has been recorded yet" in report.write_index(tmp_path, []).read_text()


def test_what_ifs_stay_off_the_ladder(frame_of, tmp_path):
    lk.save_frame(frame_of({"a": [1, 2], "b": [3, 4]}, "a", experiment="x", rung=False), tmp_path / "frames" / "x.csv")
    page = report.write_index(tmp_path, []).read_text()
    assert "base64" not in page
    assert "frames/x.csv" in page


def test_doctor_says_it_all(lab):
    output = CliRunner().invoke(cli.app, ["doctor", "--scale", "ci"]).output
    for subject in (
        "usable cores",
        "bound by",
        "memory",
        "is missing: python -m labkit tour",
        "GPU",
        "torch",
        "decoders",
        "JPEGs in part",
        "extra 'test'",
    ):
        assert subject in output
    tour.make_scale_photos()
    assert (
        "one reader" in (output := CliRunner().invoke(cli.app, ["doctor"]).output)
        or "cold speed not measured" in output
    )


def test_doctor_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(
        doctor, "requires", lambda name: ['surely-missing>=1 ; extra == "peers"', "numpy", 'pytest ; extra == "test"']
    )
    assert doctor.extras() == {"peers": 'lacks surely-missing: python -m pip install -e ".[peers]"', "test": "complete"}


def test_lab_opens_the_notebooks(monkeypatch):
    calls = []
    monkeypatch.setattr(cli.os, "execv", lambda program, command: calls.append(command))
    assert CliRunner().invoke(cli.app, ["lab", "--port", "9999"]).exit_code == 0
    assert "--port=9999" in calls[0]
    assert f"--ServerApp.root_dir={notebooks.NOTEBOOK_FOLDER}" in calls[0]
    assert "--ip=127.0.0.1" in calls[0]
    assert not [argument for argument in calls[0] if "token" in argument]  # all users of a machine may read arguments


def test_the_lab_keeps_its_runs_where_a_tour_does(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    kept = []
    monkeypatch.setattr(cli.os, "execv", lambda *command: kept.append(os.environ["LABKIT_RESULTS"]))
    CliRunner().invoke(cli.app, ["lab"])
    assert kept == [str(tmp_path / "results" / lk.env_id() / "frames")]
