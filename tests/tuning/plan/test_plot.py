"""The picture of a plan: a bar for each ceiling, the demand beside them, and the word that nothing was measured."""

import pytest
from matplotlib.figure import Figure

from labkit import plan
from labkit.course import plot_plan


@pytest.fixture(scope="module")
def far():
    return plan(gpu="h100", n_gpus=8, cpu_ms_per_image=(0.8, 1.0), storage="s3")


def test_bars_are_the_ceilings_the_scarcest_first(far):
    ax = plot_plan(far)
    rows = far.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
    assert [label.get_text() for label in ax.get_yticklabels()] == list(rows["quantity"])
    assert [bar.get_width() for bar in ax.patches[: len(rows)]] == pytest.approx(list(rows["value"]))
    assert ax.get_yticklabels()[0].get_text() == far.bottleneck


def test_it_says_what_the_gpus_ask_for_and_that_it_is_predicted(far):
    ax = plot_plan(far, ax=Figure().add_subplot())
    assert ax.get_title("right") == "predicted"
    title = " ".join(ax.get_title("left").split())
    assert title == f"{far.title}: {far.bottleneck} allow 658 of 57,200 images/s"
    assert ax.get_legend().get_texts()[0].get_text() == "the GPUs ask for 57,200"
