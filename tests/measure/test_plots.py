"""Every plot: what is drawn is what was measured, the title says what the data show, and it can be read."""

import re
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

import labkit as lk
from labkit import course
from labkit.course import ladder
from labkit.measure import plots
from labkit.measure.intervals import format_ratio
from labkit.measure.statistics import quiet_summary

PIL, SAME = [100, 104, 98, 101, 99], [99, 103, 100, 101, 98]
FAST = [2 * rate for rate in PIL]
TOP_DOWN = (pytest.approx(1.6), -0.6)  # of two rows: the first one is on top


def texts(of):
    return [text.get_text() for text in of]


def title(ax):
    return " ".join(ax.get_title("left").split())


def legend(ax):
    return sorted(texts(ax.get_legend().get_texts()))


def dots(ax):
    return [points for points in ax.collections if isinstance(points, PathCollection)]


def rows_of(collections):
    """Row of the axes -> x of the dots there."""
    found = {}
    for x, y in np.concatenate([np.asarray(points.get_offsets()) for points in collections]):
        found.setdefault(round(float(y)), []).append(float(x))
    return {row: sorted(xs) for row, xs in found.items()}


def beside(ax):
    """What stands beside each row."""
    return {(text.get_text(), text.xy[1]) for text in ax.texts if text.xy[0] == 1.01}


class TestSpeedups:
    def test_are_ratios_an_interval_and_doubt_in_the_row_of_the_variant(self, frame_of):
        frame = frame_of({"z": [10.0, 20.0, 10.0], "a": [20.0, 44.0, 21.0], "m": [9.0, 21.0, 10.0]}, "z")
        ax, summary = lk.plot_speedup(frame, ceiling=2.5), quiet_summary(frame)
        ax.figure.canvas.draw()
        assert texts(ax.get_yticklabels()) == ["a", "m"]
        ratios = {row: pytest.approx(xs) for row, xs in rows_of(dots(ax)).items()}
        assert ratios == {0: [2.0, 2.1, 2.2], 1: [0.9, 1.0, 1.05]}
        for bar, label in zip(ax.containers, "am", strict=True):
            [reach] = bar.lines[2][0].get_segments()
            drawn = [bar.lines[0].get_xdata()[0], *reach[:, 0]]
            assert drawn == pytest.approx(summary.loc[label, ["speedup", "ci_low", "ci_high"]].tolist())
        assert [bar.lines[0].get_markerfacecolor() for bar in ax.containers] == [plots.ESTIMATE, "white"]
        a, m = map(format_ratio, summary.speedup[["a", "m"]])
        assert beside(ax) == {(f"{a}x", 0), (f"{m}x ?", 1)}
        assert {"1x", "ceiling 2.50x"} <= {text.replace("\n", " ") for text in texts(ax.texts)}
        [above] = [text.get_window_extent() for text in ax.texts if text.get_text() == "ceiling 2.50x"]
        assert above.y0 >= ax.get_window_extent().y1 - 1
        upright = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
        assert [line.get_xdata()[0] for line in upright] == [1]
        assert ax.get_ylim() == TOP_DOWN
        assert texts(lk.plot_speedup(frame, baseline="m").get_yticklabels()) == ["z", "a"]

    def test_of_runs_that_were_not_interleaved_are_over_the_median(self, frame_of):
        frame = frame_of({"z": [10.0, 20.0, 30.0], "a": [20.0, 44.0, 21.0]}, "z").assign(order=np.nan)
        assert rows_of(dots(lk.plot_speedup(frame))) == {0: pytest.approx([1.0, 1.05, 2.2])}

    @pytest.mark.parametrize(
        ("rates", "options", "told"),
        [
            ({"fast": FAST}, {}, "fast: 2.00 times as fast as PIL"),
            ({"fast": FAST, "same": SAME}, {}, "fast: 2.00 times as fast as PIL"),
            ({"same": SAME}, {}, r"same: 0.99\d\d times as fast as PIL, inconclusive"),
            ({"fast": FAST}, {"title": "Two is more than one"}, "Two is more than one"),
        ],
    )
    def test_are_told_as_asked(self, frame_of, rates, options, told):
        assert re.fullmatch(told, title(lk.plot_speedup(frame_of({"PIL": PIL, **rates}, "PIL"), **options)))

    @pytest.mark.parametrize(
        ("plot", "columns"),
        [
            (course.plot_timeline, {"lane": ["a"], "kind": ["step"], "start_s": [0.0], "end_s": [1.0]}),
            (lk.plot_stalls, {"variant": ["a"], "stage": ["read"], "seconds": [1.0]}),
        ],
    )
    def test_have_the_title_that_is_given_and_so_have_other_plots(self, frame_of, plot, columns):
        assert title(plot(pd.DataFrame(columns), title="It reads")) == "It reads"
        assert title(lk.plot_speedup(frame_of({"PIL": PIL, "b": FAST}, "PIL"), title="It loads")) == "It loads"

    def test_have_a_triangle_for_a_prediction_that_moves_with_it_and_none_for_an_open_one(self, frame_of):
        runs = frame_of({"PIL": PIL, "fast": FAST, "same": SAME}, "PIL")
        for guess, drawn in (1.5, [(1.5, pytest.approx(-0.28))]), (3.0, [(3.0, pytest.approx(-0.28))]), (..., []):
            course.predict("fast", guess)
            ax = lk.plot_speedup(runs)
            assert [tuple(p.get_offsets()[0]) for p in dots(ax) if len(p.get_offsets()) == 1] == drawn
            assert ("your prediction" in legend(ax)) == bool(drawn)

    def test_with_a_wild_interval_let_it_run_out_of_the_picture(self, frame_of):
        frame = frame_of({"base": [10, 12], "wild": [12, 40], "steady": [20.5, 24.2]}, "base")
        assert quiet_summary(frame).ci_high["wild"] > 1000
        low, high = lk.plot_speedup(frame, ceiling=4.5).get_xlim()
        assert -0.3 < low < 0.05  # what the wild interval reaches to
        assert high == pytest.approx(4.5 + 3.5)  # from 1x to the ceiling, and as far again
        endless = frame_of({"base": [1, 1], "wild": [1e30, 1e-30]}, "base")
        assert quiet_summary(endless).ci_high["wild"] == np.inf
        ax = lk.plot_speedup(endless)
        [reach] = ax.containers[0].lines[2][0].get_segments()
        assert reach[:, 0].tolist() == pytest.approx([0, 1e100])
        ax.figure.canvas.draw()

    @given(st.lists(st.tuples(*[st.floats(0.01, 100)] * 4), min_size=3, max_size=8), st.none() | st.floats(0.5, 50))
    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_lie_inside_with_every_round_and_line(self, frame_of, rows, ceiling):
        frame = frame_of({"base": [1.0] * 4, **{f"v{number}": row for number, row in enumerate(rows)}}, "base")
        fig = plt.figure()
        low, high = lk.plot_speedup(frame, ax=fig.add_subplot(), ceiling=ceiling).get_xlim()
        others = quiet_summary(frame).drop(index="base")
        marks = [x for row in rows for x in row] + [1, ceiling or 1, *others.speedup]
        assert low < min(marks) <= max(marks) < high
        plt.close(fig)


