"""The report: what it shows, and how it looks in a browser."""

import re

import pytest

from labkit.app import tour_page as report
from labkit.app.notebooks import Executed, Notebook
from labkit.measure.frames import save_frame


def test_an_index_without_frames(tmp_path):
    assert "No experiment has been recorded yet" in report.write_index(tmp_path, []).read_text()


def test_what_ifs_stay_off_the_ladder(frame_of, tmp_path):
    save_frame(frame_of({"a": [1, 2], "b": [3, 4]}, "a", experiment="x", rung=False), tmp_path / "frames" / "x.csv")
    page = report.write_index(tmp_path, []).read_text()
    assert page.count("base64") == 0
    assert "frames/x.csv" in page


@pytest.fixture
def index(frame_of, tmp_path):
    """A small report: two experiments, the ladder with a limit, a notebook that ran and one that failed."""
    runs = {
        "02 decoders, imagenet": {"pil": [100, 101, 99], "torchvision": [170, 172, 171], "turbojpeg": [180, 183, 181]},
        "08 a long name of an experiment, over HTTP with 50 ms": {"files": [10, 11, 10], "shards of 1000": [9, 12, 10]},
        "11 ladder": {"PIL, one process": [90, 91, 92], "raw pixels": [900, 910, 920], "decode limit": [950, 960, 970]},
    }
    for number, (experiment, rates) in enumerate(runs.items()):
        frame = frame_of(rates, next(iter(rates)), experiment=experiment)
        save_frame(frame, tmp_path / "frames" / f"{number}.csv")
    notebooks = [Notebook(tmp_path / f"{name}.ipynb", "Which?", "3") for name in ("02_read_image", "08_shards")]
    too_long = "ValueError: " + "a_word_that_is_far_too_long_for_a_phone/" * 4
    done = [Executed(notebooks[0], None, 12.0), Executed(notebooks[1], None, 3.0, too_long)]
    return report.write_index(tmp_path, done)


@pytest.fixture
def opened_index(open_page, index):
    """Opens the report from the disk without a network; gives the page, its errors and what it asked for in vain."""

    def open_(width):
        page, errors = open_page(viewport={"width": width, "height": 800}, offline=True)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: errors.append(f"failed: {request.url[:80]}"))
        page.goto(index.as_uri())
        page.wait_for_load_state("networkidle")
        return page, errors, asked

    return open_


def test_the_report_opens_from_the_disk(opened_index, index):
    page, errors, asked = opened_index(1200)
    assert errors == []
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    shown = page.eval_on_selector_all("img", "all => all.map(image => image.complete && image.naturalWidth > 300)")
    assert shown == [True, True]
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", index.read_text()) == []


def test_the_report_is_readable_on_a_phone(opened_index):
    page, errors, _ = opened_index(390)
    assert errors == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.evaluate("() => parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    sizes = page.eval_on_selector_all("img", "all => all.map(image => image.clientWidth / image.naturalWidth)")
    assert min(sizes) > 0.6  # a plot's letters stay readable: it is scrolled in its own box, not shrunk
    for text in ("faster", "inconclusive", "turbojpeg"):  # the verdict and the best variant in words
        assert page.get_by_role("cell", name=text, exact=True).count()
