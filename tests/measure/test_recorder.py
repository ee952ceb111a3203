"""What a session keeps: without a recorder nothing, and with one what two kernels of a tour may write at once."""

import json
import multiprocessing

import pytest

import labkit as lk
from labkit import course
from labkit.app.recording import FolderRecorder, UnkeptWarning
from labkit.measure.frames import load_frame
from labkit.measure.recorder import current_recorder, set_recorder
from tests.full_disk import full_disk


def test_without_a_recorder_nothing_is_written(runs_of, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
    monkeypatch.chdir(tmp_path)
    lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment="kept")
    course.result("00_measure", "It is so.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lacking", ["a folder", "room"])
def test_a_result_that_cannot_be_kept_is_a_warning_and_not_lost(recorded_frames, tmp_path, recwarn, lacking):
    if lacking == "a folder":
        recorded_frames.parent.joinpath("results").touch()
        recorded_frames.touch()
    with full_disk(10):
        frame = lk.compare({"a": lambda: [1]}, baseline="a", rounds=2, warmups=0, experiment="kept")
        told = course.result("00_measure", "It is so.")
    assert [(one.category, one.filename) for one in recwarn] == [(UnkeptWarning, __file__)] * 2
    assert "set LABKIT_RESULTS to another folder" in str(recwarn.pop().message)
    assert len(frame) == 2
    assert "It is so." in repr(told)
    remedy = tmp_path / "another folder" / "frames"
    set_recorder(FolderRecorder(remedy))
    lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment="kept")
    assert load_frame(remedy / "kept.csv").variant.unique() == ["a"]


def _write(number):
    for value in range(20):
        for notebook in ("07_shared", f"0{number}_own"):
            current_recorder().record_result(notebook, {"value": value, "text": "x" * 5000})


def test_two_kernels_may_write_at_once(recorded_frames):
    folder = recorded_frames.with_name("results")
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        for path in folder.glob("*.json"):  # never half a file
            json.loads(path.read_text())
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    kept = {path.stem: json.loads(path.read_text())["value"] for path in folder.iterdir()}
    assert kept == {"07_shared": 19, "01_own": 19, "02_own": 19}
