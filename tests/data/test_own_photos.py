"""A reader's own photos take the place of made ones: linked under numbers, odd and bad ones named and left out."""

import os

import pytest
from matplotlib import pyplot as plt
from PIL import Image

import labkit as lk
from labkit import course
from labkit.app.storing import describe_run
from labkit.app.tour import make_scale_photos
from labkit.course.results import describe_machine
from labkit.data.own_photos import FEWEST, link_photos
from labkit.util.machine import env_id
from tests.image_files import encoded

GOOD = encoded(Image.effect_noise((90, 60), 60).convert("RGB"))
BAD = {
    "cut.jpg": GOOD[:-200],
    "text.JPEG": b"hello",
    "empty.jpg": b"",
    "cmyk.jpg": encoded(Image.new("CMYK", (80, 60))),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of small photos at several depths, with bad files and others among them."""
    folder = tmp_path / "Fotos é"
    for number in range(FEWEST):
        place = folder / ["", "a", "b/写真"][number % 3] / f"IMG {number}.{'JPG' if number % 2 else 'jpeg'}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(GOOD)
    for name, data in BAD.items():
        (folder / "a" / name).write_bytes(data)
    (folder / "notes.txt").write_text("no photo")
    (folder / "drawn.png").write_bytes(encoded(Image.new("RGB", (64, 64)), "PNG"))
    monkeypatch.setenv("LABKIT_PHOTOS", str(folder))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    return folder


def test_they_are_linked_under_numbers_and_not_copied(own):
    root = lk.make_photos(course.photo_root("imagenet"), FEWEST, progress=False)
    store = lk.FolderStore(root)
    assert len(store) == FEWEST
    assert len({key.split("/")[0] for key in store.keys()}) > 1  # noqa: SIM118 - lessons about classes need some
    assert all((root / key).is_symlink() for key in store.keys())  # noqa: SIM118
    assert {store.read(key) for key in store.keys()} == {GOOD}  # noqa: SIM118
    assert not any("IMG" in key or "写真" in key for key in store.keys())  # noqa: SIM118
    before = [os.readlink(root / key) for key in store.keys()]  # noqa: SIM118
    assert lk.make_photos(root, FEWEST, progress=False) == root
    assert [os.readlink(root / key) for key in store.keys()] == before  # noqa: SIM118


def test_bad_ones_are_named_on_the_terminal_and_in_no_result(own, capsys, monkeypatch):
    monkeypatch.setattr("labkit.util.machine._SCALES", {"ci": lk.scale().__class__("ci", FEWEST, 1, 4, 2)})
    make_scale_photos()
    said = capsys.readouterr().out
    assert all(name in said for name in BAD)
    assert "notes.txt" not in said
    assert "drawn.png: no JPEG" in said
    assert "CMYK, and not RGB or gray" in said
    assert "too few of your photos have 1000 pixels in their shorter side" in said
    keys = lk.FolderStore(course.photo_root("camera")).keys()
    assert [Image.open(course.photo_root("camera") / key).size for key in keys] in ([(2000, 1500)], [(1500, 2000)])


def test_large_ones_are_those_of_a_camera(own):
    for number in range(3):
        (own / f"large {number}.jpg").write_bytes(encoded(Image.new("RGB", (1600 + number, 1200))))
    root = course.photo_root("camera")
    assert link_photos(root, 3, "camera") == 3
    assert sorted(Image.open(path).width for path in root.glob("*/*.jpg")) == [1600, 1601, 1602]


def test_an_interrupted_run_and_photos_that_are_gone_are_made_good(own, monkeypatch):
    root, made = course.photo_root("imagenet"), []

    def interrupted(link, target):
        made.append(link)
        if len(made) == 20:
            raise KeyboardInterrupt
        os.symlink(target, link)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.symlink_to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lk.make_photos(root, FEWEST, progress=False)
    lk.make_photos(root, FEWEST, progress=False)
    assert len(lk.FolderStore(root)) == FEWEST
    (own / "IMG 0.jpeg").rename(own / "IMG renamed.jpeg")
    store = lk.FolderStore(lk.make_photos(root, FEWEST, progress=False))
    assert [store.read(key) for key in store.keys()] == [GOOD] * FEWEST  # noqa: SIM118


def test_too_few_are_refused_with_what_is_wrong(own):
    for path in list(own.rglob("IMG*"))[1:]:
        path.unlink()
    with pytest.raises(ValueError, match=r"holds 1 JPEGs that can be decoded, at any depth, and 5 other images"):
        lk.make_photos(course.photo_root("imagenet"), FEWEST, progress=False)
    assert not course.photo_root("imagenet").exists()


def test_a_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LABKIT_PHOTOS", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="nothing is not a folder: name one with JPEGs"):
        lk.make_photos(course.photo_root("imagenet"), 1)


def test_results_plots_and_frames_say_so(own, monkeypatch):
    axes = plt.figure().add_subplot()
    assert course.write_title(axes, "Twice as fast").get_text() == "Twice as fast"  # no photos so far
    lk.make_photos(course.photo_root("imagenet"), FEWEST, progress=False)
    named = env_id(), describe_machine(), course.write_title(axes, "Twice as fast").get_text()
    assert course.write_title(axes, "Simulated", of_photos=False).get_text() == "Simulated"
    monkeypatch.delenv("LABKIT_PHOTOS")
    without = env_id(), describe_machine(), course.write_title(axes, "Twice as fast").get_text()
    assert named[0].startswith(f"{without[0]}-photos-")
    assert named[1] == f"{without[1]}, own photos"
    assert named[2] == f"{without[2]} (own photos)"
    assert str(own) not in "".join(named)


def test_results_and_plots_say_that_large_ones_are_not_the_readers(own):
    lk.make_photos(course.photo_root("camera"), 3, profile="camera", progress=False)  # the reader's are small
    assert "photos" not in describe_machine()
    lk.make_photos(course.photo_root("imagenet"), FEWEST, progress=False)
    assert describe_machine().endswith(", own photos, large ones made by labkit")
    title = course.write_title(plt.figure().add_subplot(), "Twice as fast")
    assert title.get_text().replace("\n", " ") == "Twice as fast (own photos, large ones made by labkit)"


def test_they_are_not_stored(own):
    with pytest.raises(ValueError, match="leave LABKIT_PHOTOS out"):
        describe_run("")