ROUND, INTERVAL = "one round", "95 % interval of this session"
DOUBT = '"?": inconclusive, it contains 1'


class TestComparisons:
    def test_have_a_legend_of_the_marks_that_are_there_and_no_others(self, frame_of):
        plot = lk.plot_speedup
        assert legend(plot(frame_of({"a": PIL, "b": FAST}, "a"))) == [INTERVAL, ROUND]
        assert legend(plot(frame_of({"a": PIL, "b": SAME}, "a"))) == sorted([ROUND, INTERVAL, DOUBT])
        once = plot(frame_of({"a": PIL[:1], "b": FAST[:1]}, "a"))
        assert legend(once) == ['"?": inconclusive, one round has none', ROUND]
        apart = plot(frame_of({"a": PIL, "b": FAST}, "a").assign(order=np.nan))
        assert legend(apart) == [INTERVAL, "one run, over the median of the baseline's"]

    def test_are_drawn_into_the_axes_that_are_given(self, frame_of):
        ax = plt.subplots()[1]
        assert lk.plot_speedup(frame_of({"PIL": PIL, "fast": FAST}, "PIL"), ax=ax) is ax
        assert len(plt.get_fignums()) == 1

    def test_say_that_a_storage_is_simulated(self, frame_of):
        frame = frame_of({"folder": [100, 101], "tar": [130, 131], "tar, simulated": [50, 51]}, "folder")
        frame["storage"] = frame["variant"].map({"tar": "simulated hard disk", "tar, simulated": "simulated hard disk"})
        labels = texts(lk.plot_speedup(frame).get_yticklabels())
        assert labels == ["tar (simulated hard disk)", "tar, simulated"]
        assert "over tar (simulated hard disk)" in lk.plot_speedup(frame, baseline="tar").get_xlabel()


class TestTheTimeline:
    def test_has_spans_in_their_lanes_and_kinds(self):
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
        assert texts(ax.get_yticklabels()) == ["cpu", "gpu"]
        assert texts(ax.get_legend().get_texts()) == ["load", "step", "other"]
        assert ax.get_legend().get_window_extent().x0 > ax.get_window_extent().x1
        assert (ax.get_xlabel(), ax.get_xlim()[0], ax.get_ylim()) == ("time (s)", 0, TOP_DOWN)

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


