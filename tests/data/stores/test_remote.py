"""Images on HTTP servers and in object storage, in files and in tars: as in the folder, from any server and process."""

import http.server
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import quote, unquote

import fsspec
import numpy as np
import pytest
from PIL import Image

from labkit import FolderStore, HttpStore, ImageDataset, LoaderConfig, ObjectStore, TarStore, make_loader, open_store
from labkit.course import serve_folder
from labkit.data import tar as tar_index
from labkit.data.stores import Store
from labkit.data.tar import build_index
from labkit.errors import TarError
from tests.children import in_children
from tests.image_files import KEYS, put_in_memory, read_all, read_each
from tests.scripted_server import status
from tests.serving import Quiet, serving

pytestmark = pytest.mark.usefixtures("own_home")
KINDS = ["http", "http tar", "memory", "memory/", "file", "s3", "s3 bucket", "s3 tar"]


def open_remote(request, kind: str) -> tuple[Store, FolderStore]:
    """A remote store, and one of the folder whose images it has."""
    get = request.getfixturevalue
    folder, (options, bucket) = get("image_folder"), get("s3") if "s3" in kind else ({}, None)
    open_store = {
        "http": lambda: HttpStore(get("served")),
        "http tar": lambda: TarStore(f"{get('served')}.tar"),
        "memory": lambda: ObjectStore(put_in_memory(folder)),
        "memory/": lambda: ObjectStore(put_in_memory(folder) + "/"),
        "file": lambda: ObjectStore(f"file://{folder}"),
        "s3": lambda: ObjectStore("s3://photos/set", **options),
        "s3 bucket": lambda: ObjectStore("s3://photos", **options),
        "s3 tar": lambda: TarStore("s3://tars/a.tar", **options),
    }[kind]
    return open_store(), FolderStore({"s3": bucket and bucket / "set", "s3 bucket": bucket}.get(kind, folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_remote_store_gives_what_the_folder_gives(request, kind):
    store, oracle = open_remote(request, kind)
    assert list(store.keys()) == oracle.keys()
    assert read_all(store) == read_all(oracle)
    assert len(store) == len(oracle) >= 10
    assert isinstance(store, Store)
    if "tar" in kind:
        assert store.sizes().tolist() == oracle.sizes().tolist()
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(store.read, store.keys())) == read_all(oracle)


@pytest.mark.parametrize("kind", ["http", "memory", "file", "s3", "s3 bucket"])
def test_unknown_keys(request, kind):
    store, _ = open_remote(request, kind)
    for key in (
        "no.jpg", "", "cat/no.jpg", "cat/", "/top.jpg", "../top.jpg", "../set2/top.jpg", "cat/../top.jpg", "\ud800.jpg",
        *(["cat"] if kind != "http" else []),  # of which the folder's server gives a listing
    ):  # fmt: skip
        with pytest.raises(KeyError) as failure:
            store.read(key)
        assert failure.value.args == (f"{key!r} is not a file under {store.name}",)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_in_other_processes(request, start_method):
    pairs = [open_remote(request, kind) for kind in ("http", "http tar", "s3", "s3 tar") for _ in range(2)]
    stores, oracles = map(list, zip(*pairs, strict=True))
    read_each(stores[::2])  # the others are used for the first time there
    expected = read_each(oracles)
    assert in_children(start_method, read_each, (stores,), (stores,)) == [expected] * 2
    assert read_each(stores) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_loader(tmp_path, s3, num_workers):
    """Workers inherit the connections of a store that was used before, and must leave them alone."""
    options, _ = s3
    for number in range(4):
        Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "0.png", "0.png")
    fsspec.filesystem("s3", **options).put(f"{tmp_path}/", f"tars/{num_workers}/", recursive=True)
    config = LoaderConfig(1, num_workers, pin_memory=False, persistent_workers=num_workers > 0)
    with serve_folder(tmp_path) as url:
        stores = [HttpStore(url), TarStore(f"{url}a.tar")]
        root = f"s3://tars/{num_workers}/"
        stores += [ObjectStore(root, **options), TarStore(f"{root}a.tar", **options)]
        for store in stores:
            read_all(store)
            loader = make_loader(ImageDataset(store), config)
            for _ in range(2):
                images = [(image.shape, image[0, 0, 0, 0].item(), label.item()) for image, label in loader]
                assert sorted(images) == [((1, 3, 4, 5), n, 0) for n in range(1 if isinstance(store, TarStore) else 4)]


# HTTP.


@pytest.mark.parametrize("below", ["dog", "dog/", "Größe", "caf%E9", "v1.0"])
def test_a_folder_of_a_server(image_folder, served, below):
    oracle = FolderStore(
        image_folder / os.fsdecode(unquote(below, errors="surrogateescape").encode("utf-8", "surrogateescape"))
    )
    for url in {below, below if "%" in below else quote(below)}:
        store = HttpStore(f"{served}/{url}")
        assert list(store.keys()) == oracle.keys()
        assert read_all(store) == read_all(oracle)


