"""The ladder: its rungs load what they say, and its figure is drawn from its frame."""

import hashlib
import re
import threading

import psutil
import pytest
import torch
from PIL import Image

import labkit as lk
from labkit.app import tour_page as report
from labkit.course import ladder
from labkit.measure.compare import count_images
from labkit.measure.frames import save_frame
from tests.paths import REPO

STORED = REPO / "notebooks"
N_PHOTOS = 8


@pytest.fixture(scope="module")
def store(first_photos):
    return lk.FolderStore(first_photos(N_PHOTOS))


@pytest.fixture(scope="module")
def pixels(store, tmp_path_factory):
    return lk.PixelStore.build(store, tmp_path_factory.mktemp("pixels") / "x", engine="threads", progress=False)


@pytest.fixture
def variants(store, pixels):
    return ladder.ladder_variants(store, pixels, lk.scale())


@pytest.fixture
def runs(frame_of):
    rates = {"naive": [100, 101, 99], "quick": [400, 404, 396], "decode limit": [500, 500, 500]}
    return frame_of(rates, "naive", experiment=ladder.EXPERIMENT, photos="small photos", rung=False)


@pytest.mark.slow
def test_every_rung_gives_crops_and_every_photo_equally_often(variants):
    kinds = []
    for label, factory in variants.items():
        batches = list(factory())
        n_images = sum(map(count_images, batches))
        assert n_images % N_PHOTOS == 0, label
        if not label.endswith("limit"):
            kinds.append(batches[0][0].dtype)
            assert batches[0][0].shape[1:] == (3, 224, 224), label
            found = torch.cat([own for _, own in batches]).bincount()
            assert set(found.tolist()) == {n_images // N_PHOTOS}, label  # one photo per class
    assert kinds == [torch.float32] * 3 + [torch.uint8] * 5


@pytest.mark.slow
def test_a_run_leaves_no_worker_and_no_thread(variants):
    before = len(psutil.Process().children()), threading.active_count()
    for label in ("one worker per core", "threads: BatchLoader"):  # while somebody still holds the loader
        loader = variants[label]()
        assert len(list(loader)) > 1
        idle = sum(thread.name.startswith("labkit-batches") for thread in threading.enumerate())
        assert (len(psutil.Process().children()), threading.active_count() - idle) == before


def test_the_photos_must_be_the_same(pixels, first_photos):
    fewer = lk.FolderStore(first_photos(N_PHOTOS - 1))
    with pytest.raises(ValueError, match="8 raw pixels and 7 photos differ"):
        ladder.ladder_variants(fewer, pixels, lk.scale())


def test_measuring_takes_unequal_numbers_of_images_in_silence(recwarn):
    runs = ladder.measure_rungs({"a": lambda: [4, 4], "b limit": lambda: [64]}, experiment="x", factors={"photos": "p"})
    # Garbage of other tests may be collected here, and say so.
    assert [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning] == []
    assert set(runs.baseline) == {"a"}
    assert not runs.rung.any()
    assert set(runs.photos) == {"p"}


def test_the_plot_has_rungs_in_rows_and_limits_as_lines(runs):
    ax = ladder.plot_rungs(runs)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["naive", "quick"]
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["100", "400  4.0x", "decode limit 500"]
    drawn = sorted({float(x) for points in ax.collections for x, _ in points.get_offsets()})
    assert drawn == sorted({100.0, 101.0, 99.0, 400.0, 404.0, 396.0})
    assert [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [500]


def test_a_stored_figure_says_which_frame_it_shows(runs, tmp_path):
    frame = save_frame(runs, tmp_path / "frames" / ladder.FRAME)
    figure = ladder.store_figure(frame, tmp_path)
    assert (tmp_path / ladder.FRAME).read_bytes() == frame.read_bytes()
    assert ladder.drawn_from(figure) == hashlib.sha256(frame.read_bytes()).hexdigest()
    with Image.open(figure) as image:
        assert image.width > 600
    Image.new("RGB", (8, 8)).save(figure)
    assert ladder.drawn_from(figure) == ""
    title = " ".join(ladder.draw_figure(runs).axes[0].get_title("left").split())
    assert title.endswith(f" (small photos, {lk.env_id()})")


@pytest.mark.slow
def test_the_index_page_shows_every_ladder_and_no_limit_as_a_step(runs, tmp_path):
    for experiment in (ladder.EXPERIMENT, f"{ladder.EXPERIMENT}, camera"):
        path = tmp_path / "frames" / f"{experiment}.csv"
        save_frame(runs.assign(experiment=experiment), path)
    page = report.write_index(tmp_path, []).read_text()
    assert page.count("data:image/png;base64,") == 2
    assert re.findall(r"<td>(quick|decode limit)</td>", page) == ["quick", "quick"]


def test_the_readme_shows_the_stored_figure_of_the_stored_frame():
    assert f'experiment="{ladder.EXPERIMENT}"' in (STORED / f"{ladder.NOTEBOOK}.ipynb").read_text().replace("\\", "")
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (REPO / "README.md").read_text())
    assert images == [f"notebooks/{ladder.FIGURE}"]
    frame = STORED / ladder.FRAME
    assert ladder.drawn_from(STORED / ladder.FIGURE) == hashlib.sha256(frame.read_bytes()).hexdigest()
    runs = lk.load_frame(frame)
    assert ladder.is_ladder(runs)
    assert runs["variant"].iloc[0] == ladder.NAIVE
