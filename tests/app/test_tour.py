"""The tour, on small notebooks of the test's own: how they are found, run, recorded, told of and stored."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import nbformat
import psutil
import pytest
from hypothesis import example, given, strategies as st
from jupyter_client.kernelspec import KernelSpecManager
from nbformat.v4 import new_output

import labkit as lk
from labkit import course
from labkit.app import notebooks, recording, storing, tour
from labkit.app.cli import main
from labkit.app.jupyter import RecordingKernelManager
from labkit.app.notebooks import Executed, Notebook, execute, find_notebooks
from labkit.measure.frames import load_frame
from labkit.measure.recorder import current_recorder
from labkit.util.machine import env_id
from tests.hardening.searches import bounded
from tests.paths import contents, invoke


class TestFinding:
    def test_a_letter_after_the_number_puts_a_lesson_between_two(self, tmp_path):
        cell = {"source": ["# 11\n", "**Question.** Why?\n", "**Minutes.** 5"]}
        for name in ("12_last", "11b_middle", "11_first", "draft", "11bc_draft"):
            (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": [cell]}))
        expected = ["11_first", "11b_middle", "12_last"]
        for only, names in (("", expected), ("11", expected[:2]), ("11b", expected[1:2])):
            assert [each.name for each in find_notebooks(only, tmp_path)] == names

    def test_no_notebooks_at_all(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="install labkit again"):
            find_notebooks(folder=tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": []}'])
    def test_a_file_that_is_no_notebook_is_named(self, tmp_path, text):
        (tmp_path / "00_odd.ipynb").write_text(text)
        with pytest.raises(ValueError, match=r"00_odd.ipynb is not a notebook \(.*repair or remove it"):
            find_notebooks(folder=tmp_path)


class TestRecording:
    def test_a_python_kernel_of_the_lab_records_and_another_is_left_alone(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
        (tmp_path / "kernels" / "ir").mkdir(parents=True)
        spec = {"argv": ["ir", "{connection_file}"], "display_name": "R", "language": "R"}
        (tmp_path / "kernels" / "ir" / "kernel.json").write_text(json.dumps(spec))
        python, other = (
            RecordingKernelManager(kernel_name=name, kernel_spec_manager=KernelSpecManager()).format_kernel_cmd()
            for name in ("python3", "ir")
        )
        assert python[-2:] == ["--ext", "labkit.app.recording"]
        assert other[0] == "ir"
        assert "--ext" not in other
        recording.load_ipython_extension(None)
        assert current_recorder().frames == tmp_path / "frames"

    def test_a_recorded_frame_can_be_read_again(self, frame_of, recorded_frames):
        current_recorder().record_frame(frame_of({"a": [1]}, "a", experiment="02 decoders, camera/x"))
        [path] = recorded_frames.iterdir()
        assert path.name.startswith("02_decoders_camera_x-")
        assert load_frame(path)["variant"].tolist() == ["a"]

    @bounded
    @given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
    @example("02 loader", "02_loader")
    @example("a, b", "a/b")
    @example("\xe9", "\xfc")
    @example("x" * 300, "x" * 299)
    @example(".hidden", "../up")
    @example("a\udcff", "a\udcfe")
    def test_each_experiment_has_a_file_name_of_its_own(self, one, other):
        stem = recording.file_stem(one)
        assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,198}", stem)
        assert (stem == recording.file_stem(other)) == (one == other)


WORKS = """
import os, pathlib
import labkit as lk
from labkit import course
runs = lk.compare({"slow": lambda: [1], "quick": lambda: [1]}, baseline="slow", rounds=3, experiment="10 small")
lk.plot_speedup(runs)
course.result("10_works", "It works.", ("It is faster.", os.environ.get("FASTER") != "no"))
"""
SEES_THE_PAGE = "print((pathlib.Path(os.environ['LABKIT_RESULTS']).parent / 'index.html').read_text())"


@pytest.mark.exhaustive
def test_a_tour_records_goes_on_after_a_failure_and_says_so(lab, write_notebook, monkeypatch):
    write_notebook("13_works", WORKS, SEES_THE_PAGE, "print('scale', lk.scale().name)")
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    monkeypatch.setenv("LABKIT_SCALE", "ci")
    monkeypatch.setenv("TQDM_DISABLE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(lab / "compiled"))  # torch sets it where it is missing
    before = dict(os.environ)
    result = invoke(main, ["tour", "--only", "11,13"])
    assert result.exit_code == 1
    assert dict(os.environ) == before
    assert "1 of 2 notebooks ran" in result.output
    assert len(lk.FolderStore(course.photo_root("imagenet"))) == lk.scale().n_photos
    folder = lab / "results" / env_id()
    pages = {path.stem: path.read_text() for path in folder.glob("*.html")}
    assert set(pages) == {"11_fails", "13_works", "index"}
    assert "before" in pages["11_fails"]
    assert "scale ci" in pages["13_works"]
    assert re.findall(r'<img[^>]* src="([^,]*)', pages["13_works"])[-1:] == ["data:image/svg+xml;base64"]
    running = ("reloads itself", "running 13_works, notebook 2 of 2.")
    assert all(text in pages["13_works"] for text in running)
    assert not [text for text in running if text in pages["index"]]
    shown = (
        "Where do I start?",
        "<strong>It works.</strong> It is faster.",
        "data:image/png;base64,",
        ">13_works</a>",
        "KeyError",
    )
    assert all(text in pages["index"] for text in shown)
    assert re.findall(r'(?:src|href)="(https?:)?//', pages["index"]) == []
    links = re.findall(r'href="([^"#:]+)"', pages["index"])
    assert sorted(set(links)) == ["11_fails.html", "13_works.html", "frames/"]  # pages that there are
    assert load_frame(folder / "frames" / "10_small.csv").scale.unique() == ["ci"]
    assert json.loads((folder / "results" / "10_works.json").read_text())["sentences"] == ["It works.", "It is faster."]


def test_a_tour_whose_results_cannot_be_kept_says_so_before_it_begins(lab, monkeypatch):
    monkeypatch.setattr(tour, "make_scale_photos", lambda: pytest.fail("it begins"))
    (lab / "results").touch()
    result = invoke(main, ["tour", "--only", "10"])
    assert result.exit_code == 2
    assert re.search(r"^labkit: .*results/.* cannot be written to .*: run labkit in another folder", result.stderr)


@pytest.mark.exhaustive
def test_a_wheels_notebooks_run_as_copies_which_a_tour_does_not_edit(lab, monkeypatch, capsys):
    """One that writes to stderr runs, too: it is only not stored."""
    monkeypatch.setattr(tour, "make_scale_photos", lambda: None)
    monkeypatch.setattr(tour, "IS_CLONE", False)
    monkeypatch.setattr(notebooks.update_copies, "__defaults__", (lab / "notebooks",))
    before = contents(lab / "notebooks")
    assert tour.run_tour(only="12") == 0
    kept = contents(lab / "labkit-notebooks")
    assert kept.pop(".labkit-copies.json")
    assert kept == before == contents(lab / "notebooks")
    assert ": 4 files copied" in capsys.readouterr().out.replace("\n", "")


SLEEPING = """
import os, pathlib, tempfile, time
kept = tempfile.TemporaryDirectory(dir=".")
pathlib.Path("pid").write_text(str(os.getpid()))
try:
    time.sleep(60)
