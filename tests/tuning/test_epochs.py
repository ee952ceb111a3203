"""Epochs: batches of one epoch after another, and what it costs to start one."""

import pytest

from labkit.tuning.epochs import CannotDiagnose, Epochs


class TestEpochs:
    def test_one_after_the_other(self):
        epochs = Epochs([1, 2, 3])
        batches = iter(epochs)
        assert [next(batches) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
        assert len(epochs.gaps_s) == 2
        assert epochs.length == 3

    def test_a_gap_is_shared_among_the_batches(self):
        epochs = Epochs(range(10))
        epochs.gaps_s = [0.5, 0.7, 0.6]
        assert epochs.starting_s(0.1) == pytest.approx(0.05)
        assert epochs.starting_s(1.0) == 0

    def test_the_first_epoch_counts_until_a_second_begins(self):
        epochs, kept = Epochs(range(10), anew=True), Epochs(range(10))
        epochs.first_s = kept.first_s = 0.4
        assert epochs.starting_s(0) == pytest.approx(0.04)
        assert kept.starting_s(0) == 0

    def test_without_a_length(self):
        assert Epochs(iter(())).starting_s(0) == 0

    def test_no_iterable(self):
        with pytest.raises(CannotDiagnose, match="the loader must be an iterable of batches, got a int"):
            Epochs(3)
