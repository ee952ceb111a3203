"""Summaries: speed-ups, intervals, verdicts, notes, against SciPy and figures worked out by hand."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import labkit as lk
from labkit.measure import summary as summaries
from labkit.measure.summary import paired_ratios, quiet_summary, speedup_interval, verdict_of

SKEWED = np.append(np.zeros(99), 1.0)  # logarithms: one ratio of 100 is e


def test_verdicts(frame_of):
    rates = {
        "base": [100, 101, 99, 100, 102], "fast": [150, 152, 149, 151, 150], "slow": [80, 81, 79, 80, 82],
        "same": [101, 99, 100, 102, 100], "equal": [100, 101, 99, 100, 102],
    }  # fmt: skip
    verdicts = lk.summarize(frame_of(rates, "base")).verdict
    assert verdicts.tolist() == ["baseline", "faster", "slower", "inconclusive", "inconclusive"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_rounds", [5, 9, 20])
@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_the_interval_covers_the_truth_in_19_of_20_cases(n_rounds, noise):
    rng = np.random.default_rng(1)
    draws = rng.normal(size=(300, n_rounds)) if noise == "normal" else rng.standard_t(3, size=(300, n_rounds))
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


def test_what_leaves_out_1_at_95_percent_only_is_said_to_lean(frame_of):
    frame = frame_of({"a": [100] * 5, "b": [104, 101, 106, 102, 108], "c": [96, 99, 94, 98, 92]}, "a")
    summary = lk.summarize(frame)
    assert summary.loc["b", "ci_low"] > 1 > summary.loc["c", "ci_high"]
    assert summary.verdict[["b", "c"]].tolist() == ["inconclusive"] * 2
    assert summary.note.str.partition(":")[0].tolist() == ["", "leans to faster", "leans to slower"]


def test_the_bootstrap_alone_would_be_too_narrow():
    """The reason for Student's interval beside it: all five ratios lie on one side in 1 of 16 equal comparisons."""
    low, high = speedup_interval(np.array([1.01, 1.02, 1.03, 1.01, 1.05]) ** np.array([1, 1, 1, 1, 3]))
    assert low < 1 < high


def test_one_round_gives_no_interval(frame_of):
    row = lk.summarize(frame_of({"a": [10], "b": [20]}, "a")).loc["b"]
    assert row.speedup == pytest.approx(2.0)
    assert np.isnan(row.ci_low)
    assert (row.verdict, row.note) == ("inconclusive", "one run")


def test_warmups_do_not_count(frame_of):
    frame = frame_of({"a": [1, 10, 10], "b": [1, 20, 20]}, "a")
    frame["is_warmup"] = frame["round"] == 0
    assert lk.summarize(frame).loc["b", "n_runs"] == 2
    frame["is_warmup"] = True
    with pytest.raises(ValueError, match=r"^the frame holds no run besides warm-ups$"):
        lk.summarize(frame)


def test_frames_of_two_machines_are_refused(frame_of):
    both = pd.concat([frame_of({"a": [1, 2]}, "a"), frame_of({"a": [1, 2]}, "a", env_id="elsewhere")])
    with pytest.raises(ValueError, match=f"different machines.*{lk.env_id()}, elsewhere"):
        lk.summarize(both)


