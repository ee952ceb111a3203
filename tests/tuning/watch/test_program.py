"""`python -m labkit watch`, as it is used: scripts that end, fail, are killed, run in ranks, and stay as they are."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from labkit.errors import CannotRun
from labkit.watching import program
from labkit.watching.script import Script
from tests.paths import REPO

SCRIPT = REPO / "tests" / "training_script.py"
HEADLINE = "labkit watch "
pytestmark = pytest.mark.exhaustive  # each starts a process that imports torch


def run(*arguments, watched=True, **options):
    command = [sys.executable, *(["-m", "labkit", "watch"] if watched else []), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_stays_the_same_bit_for_bit(tmp_path, num_workers):
    plain = run(SCRIPT, "trains", num_workers, tmp_path / "plain", watched=False)
    watched = run("--json", tmp_path / "found.json", SCRIPT, "trains", num_workers, tmp_path / "watched")
    assert (watched.returncode, watched.stdout) == (0, plain.stdout)
    assert (tmp_path / "watched").read_bytes() == (tmp_path / "plain").read_bytes()
    found = json.loads((tmp_path / "found.json").read_text())
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert [row["role"] for row in found["loaders"]] == ["training", "other"]
    assert found["loaders"][0]["num_workers"] == num_workers
    assert found["ceiling_is_bound"]
    assert found["ceiling_low"] <= found["ceiling"] <= found["ceiling_high"]
    assert {"rung", "action", "speedup"} <= set(found["recommendation"])


@pytest.mark.parametrize(
    ("how", "num_workers", "status", "said"),
    [
        ("exits", 0, 7, "no torch.utils.data.DataLoader"), ("raises", 0, 1, "KeyError: 'photo 120'"),
        # torch itself says either, by whether the worker dies while its batch is fetched
        ("worker dies", 1, 1, "killed|Connection reset by peer"),
        ("interrupted", 0, -signal.SIGINT, "KeyboardInterrupt"),
        ("terminated", 0, -signal.SIGTERM, ""),
    ],
)  # fmt: skip
def test_however_a_script_ends_there_is_a_report(how, num_workers, status, said):
    plain, watched = run(SCRIPT, how, num_workers, watched=False), run(SCRIPT, how, num_workers)
    assert watched.returncode == plain.returncode == status
    assert watched.stdout == plain.stdout
    assert re.search(said, watched.stderr)
    assert (HEADLINE in watched.stderr) == (how != "exits")
    assert "in watch_script" not in watched.stderr, "frames of labkit's own hide the script's"


@pytest.mark.parametrize("when", ["before", "as its handler is set aside", "during"])
def test_news_of_a_worker_does_not_keep_the_report_back(monkeypatch, tmp_path, when):
    """torch's handler of SIGCHLD raises wherever the process is, so also when the report is made."""
    reports, news, set_handler = [], [RuntimeError("DataLoader worker (pid 7) is killed")], signal.signal

    def raise_once(*_):
        if news:
            raise news.pop()

    def set_after_what_is_due(number, handler):  # as Python does
        if when.startswith("as") and number == signal.SIGCHLD:
            raise_once()
        return set_handler(number, handler)

    class Ended(program._Finish):
        def __call__(self):
            if when == "before":
                raise_once()
            super().__call__()

        def _say(self):
            signal.raise_signal(signal.SIGCHLD)
            reports.append("said")

    before, terminates = set_handler(signal.SIGCHLD, raise_once), signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setattr(signal, "signal", set_after_what_is_due)
        monkeypatch.setattr(program, "_Finish", Ended)
        monkeypatch.setattr(signal, "getsignal", signal.getsignal)
        monkeypatch.setattr("sys.argv", [*sys.argv])
        monkeypatch.setattr("sys.path", [*sys.path])
        monkeypatch.setattr("sys.excepthook", sys.excepthook)
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        (tmp_path / "train.py").write_text("1 / 0")
        with pytest.raises(ZeroDivisionError):
            program.watch_script([str(tmp_path / "train.py")], program.WatchOptions())
        assert signal.getsignal(signal.SIGCHLD) is raise_once
    finally:
        set_handler(signal.SIGCHLD, before)
        set_handler(signal.SIGTERM, terminates)
    assert reports == ["said"]
    assert len(news) == (when == "during")


@pytest.mark.parametrize("options", [["--replay", "--steps", "12"], ["--steps", "12", "--end"]])
def test_some_ends_save_nothing(tmp_path, options):
    done = run(*options, "--json", tmp_path / "found.json", SCRIPT, "trains", 1, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "model").exists()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ceiling_is_bound"] == ("--replay" not in options)
    assert (found["loader_s"] or 0) == pytest.approx(0.0043 if "--replay" in options else 0, rel=0.5)
    assert ("this run is no training" in done.stderr) == ("--replay" in options)


def test_a_module_and_files(tmp_path):
    files = {name: tmp_path / f"found.{name}" for name in ("json", "html", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    done = run(*options, "--steps", "20", "-m", "tests.training_script", "trains", "0", cwd=REPO)
    assert done.returncode == 0
    assert "1 59 " in done.stdout  # it went on after its report
    assert "<img" in files["html"].read_text()
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert json.loads(files["json"].read_text())["command"] == "-m tests.training_script trains 0"


def test_ranks_report_once(tmp_path):
    command = ["--standalone", "--nproc-per-node", 2, "-m", "labkit", "watch", "--json", tmp_path / "found.json"]
    done = run("-m", "torch.distributed.run", *command, SCRIPT, "trains", 0, watched=False)
    assert (done.returncode, done.stderr.count(HEADLINE)) == (0, 1), done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert found["shares"]["compute"] == pytest.approx(min(row["compute"] for row in found["ranks"]), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.py"], "cannot read no.py"), (["no_script"], "for a module, write -m"),
        (["-m", "no_module"], "there is no module no_module here"),
        (["-m", "json"], "there is no module json.__main__"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said(words, said, monkeypatch):
    monkeypatch.setattr("sys.argv", [*sys.argv])
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(CannotRun, match=said):
        Script(words)


def test_a_script_with_an_error_is_named(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def :\n")
    done = run(path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{path} is no Python script" in done.stderr


def test_torch_is_the_one_that_is_watched():
    assert torch.utils.data.DataLoader.__init__.__module__ == "torch.utils.data.dataloader"
