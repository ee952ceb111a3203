"""Stores behind a network: against servers that fail in every way, aiohttp's, and an S3 of moto's."""

import contextlib
import http.server
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import traceback
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from labkit import (
    FolderStore,
    HttpStore,
    ImageDataset,
    LoaderConfig,
    ObjectStore,
    Store,
    TarStore,
    make_loader,
    open_store,
    serve_folder,
    serve_s3,
)
from labkit.data.blobs import fsspec_client
from labkit.data.blobs.http import HttpBlob
from labkit.data.blobs.objects import ObjectBlob
from labkit.data.blobs.opening import open_blob
from labkit.data.tar.errors import TarError
from labkit.data.tar.index import SUFFIX
from tests.children import in_children
from tests.serving import Quiet, serving

KEYS = (
    "top.jpg",
    "cat/a.jpeg",
    "cat/B.JPG",
    "cat/deeper/still/c.png",
    "dog/d.WebP",
    "dog/two words.jpg",
    "dog/[1] *?.jpg",
    "dog/50%20off #1 & more+.jpg",
    "dog/a:b;c=d.jpg",
    "dog/line\nbreak.jpg",
    "dog/back\\slash.jpg",
    'dog/"quoted" <b>.jpg',
    "Größe/日本.jpg",
    "v1.0/inside a folder with a dot.jpg",
    os.fsdecode(b"caf\xe9/\xff.jpg"),
)
OTHERS = ("notes.txt", "README", "cat/.hidden.jpg", ".cache/e.jpg", "dog/f.gif")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Indexes of remote tars are kept there."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))


def some_bytes(seed: object, size: int) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for number, name in enumerate((*KEYS, *OTHERS)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(some_bytes(name, 700 * number))
    return root


@pytest.fixture(scope="module")
def tar(folder) -> Path:
    path = folder.parent / f"{folder.name}.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(folder, ".")
    return path


@pytest.fixture(scope="module")
def served(folder):
    with serve_folder(folder) as url:
        yield url


def read_all(store: Store) -> list[bytes]:
    return list(map(store.read, store.keys()))


def read_each(stores: list[Store]) -> list[list[bytes]]:
    return list(map(read_all, stores))


# A server that does as it is told.


class Server(http.server.ThreadingHTTPServer):
    """Answers from `files`, after what `script` has for a path: functions that are called with the handler, once each.

    `asked` lists (path, range) of all requests, `connections` counts what was accepted.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.script: dict[str, list] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.tags: dict[str, str] = {}
        self.authorization: list[str | None] = []
        self.connections = 0
        self.sent = 0
        self.over = threading.Event()

    def get_request(self):
        self.connections += 1
        return super().get_request()

    def handle_error(self, request, client_address):
        """Clients that hang up are no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        own = self.server
        path = self.path.partition("?")[0]
        own.asked.append((self.path, self.headers["Range"]))
        own.authorization.append(self.headers["Authorization"])
        if own.script.get(path):
            return own.script[path].pop(0)(self)
        return self.answer(own.files.get(path))

    def answer(self, data: bytes | None) -> None:
        if data is None:
            return self.say(404, b"nothing here")
        headers = {"Content-Type": "text/html" if self.path.partition("?")[0].endswith("/") else "image/jpeg"}
        if tag := self.server.tags.get(self.path.partition("?")[0]):
            headers["ETag"] = tag
        if not (asked := self.headers["Range"]):
            return self.say(200, data, **headers)
        start, end = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        if start >= len(data):
            return self.say(416)
        part = data[start : end + 1]
        return self.say(206, part, **headers, **{"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"})

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)

    def whole(self) -> bytes:
        return self.server.files[self.path.partition("?")[0]]


def status(code: int, **headers: str):
    return lambda handler: handler.say(code, b"no", **headers)


def cut(handler: Handler) -> None:
    """Half a body, then the connection ends."""
    handler.say(200, handler.whole()[:-5], **{"Content-Length": str(len(handler.whole()))})
    handler.close_connection = True


def drop(handler: Handler) -> None:
    """No answer at all."""
    handler.close_connection = True


def stall(handler: Handler) -> None:
    """Half a body, then nothing, the connection open."""
    handler.say(200, handler.whole()[:-5], **{"Content-Length": str(len(handler.whole()))})
    handler.server.over.wait(60)
    handler.close_connection = True