def test_baseline_must_be_there(frame_of):
    frame = frame_of({"a": [10, 11], "b": [20, 21]}, "a")
    with pytest.raises(ValueError, match="baseline 'c' is not in the frame: a, b"):
        lk.summarize(frame, "c")
    frame["baseline"] = ""
    with pytest.raises(ValueError, match=r"^the frame names no single baseline: pass baseline=$"):
        lk.summarize(frame)
    assert lk.summarize(frame, "b").loc["a", "speedup"] < 1


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_is_the_wider_of_student_s_and_the_bootstrap_s(confidence):
    for logs in np.array([0.1, 0.4, 0.2, 0.35, 0.15]), np.log([1.1, 1.4]):
        student = stats.ttest_1samp(logs, 0).confidence_interval(confidence)
        assert speedup_interval(np.exp(logs), confidence=confidence) == pytest.approx(np.exp(student))
    low, high = speedup_interval(np.exp(SKEWED), confidence=confidence)
    student = stats.ttest_1samp(SKEWED, 0).confidence_interval(confidence)
    assert low == pytest.approx(np.exp(student.low))
    resampled = stats.binom(100, 0.01).ppf((1 + confidence) / 2) / 100  # how often the one ratio is drawn
    assert high == pytest.approx(np.exp(resampled))
    assert resampled > student.high


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize(
    ("rates", "others"),
    [
        (np.exp([0.1, 0.4, 0.2, 0.35, 0.15]), np.exp([0.0, 0.3, -0.2])), ([1.1, 1.4], [1.0, 1.2]),
        ([6, 6, 6], [2, 3, 2.5]), ([2, 3, 2.5], [6, 6, 6]), ([1, 1.2], [1, 1.1, 1.3]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Precision loss")
def test_the_interval_of_two_samples(rates, others, confidence):
    welch = stats.ttest_ind(np.log(rates), np.log(others), equal_var=False).confidence_interval(confidence)
    found = speedup_interval(np.array(rates), np.array(others), confidence=confidence)
    assert found == pytest.approx(np.exp(welch))
    for samples in (np.array(rates), np.ones(1)), (np.ones(1), np.array(rates)):
        assert np.isnan(speedup_interval(*samples)).all()


def test_two_samples_are_resampled_independently_and_a_rerun_says_the_same():
    low, high = speedup_interval(np.exp(SKEWED), np.exp(SKEWED))
    assert (low, high) == pytest.approx((np.exp(-0.03), np.exp(0.03)))  # a Skellam variable; Welch's reach is 0.028
    noisy = np.exp(SKEWED + np.random.default_rng(0).normal(0, 0.001, 100))
    assert speedup_interval(noisy) == speedup_interval(noisy)
    assert speedup_interval(noisy, noisy[:90]) == speedup_interval(noisy, noisy[:90])


@pytest.mark.parametrize("others", [None, np.full(3, 2.0), np.full(2, 2.0)])
def test_constant_samples_give_a_point_and_make_scipy_say_nothing(others, recwarn):
    low, high = speedup_interval(np.full(3, 6.0), others)
    assert (low, high) == pytest.approx((3, 3) if others is not None else (6, 6))
    assert not recwarn.list


@pytest.mark.parametrize(("rates", "note"), [
    ([3, 4, 5], ""),  # a spread of a quarter, and not more
    ([3, 4, 5.1], "unstable: spread 26%"),
    ([10, 11, 12, 13], ""), ([10, 11, 12, 13, 14], "unstable: drifts over the rounds"),
    ([14, 13, 12, 11, 10], "unstable: drifts over the rounds"), ([10, 10.5, 11, 11.5, 12], ""),  # by less than e^0.2
    ([10, 12.9, 13, 13.1, 13.2], "unstable: drifts over the rounds"),
    ([10, 10, 10, 10, 10], ""), ([10, 13, 11, 12, 13], ""),  # no certain trend
])  # fmt: skip
def test_notes(frame_of, rates, note, recwarn):
    summary = quiet_summary(frame_of({"a": rates, "b": rates}, "a"))
    assert not recwarn.list  # SciPy's, of constant rates
    assert dict(summary.note) == {"a": note, "b": note}


def test_a_warning_names_the_variant_and_points_at_the_caller_and_a_quiet_summary_gives_none(frame_of, recwarn):
    frame = frame_of({"a": [10, 10], "wild": [10, 90]}, "a")
    quiet = quiet_summary(frame, "wild")
    assert not recwarn
    with pytest.warns(lk.InstabilityWarning, match="wild: unstable: spread") as caught:
        pd.testing.assert_frame_equal(lk.summarize(frame, "wild"), quiet)
    assert caught[0].filename == __file__


def test_a_quiet_summary_keeps_other_warnings(monkeypatch):
    monkeypatch.setattr(summaries, "summarize", lambda *arguments: warnings.warn("something else", stacklevel=1))
    with pytest.warns(UserWarning, match="something else"):
        quiet_summary(None)


def test_every_column_of_a_summary(frame_of):
    frame = frame_of({"a": [10, 20, 40], "b": [30, 50, 130]}, "a")
    frame["cpu_s"], frame["n_images"] = [1, 2, 6, 1, 1, 1], [500, 1000, 1000, 1000, 1000, 1000]
    frame["peak_mem_mb"] = [5, 9, 7, 1, 1, 1]
    summary, ratios = quiet_summary(frame), np.array([3, 2.5, 3.25])
    assert summary.index.name == "variant"
    assert list(summary) == [
        "n_runs", "images_per_s", "spread", "cpu_s_per_1000", "peak_mem_mb", "speedup", "ci_low", "ci_high", "verdict",
        "note",
    ]  # fmt: skip
    assert summary.loc["a"].tolist()[:-1] == [3, 20, 0.75, 2, 9, 1, 1, 1, "baseline"]
    assert summary.loc["b"].tolist()[5:9] == [pytest.approx(stats.gmean(ratios)), *speedup_interval(ratios), "faster"]


@pytest.mark.parametrize("unordered", ["a", "b"])
def test_runs_are_paired_only_where_both_were_interleaved(frame_of, unordered):
    rates = {"a": [10, 20, 40], "b": [20, 40, 90]}
    frame = frame_of(rates, "a")
    frame.loc[frame.variant == unordered, "order"] = np.nan
    row = quiet_summary(frame, "a").loc["b"]
    assert row.note == "not interleaved; unstable: spread 88%"
    welch = stats.ttest_ind(*(np.log(rates[name]) for name in "ba"), equal_var=False).confidence_interval(0.95)
    assert row.speedup == pytest.approx(stats.gmean(rates["b"]) / stats.gmean(rates["a"]))
    assert (row.ci_low, row.ci_high) == pytest.approx(np.exp(welch))


def test_ratios_are_those_of_one_experiment_and_round(frame_of):
    frames = [frame_of({"a": [10, 20], "b": [30, 80]}, "a", experiment=name) for name in ("x", "y")]
    frame = pd.concat(frames, ignore_index=True)
    frame.loc[frame.index[-1], "images_per_s"] = 20.0  # b in y's second round
    own, base = frame[frame.variant == "b"], frame[frame.variant == "a"]
    ratios = paired_ratios(own.iloc[1:], base)
    assert ratios.to_dict("list") == {"round": [1, 0, 1], "speedup": [4, 3, 1]}
    for twice in ((pd.concat([own, own]), base), (own, pd.concat([base, base]))):  # the same experiment measured again
        with pytest.raises(ValueError, match=r"^runs of two .* give each compare an experiment= of its own$"):
            paired_ratios(*twice)