class QuietFolder(Quiet, http.server.SimpleHTTPRequestHandler):
    pass


def test_pythons_own_server(image_folder):
    """Its listings name folders with a slash, and it answers no range requests."""
    with serving(partial(QuietFolder, directory=image_folder)) as port:
        store, oracle = HttpStore(f"http://127.0.0.1:{port}"), FolderStore(image_folder)
        listed, utf8 = store.keys(), [key for key in KEYS if key.isprintable() or "\n" in key]
        assert [key for key in listed if key in utf8] == sorted(utf8)
        assert [store.read(key) for key in utf8] == [oracle.read(key) for key in utf8]
        for key in ("cat", "cat/", ""):  # a listing is no image
            with pytest.raises(KeyError):
                store.read(key)


def test_a_manifest_is_believed(server):
    rows = [{"key": "b/2.jpg", "width": 3}, {"key": "a/1.jpg"}]
    server.files["/p/manifest.json"] = json.dumps({"photos": rows}).encode()
    store = HttpStore(f"{server.url}/p")
    for _ in range(2):
        assert list(store.keys()) == ["a/1.jpg", "b/2.jpg"]
        assert [path for path, _ in server.asked] == ["/p/manifest.json"]


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b'{"photos": 3}', b'{"photos": [{"name": "a"}]}', b'{"photos": []}', b"null"]
)
def test_other_programs_manifests_are_not(server, text):
    server.files.update({"/p/manifest.json": text, "/p/": b'<a href="a.jpg">a</a>'})
    assert list(HttpStore(f"{server.url}/p").keys()) == ["a.jpg"]


def test_keys_that_are_given(server):
    server.files["/p/a.jpg"] = b"some bytes"
    store = HttpStore(f"{server.url}/p", keys=(key for key in ("b.jpg", "a.jpg")))
    assert list(store.keys()) == ["a.jpg", "b.jpg"]
    assert repr(store) == f"HttpStore('{server.url}/p/', 2 images)"
    assert server.asked == []
    assert store.read("a.jpg") == b"some bytes"


@pytest.mark.parametrize("page", [b"", b"no links here", b'<a href="notes.txt">x</a>', b"\xff\xfe\x00"])
def test_where_nothing_is_listed(server, page):
    """What is advised can be done: `open_store` takes no keys."""
    server.files["/p/"] = page
    said = r"http://127\.0\.0\.1:\d+/p/ lists no images: .* HttpStore\(url, keys=\[\.\.\.\]\)"
    for opened in (HttpStore, open_store):
        with pytest.raises(FileNotFoundError, match=said):
            opened(f"{server.url}/p").keys()


@pytest.mark.parametrize("code", [404, 410])
def test_a_folder_that_is_not_there(server, code):
    server.script["/p/"] = [status(code)]
    said = rf"{server.url}/p/ does not exist \({code}\): check the URL.* HttpStore\(url, keys=\[\.\.\.\]\)"
    with pytest.raises(FileNotFoundError, match=said):
        open_store(f"{server.url}/p").keys()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((url, "not an HTTP URL") for url in ("ftp://a/b", "a/b", "http://", "http:/a/b", "s3://a", "")),
        ("http://me:secret@a/b.tar?key=secret", r"^http://a/b\.tar is a tar: open it with TarStore"),
    ],
)
def test_what_is_no_address(url, said):
    with pytest.raises(ValueError, match=said):
        HttpStore(url)


# Object storage.


def test_places_without_objects(s3):
    options, _ = s3
    for store in (ObjectStore("s3://photos/no", **options), ObjectStore("memory://no/such")):
        with pytest.raises(FileNotFoundError, match=r"(photos/no|no/such) holds no image"):
            store.keys()
    with pytest.raises(FileNotFoundError, match=r"s3://tars/no\.tar does not exist"):
        TarStore("s3://tars/no.tar", **options).keys()
    for store in (ObjectStore("s3://no-such-bucket/set", **options), TarStore("s3://no-such-bucket/a.tar", **options)):
        with pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket/.* does not exist"):
            store.keys()
    with pytest.raises(TarError, match=r"s3://tars/packed\.tar is compressed \(gzip\)"):
        TarStore("s3://tars/packed.tar", **options).keys()


def test_an_object_is_one_request(server):
    """Not two, of which the first asks for its size."""
    pytest.importorskip("s3fs")
    server.files["/photos/set/a.jpg"] = b"photo"
    store = ObjectStore("s3://photos/set", endpoint_url=server.url, anon=True)
    assert store.read("a.jpg") == b"photo"
    assert [path for path, _ in server.asked] == ["/photos/set/a.jpg"]


def test_the_index_of_an_object_is_kept_until_it_changes(s3, image_tar, tmp_path, monkeypatch):
    options, _ = s3
    built = []
    monkeypatch.setattr(tar_index, "build_index", lambda blob: built.append(1) or build_index(blob))
    filesystem = fsspec.filesystem("s3", max_concurrency=1, **options)  # the one that the store has
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
