"""Images and tars in object storage: the same keys and bytes as in the folder, in any process."""

import tarfile
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from labkit import FolderStore, ObjectStore, Store, TarStore
from labkit.data.tar.errors import TarError
from tests.children import in_children
from tests.image_files import KEYS, put_in_memory, read_all, read_each

pytestmark = pytest.mark.usefixtures("own_home")


def test_an_object_store_gives_what_the_folder_gives(image_folder):
    place = put_in_memory(image_folder)
    oracle = FolderStore(image_folder)
    for url in (place, place + "/", f"file://{image_folder}"):
        store = ObjectStore(url)
        assert list(store.keys()) == oracle.keys()
        assert read_all(store) == read_all(oracle)
        assert len(store) == len(KEYS)
        assert isinstance(store, Store)
    assert repr(ObjectStore(place)) == f"ObjectStore({place!r}, {len(KEYS)} images)"


def test_objects_of_s3(s3):
    options, bucket = s3
    store, oracle = ObjectStore("s3://photos/set", **options), FolderStore(bucket / "set")
    assert list(store.keys()) == oracle.keys()
    assert len(store) >= 10
    assert read_all(store) == read_all(oracle)
    assert list(ObjectStore("s3://photos", **options).keys()) == FolderStore(bucket).keys()


UNKNOWN = ["no.jpg", "cat", "", "cat/no.jpg", "../set2/top.jpg", "/top.jpg", "cat/../top.jpg"]


@pytest.mark.parametrize("key", UNKNOWN)
def test_unknown_objects(image_folder, s3, key):
    options, _ = s3
    for store in (
        ObjectStore("s3://photos/set", **options), ObjectStore("s3://photos", **options),
        ObjectStore(put_in_memory(image_folder)), ObjectStore(f"file://{image_folder}"),
    ):  # fmt: skip
        with pytest.raises(KeyError) as failure:
            store.read(key)
        assert repr(key) in failure.value.args[0]


def test_places_without_objects(s3):
    options, _ = s3
    for store in (ObjectStore("s3://photos/no", **options), ObjectStore("memory://no/such")):
        with pytest.raises(FileNotFoundError, match=r"(photos/no|no/such) holds no image"):
            store.keys()
    with pytest.raises(FileNotFoundError):
        ObjectStore("s3://no-such-bucket", **options).keys()


def test_a_tar_in_s3(image_folder, s3):
    options, _ = s3
    store, oracle = TarStore("s3://tars/a.tar", **options), FolderStore(image_folder)
    assert list(store.keys()) == oracle.keys()
    assert read_all(store) == read_all(oracle)
    assert store.sizes().tolist() == oracle.sizes().tolist()
    with pytest.raises(FileNotFoundError):
        TarStore("s3://tars/no.tar", **options).keys()
    with pytest.raises(TarError, match=r"s3://tars/packed\.tar is compressed \(gzip\)"):
        TarStore("s3://tars/packed.tar", **options).keys()


def test_the_index_of_an_object_is_kept_until_it_changes(s3, image_tar, tmp_path, monkeypatch):
    from labkit.data.tar import index as tar_index

    options, _ = s3
    built = []
    monkeypatch.setattr(
        tar_index, "build_index", lambda blob, build=tar_index.build_index: built.append(1) or build(blob)
    )
    filesystem = fsspec.filesystem("s3", **options)
    filesystem.pipe_file("tars/b.tar", image_tar.read_bytes())
    filesystem.ls("tars")  # a listing that s3fs will remember
    for _ in range(2):
        assert len(TarStore("s3://tars/b.tar", **options).keys()) == len(KEYS)
    assert len(built) == 1
    with tarfile.open(tmp_path / "b.tar", "w") as changed:
        changed.add(image_tar, "other.jpg")
    elsewhere = fsspec.filesystem("s3", **options, skip_instance_cache=True)  # another process, say
    elsewhere.pipe_file("tars/b.tar", (tmp_path / "b.tar").read_bytes())
    assert list(TarStore("s3://tars/b.tar", **options).keys()) == ["other.jpg"]
    assert len(built) == 2


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_s3_in_other_processes(s3, image_folder, start_method):
    options, bucket = s3
    objects, members = read_all(FolderStore(bucket / "set")), read_all(FolderStore(image_folder))
    stores = [ObjectStore("s3://photos/set", **options) for _ in range(2)]
    stores += [TarStore("s3://tars/a.tar", **options) for _ in range(2)]
    for store in stores[::2]:
        read_all(store)  # the others are used for the first time there
    expected = [objects, objects, members, members]
    assert in_children(start_method, read_each, (stores,), (stores,)) == [expected] * 2
    assert read_each(stores) == expected


def test_s3_in_threads(s3):
    options, bucket = s3
    store = ObjectStore("s3://photos/set", **options)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(store.read, store.keys())) == read_all(FolderStore(bucket / "set"))
