"""Images behind HTTP: the same keys and bytes as in the folder, from any server, in any process."""

import http.server
import json
import os
import tarfile
from urllib.parse import quote, unquote

import numpy as np
import pytest
from PIL import Image

from labkit import FolderStore, HttpStore, ImageDataset, LoaderConfig, Store, TarStore, make_loader, serve_folder
from tests.children import in_children
from tests.image_files import KEYS, read_all, read_each
from tests.scripted_server import ScriptedServer
from tests.serving import Quiet, serving


def make_store(server: ScriptedServer, **options) -> HttpStore:
    return HttpStore(f"{server.url}/p", **{"retries": 2, "timeout_s": 5.0, **options})


def test_an_http_store_gives_what_the_folder_gives(image_folder, served):
    store, oracle = HttpStore(served), FolderStore(image_folder)
    assert list(store.keys()) == oracle.keys() == sorted(KEYS)
    assert read_all(store) == read_all(oracle)
    assert len(store) == len(KEYS)
    assert isinstance(store, Store)
    assert repr(store) == f"HttpStore({served!r}, {len(KEYS)} images)"


@pytest.mark.parametrize("below", ["dog", "dog/", "Größe", "caf%E9", "v1.0"])
def test_a_folder_of_a_server(image_folder, served, below):
    oracle = FolderStore(
        image_folder / os.fsdecode(unquote(below, errors="surrogateescape").encode("utf-8", "surrogateescape"))
    )
    store = HttpStore(served + (below if "%" in below else quote(below)))
    assert list(store.keys()) == oracle.keys()
    assert read_all(store) == read_all(oracle)
    if below == "Größe":
        assert list(HttpStore(served + below).keys()) == oracle.keys()


def test_pythons_own_server(image_folder):
    """Its listings name folders with a slash, and it answers no range requests."""
    handler = lambda *args: QuietFolder(*args, directory=image_folder)  # noqa: E731
    with serving(handler) as port:
        store, oracle = HttpStore(f"http://127.0.0.1:{port}"), FolderStore(image_folder)
        listed, utf8 = store.keys(), [key for key in KEYS if key.isprintable() or "\n" in key]
        assert [key for key in listed if key in utf8] == sorted(utf8)
        assert [store.read(key) for key in utf8] == [oracle.read(key) for key in utf8]
        for key in ("cat", "cat/", ""):  # a listing is no image
            with pytest.raises(KeyError):
                store.read(key)


class QuietFolder(Quiet, http.server.SimpleHTTPRequestHandler):
    pass


def test_a_manifest_is_believed(server):
    rows = [{"key": "b/2.jpg", "width": 3}, {"key": "a/1.jpg"}]
    server.files["/p/manifest.json"] = json.dumps({"photos": rows}).encode()
    store = make_store(server)
    assert list(store.keys()) == ["a/1.jpg", "b/2.jpg"]
    assert [path for path, _ in server.asked] == ["/p/manifest.json"]
    assert list(store.keys()) == ["a/1.jpg", "b/2.jpg"]
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b'{"photos": 3}', b'{"photos": [{"name": "a"}]}', b'{"photos": []}', b"null"]
)
def test_other_programs_manifests_are_not(server, text):
    server.files["/p/manifest.json"] = text
    server.files["/p/"] = b'<a href="a.jpg">a</a>'
    assert list(make_store(server).keys()) == ["a.jpg"]


def test_keys_that_are_given(server):
    server.files["/p/a.jpg"] = b"some bytes"
    store = make_store(server, keys=(key for key in ("b.jpg", "a.jpg")))
    assert list(store.keys()) == ["a.jpg", "b.jpg"]
    assert server.asked == []
    assert store.read("a.jpg") == b"some bytes"


@pytest.mark.parametrize("page", [None, b"", b"no links here", b'<a href="notes.txt">x</a>', b"\xff\xfe\x00"])
def test_where_nothing_is_listed(server, page):
    if page is not None:
        server.files["/p/"] = page
    with pytest.raises(FileNotFoundError, match=r"http://127\.0\.0\.1:\d+/p/ lists no images: pass keys="):
        make_store(server).keys()


@pytest.mark.parametrize("url", ["ftp://a/b", "a/b", "http://", "http:/a/b", "s3://a", ""])
def test_what_is_no_address(url):
    with pytest.raises(ValueError, match="not an HTTP URL"):
        HttpStore(url)


def test_a_tar_is_for_tarstore():
    with pytest.raises(ValueError, match=r"http://a/b\.tar is a tar: open it with TarStore"):
        HttpStore("http://me:secret@a/b.tar?key=secret")


@pytest.mark.parametrize(
    "key", ["no.jpg", "", "cat/no.jpg", "cat/", "/top.jpg", "../top.jpg", "cat/../top.jpg", "\ud800.jpg"]
)
def test_unknown_keys(served, key):
    with pytest.raises(KeyError) as failure:
        HttpStore(served).read(key)
    assert repr(key) in failure.value.args[0]
    assert served in failure.value.args[0]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_in_other_processes(image_folder, image_tar, served, start_method):
    with serve_folder(image_tar.parent) as url:
        stores = [HttpStore(served), HttpStore(served), TarStore(url + image_tar.name), TarStore(url + image_tar.name)]
        for store in stores[::2]:
            read_all(store)  # the others are used for the first time there
        expected = read_all(FolderStore(image_folder))
        assert in_children(start_method, read_each, (stores,), (stores,)) == [[expected] * 4] * 2
        assert read_each(stores) == [expected] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_http_in_a_loader(tmp_path, num_workers):
    """Also after the store was used here: workers inherit its connections, and must leave them alone."""
    for number in range(4):
        Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "0.png", "0.png")
    with serve_folder(tmp_path) as url:
        for store, count in ((HttpStore(url), 4), (TarStore(f"{url}a.tar"), 1)):
            read_all(store)
            config = LoaderConfig(batch_size=1, num_workers=num_workers, pin_memory=False)
            images = [image[0, 0, 0, 0].item() for image, _ in make_loader(ImageDataset(store), config)]
            assert sorted(images) == list(range(count))
