"""Folders of photos made from others, against Pillow."""

import numpy as np
import pytest
from PIL import Image

from labkit.data.stores import FolderStore
from labkit.errors import DecodeError
from labkit.peers.run import make_small_photos, repeat_photos


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate([(300, 400), (500, 280), (60, 90)]):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)
    return tmp_path / "photos"


def test_small_photos_have_the_short_side_and_the_pixels(photos, tmp_path):
    small = FolderStore(make_small_photos(photos, tmp_path / "small", 128))
    assert small.keys() == FolderStore(photos).keys()
    for path, size in zip(small.paths(), [(171, 128), (90, 60), (128, 229)], strict=True):
        image = Image.open(path)
        assert image.format == "JPEG"
        assert np.abs(np.subtract(image.size, size)).max() <= 1
        original = Image.open(photos / path.relative_to(small.root)).resize(image.size, Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(image, float) - np.asarray(original, float)).mean() < 3


def test_small_photos_that_are_there_are_kept(photos, tmp_path):
    small = make_small_photos(photos, tmp_path / "small", 128)
    (small / "a/0.jpg").write_bytes(b"kept")
    (small / "b/1.jpg").unlink()
    make_small_photos(photos, small, 128)
    assert (small / "a/0.jpg").read_bytes() == b"kept"
    assert (small / "b/1.jpg").stat().st_size > 1000


def test_a_photo_that_cannot_be_decoded_is_named(photos, tmp_path):
    (photos / "a/0.jpg").write_bytes(b"no photo")
    with pytest.raises(DecodeError, match=r"a/0\.jpg"):
        make_small_photos(photos, tmp_path / "small", 128)
    assert not (tmp_path / "small/a/0.jpg").exists()


def test_each_photo_has_several_names_and_one_content(photos, tmp_path):
    for _ in range(2):  # a rerun changes nothing
        repeated = FolderStore(repeat_photos(photos, tmp_path / "repeated", 3))
    assert list(repeated.keys())[:4] == ["a/0-0.jpg", "a/0-1.jpg", "a/0-2.jpg", "a/2-0.jpg"]
    assert len(repeated.keys()) == 9
    for key in repeated.keys():  # noqa: SIM118
        assert repeated.read(key) == (photos / f"{key[:3]}.jpg").read_bytes()
    assert (tmp_path / "repeated/a/0-0.jpg").samefile(photos / "a/0.jpg")
