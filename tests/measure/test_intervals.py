"""Intervals of speed-ups, against SciPy and by simulation."""

import numpy as np
import pytest
from scipy import stats

from labkit.measure.statistics import speedup_interval, speedup_of, verdict_of

LOGS = np.array([0.1, 0.4, 0.2, 0.35, 0.15])
LONG = np.random.default_rng(0).standard_t(3, 23) / 10


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_few_rounds_give_student_s_interval(confidence):
    for logs in LOGS, np.log([1.1, 1.4]):
        student = stats.ttest_1samp(logs, 0).confidence_interval(confidence)
        assert speedup_interval(np.exp(logs), confidence=confidence) == pytest.approx(np.exp(student))
        assert speedup_of(np.exp(logs)) == pytest.approx(stats.gmean(np.exp(logs)))


def test_from_eight_rounds_on_a_fifth_is_trimmed_at_either_end():
    """SciPy has Yuen's test of two samples only: against a constant sample it is the test of one."""
    for n in (8, 9, 10, 23):
        logs = LONG[:n]
        n_cut = n // 5
        clipped = np.asarray(stats.mstats.winsorize(logs, limits=(n_cut / n, n_cut / n)))
        kept = n - 2 * n_cut
        error = clipped.std(ddof=1) * np.sqrt((n - 1) / (kept * (kept - 1)))
        center = stats.trim_mean(logs, 0.2)
        low, high = stats.t(kept - 1, center, error).interval(0.95)
        assert speedup_interval(np.exp(logs)) == pytest.approx((np.exp(low), np.exp(high)))
        assert speedup_of(np.exp(logs)) == pytest.approx(np.exp(center))


def test_a_burst_does_not_widen_the_interval_of_a_long_comparison():
    quiet = np.random.default_rng(1).normal(0, 0.02, 12)
    disturbed = quiet.copy()
    disturbed[:2] = -1.5, 2.0
    low, high = speedup_interval(np.exp(disturbed))
    assert 0.95 < low < 1 < high < 1.05
    plain = stats.ttest_1samp(disturbed, 0).confidence_interval(0.95)
    assert plain.high - plain.low > 10 * np.log(high / low)


@pytest.mark.parametrize("n_looks", [1, 2, 3])
def test_each_look_gets_an_equal_part_of_the_error(n_looks):
    student = stats.ttest_1samp(LOGS, 0).confidence_interval(1 - 0.05 / n_looks)
    assert speedup_interval(np.exp(LOGS), n_looks=n_looks) == pytest.approx(np.exp(student))


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize(
    ("rates", "others"),
    [
        (np.exp(LOGS), np.exp([0.0, 0.3, -0.2])), ([1.1, 1.4], [1.0, 1.2]), ([6, 6, 6], [2, 3, 2.5]),
        ([2, 3, 2.5], [6, 6, 6]), ([1, 1.2], [1, 1.1, 1.3]), (np.exp(LONG), np.exp(LONG[:3])),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Precision loss")
def test_the_interval_of_two_samples(rates, others, confidence):
    welch = stats.ttest_ind(np.log(rates), np.log(others), equal_var=False).confidence_interval(confidence)
    found = speedup_interval(np.array(rates), np.array(others), confidence=confidence)
    assert found == pytest.approx(np.exp(welch))
    assert speedup_of(np.array(rates), np.array(others)) == pytest.approx(stats.gmean(rates) / stats.gmean(others))
    for samples in (np.array(rates), np.ones(1)), (np.ones(1), np.array(rates)):
        assert np.isnan(speedup_interval(*samples)).all()


def test_two_long_samples_are_trimmed_both():
    yuen = stats.ttest_ind(LONG, LONG[:9], equal_var=False, trim=0.2).confidence_interval(0.95)
    assert speedup_interval(np.exp(LONG), np.exp(LONG[:9])) == pytest.approx(np.exp(yuen))
    assert speedup_of(np.exp(LONG), np.exp(LONG[:9])) == pytest.approx(np.exp(np.mean(yuen)))


@pytest.mark.parametrize("others", [None, np.full(3, 2.0), np.full(2, 2.0)])
def test_constant_samples_give_a_point_and_make_scipy_say_nothing(others, recwarn):
    low, high = speedup_interval(np.full(3, 6.0), others)
    assert (low, high) == pytest.approx((3, 3) if others is not None else (6, 6))
    assert not recwarn.list


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_rounds", [5, 9, 20])
@pytest.mark.parametrize("noise", ["normal", "heavy", "bursts"])
def test_the_interval_covers_the_truth_in_19_of_20_cases(n_rounds, noise):
    rng = np.random.default_rng(1)
    draws = {
        "normal": lambda size: rng.normal(size=size),
        "heavy": lambda size: rng.standard_t(3, size=size),
        "bursts": lambda size: rng.normal(size=size) - 8 * ((rng.random(size) < 0.1) - 1.0 * (rng.random(size) < 0.1)),
    }[noise]((300, n_rounds))
    lows, highs = np.transpose([speedup_interval(2.0 * np.exp(0.05 * draw)) for draw in draws])
    assert np.mean((lows <= 2.0) & (highs >= 2.0)) >= 0.93  # 0.95 less two standard errors of 300 cases


def test_neighbours_that_come_and_go_make_no_verdict():
    """Runs in turn, each slowed by a load that lasts for some of them. The 95 % interval alone fails this."""
    rng, load, verdicts = np.random.default_rng(3), 0.0, []
    for _ in range(300):
        logs = []
        for number in range(5):
            first = load = 0.5 * load + rng.normal(scale=0.1)
            second = load = 0.5 * load + rng.normal(scale=0.1)
            logs.append((second - first) * (-1) ** number)
        verdicts.append(verdict_of(np.exp(logs)))
    assert np.mean(np.array(verdicts) != "inconclusive") <= 0.03


def test_a_fifth_is_seen_through_a_spread_of_a_twentieth():
    rng = np.random.default_rng(4)
    verdicts = [verdict_of(1.2 * np.exp(0.05 * rng.normal(size=5))) for _ in range(100)]
    assert verdicts.count("faster") >= 90
    assert "slower" not in verdicts
