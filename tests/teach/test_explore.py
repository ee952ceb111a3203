"""explore(): menus change what is drawn; without menus, a front end or a kernel there is still a picture."""

import base64
import io
import sys

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from labkit import course
from labkit.app import notebooks, storing
from labkit.course.feeding import WIDGET_VIEW, factors_of, plot_runs, pooled_over


@pytest.fixture
def frame(frame_of):
    """Two variants on two disks, each of them three times as fast on the second."""
    slow = frame_of({"tar": [100, 110, 90], "folder": [200, 210, 190]}, "tar", storage="disk", num_workers=2)
    fast = frame_of({"tar": [300, 330, 270], "folder": [600, 630, 570]}, "tar", storage="memory", num_workers=8)
    return pd.concat([slow, fast], ignore_index=True)


def _medians(ax):
    """Heights of the groups' markers, from left to right."""
    points = [(x, y) for line in ax.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    return [y for _, y in sorted(points)]


def _dots(ax):
    return sorted(y for dots in ax.collections for _, y in dots.get_offsets())


def test_every_run_is_a_dot_and_every_group_has_its_median(frame):
    ax = plt.subplots()[1]
    assert plot_runs(frame, x="variant", hue="storage", ax=ax) is ax
    assert _medians(ax) == [100, 300, 200, 600]
    assert _dots(ax) == sorted(frame["images_per_s"])
    assert len({line.get_marker() for line in ax.lines if len(line.get_xdata())}) == 2  # groups differ without color
    assert _medians(plot_runs(frame, x="storage", ax=plt.subplots()[1])) == [150, 450]
    assert _medians(plot_runs(frame, x="variant", hue="variant", ax=plt.subplots()[1])) == [190, 390]


def test_factors_are_what_varies(frame):
    assert factors_of(frame) == ["variant", "num_workers", "storage"]
    assert factors_of(frame.assign(page_cache=["warm", "unknown"] * 6)) == ["variant", "num_workers", "storage"]
    assert "page_cache" in factors_of(frame.assign(page_cache=["warm", "cold"] * 6))
    measured = frame.assign(steal_s=[0, 0.01] * 6, n_looks=[1, 3] * 6, n_steady_batches=[8, 9] * 6)
    assert factors_of(measured) == ["variant", "num_workers", "storage"]
    assert pooled_over(frame, ["variant", None]) == ["num_workers", "storage"]
    assert pooled_over(frame, ["variant", "storage"]) == []


def test_memory_is_drawn_for_every_variant_though_only_warm_ups_took_it(frame):
    first = ~frame.duplicated(["variant"])
    runs = frame.assign(peak_mem_mb=np.where(first, 1000.0 + np.arange(len(frame)), np.nan), is_warmup=first)
    ax = course.explore(runs, x="variant", hue="variant", metric="peak_mem_mb").ax
    assert _medians(ax) == sorted(runs.peak_mem_mb[first])
    assert ax.get_ylim()[1] > runs.peak_mem_mb.max() * 1.05  # no marker is cut by the frame


def test_wide_ranges_are_drawn_on_a_logarithmic_axis(frame):
    assert plot_runs(frame, x="variant").get_yscale() == "linear"
    wide = frame.assign(images_per_s=frame["images_per_s"].where(frame["storage"] == "disk", 10_000))
    assert plot_runs(wide, x="variant", ax=plt.subplots()[1]).get_yscale() == "log"


def test_the_menus_change_the_picture(frame):
    explorer = course.explore(frame)
    assert plt.get_fignums() == []  # no figure waits to be shown, as a script's would
    assert (explorer.x, explorer.hue) == ("variant", "num_workers")
    before, picture = _medians(explorer.ax), explorer._picture.value
    explorer.controls["hue"].value = None
    assert _medians(explorer.ax) == [190, 390] != before
    assert "pooled over num_workers, storage" in " ".join(explorer.ax.get_title(loc="left").split())
    explorer.controls["where storage"].value = "memory"
    assert _medians(explorer.ax) == [300, 600]
    assert " ".join(explorer.ax.get_title(loc="left").split()).endswith("; storage: memory")
    explorer.controls["x"].value = "num_workers"
    assert _medians(explorer.ax) == [450]
    explorer.controls["where storage"].value = None
    assert _medians(explorer.ax) == [150, 450]
    assert [label.get_text() for label in explorer.ax.get_xticklabels()] == ["2", "8"]
    explorer.controls["metric"].value = "peak_mem_mb"
    assert explorer.ax.get_ylabel() == "peak memory (MB)"
    assert explorer._picture.value != picture
    explorer.controls["where storage"].value = "disk"
    explorer.controls["where num_workers"].value = 8
    assert [text.get_text() for text in explorer.ax.texts] == ["no run has these levels"]


def test_levels_that_nobody_stated_can_be_chosen(frame):
    explorer = course.explore(frame.assign(antialias=[True, None] * 6), x="antialias")
    explorer.controls["where antialias"].value = "not stated"
    assert len(_dots(explorer.ax)) == 6


def _is_png(text):
    picture = Image.open(io.BytesIO(base64.b64decode(text)))
    return picture.format == "PNG" and len(picture.convert("L").getcolors()) > 10


def test_a_notebook_gets_menus_and_a_picture_in_one_output(frame, monkeypatch):
    bundle = course.explore(frame)._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "image/png", WIDGET_VIEW}
    assert bundle[WIDGET_VIEW]["model_id"]
    assert _is_png(bundle["image/png"])
    assert "images per second by variant and num_workers" in bundle["text/plain"]
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer = course.explore(frame, x="storage", hue="variant", metric="cpu_s")
    bundle = explorer._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png"}
    assert _is_png(bundle["image/png"])
    assert "ipywidgets is not installed" in bundle["text/plain"]
    assert explorer.ax.get_ylabel() == "CPU seconds"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda frame: frame, {"x": "color"}, "x must be one of variant, num_workers, storage, got 'color'"),
        (lambda frame: frame, {"hue": "color"}, "hue must be one of"),
        (lambda frame: frame, {"metric": "joy"}, "metric must be one of images_per_s, first_batch_s"),
        (lambda frame: frame.iloc[:0], {}, "got no runs"),
        (lambda frame: frame.iloc[:3], {}, "nothing varies"),
        (lambda frame: frame.assign(env_id=["a", "b"] * 6), {}, "runs must come from one machine, got a, b"),
    ],
)
def test_what_cannot_be_explored_is_refused(frame, change, options, message):
    with pytest.raises(ValueError, match=message):
        course.explore(change(frame), **options)


SOURCE = """
import labkit as lk
from labkit import course
runs = lk.compare({"slow": lambda: [1, 1], "quick": lambda: [1, 1]}, baseline="slow", rounds=2, progress=False)
course.explore(runs)
"""


@pytest.mark.exhaustive
def test_a_stored_notebook_and_its_page_show_the_picture(tmp_path):
    cells = [new_markdown_cell("# 99"), new_code_cell(SOURCE)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "99_x.ipynb")
    (notebook,) = notebooks.find_notebooks(folder=tmp_path)
    run = notebooks.execute(notebook)
    storing.store_all([run], storing.describe_run(""), tmp_path)
    (output,) = nbformat.read(notebook.path, as_version=4).cells[1].outputs
    assert set(output.data) == {"text/plain", "image/png"}
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_notebook_node(run.node)
    assert 'src="data:image/png;base64,' in page
    assert "widget-view+json" not in page
