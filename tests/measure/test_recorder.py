"""What a session keeps: guesses and what was measured, also for other kernels of a tour, which may write at once."""

import json
import multiprocessing

import pandas as pd
import pytest

import labkit as lk
from labkit import course
from labkit.measure import recorder


@pytest.fixture
def folder(recorded_frames):
    return recorded_frames.parent / "predictions"


def mark(runs: pd.DataFrame, guess: float = 1.5, label: str = "fast", **options) -> None:
    course.predict(label, guess, **options)
    lk.plot_speedup(runs)


def outcomes() -> pd.DataFrame:
    return course.score().walk


def outcomes_elsewhere() -> pd.DataFrame:
    """As another kernel, started later, sees them."""
    recorder.session_outcomes.clear()
    return outcomes()


def test_a_marked_guess_is_kept_with_what_it_met(runs_of, folder):
    runs = runs_of("07 copy, one", fast=2.0, other=3.0)
    course.predict("nowhere", 9)
    mark(runs, because="why not")
    (file,) = folder.iterdir()
    (row,) = json.loads(file.read_text())
    measured, low, high = lk.summarize(runs).loc["fast", ["speedup", "ci_low", "ci_high"]]
    assert row == {
        "experiment": "07 copy, one", "label": "fast", "because": "why not", "guess": 1.5,
        "measured": measured, "ci_low": low, "ci_high": high,
    }  # fmt: skip


def test_the_last_guess_counts_in_all_kernels(runs_of, folder):
    for guess in (1.5, 2.5):
        mark(runs_of("07 copy", fast=2.0), guess)
        assert list(outcomes_elsewhere()["guess"]) == [guess]
    mark(runs_of("07 copy", fast=2.0), 2.5)
    (file,) = folder.iterdir()
    file.write_text(file.read_text().replace("2.5", "3.5"))  # by another kernel, later
    assert list(outcomes()["guess"]) == [3.5]
    mark(runs_of("01 first", fast=4.0))
    assert list(outcomes_elsewhere()["experiment"]) == ["01 first", "07 copy"]


def test_a_guess_that_is_taken_back_is_forgotten_in_all_kernels(runs_of, folder):
    runs = runs_of("07 copy", fast=2.0, other=3.0)
    for label in ("one", "two"):  # two plots of an experiment
        mark(runs_of("13 peers", **{label: 2.0}), label=label)
    course.predict("other", 3.5)
    mark(runs)
    for kernel in (outcomes, outcomes_elsewhere):
        assert list(kernel()["label"]) == ["fast", "other", "one", "two"]
    mark(runs)
    mark(runs, ...)
    for kernel in (outcomes, outcomes_elsewhere):
        assert list(kernel()["label"]) == ["other", "one", "two"]
    mark(runs, None, "other")
    assert list(outcomes_elsewhere()["label"]) == ["one", "two"]


def _write(number):
    for value in range(20):
        recorder.session_outcomes.clear()
        prediction = recorder.Prediction("fast", value + 1.0, "x" * 5000)
        for experiment in ("07 copy", f"0{number}"):
            runs = pd.DataFrame({"experiment": [experiment], "env_id": lk.env_id()})
            recorder.guesses["fast"] = prediction
            recorder.keep_outcome(runs, "fast", {"speedup": 1, "ci_low": 1, "ci_high": 1})


def test_two_kernels_may_write_at_once(folder):
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        outcomes()  # never half a file
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert list(outcomes()["guess"]) == [20.0] * 3
    assert len(list(folder.iterdir())) == 3


def test_without_a_recorder_nothing_is_written(runs_of, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RESULTS", str(tmp_path / "frames"))
    monkeypatch.chdir(tmp_path)
    lk.compare({"a": lambda: [1]}, baseline="a", rounds=1, experiment="kept")
    mark(runs_of("07 copy", fast=2.0))
    assert list(tmp_path.iterdir()) == []
    assert list(course.score().frame["label"]) == ["fast"]


def test_unnamed_experiments_and_other_machines_do_not_count_and_one_round_has_no_interval(runs_of, frame_of, folder):
    mark(runs_of("", fast=2.0))
    mark(runs_of("06 reference", fast=2.0).assign(env_id="some-gpu"))
    assert outcomes().empty
    assert "no guess to compare yet" in repr(course.score())
    assert not folder.exists()
    mark(frame_of({"a": [10], "b": [20]}, "a", experiment="00 once"), 3, "b")
    recorder.session_outcomes.clear()
    assert not course.score().inside
    assert "1.5 times too high" in repr(course.score())


def test_a_damaged_file_is_named_with_the_remedy(folder):
    folder.mkdir()
    for text in ("{", "[1]", "[{}]", "3"):
        (folder / "07_copy.json").write_text(text)
        with pytest.raises(ValueError, match=r"07_copy\.json holds no predictions: delete it"):
            course.score()
