"""Every plot can be read at 600 pixels, and says in its title what its data show."""

import re
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

import labkit as lk
from labkit import course
from labkit.course import ladder
from labkit.course.predictions import plot_guesses
from labkit.measure import plots as figures
from labkit.peers.run import plot_cores, predict_cores

WIDTH_PX = 600  # of a page on a small screen
SMALLEST_PX = 10  # of the font: its capitals are then about 7.5 pixels high
# What an axis of numbers may count: a unit, or a number of things.
UNITS = re.compile(r"per second|per image|per step|second|\(s\)|\(x\)|\(ms\)|\(MB\)|images/s|cores|KB|ratio")
WOBBLE = np.array([0.99, 1.02, 1.0, 1.01, 0.98])
LONG = "one worker per core, turbojpeg and Albumentations"


def _runs(frame_of, ratio, **factors):
    rates = {"naive PIL": 100, LONG: 100 * ratio, "the same": 101}
    rates = {name: list(rate * np.roll(WOBBLE, row)) for row, (name, rate) in enumerate(rates.items())}
    return frame_of(rates, "naive PIL", experiment="02 decoders", **factors)


def _ladder(frame_of, ratio):
    runs = pd.concat([_runs(frame_of, ratio).assign(experiment=f"0{number} step") for number in (1, 2)])
    return course.plot_ladder(runs)


def _timeline(frame_of, ratio, **columns):
    spans = [(start, start + 0.1, "wait") for start in (0, 0.2 * ratio)]
    spans += [(start + 0.1, start + 0.2 * ratio, "step") for start in (0, 0.2 * ratio)]
    frame = pd.DataFrame(spans, columns=["start_s", "end_s", "kind"]).assign(lane="host")
    worker = frame.iloc[:1].assign(lane="worker 0", kind="load")
    return course.plot_timeline(pd.concat([worker, frame], ignore_index=True).assign(**columns))


def _pareto(frame_of, ratio):
    table = pd.DataFrame({"KB_per_photo": [100, 99, 26], "images_per_s": [2000, 1990, 2000 * ratio]})
    return course.plot_pareto(
        table.assign(variant=["JPEG folder", "tar with an index", "JPEG at 256"]), cost="KB_per_photo"
    )


def _stalls(frame_of, ratio):
    stages = ("read", "decode", "crop, resize, flip", "to float, normalise", "collate")
    rows = [(name, stage, 0.01 * number * scale) for name, scale in (("naive", 1), ("fast", 1 / ratio))
            for number, stage in enumerate(stages, 1)]  # fmt: skip
    return lk.plot_stalls(pd.DataFrame(rows, columns=["variant", "stage", "seconds"]), wall_s={"naive": 0.16})


def _peers(frame_of, ratio):
    rates = {
        "naive PIL": 100,
        "labkit BatchLoader, antialias": 500 * ratio,
        "torchvision v2": 450,
        "decode limit": 1800,
    }
    runs = frame_of({name: list(rate * WOBBLE) for name, rate in rates.items()}, "naive PIL", antialias="True")
    kinds = {"naive PIL": "baseline", "torchvision v2": "peer", "decode limit": "limit"}
    return course.plot_peers(runs.assign(kind=runs.variant.map(kinds).fillna("labkit"), source="JPEG files"))


def _cores(frame_of, ratio):
    names = ["labkit BatchLoader", "labkit PixelStore"]
    table = pd.DataFrame({"cpu_s_per_1000": [1.0, 0.1], "gil_us_per_image": [80, 5 * ratio]}, index=names)
    return plot_cores(
        predict_cores(table), pd.DataFrame({"variant": names, "cores": 2, "images_per_s": [1800, 19_000]})
    )


def _rungs(frame_of, ratio):
    rates = {
        "PIL, one process": 500,
        "raw pixels": 17_000 * ratio,
        "decode limit": 2100,
        "memcpy limit": 2400,
    }
    return ladder.plot_rungs(frame_of({name: list(rate * WOBBLE) for name, rate in rates.items()}, "PIL, one process"))


