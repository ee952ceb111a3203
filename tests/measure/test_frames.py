"""Summaries, intervals, frames on disk, and the doors for %timeit and Timer."""

import timeit
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from IPython.core.magics.execution import TimeitResult
from scipy import stats
from torch.utils.benchmark import Timer

import labkit as lk
from labkit.measure import frames as results
from labkit.measure.frames import (
    COLUMNS,
    make_frame,
    paired_ratios,
    quiet_summary,
    speedup_interval,
    verdict_of,
)  # fmt: skip


def test_speedup_is_the_geometric_mean_of_paired_ratios(frame_of):
    base, fast = [100.0, 90.0, 110.0, 95.0], [210.0, 175.0, 225.0, 190.0]
    row = lk.summarize(frame_of({"base": base, "fast": fast}, "base")).loc["fast"]
    assert row.speedup == pytest.approx(stats.gmean(np.divide(fast, base)))
    assert row.images_per_s == np.median(fast)
    assert row.cpu_s_per_1000 == pytest.approx(5.0)


def test_runs_of_two_calls_are_not_mixed_up(frame_of):
    frame = frame_of({"a": [10, 11], "b": [20, 21]}, "a")
    with pytest.raises(ValueError, match="experiment= of its own"):
        lk.summarize(pd.concat([frame, frame]))


def test_verdicts(frame_of):
    rates = {
        "base": [100, 101, 99, 100, 102],
        "fast": [150, 152, 149, 151, 150],
        "slow": [80, 81, 79, 80, 82],
        "same": [101, 99, 100, 102, 100],
    }
    verdicts = lk.summarize(frame_of(rates, "base")).verdict
    assert dict(verdicts) == {"base": "baseline", "fast": "faster", "slow": "slower", "same": "inconclusive"}


@pytest.mark.parametrize("n_rounds", [5, 9, 20])
@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_the_interval_covers_the_truth_in_19_of_20_cases(n_rounds, noise):
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(300):
        draw = rng.normal(size=n_rounds) if noise == "normal" else rng.standard_t(3, size=n_rounds)
        low, high = speedup_interval(2.0 * np.exp(0.05 * draw))
        covered.append(low <= 2.0 <= high)
    assert np.mean(covered) >= 0.93  # 0.95 less two standard errors of 300 cases


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
    assert list(summary.loc[["b", "c"], "verdict"]) == ["inconclusive"] * 2
    assert list(summary.loc[["b", "c"], "note"]) == [
        f"leans to {way}: more rounds would tell" for way in ("faster", "slower")
    ]


def test_the_bootstrap_alone_would_be_too_narrow():
    """The reason for Student's interval beside it: all five ratios lie on one side in 1 of 16 equal comparisons."""
    low, high = speedup_interval(np.array([1.01, 1.02, 1.03, 1.01, 1.05]) ** np.array([1, 1, 1, 1, 3]))
    assert low < 1 < high


def test_one_round_gives_no_interval(frame_of):
    row = lk.summarize(frame_of({"a": [10], "b": [20]}, "a")).loc["b"]
    assert row.speedup == pytest.approx(2.0)
    assert np.isnan(row.ci_low)
    assert (row.verdict, row.note) == ("inconclusive", "one run")


def test_identical_runs_give_a_point(frame_of):
    row = lk.summarize(frame_of({"a": [10] * 3, "b": [20] * 3}, "a")).loc["b"]
    assert (row.ci_low, row.ci_high) == pytest.approx((2.0, 2.0))


def test_warmups_do_not_count(frame_of):
    frame = frame_of({"a": [1, 10, 10], "b": [1, 20, 20]}, "a")
    frame.loc[frame["round"] == 0, "is_warmup"] = True
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


def test_scatter_and_drift_are_said_out_loud(frame_of):
    with pytest.warns(lk.InstabilityWarning, match="wild: unstable: spread"):
        lk.summarize(frame_of({"a": [10] * 6, "wild": [10, 30, 12, 40, 9, 33]}, "a"))
    with pytest.warns(lk.InstabilityWarning, match="tired: unstable: drifts"):
        lk.summarize(frame_of({"a": [10] * 6, "tired": [12, 11.8, 11, 10.6, 10, 9.5]}, "a"))


