"""Titles say what the data show: the same figures, computed in another way."""

import pandas as pd
import pytest

import labkit as lk
from labkit import course


def title(plot, *data, **options):
    return " ".join(plot(*data, **options).get_title("left").split())


def _speedup(frame):
    return title(lk.plot_speedup, frame)


class TestSpeedups:
    def test_a_certain_ratio_is_told_as_summarize_gives_it(self, frame_of):
        frame = frame_of(
            {"1 in flight": [19, 20, 19, 20, 19], "16 in flight": [300, 310, 305, 300, 302]}, "1 in flight"
        )
        ratio = lk.summarize(frame).loc["16 in flight", "speedup"]
        assert _speedup(frame) == f"16 in flight: {ratio:.1f}x of 1 in flight"

    def test_what_is_inconclusive_is_called_so(self, frame_of):
        noise, other = [100, 104, 98, 101, 99], [99, 103, 100, 101, 98]
        one = frame_of({"PIL": noise, "same": other}, "PIL")
        assert _speedup(one).endswith("x of PIL, inconclusive")
        two = frame_of({"PIL": noise, "same": other, "alike": noise[::-1]}, "PIL")
        assert _speedup(two).endswith("; 2 of 2 ratios inconclusive")
        three = frame_of({"PIL": noise, "same": other, "fast": [2 * rate for rate in noise]}, "PIL")
        assert _speedup(three) == "fast: 2.00x of PIL; 1 of 2 ratios inconclusive"

    def test_a_ratio_without_verdict_is_inconclusive_where_its_interval_contains_1(self, frame_of):
        frame = frame_of({"PIL": [100, 104, 98], "same": [99, 103, 100]}, "PIL").assign(has_verdict=False)
        assert _speedup(frame).endswith("x of PIL, inconclusive")

    def test_a_baseline_alone_is_no_comparison(self, frame_of):
        with pytest.raises(ValueError, match="only its baseline 'PIL': there is nothing to compare it with"):
            lk.plot_speedup(frame_of({"PIL": [1.0, 2.0]}, "PIL"))


class TestRates:
    def test_the_highest_median_and_the_lowest(self, frame_of):
        frame = frame_of({"warm": [4000, 4100, 4050], "cold": [1000, 1010, 1005], "between": [2000] * 3}, "cold")
        assert title(lk.plot_throughput, frame) == "warm: 4,050 per second; cold: 1,005"

    def test_one_variant_has_only_its_rate(self, frame_of):
        assert title(lk.plot_throughput, frame_of({"a": [10.0, 12.0, 11.0]}, "a")) == "a: 11 per second"


class TestSpans:
    def test_overlapping_spans_count_once(self):
        spans = [(0, 1, "compute"), (0.5, 1, "compute"), (1, 1.5, "wait"), (2, 3, "compute"), (3.5, 4, "wait")]
        frame = pd.DataFrame(spans, columns=["start_s", "end_s", "kind"]).assign(lane="GPU")
        assert title(course.plot_timeline, frame) == "GPU: compute 50% of 4 s"

    def test_the_lane_that_computes_is_told(self):
        frame = pd.DataFrame(
            {"lane": ["worker", "host"], "start_s": [0, 0], "end_s": [2.0, 1.0], "kind": ["load", "step"]}
        )
        assert title(course.plot_timeline, frame) == "host: step 50% of 2 s"


class TestOthers:
    def test_stages(self):
        seconds = {("naive", "read"): 1.0, ("naive", "decode"): 3.0, ("fast", "read"): 1.0, ("fast", "decode"): 0.6}
        parts = pd.DataFrame([{"variant": a, "stage": b, "seconds": each} for (a, b), each in seconds.items()])
        assert title(lk.plot_stalls, parts) == "naive: decode 75% of the time; 2.50x as long in all as fast"
        assert title(lk.plot_stalls, parts[:2]) == "naive: decode 75% of the time"

    def test_the_front(self):
        table = pd.DataFrame({"variant": list("abc"), "cost": [1, 2, 3], "images_per_s": [12_345.6, 20_000, 5000]})
        told = title(course.plot_pareto, table, cost="cost")
        assert told == "a: 12,346 images per second at the least cost; 1 of 3 are beaten in both"

    def test_the_ladder(self, frame_of):
        steps = {"01 a": 1.5, "02 b": 3.0}
        frames = [frame_of({"x": [100, 101, 99, 100, 100], "y": [ratio * 100] * 5}, "x", experiment=name)
                  for name, ratio in steps.items()]  # fmt: skip
        assert title(course.plot_ladder, pd.concat(frames)) == "02 b: y: 3.00x of x"
