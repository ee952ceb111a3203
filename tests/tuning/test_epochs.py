"""Epochs: batches of one epoch after another, and what it costs to start one."""

import itertools

import pytest

from labkit.errors import CannotDiagnose
from labkit.watching.timings import Epochs


def test_one_after_the_other():
    epochs = Epochs([1, 2, 3])
    assert list(itertools.islice(epochs, 7)) == [1, 2, 3, 1, 2, 3, 1]
    assert (len(epochs.gaps_s), epochs.length) == (2, 3)


@pytest.mark.parametrize(
    ("loader", "anew", "gaps_s", "waiting_s", "starting_s"),
    [
        (range(10), False, [0.5, 0.7, 0.6], 0.1, 0.05),  # shared among the batches
        (range(10), True, [0.5, 0.7, 0.6], 1.0, 0),
        (range(10), True, [], 0, 0.04),  # the first epoch counts until a second begins
        (range(10), False, [], 0, 0),
        (iter(()), True, [], 0, 0),  # without a length
    ],
)
def test_what_starting_costs_a_batch(loader, anew, gaps_s, waiting_s, starting_s):
    epochs = Epochs(loader, anew=anew)
    epochs.gaps_s, epochs.first_s = gaps_s, 0.4
    assert epochs.starting_s(waiting_s) == pytest.approx(starting_s)


def test_no_iterable():
    with pytest.raises(CannotDiagnose, match="the loader must be an iterable of batches, got a int"):
        Epochs(3)
