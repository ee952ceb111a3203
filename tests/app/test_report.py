"""The tour's page: what it shows of frames and results, and how it looks in a browser."""

import re

import pytest

from labkit import course
from labkit.app.notebooks import Executed, Notebook
from labkit.app.recording import FolderRecorder
from labkit.app.tour_page import write_index
from labkit.course import ladder
from labkit.course.results import Ratio
from labkit.measure.frames import save_frame
from labkit.measure.recorder import set_recorder


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """The text of the page about these frames."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))

    def page_of(*frames):
        for number, frame in enumerate(frames):
            save_frame(frame, tmp_path / "frames" / f"{number}.csv")
        return write_index(tmp_path, []).read_text()

    return page_of


def test_a_page_without_results_shows_the_stored_ladder(page_of):
    page = page_of()
    assert "No notebook has ended yet" in page
    assert page.count("data:image/png;base64,") == 1
    assert "This is the stored run" in page


@pytest.mark.exhaustive
def test_it_shows_every_ladder_of_its_own(page_of, frame_of):
    rates = {
        "naive, loader alone": [100, 101, 99], "naive, training": [100, 101, 99], "decode limit": [500, 500, 500],
        "quick, loader alone": [800, 808, 792], "quick, training": [400, 404, 396],
        "batches in memory, training": [500, 500, 500],
    }  # fmt: skip
    names = (ladder.EXPERIMENT, f"{ladder.EXPERIMENT}, camera")
    page = page_of(
        *(frame_of(rates, "naive, training", experiment=name, photos="small", step="a GPU") for name in names)
    )
    assert page.count("data:image/png;base64,") == 2
    assert "This is the stored run" not in page
    assert (
        page.count("the one before it: quick, 4.0 times. The training becomes 4.0 times as fast, its loader 8 times.")
        == 2
    )


def test_it_shows_results_with_their_answers_first(page_of, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_SCALE", "laptop")
    set_recorder(FolderRecorder(tmp_path / "frames"))
    gain = {"BatchLoader over DataLoader workers": Ratio(3.25, 3.1, 3.4)}
    course.result("11_prepare_once", "It is **0.8 times** as fast.", "See `x`.", ("It helps.", False), figures=gain)
    page = page_of()
    for text in (
        "<strong>It is 0.8 times as fast.</strong> See x.", "This run does not confirm all of this: It helps.",
        "<code>lk.BatchLoader</code>", "3.25x [3.1, 3.4]",
    ):  # fmt: skip
        assert text in page


@pytest.fixture
def opened(open_page, frame_of, tmp_path):
    """Opens a small report from the disk without a network: the ladder with a limit, a result, a notebook that ran and
    one that failed. Gives the page and what it asked for."""
    rates = {"decode limit": [950, 960, 970], "batches in memory, training": [2000, 2000, 2000]}
    for name, rate in {"PIL, one process": 90, "11 raw pixels": 900}.items():
        rates |= {f"{name}, {what}": [rate, rate + 10, rate + 20] for what in ("loader alone", "training")}
    save_frame(
        frame_of(rates, "PIL, one process, training", experiment="11 ladder", step="a GPU"),
        tmp_path / "frames" / "11.csv",
    )
    set_recorder(FolderRecorder(tmp_path / "frames"))
    course.result("02_read_image", "simplejpeg decodes 1.6 times as fast as PIL.")
    notebooks = [Notebook(tmp_path / f"{name}.ipynb", "Which?", "3") for name in ("02_read_image", "08_shards")]
    too_long = "ValueError: " + "a_word_that_is_far_too_long_for_a_phone/" * 4
    done = [Executed(notebooks[0], None, 12.0), Executed(notebooks[1], None, 3.0, too_long)]
    index = write_index(tmp_path, done)

    def open_(width):
        page, errors = open_page(viewport={"width": width, "height": 800}, offline=True)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: errors.append(f"failed: {request.url[:80]}"))
        page.goto(index.as_uri())
        page.wait_for_load_state("networkidle")
        assert errors == []
        return page, asked

    return open_


def test_the_report_opens_from_the_disk(opened):
    page, asked = opened(1200)
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    shown = page.eval_on_selector_all("img", "all => all.map(image => image.complete && image.naturalWidth > 300)")
    assert shown == [True]
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page.content()) == []


def test_the_report_is_readable_on_a_phone(opened):
    page, _ = opened(390)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.evaluate("() => parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    sizes = page.eval_on_selector_all("img", "all => all.map(image => image.clientWidth / image.naturalWidth)")
    assert min(sizes) > 0.6  # a plot's letters stay readable: it is scrolled in its own box, not shrunk
    assert page.get_by_text("ValueError: a_word_that").is_visible()  # of the notebook that failed
    assert page.get_by_role("cell", name="simplejpeg decodes 1.6 times as fast as PIL.").count()
