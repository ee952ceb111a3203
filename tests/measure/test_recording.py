"""compare hands its frame to a recorder, if one is installed, and writes no file itself."""

import pytest

import labkit as lk
from labkit.measure.recording import set_recorder
from tests.unsampled import leave_memory_out


@pytest.fixture(autouse=True)
def _unsampled(monkeypatch):
    leave_memory_out(monkeypatch)


class Recorder:
    def __init__(self):
        self.frames = []

    def record_frame(self, frame):
        self.frames.append(frame)


def test_without_a_recorder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
    monkeypatch.chdir(tmp_path)
    runs = lk.compare({"a": lambda: [1], "b": lambda: [1]}, baseline="a", rounds=1, experiment="kept")
    lk.predict("b", 2.0)
    for plot in (lk.plot_throughput, lk.plot_speedup, lk.plot_ladder):
        plot(runs)
    assert list(tmp_path.iterdir()) == []


def test_named_experiments_are_recorded():
    recorder = Recorder()
    set_recorder(recorder)
    named = lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment="kept")
    lk.compare({"a": lambda: [1]}, baseline="a", rounds=1)
    [recorded] = recorder.frames
    assert recorded is named