def test_a_frame_survives_the_disk(frame_of, tmp_path):
    frame = frame_of({"a": [10, 11], "naïve, PIL": [20, 22]}, "a", storage="")
    again = lk.load_frame(lk.save_frame(frame, tmp_path / "deep" / "frame.csv"))
    assert list(again.columns) == list(frame.columns)
    pd.testing.assert_frame_equal(lk.summarize(again), lk.summarize(frame))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["frame.csv"]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\xff"])
def test_a_foreign_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "not.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"not\.csv is not a frame of runs"):
        lk.load_frame(path)


def test_from_timeit():
    result = TimeitResult(
        loops=10, repeat=3, best=0.2, worst=0.4, all_runs=[2.0, 4.0, 3.0], compile_time=0, precision=3
    )
    frame = lk.from_timeit(result, "loop", n_images=32)
    assert list(frame.images_per_s) == pytest.approx([160, 80, 32 / 0.3])
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)


def test_from_timer_and_the_note_that_it_is_not_interleaved():
    measurement = Timer("sum(range(100))", timer=timeit.default_timer).timeit(50)
    frame = pd.concat([lk.from_timer(measurement, "a", 10), lk.from_timer(measurement, "b", 20)], ignore_index=True)
    row = lk.summarize(frame, "a").loc["b"]
    assert row.speedup == pytest.approx(2.0)
    assert "not interleaved" in row.note


def test_a_frame_says_where_it_comes_from_and_what_a_row_says_itself_stays():
    rows = [{"variant": "a", "device": "cuda", "extra": 1}, {"variant": "b", "device": "cpu", "extra": 2}]
    frame = make_frame(rows, seed=3, device="other", rung=False)
    assert list(frame) == [*COLUMNS, "extra", "scale", "rung"]
    assert frame.device.tolist() == ["cuda", "cpu"]
    assert (frame.seed.tolist(), frame.rung.tolist()) == ([3, 3], [False, False])
    bare = make_frame([{"variant": "a"}]).iloc[0]
    assert (bare.env_id, bare.scale, bool(bare.rung)) == (lk.env_id(), lk.scale().name, True)
    assert bare.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert np.isnan(bare.order)


SKEWED = np.append(np.zeros(99), 1.0)  # logarithms: one ratio of 100 is e


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_is_the_wider_of_student_s_and_the_bootstrap_s(confidence):
    logs = np.array([0.1, 0.4, 0.2, 0.35, 0.15])
    student = stats.ttest_1samp(logs, 0).confidence_interval(confidence)
    assert speedup_interval(np.exp(logs), confidence=confidence) == pytest.approx(np.exp(student))
    low, high = speedup_interval(np.exp(SKEWED), confidence=confidence)
    student = stats.ttest_1samp(SKEWED, 0).confidence_interval(confidence)
    assert low == pytest.approx(np.exp(student.low))
    resampled = stats.binom(100, 0.01).ppf((1 + confidence) / 2) / 100  # how often the one ratio is drawn
    assert high == pytest.approx(np.exp(resampled))
    assert resampled > student.high


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_of_two_samples(confidence):
    logs, others = np.array([0.1, 0.4, 0.2, 0.35, 0.15]), np.array([0.0, 0.3, -0.2])
    welch = stats.ttest_ind(logs, others, equal_var=False).confidence_interval(confidence)
    found = speedup_interval(np.exp(logs), np.exp(others), confidence=confidence)
    assert found == pytest.approx(np.exp(welch))
    none = np.full(2, np.nan)
    assert speedup_interval(np.exp(logs), np.ones(1)) == pytest.approx(none, nan_ok=True)
    assert speedup_interval(np.ones(1), np.exp(logs)) == pytest.approx(none, nan_ok=True)
    assert speedup_interval(np.full(2, 6.0), np.full(3, 2.0)) == pytest.approx((3, 3))


