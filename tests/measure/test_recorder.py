"""What a session keeps: without a recorder nothing, and with one what two kernels of a tour may write at once."""

import json
import multiprocessing

import labkit as lk
from labkit import course
from labkit.measure.recorder import current_recorder


def test_without_a_recorder_nothing_is_written(runs_of, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
    monkeypatch.chdir(tmp_path)
    lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment="kept")
    course.result("00_measure", "It is so.")
    assert list(tmp_path.iterdir()) == []


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
