"""Every plot: what is drawn is what was measured."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

import labkit as lk
from labkit.measure import plots, summary as summaries


@pytest.fixture
def runs(frame_of):
    rates = {"PIL": [100, 104, 98, 101, 99], "fast": [210, 200, 199, 205, 202], "same": [99, 103, 100, 101, 98]}
    return frame_of(rates, "PIL", experiment="02 loader")


def _texts(ax):
    return [text.get_text() for text in ax.texts]


def test_throughput_draws_every_run_and_the_median(runs):
    ax = lk.plot_throughput(runs, ceiling=300)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["PIL", "fast", "same"]
    assert [bar.get_width() for bar in ax.patches] == [100, 202, 100]
    dots = sorted(x for points in ax.collections[1:] for x, _ in points.get_offsets())
    assert dots == sorted(runs.images_per_s)
    assert "ceiling 300" in _texts(ax)
    assert ax.get_xlabel() == "images per second"


def test_warmups_are_not_drawn(runs):
    runs.loc[runs["round"] == 0, "is_warmup"] = True
    assert sum(len(points.get_offsets()) for points in lk.plot_throughput(runs).collections[1:]) == 12


def test_speedup_draws_ratio_interval_and_doubt(runs):
    ax = lk.plot_speedup(runs, ceiling=2.5)
    summary = lk.summarize(runs)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["fast", "same"]
    estimates = [bar.lines[0].get_xdata()[0] for bar in ax.containers]
    assert estimates == pytest.approx(list(summary.speedup[["fast", "same"]]))
    assert _texts(ax)[:2] == [f"{summary.speedup['fast']:.2f}x", f"{summary.speedup['same']:.2f}x ?"]
    assert "1x" in _texts(ax)
    assert "ceiling 2.5x" in _texts(ax)
    ax.figure.canvas.draw()
    assert [bar.lines[0].get_markerfacecolor() for bar in ax.containers] == [plots._ESTIMATE, "white"]
    [above] = [text.get_window_extent() for text in ax.texts if text.get_text() == "ceiling 2.5x"]
    assert above.y0 >= ax.get_window_extent().y1 - 1


def test_a_prediction_is_drawn_and_moves(runs):
    def triangles(ax):
        dots = [points.get_offsets() for points in ax.collections if isinstance(points, PathCollection)]
        return [tuple(offsets[0]) for offsets in dots if len(offsets) == 1]

    assert triangles(lk.plot_speedup(runs, ax=plt.subplots()[1])) == []
    for guess in (1.5, 3.0):
        lk.predict("fast", guess)
        assert triangles(lk.plot_speedup(runs, ax=plt.subplots()[1])) == [(guess, pytest.approx(-0.28))]


def test_ladder_takes_the_fastest_of_each_experiment(runs, frame_of):
    other = frame_of({"cold": [10, 11], "warm": [30, 33]}, "cold", experiment="00 cache")
    rungs = plots.ladder_rungs(pd.concat([runs, other], ignore_index=True))
    assert list(rungs.experiment) == ["00 cache", "02 loader"]
    assert list(rungs.variant) == ["warm", "fast"]
    ax = lk.plot_ladder(pd.concat([runs, other], ignore_index=True))
    assert "over cold" in ax.get_yticklabels()[0].get_text()


def test_a_ladder_of_one_pair_names_it_once(frame_of):
    places = [frame_of({"files": [10, 11], "tar": [30, 33]}, "files", experiment=f"08 {place}") for place in "ab"]
    ax = lk.plot_ladder(pd.concat(places, ignore_index=True))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["08 a", "08 b"]
    assert ax.get_xlabel() == "speed-up of tar over files (x)"


def test_timeline_spans(runs):
    spans = pd.DataFrame(
        {"lane": ["cpu", "cpu", "gpu"], "start_s": [0, 2, 1], "end_s": [1, 3, 2], "kind": ["a", "b", "a"]}
    )
    ax = lk.plot_timeline(spans)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cpu", "gpu"]
    boxes = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
    assert sorted((box.x0, box.x1) for box in boxes) == [(0, 1), (1, 2), (2, 3)]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert ax.get_xlim()[0] == 0
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().x0 > ax.get_window_extent().x1


def test_pareto_front():
    table = pd.DataFrame({"variant": list("abcd"), "bytes": [1, 2, 3, 4], "images_per_s": [10, 30, 20, 40]})
    assert list(plots.pareto_front(table, "bytes", "images_per_s").variant) == ["a", "b", "d"]
    ax = lk.plot_pareto(table, cost="bytes")
    assert set("abcd") <= set(_texts(ax))
    assert (ax.get_xlim()[0], ax.get_ylim()[0]) == (0, 0)
    named = lk.plot_pareto(table.rename(columns={"bytes": "KB_per_photo"}), cost="KB_per_photo")
    assert (named.get_xlabel(), named.get_ylabel()) == ("KB per photo", "images per second")


def test_stalls_stack_to_the_total():
    parts = pd.DataFrame({"variant": ["x"] * 3, "stage": ["read", "decode", "collate"], "seconds": [1.0, 6.0, 3.0]})
    ax = lk.plot_stalls(parts, wall_s={"x": 10.2})
    ends = [bar.get_x() + bar.get_width() for bar in ax.patches]
    assert ends == pytest.approx([1, 7, 10])
    assert {"10%", "60%", "30%"} <= set(_texts(ax))
    assert "wall time" in [text.get_text() for text in ax.get_legend().get_texts()]
    small = lk.plot_stalls(parts.assign(seconds=parts["seconds"] / 1000))
    assert {"10%", "60%", "30%"} <= set(_texts(small))


def test_stages_and_kinds_differ_without_color():
    stages = [f"stage {number}" for number in range(8)]
    parts = pd.DataFrame({"variant": "x", "stage": stages, "seconds": 1.0})
    assert len({bar.get_hatch() for bar in lk.plot_stalls(parts).patches}) == 8
    spans = pd.DataFrame({"lane": "cpu", "start_s": range(8), "end_s": range(1, 9), "kind": stages})
    ax = lk.plot_timeline(spans)
    assert len({bars.get_hatch() for bars in ax.collections}) == 8
    assert sorted(text.get_text() for text in ax.get_legend().get_texts()) == stages


@pytest.mark.parametrize("name", ["plot_speedup", "plot_ladder"])
def test_estimates_take_options(runs, name):
    ax = getattr(lk, name)(runs, markersize=3)
    assert {bar.lines[0].get_markersize() for bar in ax.containers} == {3}


@pytest.mark.parametrize("name", ["plot_throughput", "plot_speedup", "plot_ladder"])
def test_plots_draw_into_the_axes_they_are_given(runs, name):
    ax = plt.subplots()[1]
    assert getattr(lk, name)(runs, ax=ax) is ax
    assert len(plt.get_fignums()) == 1


def test_one_round_can_be_drawn(frame_of):
    lk.plot_speedup(frame_of({"a": [10], "b": [20]}, "a"))


def test_simulated_storage_is_said_on_every_plot(frame_of):
    frame = frame_of({"folder": [100, 101], "tar": [130, 131], "tar, simulated": [50, 51]}, "folder")
    frame["storage"] = frame["variant"].map({"tar": "simulated hard disk", "tar, simulated": "simulated hard disk"})
    for plot in (lk.plot_throughput, lk.plot_speedup):
        labels = [label.get_text() for label in plot(frame).get_yticklabels()]
        assert labels[-2:] == ["tar (simulated)", "tar, simulated"]
        assert "folder (simulated)" not in labels
    assert "tar (simulated)" in lk.plot_ladder(frame).get_yticklabels()[0].get_text()
    frame["baseline"] = "tar"
    assert "over tar (simulated)" in lk.plot_speedup(frame).get_xlabel()


def test_a_ladder_without_a_rung_is_named(frame_of):
    with pytest.raises(ValueError, match="no rung"):
        lk.plot_ladder(frame_of({"a": [1.0, 2.0]}, baseline="a"))


def _rows_of(ax, collections):
    """Row of the axes -> x of the dots there."""
    found = {}
    for x, y in np.concatenate([np.asarray(points.get_offsets()) for points in collections]):
        found.setdefault(round(float(y)), []).append(float(x))
    return {row: sorted(xs) for row, xs in found.items()}


def _rows_of_texts(ax):
    return {(text.get_text(), text.xy[1]) for text in ax.texts if text.xy[0] == 1.01}


def test_throughput_keeps_the_order_and_each_run_in_its_row(frame_of):
    rates = {"z": [10.0, 12.0, 11.0], "a": [300.0, 310.0, 305.0], "m": [50.0, 40.0, 45.0]}
    ax = lk.plot_throughput(frame_of(rates, "z"), ax=plt.subplots()[1])
    plt.subplots()  # another one is the current one
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == list(rates)
    assert _rows_of(ax, ax.collections[1:]) == {row: sorted(values) for row, values in enumerate(rates.values())}
    assert _rows_of_texts(ax) == {("11", 0), ("305", 1), ("45", 2)}
    assert (ax.get_xlim()[0], ax.get_ylabel()) == (0, "")


def test_speedup_draws_each_ratio_and_interval_in_its_row(frame_of):
    frame = frame_of({"z": [10.0, 20.0, 10.0], "a": [20.0, 44.0, 21.0], "m": [9.0, 21.0, 10.0]}, "z")
    ax, summary = lk.plot_speedup(frame), summaries.quiet_summary(frame)
    ax.figure.canvas.draw()
    ratios = _rows_of(ax, [points for points in ax.collections if isinstance(points, PathCollection)])
    assert {row: pytest.approx(xs) for row, xs in ratios.items()} == {0: [2.0, 2.1, 2.2], 1: [0.9, 1.0, 1.05]}
    for bar, label in zip(ax.containers, "am", strict=True):
        [reach] = bar.lines[2][0].get_segments()
        assert list(reach[:, 0]) == pytest.approx([summary.ci_low[label], summary.ci_high[label]])
    assert {row for _, row in _rows_of_texts(ax)} == {0, 1}
    assert [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"] == [
        1
    ]
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)  # the first one is on top
    other = lk.plot_speedup(frame, baseline="m")
    assert [label.get_text() for label in other.get_yticklabels()] == ["z", "a"]


def test_ratios_of_runs_that_were_not_interleaved(frame_of):
    frame = frame_of({"z": [10.0, 20.0, 30.0], "a": [20.0, 44.0, 21.0]}, "z")
    frame["order"] = np.nan
    ax = lk.plot_speedup(frame)
    ratios = _rows_of(ax, [points for points in ax.collections if isinstance(points, PathCollection)])
    assert ratios == {0: pytest.approx([1.0, 1.05, 2.2])}


def test_a_prediction_is_in_the_legend(runs):
    assert lk.plot_speedup(runs).get_legend() is None
    lk.predict("fast", 1.5)
    assert [text.get_text() for text in lk.plot_speedup(runs).get_legend().get_texts()] == ["your prediction"]


def test_rungs_of_a_ladder_are_in_their_rows(runs, frame_of):
    other = frame_of({"cold": [10, 11], "warm": [30, 33]}, "cold", experiment="00 cache")
    ax = lk.plot_ladder(pd.concat([runs, other], ignore_index=True))
    ax.figure.canvas.draw()
    assert [bar.lines[0].get_ydata()[0] for bar in ax.containers] == [0, 1]
    assert "1x" in _texts(ax)
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)


def test_spans_of_a_timeline_are_in_their_lanes():
    spans = pd.DataFrame({
        "lane": ["cpu", "gpu", "gpu"], "start_s": [0, 1, 5], "end_s": [1, 2, 7], "kind": ["load", "step", "load"],
    })  # fmt: skip
    ax = lk.plot_timeline(spans)
    ax.figure.canvas.draw()
    colors = {label: handle.get_facecolor() for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    found = {}
    for bars in ax.collections:
        kind = next(name for name, color in colors.items() if tuple(color[0]) == tuple(bars.get_facecolor()[0]))
        for box in (path.get_extents() for path in bars.get_paths()):
            assert box.y1 - box.y0 < 1
            found[box.x0, box.x1] = (kind, round((box.y0 + box.y1) / 2))
    assert found == {(0, 1): ("load", 0), (1, 2): ("step", 1), (5, 7): ("load", 1)}
    assert ax.get_xlabel() == "time (s)"
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)


def test_stalls_are_in_their_rows():
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
    assert sorted(text.get_text() for text in ax.get_legend().get_texts()) == ["collate", "decode", "read", "wall time"]
    assert (ax.get_xlabel(), ax.get_xlim()[0]) == ("seconds", 0)
    assert ax.get_ylim() == (pytest.approx(1.6), -0.6)


def test_wall_time_of_any_variant_is_in_the_legend():
    parts = pd.DataFrame({"variant": ["x", "y"], "stage": "read", "seconds": 1.0})
    ax = lk.plot_stalls(parts, wall_s={"y": 1.1})
    assert sorted(text.get_text() for text in ax.get_legend().get_texts()) == ["read", "wall time"]


def test_shares_stand_out_from_their_ground():
    ax = plt.subplots()[1]
    for ground in ((0.9, 0.9, 0.9), (0.1, 0.1, 0.1), (0.0, 0.4, 0.7), (1.0, 0.9, 0.0)):
        plots._write_shares(ax, np.zeros(1), np.ones(1), np.ones(1), ground)
    assert [text.get_color() for text in ax.texts] == ["black", "white", "white", "black"]


def test_of_equal_costs_the_faster_is_on_the_front():
    table = pd.DataFrame({"variant": list("abc"), "bytes": [1, 1, 2], "images_per_s": [10, 30, 30]})
    assert list(plots.pareto_front(table, "bytes", "images_per_s").variant) == ["b"]
    ax = lk.plot_pareto(table.set_index("variant"), cost="bytes")
    assert set("abc") <= set(_texts(ax))
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number])
