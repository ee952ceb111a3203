"""Guesses meet what was measured, are kept for other kernels, and are scored: against figures reckoned by hand."""

import json
import math
import multiprocessing

import matplotlib.pyplot as plt
import pandas as pd
import pytest

import labkit as lk
from labkit.core.machine import env_id
from labkit.measure.frames import RESULTS_VARIABLE
from labkit.measure.guess_log import outcomes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "frames"))
    return tmp_path / "predictions"


@pytest.fixture
def runs_of(frame_of):
    """A frame whose variants are exactly so many times as fast as its baseline, give or take one percent."""

    def build(experiment, **speedups):
        wobble = [0.99, 1.01, 1.0, 1.01, 0.99]
        rates = {name: [100 * speedup * one for one in wobble] for name, speedup in speedups.items()}
        return frame_of({"base": [100] * 5, **rates}, "base", experiment=experiment)

    return build


def _forget():
    """What another kernel, started later, knows of this one."""
    from labkit.measure import guess_log as guesses

    guesses._met.clear()


def test_a_marked_guess_is_kept_with_what_it_met(runs_of, folder):
    runs = runs_of("07 copy, one", fast=2.0, other=3.0)
    lk.predict("fast", 1.5, because="why not")
    lk.predict("nowhere", 9)
    lk.plot_speedup(runs)
    (file,) = folder.iterdir()
    (row,) = json.loads(file.read_text())
    summary = lk.summarize(runs).loc["fast"]
    assert row == {
        "experiment": "07 copy, one", "label": "fast", "because": "why not", "guess": 1.5,
        "measured": summary["speedup"], "ci_low": summary["ci_low"], "ci_high": summary["ci_high"],
    }  # fmt: skip


def test_other_kernels_see_it_and_a_rerun_replaces_it(runs_of, folder):
    for guess in (1.5, 2.5):
        lk.predict("fast", guess)
        lk.plot_speedup(runs_of("07 copy", fast=2.0))
        _forget()
        assert list(outcomes()["guess"]) == [guess]
    lk.plot_speedup(runs_of("01 first", fast=4.0))
    _forget()
    assert list(outcomes()["experiment"]) == ["01 first", "07 copy"]


def test_a_later_run_in_another_kernel_counts(runs_of, folder):
    lk.predict("fast", 1.5)
    lk.plot_speedup(runs_of("07 copy", fast=2.0))
    (file,) = folder.iterdir()
    file.write_text(file.read_text().replace("1.5", "2.5"))
    assert list(outcomes()["guess"]) == [2.5]


def test_two_plots_of_an_experiment_keep_both_guesses(runs_of, folder):
    runs = runs_of("13 peers", one=2.0, two=3.0)
    lk.predict("one", 1)
    lk.predict("two", 2)
    for label in ("one", "two"):
        lk.plot_speedup(runs[runs["variant"].isin(["base", label])])
    _forget()
    assert list(outcomes()["label"]) == ["one", "two"]


def _write(folder, number):
    from labkit.measure import guess_log as guesses

    for value in range(20):
        guesses._met.clear()
        prediction = guesses.Prediction("fast", value + 1.0, "x" * 5000)
        runs = pd.DataFrame({"experiment": ["07 copy", f"0{number}"], "env_id": env_id()})
        for row in (0, 1):
            guesses.keep_outcome(runs.iloc[[row]], prediction, {"measured": 1, "speedup": 1, "ci_low": 1, "ci_high": 1})