class TestStalls:
    def test_are_stacked_in_their_rows(self):
        seconds = {("x", "read"): 2.0, ("x", "decode"): 8.0, ("y", "decode"): 3.0, ("y", "collate"): 1.0}
        parts = pd.DataFrame([{"variant": a, "stage": b, "seconds": each} for (a, b), each in seconds.items()] * 2)
        ax = lk.plot_stalls(parts)
        ax.figure.canvas.draw()
        ends = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x() + bar.get_width()) for bar in ax.patches}
        assert ends == {(0, 4), (0, 20), (1, 0), (1, 6), (1, 8)}  # what a variant lacks is a bar of no width
        labels = {(text.get_text(), text.get_position()) for text in ax.texts}
        assert labels == {("20%", (2.0, 0)), ("80%", (12.0, 0)), ("75%", (3.0, 1)), ("25%", (7.0, 1))}
        assert legend(ax) == ["collate", "decode", "read"]
        assert (ax.get_xlabel(), ax.get_xlim()[0], ax.get_ylim()) == ("seconds", 0, TOP_DOWN)
        assert title(ax) == "x: decode 80% of the time"
        small = lk.plot_stalls(parts[parts.variant == "x"].assign(seconds=parts["seconds"] / 1000))
        assert sorted(texts(small.texts)) == ["20%", "80%"]
        assert title(small) == "x: decode 80% of the time"

    def test_and_kinds_of_spans_differ_without_color(self):
        stages = [f"stage {number}" for number in range(8)]
        parts = pd.DataFrame({"variant": "x", "stage": stages, "seconds": 1.0})
        assert len({bar.get_hatch() for bar in lk.plot_stalls(parts).patches}) == 8
        spans = pd.DataFrame({"lane": "cpu", "start_s": range(8), "end_s": range(1, 9), "kind": stages})
        ax = course.plot_timeline(spans)
        assert len({bars.get_hatch() for bars in ax.collections}) == 8
        assert legend(ax) == stages
        assert len(set(plots.HATCHES)) == len(plots.HATCHES) == len(plots.COLORS)


WIDTH_PX = 600  # of a page on a small screen
SMALLEST_PX = 10  # of the font: its capitals are then about 7.5 pixels high
# What an axis of numbers may count: a unit, or a number of things.
UNITS = re.compile(r"per second|per image|per step|second|\(s\)|\(x\)|\(ms\)|\(MB\)|images/s|cores|KB|ratio")
WOBBLE = np.array([0.99, 1.02, 1.0, 1.01, 0.98])
LONG = "one worker per core, turbojpeg and Albumentations"


def _noisy(frame_of, **rates):
    rows = {name: rate * np.roll(WOBBLE, row) for row, (name, rate) in enumerate(rates.items())}
    return frame_of(rows, next(iter(rates)), experiment="02 decoders")


def _runs(frame_of, ratio):
    return _noisy(frame_of, **{"naive PIL": 100, LONG: 100 * ratio, "the same": 101})


def _timeline(frame_of, ratio, title="", **columns):
    spans = [(start, start + 0.1, "wait") for start in (0, 0.2 * ratio)]
    spans += [(start + 0.1, start + 0.2 * ratio, "step") for start in (0, 0.2 * ratio)]
    frame = pd.DataFrame(spans, columns=["start_s", "end_s", "kind"]).assign(lane="host")
    worker = frame.iloc[:1].assign(lane="worker 0", kind="load")
    return course.plot_timeline(pd.concat([worker, frame], ignore_index=True).assign(**columns), title=title)


def _stalls(frame_of, ratio):
    stages = ("read", "decode", "crop, resize, flip", "to float, normalise", "collate")
    rows = [(name, stage, 0.01 * number**ratio * scale) for name, scale in (("naive", 1), ("fast", 1 / ratio))
            for number, stage in enumerate(stages, 1)]  # fmt: skip
    return lk.plot_stalls(pd.DataFrame(rows, columns=["variant", "stage", "seconds"]))


def _peers(frame_of, ratio):
    rates = {"naive PIL": 100, "labkit BatchLoader, antialias": 500 * ratio, "timm": 450, "decode limit": 1800}
    kinds = {"naive PIL": "baseline", "timm": "peer", "decode limit": "limit"}
    runs = _noisy(frame_of, **rates).assign(antialias="True", source="JPEG files", decoded_at="full size")
    return course.plot_peers(runs.assign(kind=runs.variant.map(kinds).fillna("labkit")))


