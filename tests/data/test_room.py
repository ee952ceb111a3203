"""What writes many images asks first whether the disk has room for them."""

import re
import shutil
import tarfile
from types import SimpleNamespace

import pytest

import labkit as lk
from labkit.data import tiles
from labkit.data.tar_stream import convert_tar
from tests.paths import contents

MAKERS = {
    "photos": lambda photos, place: lk.make_photos(place, 24, progress=False),
    "shards": lambda photos, place: lk.write_shards(photos, place, max_count=8, engine="threads", progress=False),
    "pixels": lambda photos, place: lk.PixelStore.build(photos, place / "a.pixels", short_side=64, progress=False),
    "tiles": lambda photos, place: lk.tile_jpegs(photos, place, progress=False),
    "tar": lambda photos, place: convert_tar(place.parent / "a.tar.gz", place / "a.tar", progress=False),
}


def images_in(folder):
    """Bytes of what was made of images: no records and no folders."""
    return sum(len(data) for name, data in contents(folder).items() if not name.endswith((".json", ".lock")))


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes every disk has free."""
    return lambda n_bytes: monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(n_bytes)))


@pytest.mark.parametrize("kind", MAKERS)
def test_what_will_not_fit_is_not_begun_and_the_rest_of_a_run_is(kind, photo_set, tmp_path, free, monkeypatch):
    monkeypatch.setattr(tiles, "_maker", lambda *options: (lambda data: data, {}))  # without jpegtran
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(photo_set, ".")
    make = MAKERS[kind]
    make(photo_set, tmp_path / "made")
    n_bytes = images_in(tmp_path / "made") * (2 if kind == "pixels" else 1)  # those need their place twice
    free(0.6 * n_bytes)
    with pytest.raises(OSError, match=r"needs about .* has .* free: make room, or choose") as error:
        make(photo_set, tmp_path / "other")
    assert isinstance(error.value, lk.LabkitError)
    needed, has = (float(found) for found in re.findall(r"([\d.]+) MB", str(error.value)))
    assert has == pytest.approx(0.6 * n_bytes / 1e6, abs=0.06)
    assert needed == pytest.approx(n_bytes / 1e6, rel=0.3, abs=0.06)
    assert images_in(tmp_path / "other") == 0  # `contents` of a folder that is not there is empty
    free(1.5 * n_bytes)
    make(photo_set, tmp_path / "other")
    assert contents(tmp_path / "other") == contents(tmp_path / "made")
    if kind not in ("tar", "pixels"):  # a rerun needs room for what is missing alone
        free(0)
        make(photo_set, tmp_path / "made")
        path = next(path for path in (tmp_path / "made").rglob("*") if path.suffix in (".jpg", ".tar"))
        n_missing = path.stat().st_size
        path.unlink()
        free(2 * n_missing + 200_000)
        make(photo_set, tmp_path / "made")
        assert contents(tmp_path / "made") == contents(tmp_path / "other")
