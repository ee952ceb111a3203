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
from labkit.lab import cli, copies, notebooks, tour
from tests.paths import contents


@pytest.mark.slow
def test_a_tour_keeps_going_and_says_what_failed(lab):
    result = CliRunner().invoke(cli.app, ["tour", "--scale", "ci"])
    assert result.exit_code == 1
    folder = lab / "results" / lk.env_id()
    pages = {path.stem: path.read_text() for path in folder.glob("*.html")}
    assert set(pages) == {"10_works", "11_fails", "12_noisy", "index"}
    assert all(text in pages["index"] for text in ("KeyError", "10 small", "data:image/png;base64,"))
    assert lk.load_frame(folder / "frames" / "10_small.csv").scale.unique() == ["ci"]
    assert "before" in pages["11_fails"]
    assert "scale ci" in pages["10_works"]


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_one_notebook_with_photos_and_links_in_an_environment_left_alone(lab, capsys, monkeypatch):
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "0")
    before = dict(os.environ)
    assert tour.run_tour(only="10") == 0
    assert dict(os.environ) == before
    assert "1 of 1 notebooks ran" in capsys.readouterr().out
    assert len(lk.FolderStore(lk.photo_root("imagenet"))) == lk.scale().n_photos
    folder = lab / "results" / lk.env_id()
    page = (folder / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(https?:)?//', page) == []
    links = re.findall(r'href="([^"#]+\.(?:html|csv))"', page)
    assert len(links) == 2
    assert all((folder / link).is_file() for link in links)


@pytest.mark.slow
def test_a_wheels_notebooks_run_as_copies_which_a_tour_does_not_edit(lab, monkeypatch, capsys):
    monkeypatch.setattr(tour, "IS_CLONE", False)
    monkeypatch.setattr(copies.update_copies, "__defaults__", (lab / "notebooks",))
    before = contents(lab / "notebooks")
    assert tour.run_tour(only="10") == 0
    kept = contents(lab / "labkit-notebooks")
    assert kept.pop(".labkit-copies.json")
    assert kept == before == contents(lab / "notebooks")
    assert ": 3 files copied" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.exhaustive
def test_store_writes_back_whole_and_quiet_runs_only(lab):
    before = contents(notebooks.NOTEBOOK_FOLDER)
    assert tour.run_tour(store_outputs=True) == 2
    after = contents(notebooks.NOTEBOOK_FOLDER)
    assert set(after) == set(before)
    assert [name for name in before if before[name] != after[name]] == ["10_works.ipynb"]
    stored = json.loads(after["10_works.ipynb"])
    assert [cell["execution_count"] for cell in stored["cells"][1:]] == [1, 2]
    assert "version" not in stored["metadata"]["language_info"]
