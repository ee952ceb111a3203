"""The command line: labkit diagnose on scripts as people write them, list, lab, and mistakes."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit.app import cli, notebooks, notebooks as copies, tour
from labkit.app.cli import app
from tests.pages import TEXTS, blocks, commands
from tests.paths import contents
from tests.stalling import stopped_time


@pytest.mark.alone
class TestDiagnose:
    @pytest.fixture(autouse=True)
    def script(self, tmp_path, monkeypatch):
        (tmp_path / "my_training.py").write_text(
            "import argparse, time\n"
            "def make_training(): return [[0, 1]], lambda batch: time.sleep(0.3)\n"
            "def failing():\n"
            "    def step(batch): raise ValueError('4 is not 5')\n"
            "    return [[0, 1]], step\n"
            "def parsed():\n"
            "    parser = argparse.ArgumentParser()\n"
            "    parser.add_argument('--naps', type=int, required=True)\n"
            "    parser.add_argument('data')\n"
            "    args = parser.parse_args()\n"
            "    return [[args.data]] * args.naps, lambda batch: time.sleep(0.001)\n"
            "def empty(): return [], print\n"
        )
        (tmp_path / "half_done.py").write_text("import nowhere_to_be_found\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*sys.path])
        monkeypatch.setattr("sys.argv", [*sys.argv])
        yield
        sys.modules.pop("my_training", None)

    def run(self, *arguments):
        return CliRunner().invoke(app, ["diagnose", *arguments])

    @pytest.mark.slow
    def test_it_says_what_to_do(self, monkeypatch):
        monkeypatch.setattr("time.sleep", stopped_time(monkeypatch).sleep)
        result = self.run("my_training:make_training", "--batches", "3", "--rounds", "1")
        assert result.exit_code == 0, result.output
        assert re.search(r"^compute +100\.0%  #{40}$", result.output, re.M)
        assert "Leave the loader as it is" in result.output

    @pytest.mark.parametrize(
        ("name", "says"),
        [("my_training", "write module:function"), ("my_training:empty", "a list, gives no batch")],
    )
    def test_one_clear_error(self, name, says):
        result = self.run(name)
        assert result.exit_code == 2
        assert says in result.output
        assert len(result.output.splitlines()) == 1

    def test_arguments_of_the_script(self):
        result = self.run("my_training:parsed", "--batches", "3", "--rounds", "1", "--", "--naps", "5", "photos")
        assert result.exit_code == 0, result.output
        assert self.run("my_training:parsed", "--", "--naps", "many", "photos").exit_code == 2

    @pytest.mark.parametrize(
        ("name", "error"), [("my_training:failing", ValueError), ("half_done:make", ModuleNotFoundError)]
    )
    def test_what_the_training_or_its_import_raises_keeps_its_traceback(self, name, error):
        assert type(self.run(name).exception) is error

    @pytest.mark.slow
    def test_the_page_on_waiting(self, tmp_path):
        (tmp_path / "train.py").write_text(blocks(TEXTS["waiting"], "python")[0].text)
        lk.make_photos(tmp_path / "photos", 40)
        [name] = [command.split()[-1] for command in commands(TEXTS["waiting"]) if "labkit diagnose" in command]
        result = self.run(name, "--batches", "2", "--rounds", "1", "--limit", "1")
        sys.modules.pop("train", None)
        assert result.exit_code == 0, result.output
        assert re.search(r"^prepare +\d+\.\d%", result.output, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tour", "--only", "77"], "no notebook begins with '77': there are 10_works, 11_fails, 12_noisy"),
        (["tour", "--scale", "huge"], "one of ci, laptop, gpu"),
        (["doctor", "--scale", "huge"], "one of ci, laptop, gpu"),
    ],
)
def test_mistakes_on_the_command_line(lab, arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_list(lab):
    lines = CliRunner().invoke(app, ["list"]).output.splitlines()
    assert lines[0].split() == ["10_works", "3", "min", "Why", "10_works?"]
    assert len(lines) == 3


@pytest.mark.parametrize("argument", ["list", "--help"])
def test_what_needs_no_library_starts_without_them(argument):
    heavy = {"torch", "numpy", "pandas", "nbformat", "PIL", "IPython", "matplotlib", "jsonschema"}
    code = (
        "import sys, labkit.app.cli as cli\n"
        f"try: cli.app([{argument!r}])\n"
        f"except SystemExit as end: print(end.code, sorted({heavy} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    assert "00_measure" in done.stdout or "tour" in done.stdout


def test_lab_opens_the_notebooks_and_keeps_its_runs_where_a_tour_does(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(cli.os, "execv", lambda _, command: calls.append((command, os.environ["LABKIT_RESULTS"])))
    assert CliRunner().invoke(app, ["lab", "--port", "9999"]).exit_code == 0
    [(command, results)] = calls
    assert {"--port=9999", "--ip=127.0.0.1", f"--ServerApp.root_dir={notebooks.NOTEBOOK_FOLDER}"} <= set(command)
    assert not [argument for argument in command if "token" in argument]  # all users of a machine may read arguments
    assert results == str(tmp_path / "results" / lk.env_id() / "frames")


def test_lab_of_a_wheel_opens_copies(lab, monkeypatch):
    calls = []
    monkeypatch.setattr(cli.os, "execv", lambda _, command: calls.append(command))
    monkeypatch.setattr("labkit.util.machine.IS_CLONE", False)
    monkeypatch.setattr(copies.update_copies, "__defaults__", (lab / "notebooks",))
    result = CliRunner().invoke(app, ["lab"])
    assert result.exit_code == 0, result.output
    assert f"--ServerApp.root_dir={lab / 'labkit-notebooks'}" in calls[0]
    (lab / "labkit-notebooks" / "10_works.ipynb").write_text("{}")
    before = contents(lab / "labkit-notebooks")
    (lab / "notebooks" / "10_works.ipynb").write_text("newer")
    result = CliRunner().invoke(app, ["lab"])
    assert "10_works.ipynb has your edits" in result.output.replace("\n", "")
    after = contents(lab / "labkit-notebooks")
    assert after == before


def test_where_no_copies_can_be_made_lab_and_tour_say_so_in_one_line(lab, monkeypatch):
    (lab / "labkit-notebooks").write_text("a file")
    monkeypatch.setattr("labkit.util.machine.IS_CLONE", False)
    monkeypatch.setattr(tour, "IS_CLONE", False)
    for command in ("lab", "tour"):
        result = CliRunner().invoke(app, [command])
        assert result.exit_code == 2
        [line] = result.output.splitlines()
        assert "labkit-notebooks" in line
        assert line.endswith("run labkit in another folder")
    assert (lab / "labkit-notebooks").read_text() == "a file"
