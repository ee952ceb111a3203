"""Whoever does what a message of a measurement's advises gets what it promises: each is followed to its end."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
from labkit import course
from labkit.measure.steady import count_images


def told(call) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


def short() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(8, 3, 4, 4)), batch_size=4)


def compared(*names: str, loader=short, baseline: str | None = None, **options) -> pd.DataFrame:
    variants = {name: (lambda: loader()) for name in names}
    return lk.compare(variants, baseline=baseline or names[0], rounds=2, warmups=0, progress=False, **options)


def both(*experiments: str | None) -> pd.DataFrame:
    return pd.concat([compared("a", "b", experiment=name) for name in experiments])


ADVICE = [  # a name; what is done; the words of the advice; what it says, which works
    ("loaders as variants", lambda: lk.compare({"a": short()}, baseline="a"), "write `lambda: loader`",
     lambda: len(compared("a")) == 2),
    ("no images", lambda: compared("a", loader=lambda: [torch.zeros(0, 3, 4, 4)] * 3), "say by count= what to count",
     lambda: compared("a", loader=lambda: [torch.zeros(0, 3, 4, 4)] * 3, count=lambda batch: 5).n_images.min() > 0),
    ("batches of texts", lambda: compared("a", loader=lambda: ["text"] * 3), "pass count= to lk.compare",
     lambda: compared("a", loader=lambda: ["text"] * 3, count=len).n_images.min() == 12),
    ("batches of texts, elsewhere", lambda: count_images("text"), "or let the loader give their number",
     lambda: set(compared("a", loader=lambda: [4] * 3).n_images) == {12}),
    ("two comparisons", lambda: lk.summarize(both(None, None)), "give each compare an experiment= of its own",
     lambda: len(lk.summarize(both("x", "y"))) == 2),
    ("two baselines", lambda: lk.summarize(both("x", "y").assign(baseline=list("aaaabbbb"))), "pass baseline=",
     lambda: lk.summarize(both("x", "y").assign(baseline=list("aaaabbbb")), "a").loc["a", "verdict"] == "baseline"),
    ("a timer's runs as an epoch", lambda: lk.epoch_time(compared("a").assign(startup_s=float("nan")), 5),
     "pass a frame from labkit.compare", lambda: len(lk.epoch_time(compared("a"), 5)) == 1),
    ("too many batches", lambda: lk.ReplayLoader(short(), 3), "the loader gave only 2 batches: ask for fewer",
     lambda: len(list(lk.ReplayLoader(short(), 2))) == 2),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::labkit.measure.statistics.InstabilityWarning")
@pytest.mark.parametrize(("mistake", "advice", "follow"), [row[1:] for row in ADVICE], ids=[row[0] for row in ADVICE])
def test_what_a_message_says_works(mistake, advice, follow):
    assert advice in told(mistake)
    assert follow()


def test_passes_that_begin_anew_are_of_the_same_work():
    left = iter([[1] * 3, [1] * 2])
    with pytest.warns(UserWarning, match="Let each pass start from the beginning, as a new iterator of the same data"):
        lk.compare({"a": lambda: next(left)}, baseline="a", rounds=2, warmups=0, progress=False)
    with warnings.catch_warnings(action="error"):
        compared("a")


def test_a_prediction_under_a_variants_name_is_marked():
    runs = compared("fast", "slow")
    course.predict("slwo", 2.0)
    with pytest.warns(UserWarning, match="if 'slow' is meant, pass it to course.predict"):
        lk.plot_speedup(runs)
    course.predict("slow", 2.0)
    with warnings.catch_warnings(action="error"):
        axes = lk.plot_speedup(runs)
    assert 2.0 in {round(float(value), 6) for line in axes.lines for value in np.ravel(line.get_xdata())} | {
        round(float(value), 6) for dots in axes.collections for value in np.ravel(dots.get_offsets())
    }