def test_two_kernels_may_write_at_once(folder):
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(folder, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        outcomes()  # never half a file
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert list(outcomes()["guess"]) == [20.0] * 3
    assert len(list(folder.iterdir())) == 3


def test_nothing_is_written_where_frames_are_not_kept(runs_of, tmp_path, monkeypatch):
    monkeypatch.delenv(RESULTS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    lk.predict("fast", 1.5)
    lk.plot_speedup(runs_of("07 copy", fast=2.0))
    assert list(tmp_path.iterdir()) == []
    assert list(lk.score().frame["label"]) == ["fast"]


def test_unnamed_experiments_and_other_machines_do_not_count(runs_of, folder):
    lk.predict("fast", 1.5)
    lk.plot_speedup(runs_of("", fast=2.0))
    lk.plot_speedup(runs_of("06 reference", fast=2.0).assign(env_id="some-gpu"))
    assert outcomes().empty
    assert not folder.exists()


def test_a_damaged_file_is_named_with_the_remedy(folder):
    folder.mkdir()
    for text in ("{", "[1]", "[{}]", "3"):
        (folder / "07_copy.json").write_text(text)
        with pytest.raises(ValueError, match=r"07_copy\.json holds no predictions: delete it"):
            lk.score()


def _walk(runs_of):
    """Guesses twice, half and exactly as high as what is measured, and one that is four times as high."""
    for number, (guess, measured) in enumerate([(4, 2), (1.5, 3), (2, 2), (8, 2)]):
        lk.predict("fast", guess)
        lk.plot_speedup(runs_of(f"0{number} step", fast=measured))
    return lk.score()


def test_the_score_is_that_reckoned_by_hand(runs_of):
    found = _walk(runs_of)
    errors = [math.log(2), -math.log(2), 0, math.log(4)]
    mean = sum(errors) / 4
    assert found.bias == pytest.approx(math.exp(mean), rel=1e-3)
    assert found.spread == pytest.approx(math.exp((sum((error - mean) ** 2 for error in errors) / 3) ** 0.5), rel=1e-3)
    assert (found.inside, found.near) == (0.25, 0.25)
    assert found.bias_interval[0] < 1 < found.bias_interval[1]


def test_the_score_in_words(runs_of):
    words = repr(_walk(runs_of))
    assert "fast (00 step): 4x guessed, 2x measured: 2 times too high." in words
    assert "fast (01 step): 1.5x guessed, 3x measured: 2 times too low." in words
    assert "fast (02 step): 2x guessed, 2x measured: inside the interval." in words
    assert "Of 4 guesses so far, 25% lie inside" in words
    assert "1.41 times too high" in words
    assert "no leaning" in words


@pytest.mark.parametrize(("factor", "kind"), [(2, "an optimist"), (0.5, "a pessimist")])
def test_a_leaning_is_named_where_it_is_certain(runs_of, factor, kind):
    for number, wobble in enumerate([0.9, 1.0, 1.1, 1.0, 0.95]):
        lk.predict("fast", 3 * factor * wobble)
        lk.plot_speedup(runs_of(f"0{number} step", fast=3))
    assert kind in repr(lk.score())


def test_a_notebook_scores_itself_and_names_the_walk(runs_of):
    _walk(runs_of)
    found = lk.score("01")
    assert list(found.frame["experiment"]) == ["01 step"]
    assert len(found.walk) == 4
    assert "00 step" not in repr(found)
    assert "Of 4 guesses" in repr(found)
    assert "<img" not in found._repr_html_()
    assert "None of these experiments has a guess" in repr(lk.score("12"))


def test_no_guess_and_a_single_one(runs_of):
    assert "lk.predict(label, speedup)" in repr(lk.score())
    assert "<img" not in lk.score()._repr_html_()
    lk.predict("<fast>", 1.5)
    lk.plot_speedup(runs_of("00 step", **{"<fast>": 2.0}))
    html = lk.score()._repr_html_()
    assert "&lt;fast&gt; (00 step): 1.5x guessed" in html
    assert "only guess so far" in html
    assert "<img" not in lk.score("00")._repr_html_()
    assert "nan" not in html
    assert html.startswith("<img alt=")


def test_the_plot_puts_right_guesses_on_the_diagonal(runs_of):
    ax = plt.subplots()[1]
    found = _walk(runs_of)
    assert found.plot(ax) is ax
    points = ax.collections[1].get_offsets()
    assert points.tolist() == found.frame[["measured", "guess"]].to_numpy().tolist()
    (diagonal,) = ax.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    assert ax.get_xlim() == ax.get_ylim()
    assert {"00", "01", "02", "03", "guessed too high", "guessed too low"} <= {text.get_text() for text in ax.texts}
    assert lk.plot_guesses(found.frame.iloc[:0]).collections


def test_one_round_gives_a_guess_without_an_interval(frame_of, folder):
    lk.predict("b", 3)
    lk.plot_speedup(frame_of({"a": [10], "b": [20]}, "a", experiment="00 once"))
    _forget()
    found = lk.score()
    assert not found.inside
    assert "1.5 times too high" in repr(found)
