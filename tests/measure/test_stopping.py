"""When a comparison stops, by a clock that only rounds advance; what its intervals are worth then, by simulation."""

import numpy as np
import pytest

import labkit as lk
from labkit.measure.compare import Stopping
from labkit.measure.statistics import speedup_interval, verdict_of


class Rounds:
    """Rounds of two or more variants with given ratios to "a"; each run takes `run_s`."""

    def __init__(self, noise, run_s=1.0, **ratios):
        self.rng, self.noise, self.run_s, self.now = np.random.default_rng(0), noise, run_s, 0.0
        self.ratios = {"a": 1.0, **ratios}

    def run(self, *, min_rounds=5, precision=0.05, budget_s=1e9, rng=None):
        """Labels of each round, and the rows."""
        stopping = Stopping(min_rounds, precision, budget_s, lambda: self.now)
        stopping.begin()
        rows, ran, labels = [], [], list(self.ratios)
        while labels:
            ran.append(labels)
            for label in labels:
                self.now += self.run_s
                rate = self.ratios[label] * np.exp(self.noise(rng or self.rng))
                rows.append({"variant": label, "round": len(ran), "images_per_s": rate})
            labels = stopping.next_round(rows, labels, "a", len(ran))
        return ran, rows, stopping.n_looks


def quiet(rng):
    return rng.normal(0, 0.01)


def noisy(rng):
    return rng.normal(0, 0.1)


def bursts(rng):
    return rng.normal(0, 0.03) - (rng.random() < 0.12) * rng.exponential(0.35)


def test_a_quiet_machine_is_believed_at_the_first_look_and_a_noisy_one_at_the_last():
    assert len(Rounds(quiet, b=1.1).run()[0]) == 5
    assert len(Rounds(noisy, b=1.1).run()[0]) == 20


def test_a_tenfold_difference_needs_no_narrow_interval():
    assert len(Rounds(lambda rng: rng.normal(0, 0.06), b=10.0).run()[0]) == 5
    assert len(Rounds(lambda rng: rng.normal(0, 0.06), b=1.1).run()[0]) > 5


def test_what_is_known_well_enough_drops_out_and_the_baseline_stays():
    ran, _, _ = Rounds(lambda rng: rng.normal(0, 0.04), b=20.0, c=1.02).run()
    assert ran[:5] == [["a", "b", "c"]] * 5
    assert ran[5:] == [["a", "c"]] * (len(ran) - 5)
    assert len(ran) > 5


@pytest.mark.parametrize(
    ("budget_s", "n_rounds", "n_looks"), [(0, 5, 1), (10, 5, 1), (12, 6, 1), (18, 9, 3), (1e9, 20, 3)]
)
def test_no_more_rounds_than_the_time_allows(budget_s, n_rounds, n_looks):
    ran, _, looks = Rounds(noisy, b=1.0).run(budget_s=budget_s)
    assert (len(ran), looks) == (n_rounds, n_looks)


def test_a_precision_is_what_it_says():
    for precision in (0.02, 0.2):
        ran, rows, n_looks = Rounds(noisy, b=1.0).run(precision=precision)
        rates = {label: np.array([row["images_per_s"] for row in rows if row["variant"] == label]) for label in "ab"}
        low, high = speedup_interval(rates["b"] / rates["a"], n_looks=n_looks)
        assert (np.log(high / low) / 2 <= np.log1p(precision)) == (len(ran) < 20)


@pytest.mark.parametrize("run_s", [0.0, 1.0])
def test_without_time_the_number_of_rounds_is_fixed_whatever_they_show(run_s):
    ran, _, n_looks = Rounds(noisy, run_s, b=1.0).run(min_rounds=3, budget_s=0)
    assert (ran, n_looks) == ([["a", "b"]] * 3, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("noise", [quiet, bursts, lambda rng: rng.normal(0, 0.05)], ids=["quiet", "bursts", "normal"])
@pytest.mark.parametrize("ratio", [1.0, 1.15, 2.0])
def test_stopping_at_a_look_that_pleases_leaves_the_intervals_valid(noise, ratio):
    """Over 400 comparisons, to within two standard errors."""
    rng, covered, verdicts = np.random.default_rng(7), [], []
    for _ in range(400):
        _, rows, n_looks = Rounds(noise, b=ratio).run(rng=rng)
        ratios = np.divide(*[[row["images_per_s"] for row in rows if row["variant"] == label] for label in "ba"])
        low, high = speedup_interval(ratios, n_looks=n_looks)
        covered.append(low <= ratio <= high)
        verdicts.append(verdict_of(ratios, n_looks=n_looks))
    assert np.mean(covered) >= 0.95 - 2 * np.sqrt(0.95 * 0.05 / 400)
    if ratio == 1.0:
        assert np.mean(np.array(verdicts) != "inconclusive") <= 0.01 + 2 * np.sqrt(0.01 * 0.99 / 400)
    else:
        assert verdicts.count("faster") >= 0.9 * 400


def test_compare_stops_by_its_own_clock():
    now, rng = [0.0], np.random.default_rng(0)

    def variant(seconds, noise):
        def batches():
            now[0] += seconds * np.exp(rng.normal(0, noise))
            yield 1

        return batches

    def n_rounds(noise, **options):
        variants = {"a": variant(1.0, noise), "b": variant(0.5, noise)}
        frame = lk.compare(variants, baseline="a", clock=lambda: now[0], **options)
        return int((~frame["is_warmup"]).sum() / 2), frame["n_looks"].iloc[0]

    assert n_rounds(0.001, budget_s=100) == (2, 3)  # `ci` asks for two rounds at least
    assert n_rounds(0.2, budget_s=100) == (8, 3)
    assert n_rounds(0.2, budget_s=1) == (2, 1)
    assert n_rounds(0.2) == (2, 1)
    assert n_rounds(0.2, rounds=4) == (4, 1)
    assert n_rounds(0.2, rounds=4, budget_s=1) == (4, 1)