def _rungs(frame_of, ratio):
    rates = {"PIL, one process": 500, "raw pixels": 17_000 * ratio, "decode limit": 2100, "memcpy limit": 2400}
    return ladder.plot_rungs(_noisy(frame_of, **rates))


def _pictures(frame_of, ratio):
    files = ["cmyk.jpeg", "rgba.png"] if ratio < 2 else ["subsampling 420.jpeg"]
    return course.plot_pictures(files, ["pil", "turbojpeg"])


EVERY = {
    "plot_speedup": lambda frame_of, ratio: lk.plot_speedup(_runs(frame_of, ratio), ceiling=1.9),
    "plot_speedup, 15 variants": lambda frame_of, ratio: lk.plot_speedup(
        _noisy(frame_of, PIL=100, **{f"variant {number}": 100 * ratio for number in range(15)})
    ),
    "plot_timeline": _timeline,
    "plot_timeline, simulated": lambda frame_of, ratio: _timeline(frame_of, ratio, simulated=True),
    "plot_timeline, simulated, with a title of two lines": lambda frame_of, ratio: _timeline(
        frame_of, ratio, "two workers, four batches ahead, pinned memory, a second stream", simulated=True
    ),
    "plot_stalls": _stalls,
    "plot_peers": _peers,
    "plot_rungs": _rungs,
    "plot_pictures": _pictures,
    "plot_images": lambda frame_of, ratio: lk.plot_images(
        torch.zeros(8, 3, 8, 8), ["image by image"] * 8, message=f"{ratio} of 8 were erased"
    ),
}


EVERY_KIND = [name for name in EVERY if "," not in name]  # others are the same plot of other data


def draw(name, frame_of, ratio=1.5):
    drawn = EVERY[name](frame_of, ratio)
    return drawn if isinstance(drawn, Figure) else drawn.figure


def title_above(figure):
    """What stands above the plot: the titles on the left, and the figure's own."""
    return " ".join([figure.get_suptitle(), *(ax.get_title("left") for ax in figure.axes)]).strip()


def shown_texts(figure):
    """All texts that can be seen: the labels of ticks only where they lie in the axes."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {text for tick in ticks for text in (tick.label1, tick.label2)
                       if not ax.axison or not low <= tick.get_loc() <= high}  # fmt: skip
    found = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return [text for text in dict.fromkeys(found) if text.get_text().strip() and text not in hidden]


def look(handle):
    """What an entry of a legend looks like without its color."""
    if isinstance(handle, Line2D):
        face = handle.get_markerfacecolor() == "white"
        return str((handle.get_marker(), handle.get_linestyle(), face, handle.get_linewidth(), handle.get_markersize()))
    if isinstance(handle, PathCollection):
        return handle.get_paths()[0].vertices.tobytes()
    return handle.get_hatch() if isinstance(handle, Patch) else type(handle)


@pytest.mark.parametrize("name", EVERY)
def test_every_plot_can_be_read_at_600_pixels_and_without_color(name, frame_of):
    figure = draw(name, frame_of)
    figure.draw_without_rendering()
    shown, px_a_point = shown_texts(figure), WIDTH_PX / (72 * figure.get_tightbbox().width)
    small = {text.get_text(): text.get_fontsize() * px_a_point for text in shown}
    assert {text: px for text, px in small.items() if px < SMALLEST_PX} == {}
    assert figure.get_figwidth() <= plots.WIDTH_IN

    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in shown]
    assert [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)] == []
    assert [text for text, box in boxes if min(box.x0, box.y0) < -2 or box.x1 > figure.bbox.x1 + 2] == []

    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            if any(re.fullmatch(r"[\d.,]+x?", tick.label1.get_text()) for tick in axis.get_major_ticks()):
                assert UNITS.search(axis.get_label_text())
        if box := ax.get_legend():
            assert not box.get_window_extent().padded(-1).overlaps(ax.bbox), "the legend lies over data"
            looks = [look(handle) for handle in box.legend_handles]
            assert len(set(looks)) == len(looks)

    assert title_above(figure)
    if name in EVERY_KIND:
        assert title_above(figure) != title_above(draw(name, frame_of, 3)), "the title is not computed from the data"


def test_a_title_stands_above_labels_of_lines_and_beside_the_word_simulated():
    ax = plots.make_axes(2)
    ax.annotate("1x", (0.5, 1), xycoords=("data", "axes fraction"), va="bottom")
    plots.mark_simulated(ax)
    above = plots.write_title(ax, "word " * 30)
    ax.figure.draw_without_rendering()
    [word] = [text for text in shown_texts(ax.figure) if text.get_text() == "simulated"]
    assert above.get_window_extent().y0 > ax.texts[0].get_window_extent().y1 - 1
    assert not above.get_window_extent().overlaps(word.get_window_extent())
