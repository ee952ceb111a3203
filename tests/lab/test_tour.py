"""The tour, on small notebooks of the test's own."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit.lab import cli, notebooks, tour


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
def test_a_signal_ends_the_tour_and_its_kernel(lab, write_notebook, number, codes):
    """nbclient would end the kernel alone, and the tour would go on with the next notebook."""
    sleeping = """
import os, pathlib, tempfile, time
kept = tempfile.TemporaryDirectory(dir=".")
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(60)
"""
    write_notebook("13_sleeps", sleeping)
    code = f"""
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from labkit.lab import cli, notebooks, tour
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
