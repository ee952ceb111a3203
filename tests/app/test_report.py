"""The tour's page: what it shows of frames and claims, and how it looks in a browser."""

import re

import pytest

from labkit.app.notebooks import Executed, Notebook
from labkit.app.tour_page import write_index
from labkit.course import ladder
from labkit.course.ledger import LEDGER
from labkit.measure.frames import save_frame


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """The text of the page about these frames."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))

    def page_of(*frames):
        for number, frame in enumerate(frames):
            save_frame(frame, tmp_path / "frames" / f"{number}.csv")
        return write_index(tmp_path, []).read_text()

    return page_of


def test_a_page_without_frames_and_one_with_a_what_if_which_stays_off_the_ladder(page_of, frame_of):
    assert "No experiment has been recorded yet" in page_of()
    page = page_of(frame_of({"a": [1, 2], "b": [3, 4]}, "a", experiment="x", rung=False))
    assert page.count("base64") == 0
    assert "frames/0.csv" in page


@pytest.mark.slow
def test_it_shows_every_ladder_and_no_limit_as_a_step(page_of, frame_of):
    rates = {"naive": [100, 101, 99], "quick": [400, 404, 396], "decode limit": [500, 500, 500]}
    names = (ladder.EXPERIMENT, f"{ladder.EXPERIMENT}, camera")
    page = page_of(*(frame_of(rates, "naive", experiment=name, photos="small", rung=False) for name in names))
    assert page.count("data:image/png;base64,") == 2
    assert re.findall(r"<td>(quick|decode limit)</td>", page) == ["quick", "quick"]


def test_it_shows_every_claim_with_its_verdict_and_survives_frames_that_cannot_be_judged(page_of, runs_of):
    runs = runs_of("04 transforms", tensors=0.8).replace({"base": "PIL"}).assign(scale="laptop")
    page = page_of(runs)
    assert [claim.id for claim in LEDGER if f"<code>{claim.id}</code>" not in page] == []
    for text in ("<strong>does not hold</strong>", "0.80x [", "laptop scale"):
        assert text in page
    assert "No verdicts: runs of elsewhere" in page_of(runs.assign(env_id="elsewhere"))


@pytest.fixture
def opened(open_page, frame_of, tmp_path):
    """Opens a small report from the disk without a network: two experiments, the ladder with a limit, a notebook that
    ran and one that failed. Gives the page and what it asked for."""
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
    assert shown == [True, True]
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page.content()) == []


def test_the_report_is_readable_on_a_phone(opened):
    page, _ = opened(390)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.evaluate("() => parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    sizes = page.eval_on_selector_all("img", "all => all.map(image => image.clientWidth / image.naturalWidth)")
    assert min(sizes) > 0.6  # a plot's letters stay readable: it is scrolled in its own box, not shrunk
    for text in ("faster", "inconclusive", "turbojpeg"):  # the verdict and the best variant in words
        assert page.get_by_role("cell", name=text, exact=True).count()
