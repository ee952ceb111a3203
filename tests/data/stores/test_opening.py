"""The store that fits a place."""

import pytest

from labkit import FolderStore, HttpStore, ObjectStore, TarStore, open_store
from labkit.data.blobs import open_blob
from tests.image_files import KEYS, put_in_memory


def test_open_store_finds_the_kind(image_folder, served, s3, image_tar):
    options, bucket = s3
    for place, kind in (
        (str(image_folder), FolderStore), (image_folder, FolderStore), (str(image_tar), TarStore),
        (image_tar, TarStore), (served, HttpStore), (f"{served}.tar", TarStore), (f"file://{image_tar}", TarStore),
        (f"file://{image_folder}", ObjectStore), (put_in_memory(image_folder), ObjectStore),
    ):  # fmt: skip
        store = open_store(place)
        assert type(store) is kind
        assert list(store.keys()) == sorted(KEYS)
        assert store.read("dog/d.WebP") == (image_folder / "dog/d.WebP").read_bytes()
    assert list(open_store("s3://tars/a.tar", **options).keys()) == sorted(KEYS)
    assert list(open_store("s3://photos/set", **options).keys()) == FolderStore(bucket / "set").keys()
    assert open_blob(image_tar).read_at(0, 5) == open_blob(f"file://{image_tar}").read_at(0, 5)


@pytest.mark.parametrize("place", ["no/such/place", "top.jpg", "gopher://photos"])
def test_open_store_says_what_it_cannot_read(image_folder, monkeypatch, place):
    monkeypatch.chdir(image_folder)
    with pytest.raises(ValueError, match="is not a folder of images") as failure:
        open_store(place)
    assert place in str(failure.value)
