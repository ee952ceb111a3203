"""Guesses are scored against what was measured: the expected figures are worked out by hand."""

import math

import matplotlib.pyplot as plt
import pytest

import labkit as lk
from labkit import course
from labkit.course.predictions import plot_guesses, predictions


def test_a_prediction_is_kept_and_replaced():
    course.predict("a", 2, because="why not")
    assert "a: you expect 3x" in repr(course.predict("a", 3))
    assert predictions().to_dict("records") == [{"label": "a", "speedup": 3.0, "because": ""}]


@pytest.mark.parametrize("speedup", [..., None])
def test_an_open_prediction_prints_nothing_and_counts_as_none(runs_of, capsys, speedup):
    assert course.predict("2 workers", speedup) is None
    assert predictions().empty
    lk.plot_speedup(runs_of("00 step", **{"2 workers": 2.0}))
    assert course.score().walk.empty
    assert repr(course.score("00")) == repr(course.score())
    assert "write one into course.predict(label, ...)" in repr(course.score())
    course.score()._ipython_display_()  # nothing to show
    assert capsys.readouterr().out == ""
    course.predict("2 workers", 2)
    assert len(predictions()) == 1


def test_a_wrong_guess_leaves_the_earlier_one():
    course.predict("a", 2)
    with pytest.raises(ValueError, match="speedup must be a number"):
        course.predict("a", "fast")
    assert list(predictions()["speedup"]) == [2]


@pytest.mark.parametrize("speedup", [0, -1, float("nan"), float("inf")])
def test_a_prediction_must_be_a_ratio(speedup):
    with pytest.raises(ValueError, match=f"speedup must be a number > 0, got {speedup}"):
        course.predict("a", speedup)


@pytest.fixture
def found(runs_of):
    """The score of guesses that are twice, half, once and four times what is measured."""
    for number, (guess, measured) in enumerate([(4, 2), (1.5, 3), (2, 2), (8, 2)]):
        course.predict("fast", guess)
        lk.plot_speedup(runs_of(f"0{number} step", fast=measured))
    return course.score()


def test_the_score_is_as_worked_out_by_hand(found):
    errors = [math.log(2), -math.log(2), 0, math.log(4)]
    mean = sum(errors) / 4
    assert found.bias == pytest.approx(math.exp(mean), rel=1e-3)
    assert found.spread == pytest.approx(math.exp((sum((error - mean) ** 2 for error in errors) / 3) ** 0.5), rel=1e-3)
    assert (found.inside, found.near) == (0.25, 0.25)
    assert found.bias_interval[0] < 1 < found.bias_interval[1]


def test_the_score_in_words(found):
    words = repr(found)
    assert "fast (00 step): 4x guessed, 2x measured: 2 times too high." in words
    assert "fast (01 step): 1.5x guessed, 3x measured: 2 times too low." in words
    assert "fast (02 step): 2x guessed, 2x measured: inside the interval." in words
    assert "Of 4 guesses so far, 25% lie inside" in words
    assert "1.41 times too high" in words
    assert "no leaning" in words


@pytest.mark.parametrize(("factor", "kind"), [(2, "an optimist"), (0.5, "a pessimist")])
def test_a_leaning_is_named_where_it_is_certain(runs_of, factor, kind):
    for number, wobble in enumerate([0.9, 1.0, 1.1, 1.0, 0.95]):
        course.predict("fast", 3 * factor * wobble)
        lk.plot_speedup(runs_of(f"0{number} step", fast=3))
    assert kind in repr(course.score())


@pytest.mark.usefixtures("found")
def test_a_notebook_scores_itself_and_names_the_score_walk():
    found = course.score("01")
    assert list(found.frame["experiment"]) == ["01 step"]
    assert len(found.walk) == 4
    assert "00 step" not in repr(found)
    assert "Of 4 guesses" in repr(found)
    assert "<img" not in found._repr_html_()
    assert "None of these experiments has a guess" in repr(course.score("12"))


def test_no_guess_and_a_single_one(runs_of):
    assert "course.predict(label, ...)" in repr(course.score())
    assert "<img" not in course.score()._repr_html_()
    course.predict("<fast>", 1.5)
    lk.plot_speedup(runs_of("00 step", **{"<fast>": 2.0}))
    html = course.score()._repr_html_()
    assert "&lt;fast&gt; (00 step): 1.5x guessed" in html
    assert "only guess so far" in html
    assert "<img" not in course.score("00")._repr_html_()
    assert "nan" not in html
    assert html.startswith("<img alt=")


def test_the_plot_puts_right_guesses_on_the_diagonal(found):
    ax = plt.subplots()[1]
    assert found.plot(ax) is ax
    points = ax.collections[1].get_offsets()
    assert points.tolist() == found.frame[["measured", "guess"]].to_numpy().tolist()
    (diagonal,) = ax.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    assert ax.get_xlim() == ax.get_ylim()
    assert {"00", "01", "02", "03", "guessed too high", "guessed too low"} <= {text.get_text() for text in ax.texts}
    assert plot_guesses(found.frame.iloc[:0]).collections
