"""What runs show: intervals of speed-ups against SciPy and by simulation, verdicts, notes, and one sentence."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st
from scipy import stats

import labkit as lk
from labkit import course
from labkit.measure.intervals import format_ratio, speedup_interval, speedup_of, t_quantile
from labkit.measure.statistics import paired_ratios, quiet_summary
from labkit.util.machine import env_id

LOGS = np.array([0.1, 0.4, 0.2, 0.35, 0.15])
LONG = np.random.default_rng(0).standard_t(3, 23) / 10


class TestIntervals:
    @pytest.mark.parametrize(("confidence", "n_looks"), [(0.9, 1), (0.95, 1), (0.95, 2), (0.95, 3)])
    def test_of_few_rounds_are_students_with_a_part_of_the_error_for_each_look(self, confidence, n_looks):
        for logs in LOGS, np.log([1.1, 1.4]):
            student = stats.ttest_1samp(logs, 0).confidence_interval(1 - (1 - confidence) / n_looks)
            found = speedup_interval(np.exp(logs), confidence=confidence, n_looks=n_looks)
            assert found == pytest.approx(np.exp(student))
            assert speedup_of(np.exp(logs)) == pytest.approx(stats.gmean(np.exp(logs)))

    @pytest.mark.parametrize("n", [8, 9, 10, 23])
    def test_from_eight_rounds_on_are_trimmed_by_a_fifth_at_either_end(self, n):
        logs, n_cut = LONG[:n], n // 5
        clipped = np.asarray(stats.mstats.winsorize(logs, limits=(n_cut / n, n_cut / n)))
        kept = n - 2 * n_cut
        error = clipped.std(ddof=1) * np.sqrt((n - 1) / (kept * (kept - 1)))
        center = stats.trim_mean(logs, 0.2)
        expected = stats.t(kept - 1, center, error).interval(0.95)
        assert speedup_interval(np.exp(logs)) == pytest.approx(np.exp(expected))
        assert speedup_of(np.exp(logs)) == pytest.approx(np.exp(center))

    @given(st.floats(0.5, 0.999), st.floats(1, 1e7))
    def test_have_scipys_quantiles(self, probability, degrees):
        assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=3e-4, abs=1e-9)

    @pytest.mark.parametrize("confidence", [0.8, 0.95])
    @pytest.mark.parametrize(
        ("rates", "others", "trim"),
        [
            (np.exp(LOGS), np.exp([0.0, 0.3, -0.2]), 0), ([6, 6, 6], [2, 3, 2.5], 0), ([2, 3, 2.5], [6, 6, 6], 0),
            (np.exp(LONG), np.exp(LONG[:3]), 0), (np.exp(LONG), np.exp(LONG[:9]), 0.2),
        ],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:Precision loss")
    def test_of_two_samples_are_welchs_and_of_two_long_ones_yuens(self, rates, others, trim, confidence):
        logs, log_others = np.log(rates), np.log(others)
        expected = stats.ttest_ind(logs, log_others, equal_var=False, trim=trim).confidence_interval(confidence)
        found = speedup_interval(np.array(rates), np.array(others), confidence=confidence)
        assert found == pytest.approx(np.exp(expected))
        center = stats.trim_mean(logs, trim) - stats.trim_mean(log_others, trim)
        assert speedup_of(np.array(rates), np.array(others)) == pytest.approx(np.exp(center))
        for samples in (np.array(rates), np.ones(1)), (np.ones(1), np.array(rates)):
            assert np.isnan(speedup_interval(*samples)).all()

    @pytest.mark.parametrize(("others", "ratio"), [(None, 6), (np.full(3, 2.0), 3), (np.full(2, 2.0), 3)])
    def test_of_constant_samples_are_a_point_and_make_scipy_say_nothing(self, others, ratio, recwarn):
        assert speedup_interval(np.full(3, 6.0), others) == pytest.approx((ratio, ratio))
        assert not recwarn.list


BASE = [100, 101, 99, 100, 102]


class TestSummaries:
    def test_have_a_row_with_a_verdict_for_each_variant(self, frame_of):
        rates = {
            "base": BASE, "fast": [150, 152, 149, 151, 150], "slow": [80, 81, 79, 80, 82],
            "same": [101, 99, 100, 102, 100], "equal": BASE,
        }  # fmt: skip
        summary = lk.summarize(frame_of(rates, "base"))
        assert summary.verdict.tolist() == ["baseline", "faster", "slower", "inconclusive", "inconclusive"]
        assert summary.loc["fast", "ci_low"] > 1 > summary.loc["slow", "ci_high"]

    def test_have_all_their_columns(self, frame_of):
        frame = frame_of({"a": [10, 20, 40], "b": [30, 50, 130]}, "a")
        frame["cpu_s"], frame["n_images"] = [1, 2, 6, 1, 1, 1], [500, 1000, 1000, 1000, 1000, 1000]
        frame["peak_mem_mb"] = [5, 9, 7, 1, 1, 1]
        summary, ratios = quiet_summary(frame), np.array([3, 2.5, 3.25])
        assert summary.index.name == "variant"
        numbers = ["n_runs", "images_per_s", "spread", "cpu_s_per_1000", "peak_mem_mb"]
        assert list(summary) == [*numbers, "speedup", "ci_low", "ci_high", "verdict", "note"]
        assert summary.loc["a"].tolist()[:-1] == [3, 20, 0.75, 2, 9, 1, 1, 1, "baseline"]
        assert summary.loc["b"].tolist()[5:9] == [
            pytest.approx(stats.gmean(ratios)), *speedup_interval(ratios), "faster"
        ]  # fmt: skip

    def test_of_one_round_have_no_interval_and_warm_ups_do_not_count(self, frame_of):
        frame = frame_of({"a": [1, 10], "b": [1, 20]}, "a").assign(is_warmup=[True, False] * 2)
        row = lk.summarize(frame).loc["b"]
        assert (row.n_runs, row.speedup, row.verdict, row.note) == (1, pytest.approx(2.0), "inconclusive", "one run")
        assert np.isnan([row.ci_low, row.ci_high]).all()
        with pytest.raises(ValueError, match=r"^the frame holds no run besides warm-ups$"):
            lk.summarize(frame.assign(is_warmup=True))

    def test_of_two_machines_or_without_a_baseline_are_refused(self, frame_of):
        frame = frame_of({"a": [10, 11], "b": [20, 21]}, "a")
        with pytest.raises(ValueError, match=f"different machines.*{env_id()}, elsewhere"):
            lk.summarize(pd.concat([frame, frame.assign(env_id="elsewhere")]))
        with pytest.raises(ValueError, match="baseline 'c' is not in the frame: a, b"):
            lk.summarize(frame, "c")
        assert lk.summarize(frame, "b").loc["a", "speedup"] < 1

    @pytest.mark.parametrize("unordered", ["a", "b"])
    def test_pair_runs_only_where_both_were_interleaved(self, frame_of, unordered):
        rates = {"a": [10, 20, 40], "b": [20, 40, 90]}
        frame = frame_of(rates, "a")
        frame.loc[frame.variant == unordered, "order"] = np.nan
        row = quiet_summary(frame, "a").loc["b"]
        assert row.note == "not interleaved; unstable: spread 88%"
        welch = stats.ttest_ind(*(np.log(rates[name]) for name in "ba"), equal_var=False).confidence_interval(0.95)
        assert row.speedup == pytest.approx(stats.gmean(rates["b"]) / stats.gmean(rates["a"]))
        assert (row.ci_low, row.ci_high) == pytest.approx(np.exp(welch))

    def test_pair_runs_of_one_experiment_and_round(self, frame_of):
        frames = [frame_of({"a": [10, 20], "b": [30, 80]}, "a", experiment=name) for name in ("x", "y")]
        frame = pd.concat(frames, ignore_index=True)
        frame.loc[frame.index[-1], "images_per_s"] = 20.0  # b in y's second round
        own, base = frame[frame.variant == "b"], frame[frame.variant == "a"]
        assert paired_ratios(own.iloc[1:], base).to_dict("list") == {"round": [1, 0, 1], "speedup": [4, 3, 1]}


def test_each_look_at_the_runs_asks_for_clearer_ones(frame_of):
    def verdict(gain, n_looks):
        rates = {"a": [100] * 5, "b": [100 * gain * one for one in (0.99, 1.01, 1.0, 1.02, 0.98)]}
        return lk.summarize(frame_of(rates, "a", n_looks=n_looks)).loc["b", "verdict"]

    verdicts = {(verdict(1 + percent / 400, 1), verdict(1 + percent / 400, 3)) for percent in range(4, 28)}
    assert verdicts == {("inconclusive", "inconclusive"), ("faster", "inconclusive"), ("faster", "faster")}


class TestNotes:
    @pytest.mark.parametrize(("rates", "note"), [
        ([3, 4, 5], ""),  # a spread of a quarter, and not more
        ([3, 4, 5.1], "unstable: spread 26%"),
        ([10, 11, 12, 13], ""), ([10, 11, 12, 13, 14], "unstable: drifts over the rounds"),
        ([14, 13, 12, 11, 10], "unstable: drifts over the rounds"), ([10, 10.5, 11, 11.5, 12], ""),  # by under e^0.2
        ([10, 12.9, 13, 13.1, 13.2], "unstable: drifts over the rounds"),
        ([10, 10, 10, 10, 10], ""), ([10, 13, 11, 12, 13], ""),  # no certain trend
    ])  # fmt: skip
    def test_tell_what_scatters_or_drifts(self, frame_of, rates, note, recwarn):
        summary = quiet_summary(frame_of({"a": rates, "b": rates}, "a"))
        assert not recwarn.list  # SciPy's, of constant rates
        assert dict(summary.note) == {"a": note, "b": note}

    def test_that_are_warnings_name_the_variant_and_point_at_the_caller(self, frame_of, recwarn):
        frame = frame_of({"a": [10, 10], "wild": [10, 90]}, "a")
        quiet = quiet_summary(frame, "wild")
        assert not recwarn
        with pytest.warns(course.InstabilityWarning, match="wild: unstable: spread") as caught:
            pd.testing.assert_frame_equal(lk.summarize(frame, "wild"), quiet)
        assert caught[0].filename == __file__

    @pytest.mark.parametrize(
        ("steady_s", "steal_s", "others_cpu_s", "note"),
        [
            (1.0, 0.0, 0.0, ""),
            (1.0, 0.12, 0.0, "disturbed: 6% of CPU time was stolen"),
            (1.0, 0.0, 0.52, "disturbed: other programs used 26% of the cores"),
            (0.1, 0.0, 0.2, ""),  # 0.3 s in all: too short to tell
        ],
    )
    def test_name_who_else_had_the_cores(self, frame_of, monkeypatch, steady_s, steal_s, others_cpu_s, note):
        monkeypatch.setattr("labkit.measure.statistics.usable_cores", lambda: 2)
        runs = frame_of({"a": [1, 1, 1], "b": [2, 2, 2]}, "a").assign(steal_s=steal_s, others_cpu_s=others_cpu_s)
        runs = runs.assign(steady_s=steady_s, first_batch_s=9.0, is_steady=True)
        assert quiet_summary(runs).note["b"] == note

    @pytest.mark.parametrize(("n_steady_batches", "note"), [(0, "whole runs"), (3, "too short for a steady rate: .*")])
    def test_tell_a_run_without_a_steady_state(self, frame_of, n_steady_batches, note):
        runs = frame_of({"a": [1, 1, 1], "b": [2, 2, 2]}, "a")
        runs = runs.assign(is_steady=False, n_steady_batches=n_steady_batches)
        assert re.fullmatch(note, quiet_summary(runs).note["b"])


UNCLEAR = 100 * np.exp([0.1, 0.0, -0.1])  # Student's interval of these three is 1.00 [0.78, 1.28]
UNTOLD = "these runs cannot tell"
VERDICTS = "faster", "slower", UNTOLD


class TestSentences:
    @pytest.fixture
    def tell(self, frame_of):
        """`tell(rates)`: the sentence on runs beside those of "no worker", which are 100 each."""

        def conclude(rates, storage=(), columns=()):
            n_rounds = len(next(iter(rates.values())))
            frame = frame_of({"no worker": [100] * n_rounds, **rates}, "no worker", **dict(columns))
            return lk.conclude(frame.assign(storage=frame["variant"].map(dict(storage))))

        return conclude

    @pytest.mark.parametrize(
        ("rates", "columns", "words"),
        [
            ([158] * 3, {}, ["faster", "1.58 times", "1.58 to 1.58"]),
            ([62] * 3, {}, ["slower", "0.62 times", "0.62 to 0.62"]),
            (UNCLEAR, {}, [UNTOLD, "1.00 times", "0.78 to 1.28"]),
            ([158] * 3, {"has_verdict": False}, ["ran at 1.58 times", "1.58 to 1.58"]),
            ([200], {}, [UNTOLD, "2.00 times", "no interval", "one run"]),
        ],
    )
    def test_on_one_variant(self, tell, rates, columns, words):
        told = tell({"2 workers": rates}, columns=columns)
        assert told.startswith('"2 workers" ')
        assert [word for word in [*words, '"no worker"'] if word not in told] == []
        assert ("faster" in told, "slower" in told, UNTOLD in told) == tuple(map(words.__contains__, VERDICTS))

    def test_name_the_fastest_of_several_and_what_is_inconclusive(self, tell):
        rates = {"a": [158] * 3, "read, decode free": [300] * 3, "c": UNCLEAR, "d": [62] * 3, "e": UNCLEAR}
        told = tell(rates)
        assert told.startswith('"read, decode free" ran faster than "no worker": 3.00 times the speed')
        assert "the largest of 5 ratios" in told
        assert f'{UNTOLD} "c", "e" from "no worker"' in told
        assert tell({"a": [62] * 3, "b": [30] * 3}).startswith('"a" ran slower than')

    def test_tell_what_is_certain_before_a_larger_ratio_that_is_not(self, tell):
        sentence = tell({"a": [158] * 3, "wild": 900 * np.exp([3, 0, -3])})
        assert sentence.startswith('"a" ran faster')
        assert "largest" not in sentence
        assert re.search(rf'{UNTOLD} "wild" from "no worker"; unstable: [^("]* \("wild"\)\.$', sentence)

    def test_on_what_is_not_there_are_refused(self, frame_of):
        frame = frame_of({"a": [1, 2], "b": [2, 3]}, "a")
        with pytest.raises(ValueError, match="only its baseline 'a': there is nothing to compare it with"):
            lk.conclude(frame[frame["variant"] == "a"])
        with pytest.raises(ValueError, match="baseline 'z' is not in the frame"):
            lk.conclude(frame, baseline="z")
        assert lk.conclude(frame, baseline="b").startswith('"a" against "b"')

    @pytest.mark.parametrize(
        ("ratio", "text"),
        [
            (1.584, "1.58"), (12.34, "12.3"), (288.4, "288"), (1288.4, "1,288"), (0.62, "0.62"), (0.0321, "0.032"),
            (1, "1.00"), (1.0031, "1.0031"), (0.9961, "0.9961"), (1.0051, "1.01"), (float("inf"), "inf"),
        ],
    )  # fmt: skip
    def test_keep_the_digits_of_ratios_that_matter(self, ratio, text):
        assert format_ratio(ratio) == text


def test_a_script_prints_the_whole_summary(frame_of):
    summary = lk.summarize(frame_of({"a": [100.0] * 5, "b": [200.0, 201, 199, 200, 200]}, "a"))
    with pd.option_context("display.width", 40, "display.max_columns", 4):
        assert all(str(value) in str(summary) for value in ("faster", "ci_high", "verdict"))