finally:
    os.write(2, b"Traceback of a socket, as kernels end with")
"""
TOUR = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from labkit.app import cli, notebooks, tour
notebooks.find_notebooks.__defaults__ = ("", pathlib.Path("notebooks"))
tour.make_scale_photos = lambda: None
sys.argv = ["labkit", "tour", "--only", "13,10"]
cli.main()
"""


@pytest.mark.exhaustive
def test_an_interrupt_ends_the_tour_and_its_kernel(lab, write_notebook):
    """nbclient would end the kernel alone, and the tour would go on with the next notebook."""
    write_notebook("13_sleeps", SLEEPING)
    process = subprocess.Popen([sys.executable, "-c", TOUR], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = lab / "notebooks" / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    kernel = psutil.Process(int(pid.read_text()))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in {1, 130, -2}
    assert "Traceback" not in err
    assert "notebooks ran" not in out
    assert psutil.wait_procs([kernel], timeout=30)[1] == []
    assert not [path for path in pid.parent.iterdir() if path.is_dir() and path.name != "figures"], (
        "the kernel could not clean up"
    )
    page = (lab / "results" / env_id() / "index.html").read_text()
    assert "the tour was interrupted while running 13_sleeps" in page
    assert "refresh" not in page
    assert f"Open {lab / 'results' / env_id() / 'index.html'} at any time" in out.replace("\n", "")


@pytest.mark.exhaustive
def test_a_kernel_that_dies_shows_what_it_said(write_notebook, capfd):
    dies = write_notebook("10_dies", "import os; os.write(2, b'why it died'); os._exit(3)")
    assert "DeadKernelError" in execute(Notebook(dies, "", "")).error
    assert "why it died" in capfd.readouterr().err


def test_a_damaged_frame_is_named_before_a_notebook_runs(lab):
    folder = lab / "results" / env_id() / "frames"
    folder.mkdir(parents=True)
    (folder / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"x\.csv is not a frame of runs"):
        tour.run_tour()


def test_a_tour_that_is_cut_short_leaves_a_page_that_says_so(lab, monkeypatch):
    monkeypatch.setattr(tour, "execute", Mock(side_effect=OSError("no room at https://me:word@here/")))
    monkeypatch.setattr(tour, "make_scale_photos", lambda: None)
    with pytest.raises(OSError, match="no room"):
        tour.run_tour(only="10")
    page = (lab / "results" / env_id() / "index.html").read_text()
    assert "failed (OSError(&#39;no room at https://here/&#39;)) while running 10_works, notebook 1 of 1." in page
    assert "refresh" not in page


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no room")], ids=["Ctrl-C", "an error"])
@pytest.mark.parametrize("stores", [False, True])
def test_a_tour_that_cannot_begin_leaves_the_earlier_one(lab, monkeypatch, error, stores):
    monkeypatch.setattr(tour, "describe_run", lambda only: {"run": "now"})
    monkeypatch.setattr(tour, "make_photos", Mock(side_effect=error))
    folder = lab / "results" / env_id()
    (folder / "frames").mkdir(parents=True)
    (folder / "index.html").write_text("an earlier tour")
    before = contents(lab)
    with pytest.raises(type(error)):
        tour.run_tour(store_outputs=stores)
    assert contents(lab) == before


class TestStoringATour:
    @pytest.fixture
    def quiet_clone(self, lab, monkeypatch):
        """The lab with its working notebook only, as a clone; earlier results are there."""
        folder = lab / "notebooks"
        for name in ("11_fails", "12_noisy"):
            (folder / f"{name}.ipynb").rename(lab / f"{name}.ipynb")
        own = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "commit.gpgsign=false"]
        for command in (["init"], [*own, "commit", "--allow-empty", "-m", "first"]):
            subprocess.run(["git", "-C", lab, *command], check=True, capture_output=True)
        (lab / "README.md").write_text("| notebook |\n|---|\n")
        (folder / "guide").mkdir(exist_ok=True)
        (folder / "guide" / "bottleneck.md").write_text("No figure.\n")
        monkeypatch.setattr(storing, "NOTEBOOK_FOLDER", folder)
        monkeypatch.setattr(storing, "STORED", folder / "results.json")
        monkeypatch.setattr(tour, "make_scale_photos", lambda: None)
        return lab

    @pytest.mark.exhaustive
    def test_all_notebooks_of_a_run_are_written_and_an_unstable_one_is_named(self, quiet_clone, write_notebook, capsys):
        source = "import warnings\nfrom labkit import course\n"
        warning = 'warnings.warn("pil: unstable: spread 40%", course.InstabilityWarning)'
        write_notebook("13_unstable", f"{source}{warning}\ncourse.result('13_unstable', 'It varies.')")
        results = quiet_clone / "results" / env_id()
        (results / "frames").mkdir(parents=True)
        (results / "frames" / "old.csv").write_text("not a frame")
        assert tour.run_tour(store_outputs=True) == 0
        stored = {path.stem: json.loads(path.read_text()) for path in (quiet_clone / "notebooks").glob("*.ipynb")}
        assert [cell["execution_count"] for cell in stored["10_works"]["cells"] if "outputs" in cell] == [1, 2]
        runs = [notebook["metadata"]["labkit"] for notebook in stored.values()]
        assert all(run.pop("seconds") >= 1 for run in runs)  # how long each notebook took: the rest is the run's
        assert runs[0] == runs[1]
        assert "InstabilityWarning: pil: unstable: spread 40%" in str(stored["13_unstable"]["cells"][1]["outputs"])
        assert "stored, though unstable, 13_unstable: pil: unstable: spread 40%" in capsys.readouterr().out
        assert [path.name for path in results.parent.rglob("old.csv")] == ["old.csv"]  # moved aside
        assert [path.name for path in (results / "frames").iterdir()] == ["10_small.csv"]

    def test_nothing_is_written_if_one_notebook_is_refused(self, quiet_clone, monkeypatch, capsys):
        def noisy(notebook, environment):
            node = nbformat.read(notebook.path, as_version=4)
            node.cells[1].outputs = [new_output("stream", name="stderr", text="hm")]
            return Executed(notebook, node, 1.0)

        monkeypatch.setattr(tour, "execute", noisy)
        before = contents(quiet_clone / "notebooks")
        assert tour.run_tour(store_outputs=True) == 1
        assert contents(quiet_clone / "notebooks") == before
        said = capsys.readouterr().out
        assert "failed 10_works: wrote to stderr" in said
        assert "no notebook was stored: all are, or none" in said

    def test_a_part_cannot_be_stored(self, lab):
        before = contents(lab)
        result = invoke(main, ["tour", "--store", "--only", "10"])
        assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
        assert "--store and --only 10 exclude each other: all notebooks are stored, or none" in result.output
        assert contents(lab) == before
