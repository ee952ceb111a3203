"""Summaries, intervals, frames on disk, and the doors for %timeit and Timer."""

import timeit

import numpy as np
import pandas as pd
import pytest
from IPython.core.magics.execution import TimeitResult
from scipy import stats
from torch.utils.benchmark import Timer

import labkit as lk
from labkit.measure.results import COLUMNS, RESULTS_VARIABLE, record, speedup_interval, verdict_of


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
    with pytest.raises(ValueError, match="no run besides warm-ups"):
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
    with pytest.raises(ValueError, match="pass baseline="):
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


def test_a_tour_collects_named_experiments_only(frame_of, tmp_path, monkeypatch):
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path))
    record(frame_of({"a": [1]}, "a", experiment="02 decoders, camera/x"))
    record(frame_of({"a": [1]}, "a", experiment=""))
    [path] = tmp_path.iterdir()
    assert path.name.startswith("02_decoders_camera_x-"), "readable, and with a checksum of what is not told"


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
