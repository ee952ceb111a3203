"""Pillow's limit of pixels is labkit's: as it is when an image is read, in this process and in those that it starts."""

import pytest
from PIL import Image
from torch.utils.data import DataLoader

import labkit as lk
from labkit.data.sizes import read_header
from labkit.errors import ItemErrors
from tests.image_files import write_pictures

REMEDY = r"if you trust the file, set PIL\.Image\.MAX_IMAGE_PIXELS = None, or to half the pixels"


@pytest.fixture
def photos(tmp_path):
    """Of 320 pixels each."""
    return write_pictures(tmp_path / "photos", "a/1.jpg", "a/2.png", "b/3.png", "b/4.webp", size=(20, 16))


@pytest.fixture
def low(monkeypatch):
    """A limit, set after all imports, that the photos exceed."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 159)
    return lambda limit: monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)


DOORS = {
    "ImageDataset": lambda root, out: list(lk.ImageDataset(root)),
    "PILDataset": lambda root, out: list(lk.PILDataset(lk.FolderStore(root))),
    "BatchLoader": lambda root, out: list(lk.BatchLoader(root, batch_size=1, size=8)),
    "PixelStore": lambda root, out: lk.PixelStore.build(root, out / "pixels", progress=False),
    "read_shards": lambda root, out: list(
        lk.read_shards(lk.write_shards(root, out / "shards", engine="threads", progress=False))
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_error_names_the_remedy_and_that_works(photos, tmp_path, low, door):
    with pytest.raises((lk.DecodeError, ItemErrors), match=REMEDY):
        DOORS[door](photos, tmp_path)
    for limit in (None, 160):
        low(limit)
        assert len(DOORS[door](photos, tmp_path / str(limit))) >= 2


def test_workers_have_it_too(photos, tmp_path, low):
    shards = lk.write_shards(photos, tmp_path / "shards", engine="threads", progress=False)
    low(None)
    for dataset in (lk.ImageDataset(photos), lk.read_shards(shards)):
        loader = DataLoader(dataset, None, num_workers=1, multiprocessing_context="forkserver")
        assert len(list(loader)) == 4


def test_a_header_says_the_same(photos, low):
    path = str(photos / "a" / "2.png")
    assert "set PIL.Image.MAX_IMAGE_PIXELS = None" in read_header(path).error
    low(None)
    assert read_header(path).width == 20
