"""What labkit made of images is not taken for that of others that were put in their place since."""

import os
import shutil
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import labkit as lk
from labkit.errors import ItemErrors
from tests.image_files import write_pictures
from tests.serving import QuietFolder, serving

KEY = "cat/1.png"
OTHER = (10, 200, 30)


@pytest.fixture
def photos(tmp_path) -> Path:
    return write_pictures(tmp_path / "photos", "cat/0.png", KEY, "dog/2.png", "dog/3.jpg")


@pytest.fixture(params=["folder", "tar", "folder of tars", "server", "fsspec"])
def place(request, photos):
    """What opens the photos as they are in the folder now."""
    (photos.parent / "tars").mkdir()

    def packed(path: Path) -> Path:
        with tarfile.open(path, "w") as tar:
            tar.add(photos, ".")
        return path

    places = {
        "folder": lambda: photos, "fsspec": lambda: f"file://{photos}",
        "tar": lambda: packed(photos.with_suffix(".tar")),
        "folder of tars": lambda: packed(photos.parent / "tars" / "a.tar").parent,
    }  # fmt: skip
    if request.param != "server":
        yield places[request.param]
        return
    with serving(partial(QuietFolder, directory=photos.parent)) as port:
        yield lambda: f"http://127.0.0.1:{port}/photos"


def replace(path: Path, *, keeps_size: bool, keeps_time: bool = False) -> None:
    """Put another picture there: uncompressed PNGs of one shape have one size."""
    before = path.stat()
    Image.new("RGB", (20, 16) if keeps_size else (30, 16), OTHER).save(path, compress_level=0)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size == before.st_size) == keeps_size


@pytest.fixture
def stored(photos) -> Path:
    """The photo, of a size that the other picture may have."""
    Image.new("RGB", (20, 16), (90, 0, 0)).save(photos / KEY, compress_level=0)
    return photos / KEY


MAKERS = {
    "pixels": lambda source, out: lk.PixelStore.build(source, out / "x.pixels", progress=False),
    "shards": lambda source, out: lk.write_shards(source, out / "shards", engine="threads", progress=False),
}


@pytest.mark.parametrize("keeps_size", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_rerun_refuses_to_pass_for_others(place, stored, tmp_path, own_home, maker, keeps_size):
    make = MAKERS[maker]
    make(place(), tmp_path)
    made = [path for path in (tmp_path / "x.pixels", tmp_path / "shards" / "shard-000000.tar") if path.exists()]
    before = made[0].read_bytes()
    make(place(), tmp_path)  # a rerun of the same
    earlier_s = made[0].stat().st_mtime - 2  # servers tell seconds
    os.utime(made[0], (earlier_s, earlier_s))
    replace(stored, keeps_size=keeps_size)
    with pytest.raises((ValueError, ItemErrors), match=r"choose another|other pixels|other images"):
        make(place(), tmp_path)
    assert made[0].read_bytes() == before
    (tmp_path / "elsewhere").mkdir()
    make(place(), tmp_path / "elsewhere")  # as the message says


@pytest.mark.parametrize("maker", MAKERS)
def test_the_same_images_in_new_files_are_the_same(photos, tmp_path, maker):
    make = MAKERS[maker]
    make(photos, tmp_path)
    shutil.copytree(photos, tmp_path / "copy")
    shutil.rmtree(photos)
    shutil.copytree(tmp_path / "copy", photos)
    make(photos, tmp_path)


def test_a_time_that_was_set_back_hides_nothing(stored, photos, tmp_path):
    """As `cp -p`, `mv` and `rsync -t` leave the time of the modification."""
    lk.PixelStore.build(photos, tmp_path / "x.pixels", progress=False)
    replace(stored, keeps_size=True, keeps_time=True)
    with pytest.raises(ValueError, match=rf"holds other pixels of 1 image that were replaced since, such as '{KEY}'"):
        lk.PixelStore.build(photos, tmp_path / "x.pixels", progress=False)


def test_parts_of_a_killed_run_are_made_anew(stored, photos, tmp_path):
    (photos / "dog" / "3.jpg").write_bytes(b"damaged")
    with pytest.raises(ItemErrors):
        lk.PixelStore.build(photos, tmp_path / "x.pixels", progress=False)
    replace(stored, keeps_size=True)
    shutil.copy(photos / "dog" / "2.png", photos / "dog" / "3.jpg")
    store = lk.PixelStore.build(photos, tmp_path / "x.pixels", progress=False)
    assert store.pixels(list(store.keys).index(KEY))[0, 0].tolist() == list(OTHER)
    lk.PixelStore.build(photos, tmp_path / "x.pixels", progress=False)


def test_tiles_are_made_anew_of_what_was_replaced(tmp_path):
    source, options = tmp_path / "photos", {"short_side": 64, "quality": 90, "progress": False}
    flat = [Image.new("RGB", (256, 192), color) for color in ((90, 0, 0), OTHER)]
    write_pictures(source, "a.jpg", "b.jpg", size=(256, 192))
    flat[0].save(source / "a.jpg")
    n_bytes = (source / "a.jpg").stat().st_size
    lk.tile_jpegs(source, tmp_path / "tiled", **options)
    kept = (tmp_path / "tiled" / "b.jpg").stat().st_ino
    flat[1].save(source / "a.jpg")
    with open(source / "a.jpg", "ab") as file:  # what follows the picture is left out
        file.write(bytes(n_bytes - file.tell()) if file.tell() <= n_bytes else b"")
    assert (source / "a.jpg").stat().st_size == n_bytes
    lk.tile_jpegs(source, tmp_path / "tiled", **options)
    assert np.allclose(np.asarray(Image.open(tmp_path / "tiled" / "a.jpg")), OTHER, atol=3)
    assert (tmp_path / "tiled" / "b.jpg").stat().st_ino == kept


def test_a_server_tells_sizes_and_times(photos):
    local = lk.FolderStore(photos)
    with serving(partial(QuietFolder, directory=photos)) as port:
        store = lk.HttpStore(f"http://127.0.0.1:{port}")
        assert store.sizes().tolist() == local.sizes().tolist()
        assert store.changed_at() == pytest.approx([path.stat().st_mtime for path in local.paths()], abs=1)
        with pytest.raises(lk.LabkitError, match="is not a file under"):
            lk.HttpStore(f"http://127.0.0.1:{port}", keys=["none.jpg"]).sizes()