def _claims(frame_of, ratio):
    nan, seeded = float("nan"), "holds" if ratio < 2 else "does not hold"
    settings = [
        ("decode-cv2", "224 x 224", "measured", "holds", 1.2, 1.2),
        ("decode-cv2", "500 x 375", "measured", "larger here", 1.8, 1.2),
        ("marigold-tar", "the first iteration from a rotating disk", "simulated", "not judged", 1.4, 6.0),
        ("seeded-workers", "a rerun with as many workers", "measured", seeded, nan, nan),
    ]  # fmt: skip
    tests = pd.DataFrame(settings, columns=["id", "setting", "kind", "outcome", "measured", "claimed"])
    tests = tests.assign(ci_low=tests.measured * 0.9, ci_high=tests.measured * 1.1)
    tests = tests.assign(agrees_from=tests.claimed * 0.8, agrees_to=tests.claimed * 1.2)
    table = pd.DataFrame({"id": tests.id.unique()})
    table.attrs["tests"] = tests.to_dict("records")
    return course.plot_claims(table)


def _conformance(frame_of, ratio):
    files = ["subsampling 420.jpeg", "cmyk.jpeg", "exif 6 as text.png"]
    rows = [(name, decoder, "same" if decoder == "pil" and ratio < 2 else "differs")
            for name in files for decoder in ("pil", "torchvision", "turbojpeg")]  # fmt: skip
    return course.plot_conformance(pd.DataFrame(rows, columns=["file", "decoder", "outcome"]))


def _guesses(frame_of, ratio):
    rows = [("02 decoders", 1.5, 1.4, 1.6), ("03 workers", 3 / ratio, 1.8, 2.2)]
    frame = pd.DataFrame(rows, columns=["experiment", "guess", "ci_low", "ci_high"])
    return plot_guesses(frame.assign(measured=[1.5, 2.0]))


def _images(frame_of, ratio):
    return lk.plot_images(torch.zeros(8, 3, 8, 8), ["image by image"] * 8, message=f"{ratio} of 8 were erased")


def _pictures(frame_of, ratio):
    return course.plot_pictures(
        ["cmyk.jpeg", "rgba.png"] if ratio < 2 else ["subsampling 420.jpeg"], ["pil", "turbojpeg"]
    )


def _plan(frame_of, ratio):
    return course.plot_plan(lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=ratio, storage="nvme"))


PLOTS = {
    "plot_throughput": lambda frame_of, ratio: lk.plot_throughput(_runs(frame_of, ratio)),
    "plot_speedup": lambda frame_of, ratio: lk.plot_speedup(_runs(frame_of, ratio), about="500 x 375", ceiling=1.9),
    "plot_ladder": _ladder,
    "plot_timeline": _timeline,
    "plot_timeline, simulated": lambda frame_of, ratio: _timeline(frame_of, ratio, simulated=True),
    "plot_pareto": _pareto,
    "plot_stalls": _stalls,
    "plot_peers": _peers,
    "plot_cores": _cores,
    "plot_rungs": _rungs,
    "plot_claims": _claims,
    "plot_conformance": _conformance,
    "plot_pictures": _pictures,
    "plot_images": _images,
    "plot_guesses": _guesses,
    "plot_plan": _plan,
}  # fmt: skip


def _draw(plot, frame_of, ratio=1.5):
    drawn = plot(frame_of, ratio)
    return drawn if isinstance(drawn, Figure) else drawn.figure


def title_of(figure):
    """What stands above the plot: the titles on the left, and the figure's own."""
    own = [] if figure._suptitle is None else [figure._suptitle.get_text()]
    return " ".join(" ".join([*own, *(ax.get_title("left") for ax in figure.axes)]).split())