def test_two_samples_are_resampled_independently_and_a_rerun_says_the_same():
    low, high = speedup_interval(np.exp(SKEWED), np.exp(SKEWED))
    assert (low, high) == pytest.approx((np.exp(-0.03), np.exp(0.03)))  # a Skellam variable; Welch's reach is 0.028
    noisy = np.exp(SKEWED + np.random.default_rng(0).normal(0, 0.001, 100))
    assert speedup_interval(noisy) == speedup_interval(noisy)
    assert speedup_interval(noisy, noisy[:90]) == speedup_interval(noisy, noisy[:90])


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


def test_a_quiet_summary_is_the_same_without_the_warning(frame_of, recwarn):
    frame = frame_of({"a": [10, 10], "wild": [10, 90]}, "a")
    quiet = quiet_summary(frame, "wild")
    assert not recwarn
    with pytest.warns(lk.InstabilityWarning):
        pd.testing.assert_frame_equal(lk.summarize(frame, "wild"), quiet)


def test_a_warning_points_at_the_caller(frame_of):
    with pytest.warns(lk.InstabilityWarning, match="unstable") as caught:
        lk.summarize(frame_of({"a": [10, 90]}, "a"))
    assert caught[0].filename == __file__


def test_every_column_of_a_summary(frame_of):
    frame = frame_of({"a": [10, 20, 40], "b": [30, 60, 120]}, "a")
    frame["cpu_s"], frame["n_images"] = [1, 2, 6, 1, 1, 1], [500, 1000, 1000, 1000, 1000, 1000]
    frame["peak_mem_mb"] = [5, 9, 7, 1, 1, 1]
    summary = quiet_summary(frame)
    assert summary.index.name == "variant"
    assert list(summary) == [
        "n_runs", "images_per_s", "spread", "cpu_s_per_1000", "peak_mem_mb", "speedup", "ci_low", "ci_high", "verdict",
        "note",
    ]  # fmt: skip
    assert summary.loc["a"].tolist()[:-1] == [3, 20, 0.75, 2, 9, 1, 1, 1, "baseline"]
    assert summary.loc["b"].tolist()[5:9] == pytest.approx([3, 3, 3, "faster"])


def test_equal_to_the_last_digit_is_no_difference(frame_of):
    assert lk.summarize(frame_of({"a": [10] * 3, "b": [10] * 3}, "a")).verdict["b"] == "inconclusive"


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
    frame = pd.concat(
        [frame_of({"a": [10, 20], "b": [30, 80]}, "a", experiment=name) for name in ("x", "y")], ignore_index=True
    )
    frame.loc[frame.index[-1], "images_per_s"] = 20.0  # b in y's second round
    own, base = frame[frame.variant == "b"], frame[frame.variant == "a"]
    ratios = paired_ratios(own.iloc[1:], base)
    assert ratios.to_dict("list") == {"round": [1, 0, 1], "speedup": [4, 3, 1]}
    again, base_again = (
        own.assign(images_per_s=1.0),
        base.assign(images_per_s=1.0),
    )  # measured anew, under the same name
    for doubled in ((pd.concat([own, again]), base), (own, pd.concat([base, base_again]))):
        with pytest.raises(ValueError, match=r"^runs of two .* give each compare an experiment= of its own$"):
            paired_ratios(*doubled)


def test_text_that_is_missing_comes_back_empty_and_a_missing_column_is_named(frame_of, tmp_path):
    frame = frame_of({"a": [1.5]}, "a", storage="", page_cache="", experiment="", seed=None)
    path = lk.save_frame(frame, tmp_path / "frame.csv")
    assert path == tmp_path / "frame.csv"
    again = lk.load_frame(str(path)).iloc[0]
    assert (again.storage, again.page_cache, again.experiment, again.images_per_s) == ("", "", "", 1.5)
    assert np.isnan(again.seed)
    empty = frame.assign(**dict.fromkeys(("variant", "baseline", "device", "env_id"), ""))
    back = lk.load_frame(lk.save_frame(empty, path)).iloc[0]
    assert (back.variant, back.baseline, back.device, back.env_id) == ("", "", "", "")
    lk.save_frame(frame.drop(columns=["seed", "order"]), path)
    with pytest.raises(ValueError, match=r"it lacks order, seed$"):
        lk.load_frame(path)


