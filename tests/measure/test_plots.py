"""Every plot: what is drawn is what was measured, and the title says what the data show."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

import labkit as lk
from labkit import course
from labkit.measure.intervals import format_ratio
from labkit.measure.statistics import quiet_summary

PIL, SAME = [100, 104, 98, 101, 99], [99, 103, 100, 101, 98]
FAST = [2 * rate for rate in PIL]


def texts(of):
    return [text.get_text() for text in of]


def title(ax):
    return " ".join(ax.get_title("left").split())


def dots(ax):
    return [points for points in ax.collections if isinstance(points, PathCollection)]


def rows_of(ax):
    """Row of the axes -> x of the dots there."""
    found = {}
    for x, y in np.concatenate([np.asarray(points.get_offsets()) for points in dots(ax)]):
        found.setdefault(round(float(y)), []).append(float(x))
    return {row: pytest.approx(sorted(xs)) for row, xs in found.items()}


class TestSpeedups:
    def test_are_ratios_an_interval_and_doubt_in_the_row_of_the_variant(self, frame_of):
        frame = frame_of({"z": [10.0, 20.0, 10.0], "a": [20.0, 44.0, 21.0], "m": [9.0, 21.0, 10.0]}, "z")
        ax, summary = lk.plot_speedup(frame, ceiling=2.5), quiet_summary(frame)
        assert texts(ax.get_yticklabels()) == ["a", "m"]
        assert rows_of(ax) == {0: [2.0, 2.1, 2.2], 1: [0.9, 1.0, 1.05]}
        for bar, label in zip(ax.containers, "am", strict=True):
            [reach] = bar.lines[2][0].get_segments()
            drawn = [bar.lines[0].get_xdata()[0], *reach[:, 0]]
            assert drawn == pytest.approx(summary.loc[label, ["speedup", "ci_low", "ci_high"]].tolist())
        a, m = map(format_ratio, summary.speedup[["a", "m"]])
        assert {f"{a}x", f"{m}x ?", "1x", "ceiling 2.50x"} == set(texts(ax.texts))
        assert {1.0, 2.5} <= {line.get_xdata()[0] for line in ax.lines}
        assert texts(lk.plot_speedup(frame, baseline="m").get_yticklabels()) == ["z", "a"]

    def test_of_runs_that_were_not_interleaved_are_over_the_median(self, frame_of):
        frame = frame_of({"z": [10.0, 20.0, 30.0], "a": [20.0, 44.0, 21.0]}, "z").assign(order=np.nan)
        assert rows_of(lk.plot_speedup(frame)) == {0: [1.0, 1.05, 2.2]}

    @pytest.mark.parametrize(
        ("rates", "options", "told"),
        [
            ({"fast": FAST, "same": SAME}, {}, "fast: 2.00 times"),
            ({"same": SAME}, {}, "inconclusive"),
            ({"fast": FAST}, {"title": "Two is more than one"}, "Two is more than one"),
        ],
    )
    def test_have_a_title_of_what_the_runs_show(self, frame_of, rates, options, told):
        ax = plt.subplots()[1]
        assert lk.plot_speedup(frame_of({"PIL": PIL, **rates}, "PIL"), ax=ax, **options) is ax
        assert told in title(ax)

    @pytest.mark.parametrize(("guess", "drawn"), [(1.5, [1.5]), (3.0, [3.0]), (..., [])])
    def test_have_a_mark_for_a_prediction_and_none_for_an_open_one(self, frame_of, guess, drawn):
        course.predict("fast", guess)
        ax = lk.plot_speedup(frame_of({"PIL": PIL, "fast": FAST, "same": SAME}, "PIL"))
        assert [points.get_offsets()[0][0] for points in dots(ax) if len(points.get_offsets()) == 1] == drawn
        assert ("your prediction" in texts(ax.get_legend().get_texts())) == bool(drawn)

    def test_lie_inside_whatever_a_wild_interval_does(self, frame_of):
        frame = frame_of({"base": [1.0, 1.01], "far": [230.0, 200.0], "wild": [1.0, 9.0]}, "base")
        assert quiet_summary(frame).ci_high["wild"] > 10_000
        low, high = lk.plot_speedup(frame).get_xlim()
        assert low < 1 < 230 < high < 3000
        endless = frame_of({"base": [1, 1], "wild": [1e30, 1e-30]}, "base")
        assert quiet_summary(endless).ci_high["wild"] == np.inf
        lk.plot_speedup(endless).figure.canvas.draw()


class TestTheTimeline:
    def test_has_spans_of_their_kinds_and_says_that_they_are_simulated(self):
        spans = pd.DataFrame({
            "lane": ["cpu", "cpu", "gpu", "gpu"], "start_s": [0, 2, 1, 5], "end_s": [1, 3, 2, 7],
            "kind": ["load", "other", "step", "load"],
        })  # fmt: skip
        ax = course.plot_timeline(spans, title="It reads")
        drawn = {(box.x0, box.x1) for bars in ax.collections for box in (p.get_extents() for p in bars.get_paths())}
        assert drawn == {(0, 1), (2, 3), (1, 2), (5, 7)}
        assert texts(ax.get_yticklabels()) == ["cpu", "gpu"]
        assert texts(ax.get_legend().get_texts()) == ["load", "step", "other"]
        assert (title(ax), ax.get_title("right")) == ("It reads", "")
        assert course.plot_timeline(spans.assign(simulated=True)).get_title("right") == "simulated"

    @pytest.mark.parametrize(
        ("spans", "told"),
        [
            (  # overlapping spans count once
                [("GPU", 0, 1, "compute"), ("GPU", 0.5, 1, "compute"), ("GPU", 1, 1.5, "wait"),
                 ("GPU", 2, 3, "compute"), ("GPU", 3.5, 4, "wait")],
                "GPU: compute 50% of 4 s",
            ),
            ([("host", 0, 1, "step"), ("worker", 0, 2, "load")], "host: step 50% of 2 s"),
            ([("worker", 0, 1, "load"), ("worker", 3, 4, "load")], "worker: load 50% of 4 s"),
        ],
    )  # fmt: skip
    def test_tells_how_much_of_the_time_the_lane_works_that_computes(self, spans, told):
        assert title(course.plot_timeline(pd.DataFrame(spans, columns=["lane", "start_s", "end_s", "kind"]))) == told


def test_stalls_are_stacked_in_their_rows_with_their_shares():
    seconds = {("x", "read"): 2.0, ("x", "decode"): 8.0, ("y", "decode"): 3.0, ("y", "collate"): 1.0}
    parts = pd.DataFrame([{"variant": a, "stage": b, "seconds": each} for (a, b), each in seconds.items()] * 2)
    ax = lk.plot_stalls(parts)
    ends = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x() + bar.get_width()) for bar in ax.patches}
    assert ends == {(0, 4), (0, 20), (1, 0), (1, 6), (1, 8)}  # what a variant lacks is a bar of no width
    assert sorted(texts(ax.texts)) == ["20%", "25%", "75%", "80%"]
    assert sorted(texts(ax.get_legend().get_texts())) == ["collate", "decode", "read"]
    assert title(ax) == "x: decode 80% of the time"
    assert title(lk.plot_stalls(parts, title="It reads")) == "It reads"
