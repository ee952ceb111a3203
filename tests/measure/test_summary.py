"""Summaries: speed-ups, intervals, verdicts, notes, against SciPy and figures worked out by hand."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import labkit as lk
from labkit import course
from labkit.measure import statistics as summaries
from labkit.measure.statistics import paired_ratios, quiet_summary, speedup_interval


def test_verdicts(frame_of):
    rates = {
        "base": [100, 101, 99, 100, 102], "fast": [150, 152, 149, 151, 150], "slow": [80, 81, 79, 80, 82],
        "same": [101, 99, 100, 102, 100], "equal": [100, 101, 99, 100, 102],
    }  # fmt: skip
    verdicts = lk.summarize(frame_of(rates, "base")).verdict
    assert verdicts.tolist() == ["baseline", "faster", "slower", "inconclusive", "inconclusive"]


def test_what_leaves_out_1_at_95_percent_only_is_said_to_lean(frame_of):
    frame = frame_of({"a": [100] * 5, "b": [104, 101, 106, 102, 108], "c": [96, 99, 94, 98, 92]}, "a")
    summary = lk.summarize(frame)
    assert summary.loc["b", "ci_low"] > 1 > summary.loc["c", "ci_high"]
    assert summary.verdict[["b", "c"]].tolist() == ["inconclusive"] * 2
    assert summary.note.str.partition(":")[0].tolist() == ["", "leans to faster", "leans to slower"]


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
    with pytest.warns(course.InstabilityWarning, match="wild: unstable: spread") as caught:
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


@pytest.mark.parametrize(
    ("steady_s", "steal_s", "others_cpu_s", "note"),
    [
        (1.0, 0.0, 0.0, ""),
        (1.0, 0.12, 0.0, "disturbed: 6% of CPU time was stolen"),
        (1.0, 0.0, 0.52, "disturbed: other programs used 26% of the cores"),
        (0.1, 0.0, 0.2, ""),  # 0.3 s in all: too short to tell
    ],
)
def test_the_note_names_who_else_had_the_cores(frame_of, monkeypatch, steady_s, steal_s, others_cpu_s, note):
    monkeypatch.setattr(summaries, "usable_cores", lambda: 2)
    runs = frame_of({"a": [1, 1, 1], "b": [2, 2, 2]}, "a").assign(steal_s=steal_s, others_cpu_s=others_cpu_s)
    runs = runs.assign(steady_s=steady_s, first_batch_s=9.0, is_steady=True)
    assert quiet_summary(runs).note["b"] == note
