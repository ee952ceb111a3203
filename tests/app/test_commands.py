"""The command line: what an installation starts, its help, mistakes, and the commands without a file of their own."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import labkit as lk
from labkit import course
from labkit.app import cli, doctor, notebooks
from labkit.app.cli import main
from labkit.util.machine import env_id
from tests.paths import REPO, contents, invoke

COMMANDS = {
    "tour", "lab", "list", "doctor", "peers", "watch", "diff", "diagnose", "claims", "convert", "site",
}  # fmt: skip


def run(*arguments, **variables):
    return invoke(main, list(map(str, arguments)), env=variables)


def test_an_installation_has_the_packages_version_and_names_its_commands(tmp_path):
    """Started as a shell starts what pip writes for an entry of [project.scripts]."""
    entry = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["labkit"]
    module, _, name = entry.partition(":")
    script = tmp_path / "labkit"
    script.write_text(f"import sys\nfrom {module} import {name}\nsys.exit({name}())\n")
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "120"}, "text": True}
    assert subprocess.check_output([sys.executable, script, "--version"], **place) == f"labkit {lk.__version__}\n"
    assert f'version = "{lk.__version__}"' in (REPO / "pyproject.toml").read_text()
    told = subprocess.check_output([sys.executable, script, "--help"], **place)
    assert re.search(r"usage: labkit \[-h\] \[--version\] COMMAND", told), told
    assert set(re.findall(r"^\W*(\w+)  ", told, re.M)) >= COMMANDS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command):
    result = run(command, "--help", COLUMNS="120")
    assert result.exit_code == 0
    assert re.search(rf"usage: labkit {command} ", result.output)


def test_what_needs_no_library_starts_without_them():
    heavy = {"torch", "numpy", "pandas", "nbformat", "PIL", "IPython", "matplotlib", "jsonschema"}
    code = (
        "import sys, labkit.app.cli as cli\n"
        "for argument in ('list', '--help'):\n"
        "    try: print(cli.main([argument]), end='')\n"
        "    except SystemExit as end: print(end.code, end='')\n"
        f"    print(sorted({heavy} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^(?:None|\d+)\[.*$", said, re.M) == ["None[]", "0[]"]
    assert "00_measure" in said
    assert "tour" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tour", "--only", "77"], "no notebook begins with '77': there are 10_works, 11_fails, 12_noisy"),
        (["convert", "x.tar", "y", "--short-side", "8"], "pass --to tiles with them"),
    ],
)
def test_mistakes_are_told_with_what_is_accepted(lab, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_list_shows_each_notebooks_minutes_and_question(lab):
    lines = run("list").output.splitlines()
    assert lines[0].split() == ["10_works", "3", "min", "Why", "10_works?"]
    assert len(lines) == 3


class TestLab:
    @pytest.fixture
    def started(self, monkeypatch):
        """The commands that were started in place of this process, and where they keep their runs."""
        calls = []
        monkeypatch.delenv("LABKIT_RESULTS", raising=False)
        monkeypatch.setattr(cli.os, "execv", lambda _, command: calls.append((command, os.environ["LABKIT_RESULTS"])))
        return calls

    def test_it_opens_the_notebooks_and_keeps_its_runs_where_a_tour_does(self, started, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert run("lab", "--port", "9999").exit_code == 0
        [(command, results)] = started
        assert "--LabApp.default_url=/lab/tree/00_measure.ipynb" in command
        assert "--no-browser" not in command
        assert {"--port=9999", "--ip=127.0.0.1", f"--ServerApp.root_dir={notebooks.NOTEBOOK_FOLDER}"} <= set(command)
        assert not [argument for argument in command if "token" in argument]  # all users may read arguments
        assert results == str(tmp_path / "results" / env_id() / "frames")
        assert run("lab", "--no-browser").exit_code == 0
        assert "--no-browser" in started[1][0]

    def test_where_results_cannot_be_kept_it_says_so_and_starts(self, started, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "file" / "frames"))
        result = run("lab")
        assert re.search(r"no result will be kept: .*/frames cannot .*set LABKIT_RESULTS to another", result.output)
        monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
        assert run("lab").output == ""
        assert len(started) == 2

    def test_that_of_a_wheel_opens_copies(self, lab, started, monkeypatch):
        monkeypatch.setattr("labkit.util.machine.IS_CLONE", False)
        monkeypatch.setattr(notebooks.update_copies, "__defaults__", (lab / "notebooks",))
        result = run("lab")
        assert result.exit_code == 0, result.output
        assert f"--ServerApp.root_dir={lab / 'labkit-notebooks'}" in started[0][0]
        assert set(contents(lab / "notebooks")) < set(contents(lab / "labkit-notebooks"))


TRAINING = """
import argparse
def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument('--naps', type=int, required=True)
    parser.add_argument('data')
    args = parser.parse_args()
    return [[args.data]] * args.naps, len
