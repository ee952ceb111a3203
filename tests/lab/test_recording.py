"""What is recorded: by the kernels of a tour and of `labkit lab`, and under which names."""

import pytest
from jupyter_client.kernelspec import KernelSpec

import labkit as lk
from labkit.app import recording
from labkit.app.jupyter import RecordingKernelManager
from labkit.app.notebooks import Notebook, execute
from labkit.measure.recorder import current_recorder
from tests.paths import contents

MEASURING = """
import labkit as lk
from labkit import course
runs = lk.compare({"a": lambda: [1], "b": lambda: [1]}, baseline="a", rounds=2, experiment="02 decoders, camera/x")
course.predict("b", 2.0)
lk.plot_speedup(runs);
"""


@pytest.fixture
def notebook(write_notebook):
    return Notebook(write_notebook("00_measure", MEASURING), "", "")


@pytest.mark.exhaustive
def test_a_toured_notebook_records_its_frames_and_guesses(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "results" / "frames"))
    assert execute(notebook).error == ""
    frames, guesses = sorted(contents(tmp_path / "results"))
    assert frames.startswith("frames/02_decoders_camera_x-")
    assert guesses.startswith("predictions/02_decoders_camera_x-")


@pytest.mark.exhaustive
def test_outside_a_tour_it_writes_nothing(notebook, tmp_path, monkeypatch):
    monkeypatch.delenv("LABKIT_RESULTS", raising=False)
    assert execute(notebook).error == ""
    assert set(contents(tmp_path)) == {"notebooks/00_measure.ipynb"}


def test_a_kernel_of_the_lab_records(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
    manager = RecordingKernelManager(kernel_name="python3")
    assert manager.format_kernel_cmd()[-2:] == ["--ext", "labkit.app.recording"]
    manager._kernel_spec = KernelSpec(argv=["ir", "{connection_file}"], language="R")
    assert "--ext" not in manager.format_kernel_cmd()
    recording.load_ipython_extension(None)
    assert current_recorder().frames == tmp_path / "frames"


def test_a_recorded_frame_can_be_read_again(frame_of, recorded_frames):
    frame = frame_of({"a": [1]}, "a", experiment="kept")
    current_recorder().record_frame(frame)
    assert lk.load_frame(recorded_frames / "kept.csv")["variant"].tolist() == ["a"]


def test_each_experiment_has_a_file_of_its_own():
    longest = "a" * recording._MAX_STEM_LENGTH
    plain = {"02 loader": "02_loader", longest: longest, "a b c-1.D": "a_b_c-1.D"}
    assert {name: recording.file_stem(name) for name in plain} == plain
    names = [longest + "a", longest + "b", ".a", "..a", "a/b", "a b", "a_b", "a\udcff", "a\udcfe"]
    stems = [recording.file_stem(name) for name in names]
    assert len(set(stems)) == len(names)
    assert not [stem for stem in stems if stem.startswith(".") or len(stem) > recording._MAX_STEM_LENGTH + 9]
