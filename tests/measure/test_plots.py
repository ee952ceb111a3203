"""Every plot: what is drawn is what was measured."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from matplotlib.collections import PathCollection

import labkit as lk
from labkit import course
from labkit.measure import plots, statistics as summaries
from labkit.measure.statistics import format_ratio

PLOTS = {"plot_throughput": lk.plot_throughput, "plot_speedup": lk.plot_speedup, "plot_ladder": course.plot_ladder}


@pytest.fixture
def runs(frame_of):
    rates = {"PIL": [100, 104, 98, 101, 99], "fast": [210, 200, 199, 205, 202], "same": [99, 103, 100, 101, 98]}
    return frame_of(rates, "PIL", experiment="02 loader")


def _texts(texts):
    return [text.get_text() for text in texts]


def _rows_of(collections):
    """Row of the axes -> x of the dots there."""
    found = {}
    for x, y in np.concatenate([np.asarray(points.get_offsets()) for points in collections]):
        found.setdefault(round(float(y)), []).append(float(x))
    return {row: sorted(xs) for row, xs in found.items()}


def _rows_of_texts(ax):
    return {(text.get_text(), text.xy[1]) for text in ax.texts if text.xy[0] == 1.01}


def _dots(ax):
    return [points for points in ax.collections if isinstance(points, PathCollection)]


def test_throughput_draws_every_run_and_the_median_in_the_row_of_its_variant(frame_of):
    rates = {"z": [10.0, 12.0, 11.0], "a": [300.0, 310.0, 305.0], "m": [50.0, 40.0, 45.0]}
    frame = frame_of({name: [1.0, *values] for name, values in rates.items()}, "z")
    frame["is_warmup"] = frame["round"] == 0
    ax = lk.plot_throughput(frame, ax=plt.subplots()[1])
    plt.subplots()  # another one is the current one
    ax.figure.canvas.draw()
    assert _texts(ax.get_yticklabels()) == list(rates)
    assert [bar.get_width() for bar in ax.patches] == [11, 305, 45]
    assert {row: [x] for row, x in enumerate([11, 305, 45])} == _rows_of(ax.collections[:1])
    assert _rows_of(ax.collections[1:]) == {row: sorted(values) for row, values in enumerate(rates.values())}
    assert _rows_of_texts(ax) == {("11", 0), ("305", 1), ("45", 2)}
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xlim()[0]) == ("images per second", "", 0)


def test_speedup_draws_ratios_interval_and_doubt_in_the_row_of_the_variant(frame_of):
    frame = frame_of({"z": [10.0, 20.0, 10.0], "a": [20.0, 44.0, 21.0], "m": [9.0, 21.0, 10.0]}, "z")
    ax, summary = lk.plot_speedup(frame, ceiling=2.5), summaries.quiet_summary(frame)
    ax.figure.canvas.draw()
    assert _texts(ax.get_yticklabels()) == ["a", "m"]
    ratios = {row: pytest.approx(xs) for row, xs in _rows_of(_dots(ax)).items()}
    assert ratios == {0: [2.0, 2.1, 2.2], 1: [0.9, 1.0, 1.05]}
    for bar, label in zip(ax.containers, "am", strict=True):
        [reach] = bar.lines[2][0].get_segments()
        drawn = [bar.lines[0].get_xdata()[0], *reach[:, 0]]
        assert drawn == pytest.approx(summary.loc[label, ["speedup", "ci_low", "ci_high"]].tolist())
    assert [bar.lines[0].get_markerfacecolor() for bar in ax.containers] == [plots.ESTIMATE, "white"]
    assert _rows_of_texts(ax) == {
        (f"{format_ratio(summary.speedup['a'])}x", 0),
        (f"{format_ratio(summary.speedup['m'])}x ?", 1),
    }
    assert {"1x", "ceiling 2.50x"} <= set(_texts(ax.texts))
    [above] = [text.get_window_extent() for text in ax.texts if text.get_text() == "ceiling 2.50x"]
    assert above.y0 >= ax.get_window_extent().y1 - 1
    upright = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert [line.get_xdata()[0] for line in upright] == [1]
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)  # the first one is on top
    assert _texts(lk.plot_speedup(frame, baseline="m").get_yticklabels()) == ["z", "a"]


def test_a_logarithmic_axis_has_room_for_the_estimates_and_refuses_other_scales(frame_of):
    frame = frame_of({"z": [1.0, 1.01], "a": [230.0, 200.0], "m": [1.0, 9.0]}, "z")
    ax = lk.plot_speedup(frame, xscale="log")
    low, high = ax.get_xlim()
    assert ax.get_xscale() == "log"
    assert 0.05 < low < 1
    assert 230 < high < 3000
    with pytest.raises(ValueError, match="xscale"):
        lk.plot_speedup(frame, xscale="symlog")


def test_ratios_of_runs_that_were_not_interleaved(frame_of):
    frame = frame_of({"z": [10.0, 20.0, 30.0], "a": [20.0, 44.0, 21.0]}, "z").assign(order=np.nan)
    assert _rows_of(_dots(lk.plot_speedup(frame))) == {0: pytest.approx([1.0, 1.05, 2.2])}


def test_one_round_can_be_drawn(frame_of):
    lk.plot_speedup(frame_of({"a": [10], "b": [20]}, "a"))


def _legend(ax):
    return set(_texts(ax.get_legend().get_texts()))


def test_a_prediction_is_drawn_and_moves_and_an_open_one_is_not(runs):
    def triangles(ax):
        return [tuple(points.get_offsets()[0]) for points in _dots(ax) if len(points.get_offsets()) == 1]

    for guess in (1.5, 3.0):
        course.predict("fast", guess)
        ax = lk.plot_speedup(runs)
        assert triangles(ax) == [(guess, pytest.approx(-0.28))]
        assert "your prediction" in _legend(ax)
    course.predict("fast", ...)
    ax = lk.plot_speedup(runs)
    assert triangles(ax) == []
    assert "your prediction" not in _legend(ax)


ROUND, INTERVAL = "one round", "95 % interval, over the rounds of this session"
DOUBT = '"?": inconclusive: the 99 % interval contains 1'


@pytest.mark.parametrize("plot", [lk.plot_speedup, course.plot_ladder])
def test_the_legend_explains_the_marks_that_are_there_and_no_others(frame_of, plot):
    base, same, fast = [100, 104, 98], [99, 103, 100], [210, 200, 199]
    assert _legend(plot(frame_of({"a": base, "b": fast}, "a"))) == {ROUND, INTERVAL}
    assert _legend(plot(frame_of({"a": base, "b": same}, "a"))) == {ROUND, INTERVAL, DOUBT}
    once = plot(frame_of({"a": base[:1], "b": fast[:1]}, "a"))
    assert _legend(once) == {ROUND, '"?": inconclusive: one round has no interval'}
    apart = plot(frame_of({"a": base, "b": fast}, "a").assign(order=np.nan))
    assert _legend(apart) == {"one run, over the median of the baseline's", INTERVAL}


def test_a_comparison_without_a_verdict_has_a_mark_of_its_own(runs, monkeypatch):
    summary = summaries.quiet_summary(runs).assign(verdict=["baseline", "", "inconclusive"])
    monkeypatch.setattr(plots, "quiet_summary", lambda *arguments: summary)
    ax = lk.plot_speedup(runs)
    assert [bar.lines[0].get_marker() for bar in ax.containers] == ["D", "s"]
    assert _legend(ax) == {ROUND, INTERVAL, DOUBT, "no verdict"}
    assert (f"{format_ratio(summary.speedup['fast'])}x", 0) in _rows_of_texts(ax)


@pytest.mark.parametrize("count", [1, 2, 8, 20])
@pytest.mark.parametrize("name", ["plot_speedup", "plot_ladder"])
def test_the_legend_lies_below_the_axes_and_inside_the_picture(frame_of, name, count):
    parts = [
        frame_of({"base": [10.0, 11.0, 10.5], f"variant {number}": [10.1, 10.8, 12.0]}, "base", experiment=f"{number}")
        for number in range(count)
    ]
    if name == "plot_speedup":  # one experiment of many variants
        parts = [part.assign(experiment="all") for part in [parts[0], *(part[3:] for part in parts[1:])]]
    course.predict("variant 0", 1.2)
    ax = PLOTS[name](pd.concat(parts, ignore_index=True))
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent()
    assert box.y1 < ax.xaxis.label.get_window_extent().y0
    assert box.x0 >= 0 <= box.y0
    assert box.x1 <= ax.get_window_extent().x1 + 1
    assert ax.get_window_extent().height / ax.figure.dpi > 0.45 * count  # inches: the rows keep their height


def test_a_ladder_draws_the_fastest_of_each_experiment_in_its_row(runs, frame_of):
    other = frame_of({"cold": [10, 11], "warm": [30, 33]}, "cold", experiment="00 cache")
    both = pd.concat([runs, other], ignore_index=True)
    rungs = plots.ladder_rungs(both)
    assert rungs[["experiment", "variant"]].to_numpy().tolist() == [["00 cache", "warm"], ["02 loader", "fast"]]
    ax = course.plot_ladder(both)
    assert "over cold" in ax.get_yticklabels()[0].get_text()
    assert [bar.lines[0].get_ydata()[0] for bar in ax.containers] == [0, 1]
    assert "1x" in _texts(ax.texts)
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)


@pytest.mark.parametrize(
    ("speedups", "ticks"),
    [
        ({"a": 0.6, "b": 1.5, "c": 288.0}, "0.5x 1x 2x 5x 10x 20x 50x 100x 200x"),
        ({"a": 1.02, "b": 1.21}, "1x 1.05x 1.1x 1.15x 1.2x"),
        ({"a": 0.002, "b": 9000.0}, "0.001x 0.01x 0.1x 1x 10x 100x 1000x 10000x"),
    ],
    ids=["one point far away", "close together", "many decades"],
)
def test_a_ladder_has_a_logarithmic_axis_with_plain_ticks(frame_of, speedups, ticks):
    frames = [
        frame_of({"slow": [10, 10.1, 9.9], "fast": [10 * ratio, 10.1 * ratio, 9.9 * ratio]}, "slow", experiment=name)
        for name, ratio in speedups.items()
    ]
    ax = course.plot_ladder(pd.concat(frames, ignore_index=True))
    low, high = ax.get_xlim()
    ax.figure.canvas.draw()
    shown = [text.get_text() for at, text in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True) if low < at < high]
    assert (ax.get_xscale(), set(ticks.split()) - set(shown)) == ("log", set())
    assert len(shown) <= 11


def test_a_wild_interval_does_not_set_the_axis_of_a_ladder(frame_of):
    wild = frame_of({"slow": [10, 10], "fast": [10, 60]}, "slow", experiment="wild")
    assert plots.ladder_rungs(wild)["ci_high"].iloc[0] > 10_000
    low, high = course.plot_ladder(wild).get_xlim()
    assert (low, high) == (pytest.approx(0.1), pytest.approx(10 * 6**0.5))


class TestWideIntervals:
    WILD = {"base": [10, 12], "wild": [12, 40], "steady": [20.5, 24.2]}  # noqa: RUF012

    def test_the_rounds_set_the_axis(self, frame_of):
        frame = frame_of(self.WILD, "base")
        assert summaries.quiet_summary(frame).ci_high["wild"] > 1000
        low, high = lk.plot_speedup(frame, ceiling=4.5).get_xlim()
        assert -0.3 < low < 0.05  # what the wild interval reaches to
        assert high == pytest.approx(4.5 + 3.5)  # from 1x to the ceiling, and as far again

    def test_an_endless_interval_is_drawn(self, frame_of):
        frame = frame_of({"base": [1, 1], "wild": [1e30, 1e-30]}, "base")
        assert summaries.quiet_summary(frame).ci_high["wild"] == np.inf
        ax = lk.plot_speedup(frame)
        [reach] = ax.containers[0].lines[2][0].get_segments()
        assert reach[:, 0].tolist() == pytest.approx([0, 1e100])
        ax.figure.canvas.draw()

    @given(st.lists(st.tuples(*[st.floats(0.01, 100)] * 4), min_size=1, max_size=4), st.none() | st.floats(0.5, 50))
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_every_round_estimate_and_line_is_inside(self, frame_of, rows, ceiling):
        rates = {f"v{number}": row[: len(rows[0])] for number, row in enumerate(rows)}
        frame = frame_of({"base": [1.0] * 4, **rates}, "base")
        fig = plt.figure()
        ax = lk.plot_speedup(frame, ax=fig.add_subplot(), ceiling=ceiling)
        low, high = ax.get_xlim()
        others = summaries.quiet_summary(frame).drop(index="base")
        marks = [x for row in rows for x in row] + [1, ceiling or 1, *others.speedup]
        assert low < min(marks) <= max(marks) < high
        plt.close(fig)


def test_long_labels_of_a_ladder_are_wrapped(frame_of):
    frame = frame_of({"files": [1, 2], "shards of 1000, read by four threads": [2, 3]}, "files", experiment="08 " * 15)
    [label] = _texts(course.plot_ladder(frame).get_yticklabels())
    assert max(map(len, label.splitlines())) <= 48
    assert label.replace("\n", " ").endswith("shards of 1000, read by four threads over files")


def test_a_ladder_without_a_rung_is_named(frame_of):
    with pytest.raises(ValueError, match="no rung"):
        course.plot_ladder(frame_of({"a": [1.0, 2.0]}, baseline="a"))


def test_a_timeline_draws_spans_in_their_lanes_and_kinds():
    spans = pd.DataFrame({
        "lane": ["cpu", "cpu", "gpu", "gpu"], "start_s": [0, 2, 1, 5], "end_s": [1, 3, 2, 7],
        "kind": ["load", "other", "step", "load"],
    })  # fmt: skip
    ax = course.plot_timeline(spans)
    ax.figure.canvas.draw()
    colors = {label: handle.get_facecolor() for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    found = {}
    for bars in ax.collections:
        [kind] = [name for name, color in colors.items() if tuple(color[0]) == tuple(bars.get_facecolor()[0])]
        for box in (path.get_extents() for path in bars.get_paths()):
            assert box.y1 - box.y0 < 1
            found[box.x0, box.x1] = (kind, round((box.y0 + box.y1) / 2))
    assert found == {(0, 1): ("load", 0), (2, 3): ("other", 0), (1, 2): ("step", 1), (5, 7): ("load", 1)}
    assert _texts(ax.get_yticklabels()) == ["cpu", "gpu"]
    assert _texts(ax.get_legend().get_texts()) == ["load", "step", "other"]
    assert ax.get_legend().get_window_extent().x0 > ax.get_window_extent().x1
    assert (ax.get_xlabel(), ax.get_xlim()[0]) == ("time (s)", 0)
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)


def test_pareto_front():
    table = pd.DataFrame({
        "variant": list("abcde"), "KB_per_photo": [1, 1, 2, 3, 4], "images_per_s": [5, 10, 30, 30, 40],
    })  # fmt: skip
    ax = course.plot_pareto(table.set_index("variant"), cost="KB_per_photo")
    assert _legend(ax) == set("abcde")
    assert (ax.get_xlim()[0], ax.get_ylim()[0]) == (0, 0)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("KB per photo", "images per second")
    [front] = ax.lines
    assert front.get_xydata().tolist() == [[1, 10], [2, 30], [4, 40]]


def test_stalls_are_stacked_in_their_rows():
    seconds = {("x", "read"): 2.0, ("x", "decode"): 8.0, ("y", "decode"): 3.0, ("y", "collate"): 1.0}
    parts = pd.DataFrame([{"variant": a, "stage": b, "seconds": each} for (a, b), each in seconds.items()] * 2)
    ax = lk.plot_stalls(parts, wall_s={"x": 21.0, "y": 8.5})
    ax.figure.canvas.draw()
    ends = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x() + bar.get_width()) for bar in ax.patches}
    assert ends == {(0, 4), (0, 20), (1, 0), (1, 6), (1, 8)}  # what a variant lacks is a bar of no width
    segments = np.array(ax.collections[0].get_segments())
    assert segments.mean(axis=1).tolist() == [[21.0, 0], [8.5, 1]]
    assert all(0 < np.ptp(segment[:, 1]) < 1 for segment in segments)
    labels = {(text.get_text(), text.get_position()) for text in ax.texts}
    assert labels == {("20%", (2.0, 0)), ("80%", (12.0, 0)), ("75%", (3.0, 1)), ("25%", (7.0, 1))}
    assert sorted(_texts(ax.get_legend().get_texts())) == ["collate", "decode", "read", "wall time"]
    assert (ax.get_xlabel(), ax.get_xlim()[0]) == ("seconds", 0)
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)
    small = lk.plot_stalls(parts.assign(seconds=parts["seconds"] / 1000), wall_s={"y": 0.1})
    assert sorted(_texts(small.texts)) == ["20%", "25%", "75%", "80%"]
    assert "wall time" in _texts(small.get_legend().get_texts())


def test_stages_and_kinds_differ_without_color():
    stages = [f"stage {number}" for number in range(8)]
    parts = pd.DataFrame({"variant": "x", "stage": stages, "seconds": 1.0})
    assert len({bar.get_hatch() for bar in lk.plot_stalls(parts).patches}) == 8
    spans = pd.DataFrame({"lane": "cpu", "start_s": range(8), "end_s": range(1, 9), "kind": stages})
    ax = course.plot_timeline(spans)
    assert len({bars.get_hatch() for bars in ax.collections}) == 8
    assert sorted(_texts(ax.get_legend().get_texts())) == stages


@pytest.mark.parametrize("name", ["plot_throughput", "plot_speedup", "plot_ladder"])
def test_plots_draw_into_the_axes_they_are_given(runs, name):
    ax = plt.subplots()[1]
    assert PLOTS[name](runs, ax=ax) is ax
    assert len(plt.get_fignums()) == 1


def test_simulated_storage_is_said_on_every_plot(frame_of):
    frame = frame_of({"folder": [100, 101], "tar": [130, 131], "tar, simulated": [50, 51]}, "folder")
    frame["storage"] = frame["variant"].map({"tar": "simulated hard disk", "tar, simulated": "simulated hard disk"})
    for plot in (lk.plot_throughput, lk.plot_speedup):
        labels = _texts(plot(frame).get_yticklabels())
        assert labels[-2:] == ["tar (simulated hard disk)", "tar, simulated"]
        assert not [label for label in labels if label.startswith("folder (")]
    assert "tar (simulated hard" in course.plot_ladder(frame).get_yticklabels()[0].get_text()
    frame["baseline"] = "tar"
    assert "over tar (simulated hard disk)" in lk.plot_speedup(frame).get_xlabel()
