"""The command that an installation puts beside `python`: every subcommand, started as a shell starts it."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import labkit as lk
from tests.paths import REPO

# What pip writes for an entry of [project.scripts].
SCRIPT = """
import re
import sys
from {module} import {name}
if __name__ == "__main__":
    sys.argv[0] = re.sub(r"(-script\\.pyw|\\.exe)?$", "", sys.argv[0])
    sys.exit({name}())
"""
COMMANDS = (
    "tour", "lab", "list", "doctor", "peers", "watch", "diagnose", "plan", "claims", "reference",
    "convert", "site",
)  # fmt: skip


def _installed():
    """The installed script, if it runs this checkout."""
    path = Path(sys.executable).with_name("labkit")
    try:
        root = distribution("labkit-images").locate_file("")
    except PackageNotFoundError:
        return []
    finders = [Path(str(root)), *(Path(line) for file in Path(str(root)).glob("*labkit*.pth") for line in file.open())]
    return [path] if path.exists() and any(Path(str(each).strip()) == REPO for each in finders) else []


@pytest.fixture(scope="module", params=["of pyproject.toml", *_installed()], ids=str)
def script(request, tmp_path_factory):
    """The script that `pip install` makes of this checkout, and that of this environment, if it is of this checkout."""
    if request.param != "of pyproject.toml":
        return request.param
    entries = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = entries["labkit"].split(":")
    path = tmp_path_factory.mktemp("bin") / "labkit"
    path.write_text(SCRIPT.format(module=module, name=name))
    return path


@pytest.fixture
def labkit(script, tmp_path):
    """`labkit(*words)`: what the command says in an empty folder, and its status."""

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(REPO), "LABKIT_HOME": str(tmp_path), "COLUMNS": "120"}
        command = [sys.executable, script, *words]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 240}
        done = subprocess.run(list(map(str, command)), check=False, **options)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def test_its_version_is_the_packages(labkit):
    done = labkit("--version")
    assert (done.returncode, done.stdout) == (0, f"labkit {lk.__version__}\n")
    assert f'version = "{lk.__version__}"' in (REPO / "pyproject.toml").read_text()


def test_it_names_its_commands_and_itself(labkit):
    done = labkit("--help")
    assert re.search(r"Usage: labkit \[OPTIONS\] COMMAND", done.stdout), done.stdout
    assert set(COMMANDS) <= set(re.findall(r"^\W*(\w+)  ", done.stdout, re.M))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(labkit, command):
    done = labkit(command, "--help")
    assert done.returncode == 0
    assert f"Usage: labkit {command}" in done.stdout


def test_watch_runs_the_script(labkit, tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint('trained', sys.argv)\nsys.exit(3)\n")
    done = labkit("watch", "train.py", "--epochs", "1")
    assert (done.returncode, done.stdout) == (3, "trained ['train.py', '--epochs', '1']\n")
    assert "labkit watch: no torch.utils.data.DataLoader" in done.stderr


def test_watch_reports_on_a_training(labkit, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "for batch in DataLoader(torch.zeros(60, 4), 2): batch.mean()\n"
    )
    done = labkit("watch", "--json", "found.json", "train.py")
    assert (done.returncode, done.stdout) == (0, "")
    assert "labkit watch 2" in done.stderr
    assert (tmp_path / "found.json").is_file()


def test_small_things_work(labkit, tmp_path):
    """Every command that does something small does it."""
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(REPO / "LICENSE", "LICENSE")
    (tmp_path / "my_training.py").write_text("def make(): return [[0, 1]], lambda batch: sum(range(1000))\n")
    for words, said in (
        (["list"], "00_measure"),
        (["doctor"], "usable"),
        (["plan", "--gpu", "a100", "--cores", "16", "--cpu-ms", "5"], "images/s"),
        (["convert", "a.tar.gz", "a.tar"], "a.tar: "),
        (["diagnose", "my_training:make", "--batches", "2", "--rounds", "1", "--limit", "1"], "compute"),
        (["claims"], ""),
        (["peers", "--list"], "torch"),
    ):
        done = labkit(*words)
        assert done.returncode == 0, (words, done.stderr)
        assert said in done.stdout, words