def empty(): return [], print
"""


class TestDiagnose:
    @pytest.fixture(autouse=True)
    def script(self, tmp_path, monkeypatch):
        (tmp_path / "my_training.py").write_text(TRAINING)
        (tmp_path / "half_done.py").write_text("import nowhere_to_be_found\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*sys.path])
        monkeypatch.setattr("sys.argv", [*sys.argv])
        yield
        sys.modules.pop("my_training", None)

    @pytest.mark.parametrize(
        ("name", "says"),
        [("my_training", "write module:function"), ("my_training:empty", "a list, gives no batch")],
    )
    def test_what_cannot_be_diagnosed_is_told_in_one_line(self, name, says):
        result = run("diagnose", name)
        assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
        assert says in result.output

    def test_the_script_gets_its_own_arguments(self):
        result = run("diagnose", "my_training:parsed", "--batches", 3, "--rounds", 1, "--", "--naps", 5, "photos")
        assert result.exit_code == 0, result.output
        assert run("diagnose", "my_training:parsed", "--", "--naps", "many", "photos").exit_code == 2

    def test_what_the_import_of_the_training_raises_keeps_its_traceback(self):
        assert type(run("diagnose", "half_done:make").exception) is ModuleNotFoundError


class TestDoctor:
    def test_it_reports_on_the_machine_the_photos_and_the_libraries(self, lab):
        output = run("doctor", "--scale", "ci").output
        for subject in (
            "usable cores",
            "is missing: python -m labkit tour",
            "GPU",
            "torch",
            "decoders",
            "extra 'test'",
        ):
            assert subject in output
        course.photo_root("imagenet").mkdir(parents=True)
        assert str(course.photo_root("imagenet")) in run("doctor").output

    def test_it_names_what_an_extra_lacks(self, tmp_path, monkeypatch):
        about = tmp_path / "own-1.0.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(
            "Metadata-Version: 2.1\nName: own\nVersion: 1.0\nProvides-Extra: test\nProvides-Extra: peers\n"
            'Requires-Dist: surely-missing>=1 ; extra == "peers"\nRequires-Dist: numpy\n'
            'Requires-Dist: pytest ; extra == "test"\n'
        )
        monkeypatch.syspath_prepend(tmp_path)
        lacks = 'lacks surely-missing: python -m pip install -e ".[peers]"'
        assert doctor.extras("own") == {"peers": lacks, "test": "complete"}
        lacks = doctor.extras("surely-missing")["loaders"]
        assert lacks.startswith("lacks labkit itself, which runs from its folder: python -m pip install")


def test_what_cannot_be_printed_is_one_line_or_none():
    """On a full disk, and where nobody reads it."""
    read, closed = os.pipe()
    os.close(read)
    said = "labkit: nothing more can be printed: No space left on device\n"
    command = [sys.executable, "-m", "labkit", "list"]
    for stdout, expected in ((os.open("/dev/full", os.O_WRONLY), said), (closed, "")):
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder in which nobody can write")
def test_peers_refuses_a_folder_it_cannot_write_to_before_it_measures(monkeypatch):
    monkeypatch.setattr("labkit.peers.command.compare_peers", lambda *_, **__: pytest.fail("it measures"))
    monkeypatch.chdir("/proc")
    result = run("peers")
    assert (result.exit_code, "/proc/results" in result.output) == (2, True), result.output


def test_what_never_was_is_refused_as_ever():
    for words, message in (
        (["list", "--nothing"], "unrecognized arguments: --nothing"),
        (["no"], "invalid choice: 'no'"),
    ):
        result = run(*words)
        assert result.exit_code == 2
        assert message in result.output
