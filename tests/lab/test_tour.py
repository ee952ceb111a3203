"""The tour, on small notebooks of the test's own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_notebook
from typer.testing import CliRunner

import labkit as lk
from labkit import course
from labkit.app import cli, notebooks as copies, storing, tour
from labkit.app.notebooks import Executed
from labkit.measure.frames import save_frame
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
from labkit.app import cli, notebooks, tour
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
        page = (lab / "results" / lk.env_id() / "index.html").read_text()
        assert "the tour was interrupted while running 13_sleeps" in page
        assert "refresh" not in page
        assert f"Open {lab / 'results' / lk.env_id() / 'index.html'} at any time" in out.replace("\n", "")


@pytest.mark.exhaustive
def test_one_notebook_with_photos_and_links_in_an_environment_left_alone(lab, capsys, monkeypatch):
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(lab / "compiled"))  # torch sets it where it is missing
    before = dict(os.environ)
    assert tour.run_tour(only="10") == 0
    assert dict(os.environ) == before
    assert "1 of 1 notebooks ran" in capsys.readouterr().out
    assert len(lk.FolderStore(course.photo_root("imagenet"))) == lk.scale().n_photos
    folder = lab / "results" / lk.env_id()
    page = (folder / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(https?:)?//', page) == []
    links = re.findall(r'href="([^"#:]+)"', page)
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


@pytest.fixture
def quiet_clone(lab, monkeypatch):
    """The lab with its working notebook only, as a clone; earlier results are there."""
    folder = lab / "notebooks"
    for name in ("11_fails", "12_noisy"):
        (folder / f"{name}.ipynb").rename(lab / f"{name}.ipynb")
    subprocess.run(["git", "init", lab], check=True, capture_output=True)
    own = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", lab, *own, "commit", "--allow-empty", "-m", "first"], check=True, capture_output=True)
    monkeypatch.setattr(storing, "NOTEBOOK_FOLDER", folder)
    monkeypatch.setattr(tour, "make_scale_photos", lambda: None)
    return lab


UNSTABLE = """
import warnings, labkit as lk; from labkit import course
warnings.warn("pil: unstable: spread 40%", course.InstabilityWarning)
"""


@pytest.mark.exhaustive
def test_store_writes_all_notebooks_of_a_run_and_names_an_unstable_one(quiet_clone, write_notebook, capsys):
    write_notebook("13_unstable", UNSTABLE)
    (quiet_clone / "results" / lk.env_id() / "frames").mkdir(parents=True)
    (quiet_clone / "results" / lk.env_id() / "frames" / "old.csv").write_text("not a frame")
    assert tour.run_tour(store_outputs=True) == 0
    stored = {path.stem: json.loads(path.read_text()) for path in (quiet_clone / "notebooks").glob("*.ipynb")}
    assert [cell["execution_count"] for cell in stored["10_works"]["cells"][1:]] == [1, 2]
    runs = [notebook["metadata"]["labkit"] for notebook in stored.values()]
    assert all(run.pop("seconds") >= 1 for run in runs)  # how long each notebook took: the rest is the run's
    assert runs[0] == runs[1]
    assert "InstabilityWarning: pil: unstable: spread 40%" in str(stored["13_unstable"]["cells"][1]["outputs"])
    said = capsys.readouterr().out
    assert "stored, though unstable, 13_unstable: pil: unstable: spread 40%" in said
    assert [path.name for path in (quiet_clone / "results").rglob("old.csv")] == ["old.csv"]
    assert [path.name for path in (quiet_clone / "results" / lk.env_id() / "frames").iterdir()] == ["10_small.csv"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", ["11_fails", "12_noisy"])
def test_store_writes_nothing_if_one_notebook_is_refused(quiet_clone, other, capsys):
    (quiet_clone / f"{other}.ipynb").rename(quiet_clone / "notebooks" / f"{other}.ipynb")
    before = contents(quiet_clone / "notebooks")
    assert tour.run_tour(store_outputs=True) == 1
    assert contents(quiet_clone / "notebooks") == before
    said = capsys.readouterr().out
    assert f"failed {other}: " in said
    assert "no notebook was stored: all are, or none" in said


def test_a_part_cannot_be_stored(lab):
    before = contents(lab)
    result = CliRunner().invoke(cli.app, ["tour", "--store", "--only", "10"])
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
    assert "--only 10 exclude each other" in result.output
    assert contents(lab) == before


@pytest.fixture
def pages(lab, monkeypatch):
    """Runs a tour of notebook 10 that is not executed; gives its page as it was meanwhile, and as it is at the end."""

    def run(outcome):
        seen = []

        def execute(notebook, *, environment):
            page = Path(environment["LABKIT_RESULTS"]).parent / "index.html"
            seen.append(page.read_text())
            if isinstance(outcome, BaseException):
                raise outcome
            save_frame(lk.compare(TWO, baseline="a", rounds=2, experiment="10 small"), page.parent / "frames/10.csv")
            return Executed(notebook, outcome, 1.0)

        monkeypatch.setattr(tour, "execute", execute)
        monkeypatch.setattr(tour, "make_scale_photos", lambda: None)
        with pytest.raises(type(outcome)) if isinstance(outcome, BaseException) else nullcontext():
            tour.run_tour(only="10")
        return *seen, (lab / "results" / lk.env_id() / "index.html").read_text()

    return run


def test_the_page_says_what_runs_and_shows_what_was_measured(pages):
    before, final = pages(new_notebook())
    assert all(text in before for text in (REFRESH, "running 10_works, notebook 1 of 1.", "Where do I start?"))
    assert "judged when the tour has ended" in before
    assert all(text in final for text in ("<td>10 small</td>", "data:image/png;base64,", ">10_works</a>"))
    assert not [text for text in (REFRESH, "running 10_works", "judged when") if text in final]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "the tour was interrupted while running 10_works, notebook 1 of 1."),
        (OSError("no room at https://me:word@here/"), "failed (OSError(&#39;no room at https://here/&#39;)) while"),
    ],
    ids=["Ctrl-C", "an error"],
)
def test_a_tour_that_is_cut_short_leaves_a_page_that_says_so(pages, error, told):
    _, final = pages(error)
    assert told in final
    assert REFRESH not in final


def test_a_damaged_frame_is_named_before_a_notebook_runs(lab, monkeypatch):
    folder = lab / "results" / lk.env_id() / "frames"
    folder.mkdir(parents=True)
    (folder / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"x\.csv is not a frame of runs"):
        tour.run_tour()


REFRESH = 'http-equiv="refresh"'
TWO = {"a": lambda: [1, 1], "b": lambda: [1, 1]}