def shown_texts(figure):
    """All texts that can be seen: the labels of ticks only where they lie in the axes."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {text for tick in ticks for text in (tick.label1, tick.label2)
                       if not ax.axison or not low <= tick.get_loc() <= high}  # fmt: skip
    texts = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return [text for text in dict.fromkeys(texts) if text.get_text().strip() and text not in hidden]


def scale_of(figure):
    """Pixels of a page for one point of text."""
    return WIDTH_PX / (72 * figure.get_tightbbox().width)


@pytest.fixture(scope="module")
def drawn():
    """Each figure by its name, drawn once."""
    yield {}
    plt.close("all")


@pytest.fixture(params=PLOTS)
def figure(request, frame_of, drawn):
    if request.param not in drawn:
        drawn[request.param] = _draw(PLOTS[request.param], frame_of)
        drawn[request.param].draw_without_rendering()
    return drawn[request.param]


@pytest.mark.parametrize("name", PLOTS)
def test_the_title_is_computed_from_the_data(name, drawn, frame_of):
    first = drawn.get(name) or _draw(PLOTS[name], frame_of)
    titles = [title_of(first), title_of(_draw(PLOTS[name], frame_of, 3))]
    assert all(titles)
    assert len(set(titles)) == 2


def test_a_plot_can_be_read_at_600_pixels(figure):
    small = {text.get_text(): text.get_fontsize() * scale_of(figure) for text in shown_texts(figure)}
    assert {text: px for text, px in small.items() if px < SMALLEST_PX} == {}
    assert figure.get_figwidth() <= figures.WIDTH_IN


def test_no_text_meets_another_or_leaves_the_figure(figure):
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in shown_texts(figure)]
    assert [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)] == []
    right = figure.bbox.x1 + 2
    assert [text for text, box in boxes if box.x0 < -2 or box.x1 > right] == []


def test_no_legend_lies_over_data(figure):
    legends = [(ax, ax.get_legend()) for ax in figure.axes if ax.get_legend()]
    assert [ax for ax, legend in legends if legend.get_window_extent().padded(-1).overlaps(ax.bbox)] == []


def test_each_axis_of_numbers_has_its_unit(figure):
    for axis in (axis for ax in figure.axes if ax.axison for axis in (ax.xaxis, ax.yaxis)):
        labels = [tick.label1.get_text() for tick in axis.get_major_ticks()]
        if any(re.fullmatch(r"[\d.,]+x?", label) for label in labels):
            assert UNITS.search(axis.get_label_text())


def _look(handle):
    """What an entry of a legend looks like without its color."""
    if isinstance(handle, Line2D):
        face = handle.get_markerfacecolor() == "white"
        return str((handle.get_marker(), handle.get_linestyle(), face, handle.get_linewidth(), handle.get_markersize()))
    if isinstance(handle, PathCollection):
        return handle.get_paths()[0].vertices.tobytes()
    return handle.get_hatch() if isinstance(handle, Patch) else type(handle)


def test_no_two_entries_of_a_legend_differ_in_color_alone(figure):
    for legend in filter(None, (ax.get_legend() for ax in figure.axes)):
        looks = [_look(handle) for handle in legend.legend_handles]
        assert len(set(looks)) == len(looks)


def test_what_colors_tell_apart_marks_and_hatches_tell_apart_too():
    assert len(set(figures.HATCHES)) == len(figures.HATCHES) == len(figures.COLORS)
    assert len(set(figures.MARKERS)) == len(figures.MARKERS)


def test_a_title_stands_above_labels_of_lines_and_beside_the_word_simulated():
    ax = figures.make_axes(2)
    ax.annotate("1x", (0.5, 1), xycoords=("data", "axes fraction"), va="bottom")
    figures.mark_simulated(ax)
    figures.write_title(ax, "word " * 30)
    ax.figure.draw_without_rendering()
    title, word = ax._left_title.get_window_extent(), ax._right_title.get_window_extent()
    assert title.y0 > ax.texts[0].get_window_extent().y1 - 1
    assert not title.overlaps(word)
    plt.close("all")