def noise(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    handler.close_connection = True


@pytest.fixture
def server():
    own = Server()
    thread = threading.Thread(target=own.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield own
    own.over.set()
    own.shutdown()
    own.server_close()
    thread.join()


@pytest.fixture
def photo(server) -> str:
    """The path of a photo on the server, and the quick store that reads it."""
    server.files["/p/a.jpg"] = some_bytes("a", 10_000)
    return "/p/a.jpg"


def quick(server: Server, **options) -> HttpStore:
    return HttpStore(f"{server.url}/p", **{"keys": ["a.jpg"], "retries": 2, "timeout_s": 5.0, **options})


# Keys.


def test_an_http_store_gives_what_the_folder_gives(folder, served):
    store, oracle = HttpStore(served), FolderStore(folder)
    assert list(store.keys()) == oracle.keys() == sorted(KEYS)
    assert read_all(store) == read_all(oracle)
    assert len(store) == len(KEYS)
    assert isinstance(store, Store)
    assert repr(store) == f"HttpStore({served!r}, {len(KEYS)} images)"


@pytest.mark.parametrize("below", ["dog", "dog/", "Größe", "caf%E9", "v1.0"])
def test_a_folder_of_a_server(folder, served, below):
    oracle = FolderStore(
        folder / os.fsdecode(unquote(below, errors="surrogateescape").encode("utf-8", "surrogateescape"))
    )
    store = HttpStore(served + (below if "%" in below else quote(below)))
    assert list(store.keys()) == oracle.keys()
    assert read_all(store) == read_all(oracle)
    if below == "Größe":
        assert list(HttpStore(served + below).keys()) == oracle.keys()


def test_pythons_own_server(folder):
    """Its listings name folders with a slash, and it answers no range requests."""
    handler = lambda *args: QuietFolder(*args, directory=folder)  # noqa: E731
    with serving(handler) as port:
        store, oracle = HttpStore(f"http://127.0.0.1:{port}"), FolderStore(folder)
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
    store = quick(server, keys=None)
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
    assert list(quick(server, keys=None).keys()) == ["a.jpg"]


def test_keys_that_are_given(server, photo):
    store = quick(server, keys=(key for key in ("b.jpg", "a.jpg")))
    assert list(store.keys()) == ["a.jpg", "b.jpg"]
    assert server.asked == []
    assert store.read("a.jpg") == server.files[photo]


LISTING = """
<html><head><link href="style.jpg"></head><body>
<a href="../">up</a> <a href="/">top</a> <a href="/other/x.jpg">elsewhere</a> <a href="/p">here</a> <a href="./">.</a>
<a href="?C=N;O=D">sort</a> <a href="#top">top</a> <a name="anchor">none</a> <a href>none</a> <a href="">none</a>
<a href="http://other.host/p/foreign.jpg">foreign</a> <a href="//other.host/p/foreign.jpg">foreign</a>
<a href="mailto:a@b.jpg">mail</a> <a href="javascript:void(0).jpg">code</a> <a href="ftp://127.0.0.1/p/f.jpg">ftp</a>
<a href="plain.jpg">1</a> <A HREF='single.jpg'>2</A> <a class=x href=bare.jpg>3</a> <a href="plain.jpg">again</a>
<a href="/p/absolute.jpg">4</a> <a href="HOST/p/full.jpg">5</a> <a href="a%20b.jpg">6</a>
<a href="a&amp;b.jpg?x=1#y">7</a> <a href="/%70/encoded.jpg">8</a>
<a href="sub/">folder</a> <a href="bare">folder</a> <a href="notes.txt">text</a> <a href="LICENSE">text</a>
<a href="http://[bad">bad</a> <a href="//127.0.0.1">out</a> <a href="%2e%2e/escape.jpg">out</a>
<a href="sub/../../p/inside.jpg">in</a> <a href=".hidden.jpg">hidden</a> <a href=".cache/">hidden</a>
</body></html>
"""


def test_links_of_a_listing(server):
    server.files["/p/"] = LISTING.replace("HOST", server.url).encode()
    server.files["/p/sub/"] = (
        b'<a href="../">up</a><a href="one.jpg">1</a><a href="deep/">2</a><a href="../sub/">here</a>'
    )
    server.files["/p/sub/deep/"] = b'<a href="two.png">2</a><a href="/p/">top</a>'
    server.files["/p/bare/"] = b'<a href="three.webp">3</a>'
    assert list(quick(server, keys=None).keys()) == sorted([
        "plain.jpg", "single.jpg", "bare.jpg", "absolute.jpg", "full.jpg", "a b.jpg", "a&b.jpg", "inside.jpg",
        "encoded.jpg",
        "sub/one.jpg", "sub/deep/two.png", "bare/three.webp",
    ])  # fmt: skip
    asked = [path for path, _ in server.asked]
    assert len(asked) == len(set(asked))
    assert all(path.startswith("/p/") for path in asked)


def test_a_link_back_ends(server):
    server.files["/p/"] = b'<a href="loop/">1</a><a href="a.jpg">a</a>'
    server.files["/p/loop/"] = (
        b'<a href="/p/">1</a><a href="/p/loop">2</a><a href="../loop/">3</a><a href="b.jpg">b</a>'
    )
    assert list(quick(server, keys=None).keys()) == ["a.jpg", "loop/b.jpg"]
    assert len(server.asked) < 6


def test_folders_without_end_are_an_error(server, monkeypatch):
    """Each page leads one folder deeper, as a link to its own folder makes it."""
    monkeypatch.setattr(
        Handler, "answer", lambda self, data: self.say(200, b'<a href="x/">x</a>', Content_Type="text/html")
    )
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:\d+/p/.* without end.* pass keys="):
        quick(server, keys=None).keys()
    assert len(server.asked) < 200


def test_a_folder_that_cannot_be_listed_is_an_error(server):
    """Half the keys would be worse than none."""
    server.files["/p/"] = b'<a href="a.jpg">a</a><a href="sub/">sub</a>'
    server.script["/p/sub/"] = [status(403)]
    with pytest.raises(OSError, match=r"/p/sub/: access denied \(403\)"):
        quick(server, keys=None).keys()


@pytest.mark.parametrize("page", [None, b"", b"no links here", b'<a href="notes.txt">x</a>', b"\xff\xfe\x00"])
def test_where_nothing_is_listed(server, page):
    if page is not None:
        server.files["/p/"] = page
    with pytest.raises(FileNotFoundError, match=r"http://127\.0\.0\.1:\d+/p/ lists no images: pass keys="):
        quick(server, keys=None).keys()


@pytest.mark.parametrize("url", ["ftp://a/b", "a/b", "http://", "http:/a/b", "s3://a", ""])
def test_what_is_no_address(url):
    with pytest.raises(ValueError, match="not an HTTP URL"):
        HttpStore(url)


def test_a_tar_is_for_tarstore():
    with pytest.raises(ValueError, match=r"http://a/b\.tar is a tar: open it with TarStore"):
        HttpStore("http://me:secret@a/b.tar?key=secret")


# Reading.


@pytest.mark.parametrize(
    "key", ["no.jpg", "", "cat/no.jpg", "cat/", "/top.jpg", "../top.jpg", "cat/../top.jpg", "\ud800.jpg"]
)
def test_unknown_keys(served, key):
    with pytest.raises(KeyError) as failure:
        HttpStore(served).read(key)
    assert repr(key) in failure.value.args[0]
    assert served in failure.value.args[0]


def test_connections_are_kept(server, photo):
    store = quick(server)
    for _ in range(20):
        assert store.read("a.jpg") == server.files[photo]
    with pytest.raises(KeyError):
        store.read("no.jpg")
    store.read("a.jpg")
    assert (len(server.asked), server.connections) == (22, 1)


def test_threads_have_connections_of_their_own(server, photo):
    store = quick(server, num_connections=3)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(store.read, ["a.jpg"] * 100)) == {server.files[photo]}
    assert 1 <= server.connections <= 3


def test_a_connection_that_the_server_closed_is_opened_again(server, photo):
    store = quick(server, retries=0)

    def last(handler):
        handler.answer(handler.whole())
        handler.close_connection = True

    for _ in range(3):
        server.script[photo] = [last]
        store.read("a.jpg")
        time.sleep(0.05)  # until it has reached this end
    assert store.read("a.jpg") == server.files[photo]


PASSING = {
    "500": status(500), "502": status(502), "503": status(503), "504": status(504), "429": status(429, Retry_After="0"),
    "408": status(408), "cut": cut, "dropped": drop, "noise": noise,
}  # fmt: skip


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_tried_again(server, photo, fault):
    server.script[photo] = [PASSING[fault]] * 2
    assert quick(server).read("a.jpg") == server.files[photo]
    assert len(server.asked) == 3


@pytest.mark.parametrize("fault", PASSING)
def test_tries_end(server, photo, fault):
    server.script[photo] = [PASSING[fault]] * 9
    with pytest.raises(
        OSError, match=r"/p/a\.jpg gave no complete answer in 3 tries \(\w+\): check the server"
    ) as failure:
        quick(server).read("a.jpg")
    assert server.url in str(failure.value)
    assert len(server.asked) == 3


def test_a_stalled_body_is_given_up(server, photo):
    server.script[photo] = [stall]
    assert quick(server, timeout_s=0.3).read("a.jpg") == server.files[photo]
    server.script[photo] = [stall] * 9
    with pytest.raises(OSError, match=r"gave no complete answer in 2 tries \(ReadTimeoutError\)"):
        quick(server, timeout_s=0.2, retries=1).read("a.jpg")


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(OSError, match=rf"http://127\.0\.0\.1:{port}/a\.jpg gave no complete answer in 2 tries"):
        HttpStore(f"http://127.0.0.1:{port}", retries=1).read("a.jpg")


@pytest.mark.parametrize(("retry_after", "longest"), [("1000000", 10), ("Fri, 31 Dec 2100 23:59:59 GMT", 10), ("2", 2)])
def test_waits_are_bounded(server, photo, monkeypatch, retry_after, longest):
    waits = []
    with monkeypatch.context() as patch:
        patch.setattr("urllib3.util.retry.time.sleep", waits.append)
        server.script[photo] = [status(503, Retry_After=retry_after)] * 2
        assert quick(server).read("a.jpg") == server.files[photo]
    assert waits == [longest] * 2


def test_waits_grow_and_are_bounded(server, photo, monkeypatch):
    waits = []
    with monkeypatch.context() as patch:
        patch.setattr("urllib3.util.retry.time.sleep", waits.append)
        server.script[photo] = [status(500)] * 12
        quick(server, retries=12).read("a.jpg")
    assert len(waits) >= 10
    assert max(waits) == 10
    assert all(later > earlier for earlier, later in zip(waits, waits[2:], strict=False) if earlier < 10)


def test_an_answer_that_cannot_be_right_is_an_error(server, photo):
    for code, said in ((400, "answered 400"), (410, "answered 410"), (501, "answered 501"), (204, "answered 204")):
        server.script[photo] = [status(code) if code != 204 else lambda handler: handler.say(204)]
        with pytest.raises(OSError, match=rf"/p/a\.jpg {said}"):
            quick(server).read("a.jpg")
    for code in (401, 403):
        server.script[photo] = [status(code)]
        with pytest.raises(OSError, match=rf"/p/a\.jpg: access denied \({code}\); check the credentials"):
            quick(server).read("a.jpg")
    assert len(server.asked) == 6  # none was tried again


def test_redirects_are_followed(server, photo):
    server.files["/elsewhere/b.jpg"] = b"moved"
    server.script[photo] = [status(302, Location="/elsewhere/b.jpg")]
    assert quick(server).read("a.jpg") == b"moved"
    server.script[photo] = [status(302, Location=photo)] * 9
    with pytest.raises(OSError, match=r"/p/a\.jpg gave no complete answer in 3 tries"):
        quick(server).read("a.jpg")


# What must not be told.

SECRETS = ("pa55word", "s1gnature", "fr4gment")


def told(function, *arguments) -> str:
    """All that a failure shows, if there is one."""
    try:
        function(*arguments)
    except (KeyError, OSError, ValueError) as error:
        return "".join(traceback.format_exception(error)) + repr(error)
    return ""


def secrets_in(texts: list[str]) -> list[tuple[str, str]]:
    return [(secret, text) for secret in SECRETS for text in texts if secret in text]


@pytest.mark.parametrize("fault", [status(500), status(403), status(400), cut, drop, noise, None])
def test_secrets_are_not_told(server, photo, caplog, fault):
    """In no message, representation or log; but sent they are, where they belong."""
    caplog.set_level(logging.INFO)
    url = server.url.replace("//", "//me:pa55word@")
    store = HttpStore(f"{url}/p?sig=s1gnature#fr4gment", keys=["a.jpg", "b.jpg"], retries=1)
    server.script[photo] = [fault] * 2 if fault else []
    server.script["/p/b.jpg"] = [status(302, Location=f"{server.url}/p/c.jpg?sig=s1gnature")]
    texts = [repr(store), str(store), repr(pickle.loads(pickle.dumps(store))), repr(store._client)]
    texts += [told(store.read, key) for key in ("a.jpg", "b.jpg", "no.jpg", "../no.jpg")]
    texts.append(told(HttpStore(f"{url}/q?sig=s1gnature#fr4gment", retries=1).keys))
    assert sum(map(bool, texts)) == 8 + (fault is not None)
    assert secrets_in([*texts, caplog.text]) == []
    assert server.asked[0][0] == "/p/a.jpg?sig=s1gnature"
    assert server.authorization[0] == "Basic bWU6cGE1NXdvcmQ="


def test_secrets_are_not_told_of_addresses_that_are_none():
    texts = [told(make, "gopher://me:pa55word@host/x?sig=s1gnature#fr4gment") for make in (HttpStore, open_store)]
    assert all(texts)
    assert secrets_in(texts) == []


def test_credentials_do_not_go_to_other_hosts(server, photo):
    other = server.url.replace("127.0.0.1", "localhost")
    server.files["/elsewhere/b.jpg"] = b"moved"
    server.script[photo] = [status(302, Location=f"{other}/elsewhere/b.jpg")]
    url = server.url.replace("//", "//me:pa55word@")
    assert HttpStore(f"{url}/p", keys=["a.jpg"]).read("a.jpg") == b"moved"
    assert [bool(sent) for sent in server.authorization] == [True, False]


# Processes.


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_in_other_processes(folder, tar, served, start_method):
    with serve_folder(tar.parent) as url:
        stores = [HttpStore(served), HttpStore(served), TarStore(url + tar.name), TarStore(url + tar.name)]
        for store in stores[::2]:
            read_all(store)  # the others are used for the first time there
        expected = read_all(FolderStore(folder))
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


# Tars by range requests.


@pytest.fixture
def remote(server, tar) -> TarStore:
    server.files["/t/a.tar"] = tar.read_bytes()
    server.tags["/t/a.tar"] = '"1"'
    return TarStore(f"{server.url}/t/a.tar")


def test_a_tar_behind_http(folder, remote, server):
    oracle = FolderStore(folder)
    assert list(remote.keys()) == oracle.keys()
    assert read_all(remote) == read_all(oracle)
    assert remote.sizes().tolist() == oracle.sizes().tolist()
    assert remote.read("./notes.txt") == (folder / "notes.txt").read_bytes()
    assert repr(remote) == f"TarStore('a.tar', mode='index', {len(KEYS)} images)"
    assert all(asked for _, asked in server.asked)
    assert server.connections == 1


def test_headers_are_fetched_many_at_a_time(remote, server):
    remote.keys()
    assert len(server.asked) < 8


def test_a_read_is_one_request_for_its_bytes(remote, server, tar):
    remote.keys()
    server.asked.clear()
    data = remote.read("dog/d.WebP")
    offset = tar.read_bytes().index(data)
    assert server.asked == [("/t/a.tar", f"bytes={offset}-{offset + len(data) - 1}")]
    server.asked.clear()
    assert remote.read("top.jpg") == b""
    assert server.asked == []


def test_the_index_is_kept_at_home(remote, server, tmp_path):
    remote.keys()
    (stored,) = (tmp_path / "home").rglob("*" + SUFFIX)
    server.asked.clear()
    TarStore(f"{server.url}/t/a.tar").keys()
    assert server.asked == [("/t/a.tar", "bytes=0-0")]
    server.tags["/t/a.tar"] = '"2"'
    TarStore(f"{server.url}/t/a.tar").keys()
    assert len(server.asked) > 2
    assert [stored] == list((tmp_path / "home").rglob("*" + SUFFIX))


def test_without_a_version_no_index_is_kept(remote, server, tmp_path):
    """Another file of the same size may lie there next time."""
    server.tags.clear()
    remote.keys()
    assert list((tmp_path / "home").rglob("*" + SUFFIX)) == []
    assert read_all(remote)


def test_a_tar_that_changes_on_the_server(remote, server):
    remote.read("dog/d.WebP")
    server.tags["/t/a.tar"] = '"2"'
    with pytest.raises(OSError, match=r"/t/a\.tar changed on the server: open it again"):
        remote.read("dog/d.WebP")


def test_a_remote_tar_that_is_cut(remote, server):
    remote.keys()
    server.files["/t/a.tar"] = server.files["/t/a.tar"][:3000]
    for key in KEYS[1:]:
        with pytest.raises((TarError, OSError), match=r"/t/a\.tar"):
            remote.read(key)
    server.tags["/t/a.tar"] = '"2"'
    with pytest.raises(TarError, match=r"/t/a\.tar is cut or damaged.*last whole member"):
        TarStore(f"{server.url}/t/a.tar").keys()


@pytest.mark.parametrize("fault", [status(500), status(503), drop, noise])
def test_faults_within_a_tar_pass(folder, remote, server, fault):
    server.script["/t/a.tar"] = [fault, fault]
    assert len(remote.keys()) == len(KEYS)
    server.script["/t/a.tar"] = [fault, fault]
    assert remote.read("dog/d.WebP") == (folder / "dog/d.WebP").read_bytes()


def endless(handler: Handler) -> None:
    """A server without range requests sends the whole file: here a very long one."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(10**12))
    handler.end_headers()
    while not handler.server.over.is_set():
        handler.wfile.write(bytes(1 << 20))
        handler.server.sent += 1 << 20


def test_a_server_without_range_requests(remote, server):
    server.script["/t/a.tar"] = [endless] * 9
    with pytest.raises(OSError, match=r"/t/a\.tar: the server does not support range requests; download"):
        remote.keys()
    assert server.sent < 100 << 20  # and it was not fetched in whole first


@pytest.mark.parametrize(
    "said",
    [{}, {"Content_Range": "bytes 0-0/*"}, {"Content_Range": "bytes 7-7/10000"}, {"Content_Range": "items 0-0/9"}],
)
def test_ranges_that_cannot_be_right(remote, server, said):
    server.script["/t/a.tar"] = [lambda handler: handler.say(206, b"x", **said)]
    with pytest.raises(OSError, match=r"/t/a\.tar: the server does not support range requests"):
        remote.keys()


def test_other_bytes_than_were_asked_for(remote, server):
    remote.keys()
    server.script["/t/a.tar"] = [
        lambda handler: handler.say(206, bytes(3000), Content_Range="bytes 0-2999/999999", ETag='"1"')
    ]
    with pytest.raises(OSError, match=r"/t/a\.tar"):
        remote.read("dog/d.WebP")


def short_range(handler: Handler) -> None:
    """Half of what was asked for, and a header that says so: a server may."""
    first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"]).groups())
    middle = (first + last) // 2
    handler.say(206, bytes(middle + 1 - first), **{"Content-Range": f"bytes {first}-{middle}/{10**9}"})


def test_a_range_that_is_answered_in_part_is_an_error(server):
    server.script["/a.bin"] = [short_range]
    with pytest.raises(OSError, match=r"a\.bin: the server sent 50 bytes instead of the 100 requested: run again"):
        HttpBlob(f"{server.url}/a.bin").read_at(1000, 100)


class FailingFilesystem:
    """An object store's client that raises its own classes."""

    def __init__(self, error: Exception | None = None, data: bytes = b""):
        self.error, self.data = error, data

    def cat_file(self, path, start=None, end=None):
        if self.error:
            raise self.error
        return self.data

    def find(self, path):
        raise self.error

    def info(self, path):
        if self.error:
            raise self.error
        return {"size": 100}

    def invalidate_cache(self, path):
        pass


class ClientError(Exception):
    """As botocore's and aiohttp's: no OSError."""


CLIENTS_ERRORS = [
    (ClientError("http://user:secret@host/a?signature"), r"no complete answer \(ClientError\): check the server"),
    (OSError(121, "Internal Server Error"), "no complete answer \\(Internal Server Error\\): check the server"),
    (PermissionError("Access Denied"), "access denied; check the credentials"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said"), CLIENTS_ERRORS)
def test_an_object_stores_own_errors_name_the_object(monkeypatch, error, said):
    monkeypatch.setattr(fsspec_client, "_open_filesystem", lambda *given: (FailingFilesystem(error), "bucket/set"))
    store, blob = ObjectStore("s3://bucket/set"), ObjectBlob("s3://bucket/set/a.tar")
    calls = {"set/a.jpg": lambda: store.read("a.jpg"), "set": store.keys, "set/a.tar": blob.fingerprint}
    for name, call in calls.items():
        with pytest.raises(OSError, match=f"s3://bucket/{name}:? .*{said}") as failure:
            call()
        assert "secret" not in str(failure.value)
        assert failure.value.__suppress_context__


@pytest.mark.parametrize("n_bytes", [19, 21])
def test_an_object_of_which_too_much_or_too_little_comes_is_an_error(monkeypatch, n_bytes):
    monkeypatch.setattr(
        fsspec_client, "_open_filesystem", lambda *given: (FailingFilesystem(data=bytes(n_bytes)), "bucket/a.tar")
    )
    blob = ObjectBlob("s3://bucket/a.tar")
    with pytest.raises(OSError, match=rf"s3://bucket/a\.tar: the server sent {n_bytes} bytes instead of the 20"):
        blob.read_at(80, 30)
    assert blob.read_at(100, 30) == b""


def test_places_without_a_tar(server, tar):
    server.files.update({"/empty.tar": b"", "/page.tar": b"<html>login</html>", "/x.tgz": b"\x1f\x8b" + bytes(600)})
    server.tags.update(dict.fromkeys(server.files, '"1"'))
    with pytest.raises(FileNotFoundError, match=r"/no\.tar does not exist"):
        TarStore(f"{server.url}/no.tar").keys()
    with pytest.raises(TarError, match=r"/empty\.tar is empty"):
        TarStore(f"{server.url}/empty.tar").keys()
    with pytest.raises(TarError, match=r"/page\.tar is not a tar"):
        TarStore(f"{server.url}/page.tar").keys()
    with pytest.raises(
        TarError, match=r"/x\.tgz is compressed \(gzip\).*Download and convert it: python -m labkit convert x\.tgz "
    ):
        open_store(f"{server.url}/x.tgz").keys()


def test_secrets_of_a_tar_are_not_told(server, tar, caplog):
    caplog.set_level(logging.INFO)
    server.files["/t/a.tar"] = tar.read_bytes()
    store = TarStore(server.url.replace("//", "//me:pa55word@") + "/t/a.tar?sig=s1gnature")
    texts = [repr(store), store.name]
    server.script["/t/a.tar"] = [status(403)]
    texts += [told(store.read, "dog/d.WebP"), told(store.read, "no.jpg")]
    server.script["/t/a.tar"] = [status(400)]
    texts.append(told(store.read, "dog/d.WebP"))
    assert all(texts)
    assert secrets_in([*texts, caplog.text]) == []


# The folder server.


def fetch(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def raw_get(url: str, path: str) -> bytes:
    """A path as it stands, which other clients would tidy."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_the_folder_server_answers_ranges(folder, served):
    data = (folder / "dog/d.WebP").read_bytes()
    assert fetch(served + "dog/d.WebP") == (200, data)
    assert fetch(served + "dog/d.WebP", Range="bytes=10-19") == (206, data[10:20])
    assert fetch(served + "dog/d.WebP", Range=f"bytes={len(data)}-")[0] == 416
    assert fetch(served + "no.jpg")[0] == 404


@pytest.mark.parametrize(
    "path", ["/../secret", "/%2e%2e/secret", "//{folder}/../secret", "/{folder}/../secret", "/cat/../../secret"]
)
def test_the_folder_server_does_not_leave_its_folder(folder, served, path):
    (folder.parent / "secret").write_text("pa55word")
    answer = raw_get(served, path.format(folder=str(folder)))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"pa55word" not in answer


def test_latency_is_waited_for(folder):
    with serve_folder(folder, latency_ms=150) as url:
        store = HttpStore(url, keys=["dog/d.WebP"])
        start = time.perf_counter()
        assert store.read("dog/d.WebP") == (folder / "dog/d.WebP").read_bytes()
        assert time.perf_counter() - start >= 0.15


def listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def test_the_server_ends_with_its_block(folder):
    urls = []

    def failing() -> None:
        with serve_folder(folder) as url:
            urls.append(url)
            assert listens(url)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not listens(urls[0])


def sleep_long() -> None:
    time.sleep(300)


def test_the_server_ends_though_a_worker_lives(folder):
    """A forked worker has a copy of the server's pipe."""
    with serve_folder(folder) as url:
        worker = multiprocessing.get_context("fork").Process(target=sleep_long, daemon=True)
        worker.start()
    assert not listens(url)
    worker.kill()
    worker.join()


ABANDONED = """
import os, signal, sys
from labkit import serve_folder
with serve_folder(sys.argv[1]) as url:
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_server_ends_when_its_process_is_killed(folder):
    parent = subprocess.run([sys.executable, "-c", ABANDONED, folder], stdout=subprocess.PIPE, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    url = parent.stdout.strip()
    assert url.startswith("http://127.0.0.1:")
    for _ in range(200):
        if not listens(url):
            break
        time.sleep(0.1)
    assert not listens(url)


def test_a_folder_to_serve_must_be_one(folder):
    with pytest.raises(FileNotFoundError, match="no is not a folder"), serve_folder(folder / "no"):
        pass


# Object storage.


@pytest.fixture(scope="module")
def s3(folder, tar, tmp_path_factory):
    """Options for a server with the folder under `photos/set`, and in its neighbour, a folder of tars."""
    bucket, tars = tmp_path_factory.mktemp("bucket"), tmp_path_factory.mktemp("tars")
    for name in ("set", "set2"):
        for path in folder.rglob("*"):
            if path.is_file() and path.name.isprintable() and "\\" not in path.name and path.stat().st_size:
                (bucket / name / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                (bucket / name / path.relative_to(folder)).write_bytes(path.read_bytes())
    (tars / "a.tar").write_bytes(tar.read_bytes())
    (tars / "packed.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    Image.fromarray(np.zeros((4, 5, 3), np.uint8)).save(tars / "black.png")
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    with serve_s3({"photos": bucket, "tars": tars}) as options:
        yield options, bucket


def in_memory(folder: Path) -> str:
    place = f"memory://{uuid.uuid4()}/set"
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            fsspec.filesystem("memory").pipe_file(f"{place}/{name}", path.read_bytes())
            fsspec.filesystem("memory").pipe_file(f"{place}2/{name}", b"another folder")
    return place


def test_an_object_store_gives_what_the_folder_gives(folder):
    place = in_memory(folder)
    oracle = FolderStore(folder)
    for url in (place, place + "/", f"file://{folder}"):
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
def test_unknown_objects(folder, s3, key):
    options, _ = s3
    for store in (
        ObjectStore("s3://photos/set", **options), ObjectStore("s3://photos", **options),
        ObjectStore(in_memory(folder)), ObjectStore(f"file://{folder}"),
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


def test_a_tar_in_s3(folder, s3):
    options, _ = s3
    store, oracle = TarStore("s3://tars/a.tar", **options), FolderStore(folder)
    assert list(store.keys()) == oracle.keys()
    assert read_all(store) == read_all(oracle)
    assert store.sizes().tolist() == oracle.sizes().tolist()
    with pytest.raises(FileNotFoundError):
        TarStore("s3://tars/no.tar", **options).keys()
    with pytest.raises(TarError, match=r"s3://tars/packed\.tar is compressed \(gzip\)"):
        TarStore("s3://tars/packed.tar", **options).keys()


def test_the_index_of_an_object_is_kept_until_it_changes(s3, tar, tmp_path, monkeypatch):
    from labkit.data.tar import index as tar_index

    options, _ = s3
    built = []
    monkeypatch.setattr(
        tar_index, "build_index", lambda blob, build=tar_index.build_index: built.append(1) or build(blob)
    )
    filesystem = fsspec.filesystem("s3", **options)
    filesystem.pipe_file("tars/b.tar", tar.read_bytes())
    filesystem.ls("tars")  # a listing that s3fs will remember
    for _ in range(2):
        assert len(TarStore("s3://tars/b.tar", **options).keys()) == len(KEYS)
    assert len(built) == 1
    with tarfile.open(tmp_path / "b.tar", "w") as changed:
        changed.add(tar, "other.jpg")
    elsewhere = fsspec.filesystem("s3", **options, skip_instance_cache=True)  # another process, say
    elsewhere.pipe_file("tars/b.tar", (tmp_path / "b.tar").read_bytes())
    assert list(TarStore("s3://tars/b.tar", **options).keys()) == ["other.jpg"]
    assert len(built) == 2


def test_a_tar_in_memory(folder, tar):
    url = f"memory://{uuid.uuid4()}/a.tar"
    fsspec.filesystem("memory").pipe_file(url, tar.read_bytes())
    assert read_all(TarStore(url)) == read_all(FolderStore(folder))
    assert read_all(TarStore(f"file://{tar}")) == read_all(FolderStore(folder))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_s3_in_other_processes(s3, folder, start_method):
    options, bucket = s3
    objects, members = read_all(FolderStore(bucket / "set")), read_all(FolderStore(folder))
    stores = [ObjectStore("s3://photos/set", **options) for _ in range(2)]
    stores += [TarStore("s3://tars/a.tar", **options) for _ in range(2)]
    for store in stores[::2]:
        read_all(store)  # the others are used for the first time there
    expected = [objects, objects, members, members]
    assert in_children(start_method, read_each, (stores,), (stores,)) == [expected] * 2
    assert read_each(stores) == expected


def test_s3_in_a_loader(s3):
    options, _ = s3
    dataset = ImageDataset(ObjectStore("s3://tars", **options))
    config = LoaderConfig(batch_size=1, num_workers=2, pin_memory=False, persistent_workers=True)
    loader = make_loader(dataset, config)
    for _ in range(2):
        ((images, labels),) = loader
        assert images.shape == (1, 3, 4, 5)
        assert torch.equal(labels, torch.zeros(1, dtype=torch.int64))


def test_s3_in_threads(s3):
    options, bucket = s3
    store = ObjectStore("s3://photos/set", **options)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(store.read, store.keys())) == read_all(FolderStore(bucket / "set"))


def test_without_s3fs_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for use in (
        ObjectStore("s3://bucket/a").keys,
        lambda: ObjectStore("s3://bucket/a").read("b"),
        TarStore("s3://b/a.tar").keys,
    ):
        with pytest.raises(ImportError, match=r's3fs.*pip install -e "\.\[s3\]"'):
            use()


@pytest.mark.parametrize("module", ["moto.server", "s3fs"])
def test_without_moto_its_extra_is_named(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[test\]"'), serve_s3({"a": tmp_path}):
        pass


# Whatever the place.


def test_open_store_finds_the_kind(folder, served, s3, tar):
    options, bucket = s3
    with serve_folder(tar.parent) as url:
        for place, kind in (
            (str(folder), FolderStore), (folder, FolderStore), (str(tar), TarStore), (tar, TarStore),
            (served, HttpStore), (url + tar.name, TarStore), (f"file://{folder}", ObjectStore),
            (f"file://{tar}", TarStore), (in_memory(folder), ObjectStore),
        ):  # fmt: skip
            store = open_store(place)
            assert type(store) is kind
            assert list(store.keys()) == sorted(KEYS)
            assert store.read("dog/d.WebP") == (folder / "dog/d.WebP").read_bytes()
    assert list(open_store("s3://tars/a.tar", **options).keys()) == sorted(KEYS)
    assert list(open_store("s3://photos/set", **options).keys()) == FolderStore(bucket / "set").keys()
    assert open_blob(tar).read_at(0, 5) == open_blob(f"file://{tar}").read_at(0, 5)
