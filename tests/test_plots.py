"""Every plot: what is drawn is what was measured."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

import labkit as lk
from labkit.measure import plots


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
    assert np.isclose(ax.lines[0].get_xdata()[0], 10.2)


def test_stages_and_kinds_differ_without_color():
    stages = [f"stage {number}" for number in range(8)]
    parts = pd.DataFrame({"variant": "x", "stage": stages, "seconds": 1.0})
    assert len({bar.get_hatch() for bar in lk.plot_stalls(parts).patches}) == 8
    spans = pd.DataFrame({"lane": "cpu", "start_s": range(8), "end_s": range(1, 9), "kind": stages})
    assert len({bars.get_hatch() for bars in lk.plot_timeline(spans).collections}) == 8


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
