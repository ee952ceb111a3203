"""Whoever does what a message of a measurement's advises gets what it promises: each is followed to its end."""

import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import labkit as lk
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