def test_frames_from_timers_tell_rounds_and_clock():
    result = TimeitResult(loops=4, repeat=2, best=0, worst=0, all_runs=[2.0, 4.0], compile_time=0, precision=3)
    frame = lk.from_timeit(result, "loop", 8)
    assert frame[["variant", "round", "is_warmup", "n_images", "steady_s", "experiment"]].to_numpy().tolist() == [
        ["loop", 0, False, 8, 0.5, "timeit"], ["loop", 1, False, 8, 1.0, "timeit"]
    ]  # fmt: skip
    measurement = Timer("sum(range(100))", timer=timeit.default_timer).timeit(50)
    timed = lk.from_timer(measurement, "timed", 10)
    assert (timed.experiment[0], timed.variant[0], timed.n_images[0]) == ("timer", "timed", 10)
    assert timed.images_per_s[0] == 10 / measurement.times[0]


@pytest.mark.parametrize(
    ("rates", "others"),
    [([1.1, 1.4], [1.0, 1.2]), ([6, 6, 6], [2, 3, 2.5]), ([2, 3, 2.5], [6, 6, 6]), ([1, 1.2], [1, 1.1, 1.3])],
)
@pytest.mark.filterwarnings("ignore:Precision loss")
def test_two_runs_are_enough_and_one_sample_may_be_constant(rates, others):
    logs, other_logs = np.log(rates), np.log(others)
    welch = stats.ttest_ind(logs, other_logs, equal_var=False).confidence_interval(0.95)
    assert speedup_interval(np.array(rates), np.array(others)) == pytest.approx(np.exp(welch))


def test_two_paired_runs_are_enough():
    student = stats.ttest_1samp(np.log([1.1, 1.4]), 0).confidence_interval(0.95)
    assert speedup_interval(np.array([1.1, 1.4])) == pytest.approx(np.exp(student))


@pytest.mark.parametrize("others", [None, np.full(3, 2.0)])
def test_constant_samples_make_scipy_say_nothing(others, recwarn):
    low, high = speedup_interval(np.full(3, 6.0), others)
    assert (low, high) == pytest.approx((3, 3) if others is not None else (6, 6))
    assert not recwarn.list


def test_a_quiet_summary_keeps_other_warnings(monkeypatch):
    monkeypatch.setattr(results, "summarize", lambda *arguments: warnings.warn("something else", stacklevel=1))
    with pytest.warns(UserWarning, match="something else"):
        quiet_summary(None)


LABELS = ["a\rb", "a\nb", 'a"b', "a,b", "1", "None", "nan", ""]


def test_labels_of_all_kinds_survive_the_disk(frame_of, tmp_path):
    frame = frame_of({label: [1.0, 2.0] for label in LABELS}, LABELS[0])
    frame["peak_mem_mb"] = np.nan
    read = lk.load_frame(lk.save_frame(frame, tmp_path / "frame.csv"))
    assert list(read["variant"]) == list(frame["variant"])
    assert set(read["baseline"]) == {LABELS[0]}
    assert read["peak_mem_mb"].isna().all()
    assert (list(read), len(read)) == (list(frame), len(frame))


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("images_per_s", "fast", "images_per_s holds what is no number"), ("steady_s", "inf", "what is no number"),
        ("images_per_s", "0", "images_per_s holds what is no rate"), ("images_per_s", "-1", "holds what is no rate"),
        ("images_per_s", "", "holds what is no rate"), ("is_warmup", "maybe", "is neither True nor False"),
        ("scale", "ci,more", "a.csv is not a frame of runs"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_measured_is_refused(frame_of, tmp_path, column, value, what):
    frame = frame_of({"a": [0.5, 2.0], "b": [3.0, 4.0]}, "a").astype(str)
    lk.save_frame(frame, tmp_path / "a.csv")
    assert len(lk.load_frame(tmp_path / "a.csv")) == 4
    frame.loc[1, column] = value
    text = frame.to_csv(index=False).replace(f'"{value}"', value)
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=f"a.csv is not a frame of runs: .*{what}" if "a.csv" not in what else what):
        lk.load_frame(tmp_path / "a.csv")
