"""Images on servers: what is listed, asked for, retried, refused and told, of single files and of ranges of a tar."""

import logging
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import fsspec
import pytest

from labkit import FolderStore, HttpStore, ObjectStore, PixelStore, TarStore, course, open_store, write_shards
from labkit.data.remote import reads_ahead
from labkit.data.stores import ListedStore
from labkit.errors import StorageError, TarError
from tests.image_files import KEYS, read_all
from tests.scripted_server import Handler, ScriptedServer, cut, drop, noise, serve_script, stall, status
from tests.serving import QuietFolder, serving
from tests.tars import make_tar

pytestmark = pytest.mark.usefixtures("own_home")

# What an HttpStore lists.


def test_pythons_own_server_is_read(image_folder):
    """Its listings name folders with a slash, and it answers no range requests."""
    with serving(partial(QuietFolder, directory=image_folder)) as port:
        store, oracle = HttpStore(f"http://127.0.0.1:{port}"), FolderStore(image_folder)
        listed, utf8 = store.keys(), [key for key in KEYS if key.isprintable() or "\n" in key]
        assert [key for key in listed if key in utf8] == sorted(utf8)
        assert [store.read(key) for key in utf8] == [oracle.read(key) for key in utf8]
        for key in ("cat", "cat/", ""):  # a listing is no image
            with pytest.raises(KeyError):
                store.read(key)


LISTING = """
<html><head><link href="style.jpg"></head><body>
<a href="../">up</a> <a href="/">top</a> <a href="/other/x.jpg">elsewhere</a> <a href="/p">here</a> <a href="./">.</a>
<a href="?C=N;O=D">sort</a> <a href="#top">top</a> <a name="anchor">none</a> <a href>none</a> <a href="">none</a>
<a href="http://other.host/p/foreign.jpg">foreign</a> <a href="//other.host/p/foreign.jpg">foreign</a>
<a href="mailto:a@b.jpg">mail</a> <a href="javascript:void(0).jpg">code</a> <a href="ftp://127.0.0.1/p/f.jpg">ftp</a>
<a href="plain.jpg">1</a> <A HREF='single.jpg'>2</A> <a class=x href=bare.jpg>3</a> <a href="plain.jpg">again</a>
<a href="/p/absolute.jpg">4</a> <a href="HOST/p/full.jpg">5</a> <a href="a%20b.jpg">6</a>
<a href="a&amp;b.jpg?x=1#y">7</a> <a href="/%70/encoded.jpg">8</a>
<a href="sub/">folder</a> <a href="bare/">folder</a> <a href="notes.txt">text</a> <a href="LICENSE">text</a>
<a href="http://[bad">bad</a> <a href="//127.0.0.1">out</a> <a href="%2e%2e/escape.jpg">out</a>
<a href="sub/../../p/inside.jpg">in</a> <a href=".hidden.jpg">hidden</a> <a href=".cache/">hidden</a>
</body></html>
"""
BELOW = {
    "sub/": '<a href="../">up</a><a href="one.jpg">1</a><a href="deep/">2</a><a href="../sub/">here</a>',
    "sub/deep/": '<a href="two.png">2</a><a href="/p/">top</a><a href="/p/sub">2</a>',
    "bare/": '<a href="three.webp">3</a>',
}


def test_listing_pages_link_to_images_and_folders_below(server):
    """Each once, and no others."""
    server.files = {f"/p/{folder}": page.encode() for folder, page in BELOW.items()}
    server.files["/p/"] = LISTING.replace("HOST", server.url).encode()
    assert list(HttpStore(f"{server.url}/p").keys()) == sorted([
        "plain.jpg", "single.jpg", "bare.jpg", "absolute.jpg", "full.jpg", "a b.jpg", "a&b.jpg", "inside.jpg",
        "encoded.jpg", "sub/one.jpg", "sub/deep/two.png", "bare/three.webp",
    ])  # fmt: skip
    asked = [path for path, _ in server.asked]
    assert len(asked) == len(set(asked))
    assert all(path.startswith("/p/") for path in asked)


class Endless(Handler):
    """Each page leads one folder deeper, as a link to its own folder makes it."""

    def answer(self, data: bytes | None) -> None:
        self.say(200, b'<a href="x/">x</a>', Content_Type="text/html")


def test_folders_without_end_are_an_error():
    with serve_script(Endless) as server:
        with pytest.raises(OSError, match=r"http://127\.0\.0\.1:\d+/p/.* without end.* HttpStore\(url, keys="):
            HttpStore(f"{server.url}/p").keys()
        assert len(server.asked) < 200


def test_a_folder_that_cannot_be_listed_is_an_error(server):
    """Half the keys would be worse than none."""
    server.files["/p/"] = b'<a href="a.jpg">a</a><a href="sub/">sub</a>'
    server.script["/p/sub/"] = [status(403)]
    with pytest.raises(OSError, match=r"/p/sub/: access denied \(403\)"):
        HttpStore(f"{server.url}/p").keys()


OTHER_PROGRAMS = ["[]", "{", '{"photos": [{"name": "a"}]}', '{"photos": []}']


@pytest.mark.parametrize(
    ("manifest", "keys"),
    [
        ('{"photos": [{"key": "b/2.jpg", "width": 3}, {"key": "a/1.jpg"}]}', ["a/1.jpg", "b/2.jpg"]),
        *((manifest, ["page.jpg"]) for manifest in OTHER_PROGRAMS),
    ],
)
def test_a_manifest_of_ours_is_believed_and_asked_for_once(server, manifest, keys):
    server.files = {"/p/manifest.json": manifest.encode(), "/p/": b'<a href="page.jpg">a</a>', "/p/a.jpg": b"photo"}
    store = HttpStore(f"{server.url}/p")
    for _ in range(2):
        assert list(store.keys()) == keys
    assert [path for path, _ in server.asked] == ["/p/manifest.json", "/p/"][: 1 if "a/1.jpg" in keys else 2]
    server.asked.clear()
    given = HttpStore(f"{server.url}/p", keys=(key for key in ("b.jpg", "a.jpg")))
    assert list(given.keys()) == ["b.jpg", "a.jpg"]
    assert repr(given) == f"HttpStore('{server.url}/p/', 2 images)"
    assert server.asked == []
    assert given.read("a.jpg") == b"photo"


@pytest.mark.parametrize("page", [b"", b"no links here", b'<a href="notes.txt">x</a>', b"\xff\xfe\x00", 404, 410])
def test_where_nothing_is_listed_the_remedy_is_named(server, page):
    """What is advised can be done: `open_store` takes no keys."""
    server.files["/p/"], said = page, "lists no images: .*"
    if isinstance(page, int):
        server.script["/p/"], said = [status(page)] * 2, rf"does not exist \({page}\): check the URL.*"
    for opened in (HttpStore, open_store):
        with pytest.raises(FileNotFoundError, match=rf"{server.url}/p/ {said} HttpStore\(url, keys=\[\.\.\.\]\)"):
            opened(f"{server.url}/p").keys()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://a/b", "not an HTTP URL"),
        ("http:/a/b", "not an HTTP URL"),
        ("http://me:secret@a/b.TAR?key=secret", r"^http://a/b\.TAR is a tar: open it with TarStore"),
    ],
)
def test_what_is_no_address_of_a_folder_is_an_error(url, said):
    with pytest.raises(ValueError, match=said):
        HttpStore(url)


# Requests, and servers that fail in every way.

KEY, PATH = "a.jpg", "/p/a.jpg"
DATA = random.Random(0).randbytes(10_000)


@pytest.fixture
def photo(server) -> ScriptedServer:
    """A server with one photo."""
    server.files[PATH] = DATA
    return server


def make_get(photo: ScriptedServer, **options) -> Callable[[], bytes]:
    """Read the photo from a store that gives up soon."""
    store = HttpStore(f"{photo.url}/p", **{"retries": 2, "timeout_s": 5.0, **options})
    return lambda: store.read(KEY)


def test_connections_are_kept(photo):
    get = make_get(photo)
    assert [get() for _ in range(20)] == [DATA] * 20
    photo.script[PATH] = [status(404)]
    with pytest.raises(KeyError):
        get()
    get()
    assert (len(photo.asked), photo.connections) == (22, 1)


def test_a_connection_that_the_server_closed_is_opened_again(photo):
    get = make_get(photo, retries=0)

    def close_after(handler):
        handler.answer(handler.whole())
        handler.close_connection = True

    for _ in range(3):
        photo.script[PATH] = [close_after]
        get()
        assert photo.closed.acquire(timeout=20)
    assert get() == DATA


def read_together(server: ScriptedServer, path: str, read: Callable[[], bytes], n_at_once: int) -> set[bytes]:
    """What is read when the server answers only so many requests together."""
    barrier = threading.Barrier(n_at_once, timeout=20)
    server.script[path] = [lambda handler: barrier.wait() + 1 and handler.answer(handler.whole())] * (2 * n_at_once)
    with ThreadPoolExecutor(24) as pool:
        together = [pool.submit(read) for _ in range(2 * n_at_once)]
        return {future.result() for future in [*together, *(pool.submit(read) for _ in range(50))]}


@pytest.mark.parametrize(("allowed", "expected"), [(6, 6), (1, 3), (None, 3)])
def test_threads_have_connections_of_their_own_and_more_when_asked_for(photo, allowed, expected):
    store = HttpStore(f"{photo.url}/p", num_connections=3)
    if allowed:
        store.allow_requests(allowed)
    assert read_together(photo, PATH, lambda: store.read(KEY), expected) == {DATA}
    assert photo.connections == expected


TRANSIENT = [*map(status, (500, 503, 520, 408, 425)), status(429, Retry_After="0"), cut, drop, noise]


@pytest.mark.parametrize("fault", TRANSIENT)
def test_transient_faults_are_retried_a_number_of_times(photo, fault):
    photo.script[PATH] = [fault] * 2
    assert make_get(photo)() == DATA
    assert len(photo.asked) == 3
    photo.script[PATH] = [fault] * 9
    with pytest.raises(OSError, match=rf"{photo.url}{PATH} gave no complete answer in 3 tries \(\w+\): check"):
        make_get(photo)()
    assert len(photo.asked) == 6


def test_a_stalled_body_is_given_up(photo):
    photo.script[PATH] = [stall]
    assert make_get(photo, timeout_s=0.3)() == DATA
    assert len(photo.asked) == 2


@pytest.mark.parametrize(("retry_after", "longest"), [("1000000", 10), ("2", 2), ("soon", 0), (None, 0)])
def test_waits_are_what_a_server_asks_for_and_bounded(photo, monkeypatch, retry_after, longest):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    photo.script[PATH] = [status(503, **({"Retry_After": retry_after} if retry_after else {}))] * 12
    assert make_get(photo, retries=12)() == DATA
    assert waits == [longest] * 12 if longest else max(waits) == 10  # of its own, they grow


@pytest.mark.parametrize("code", [400, 501, 204, 401, 403])
def test_other_statuses_are_errors_at_once(photo, code):
    photo.script[PATH] = [lambda handler: handler.say(code)]
    said = rf": access denied \({code}\); check the credentials" if code in (401, 403) else f" answered {code}"
    with pytest.raises(OSError, match=PATH + said):
        make_get(photo)()
    assert len(photo.asked) == 1


def test_redirects_are_followed_and_credentials_do_not_go_to_other_hosts(photo, caplog):
    """Nor do they, or signatures, go into a log."""
    caplog.set_level(logging.INFO)
    photo.files["/elsewhere/b.jpg"] = b"moved"
    elsewhere = photo.url.replace("127.0.0.1", "localhost") + "/elsewhere/b.jpg?sig=s1gnature"
    photo.script[PATH] = [status(302, Location=place) for place in ("/elsewhere/b.jpg", elsewhere, *[PATH] * 9)]
    get = HttpStore(photo.url.replace("//", "//me:pa55word@") + "/p", retries=2).read
    for _ in range(2):
        assert get(KEY) == b"moved"
    assert [bool(sent) for sent in photo.authorization] == [True, True, True, False]
    with pytest.raises(OSError, match=f"{PATH} gave no complete answer in 3 tries"):
        get(KEY)
    assert "s1gnature" not in caplog.text
    assert "pa55word" not in caplog.text


# Ranges of a tar.

TAR = "/t/a.tar"
DOG = "dog/d.WebP"


@pytest.fixture
def remote(server, image_tar) -> TarStore:
    server.files[TAR] = image_tar.read_bytes()
    server.tags[TAR] = '"1"'
    return TarStore(f"{server.url}{TAR}")


def test_a_tar_is_listed_by_few_requests_and_a_read_is_one_for_its_bytes(image_folder, image_tar, remote, server):
    assert list(remote.keys()) == sorted(KEYS)
    assert len(server.asked) < 8  # one request fetches many headers
    assert all(asked for _, asked in server.asked)
    assert read_all(remote) == read_all(FolderStore(image_folder))
    assert remote.read("./notes.txt") == (image_folder / "notes.txt").read_bytes()
    assert repr(remote) == f"TarStore('a.tar', {len(KEYS)} images)"
    server.asked.clear()
    data = remote.read(DOG)
    offset = image_tar.read_bytes().index(data)
    assert server.asked == [(TAR, f"bytes={offset}-{offset + len(data) - 1}")]
    assert remote.read("top.jpg") == b""  # which needs none
    assert len(server.asked) == server.connections == 1


def test_headers_that_lie_far_apart_are_found_whatever_fails_meanwhile(server, tmp_path):
    files = {f"{size}.jpg": random.Random(size).randbytes(size) for size in (1, 1 << 20, 700, 3_000_000, 1 << 19, 5)}
    server.files[TAR] = make_tar(tmp_path / "a.tar", files).read_bytes()
    server.script[TAR] = [status(500), drop]
    store = TarStore(f"{server.url}{TAR}")
    assert list(store.keys()) == sorted(files)
    server.script[TAR] = [status(503), noise]
    assert {key: store.read(key) for key in files} == files


def test_members_are_asked_for_at_a_time(remote, server, image_folder):
    remote.allow_requests(12)
    remote.keys()
    assert read_together(server, TAR, lambda: remote.read(DOG), 12) == {(image_folder / DOG).read_bytes()}


def test_the_index_is_kept_at_home_until_the_tar_changes(remote, server, own_home):
    """Without a version none is kept: another file of the same size may lie there next time."""
    server.tags.clear()
    assert read_all(remote)
    assert not own_home.exists()
    kept = []
    for tag, is_kept in (('"1"', False), ('"1"', True), ('"2"', False), ('"2"', True)):
        server.tags[TAR] = tag
        server.asked.clear()
        TarStore(f"{server.url}{TAR}").keys()
        assert (server.asked == [(TAR, "bytes=0-0")]) == is_kept
        kept += [path for path in own_home.rglob("*") if path.is_file()]
    assert len(kept) == 4
    assert len(set(kept)) == 1


@pytest.mark.parametrize("code", [404, 410])
def test_a_tar_that_is_deleted_on_the_server_is_missing(remote, server, code):
    """While it is read, and before its first byte."""
    remote.read(DOG)
    server.script[TAR] = [status(code)] * 2
    for read in (lambda: remote.read(DOG), TarStore(f"{server.url}{TAR}").keys):
        with pytest.raises(FileNotFoundError, match=rf"{server.url}/t/a\.tar does not exist"):
            read()


def test_a_tar_that_is_cut_or_changes_on_the_server_is_an_error(remote, server):
    remote.keys()
    server.tags[TAR] = '"2"'
    with pytest.raises(OSError, match=r"/t/a\.tar changed on the server: open it again"):
        remote.read(DOG)
    server.files[TAR], server.tags[TAR] = server.files[TAR][:3000], '"1"'
    for key in KEYS[1:]:
        with pytest.raises((TarError, OSError), match=r"/t/a\.tar"):
            remote.read(key)
    server.tags[TAR] = '"3"'
    with pytest.raises(TarError, match=r"/t/a\.tar is cut or damaged.*last whole member"):
        TarStore(f"{server.url}{TAR}").keys()


def endless(handler: Handler) -> None:
    """A server without range requests sends the whole file: here a very long one."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(10**12))
    handler.end_headers()
    while not handler.server.over.is_set():
        handler.wfile.write(bytes(1 << 20))
        handler.server.sent += 1 << 20


def test_a_server_without_range_requests_is_refused_at_once(remote, server):
    server.script[TAR] = [endless] * 9
    with pytest.raises(OSError, match=r"/t/a\.tar: the server does not support range requests; download"):
        remote.keys()
    assert server.sent < 100 << 20  # and it was not fetched in whole first


NO_RANGES = "the server does not support range requests"


@pytest.mark.parametrize(
    ("content_range", "n_bytes", "said"),
    [
        *((said, 1, NO_RANGES) for said in ("", "bytes 0-0/*", "bytes 7-7/10000", "items 0-0/9")),
        ("bytes 0-2999/999999", 3000, NO_RANGES),
        ("bytes {start}-{end}/999999", 50, r"the server sent 50 bytes instead of the \d+ requested: run again"),
    ],
)
def test_answers_other_than_the_range_that_was_asked_for_are_errors(remote, server, content_range, n_bytes, said):
    """A server may answer a part of it."""

    def answer(handler: Handler) -> None:
        start = int(re.search(r"\d+", handler.headers["Range"])[0])
        said = content_range.format(start=start, end=start + n_bytes - 1)
        handler.say(206, bytes(n_bytes), Content_Range=said, ETag='"1"')

    remote.keys()
    server.script[TAR] = [answer] * 2
    for use in (lambda: remote.read(DOG), TarStore(f"{server.url}{TAR}").names)[: 2 if n_bytes == 1 else 1]:
        with pytest.raises(OSError, match=rf"/t/a\.tar: {said}"):
            use()


@pytest.mark.parametrize(
    ("name", "data", "error", "said"),
    [
        ("no.tar", None, FileNotFoundError, "does not exist"),
        ("empty.tar", b"", TarError, "is not a tar"),
        (
            "x.tgz", b"\x1f\x8b" + bytes(600), TarError,
            r"is compressed \(gzip\).*Download and convert it: python -m labkit convert x\.tgz ",
        ),
    ],
)  # fmt: skip
def test_places_without_a_tar_are_told_apart(server, name, data, error, said):
    server.files[f"/{name}"], server.tags[f"/{name}"] = data, '"1"'
    with pytest.raises(error, match=rf"/{name} {said}"):
        open_store(f"{server.url}/{name}").keys()


# Object storage: other libraries' clients.

OBJECT = "/photos/set/a.jpg"


@pytest.mark.parametrize(("settings", "expected"), [({"read_timeout": 30}, 12), ({"max_pool_connections": 3}, 3)])
def test_an_object_is_one_request_and_as_many_go_together_as_allowed(server, settings, expected):
    """Not two, of which the first asks for its size. Botocore's own number is 10."""
    pytest.importorskip("s3fs")
    server.files[OBJECT] = b"photo"
    store = ObjectStore("s3://photos/set", endpoint_url=server.url, anon=True, config_kwargs=settings)
    store.allow_requests(12)
    assert store.read("a.jpg") == b"photo"
    assert [path for path, _ in server.asked] == [OBJECT]
    assert read_together(server, OBJECT, lambda: store.read("a.jpg"), expected) == {b"photo"}
    assert server.connections == expected


class ClientError(Exception):
    """Not an OSError, like those of botocore and aiohttp."""


class FailingFilesystem(fsspec.AbstractFileSystem):
    """An object store whose client raises errors of its own classes, or sends other bytes than were asked for."""

    protocol = "failing"
    cachable = False

    def cat_file(self, path, start=None, end=None, **options):
        if "error" in self.storage_options:
            raise self.storage_options["error"]
        return repr(self.storage_options).encode() if start is None else bytes(self.storage_options["n_bytes"])

    def info(self, path, **options):
        return {"size": len(self.cat_file(path)) and 100}

    find = info


fsspec.register_implementation("failing", FailingFilesystem, clobber=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClientError("http://user:secret@host/a?signature"), r"no complete answer \(ClientError\): check the server"),
        (OSError(121, "Internal Server Error"), r"no complete answer \(Internal Server Error\): check the server"),
        (PermissionError("Access Denied"), r"access denied \(Access Denied\); check the credentials"),
        (PermissionError("No such key; signature=secret."), r"access denied \(No such key; signature=\.\.\.\); check"),
    ],
)
def test_a_clients_own_errors_name_the_object_and_no_secret(error, said):
    store, tar = ObjectStore("failing://bucket/set", error=error), TarStore("failing://bucket/set/a.tar", error=error)
    calls = {"set/a.jpg": lambda: store.read("a.jpg"), "set": store.keys, "set/a.tar": tar.keys}
    for name, call in calls.items():
        with pytest.raises(OSError, match=f"failing://bucket/{name}:? .*{said}") as failure:
            call()
        assert "secret" not in str(failure.value)
        assert failure.value.__suppress_context__


@pytest.mark.parametrize("n_bytes", [99, 101])
def test_an_object_of_which_too_much_or_too_little_comes_is_an_error(n_bytes):
    said = rf"failing://bucket/a\.tar: the server sent {n_bytes} bytes instead of the 100 requested: run again"
    with pytest.raises(OSError, match=said):
        TarStore("failing://bucket/a.tar", n_bytes=n_bytes).keys()
    store = ObjectStore("failing://bucket", n_bytes=n_bytes)
    store.allow_requests(64)  # of which only S3's client is told
    assert store.read("a.jpg") == f"{{'n_bytes': {n_bytes}}}".encode()


class ListingFilesystem(fsspec.AbstractFileSystem):
    """An object store that tells the size of one of its two objects."""

    protocol = "listing"
    cachable = False

    sizes = ({"size": 7}, {}, {"size": 9})

    def find(self, path, **options):
        return {f"{path}/{letter}.jpg": about for letter, about in zip("abc", self.sizes, strict=False)}

    def cat_file(self, path, start=None, end=None, **options):
        return b"photo"


def test_the_sizes_of_objects_are_those_of_the_listing(monkeypatch):
    fsspec.register_implementation("listing", ListingFilesystem, clobber=True)
    store = ObjectStore("listing://bucket")
    assert store.sizes().tolist() == [7, 5, 9]
    monkeypatch.setattr(ListingFilesystem, "sizes", ({"size": 7}, {}))
    with pytest.raises(KeyError, match=r"'c\.jpg' is no longer under listing://bucket: open the store again"):
        store.sizes()


# What is read as a whole.


class Meeting(ListedStore):
    """Answers when as many requests as it has images are there together; refuses one of them."""

    def __init__(self, name, n_images):
        super().__init__(name)
        self._meeting, self._n_images = threading.Barrier(n_images, timeout=30), n_images

    def _list_keys(self):
        return [f"{number:02}.jpg" for number in range(self._n_images)]

    def read(self, key):
        self._meeting.wait()
        if key == "03.jpg":
            raise StorageError("03.jpg gave no answer")
        return key.encode()


def test_a_distant_store_is_read_ahead_and_in_order():
    store = Meeting("s3://bucket/photos", 32)
    read = dict(zip(store.keys(), reads_ahead(store, store.keys()), strict=True))
    with pytest.raises(StorageError, match=r"03\.jpg gave no answer"):
        read.pop("03.jpg")()
    assert [(key, one()) for key, one in read.items()] == [(key, key.encode()) for key in read]


def test_who_stops_reading_waits_for_no_more():
    asked = []

    class Counting(Meeting):
        def read(self, key):
            asked.append(key)
            return b""

    store = Counting("s3://bucket/photos", 500)
    with closing(reads_ahead(store, store.keys())) as reads:
        next(reads)()
    assert 1 <= len(asked) <= 32


@pytest.mark.parametrize("pack", [write_shards, PixelStore.build])
def test_what_is_packed_of_object_storage_is_that_of_its_folder(tmp_path, photo_set, pack):
    pytest.importorskip("s3fs")
    made = []
    with course.serve_s3({"photos": photo_set}) as options:
        for name, store in {"near": FolderStore(photo_set), "far": ObjectStore("s3://photos", **options)}.items():
            (tmp_path / name).mkdir()
            pack(store, tmp_path / name / "made", num_workers=1, progress=False)
            paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
            made.append({path.name: path.read_bytes() for path in paths})
    assert made[0] == made[1] != {}


@pytest.mark.parametrize("how", ["option", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_service_that_does_not_answer_is_named(monkeypatch, how):
    pytest.importorskip("s3fs")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    options = {"config_kwargs": {"retries": {"max_attempts": 0}}, "key": "k", "secret": "s"}
    if how == "option":
        options["endpoint_url"] = url.replace("127", "me:hu5h@127")
    else:
        monkeypatch.setenv(how, url)
    for call in (
        ObjectStore("s3://bucket/a", **options).keys,
        partial(ObjectStore("s3://bucket/a", **options).read, "b"),
    ):
        with pytest.raises(OSError, match=rf"^s3://bucket/a(/b)? at {url} gave no complete answer \(\w+\): check"):
            call()


def test_without_s3fs_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # fsspec has not looked for it under this name before
    store = ObjectStore("s3a://bucket/a")
    for use in (store.keys, lambda: store.read("b"), TarStore("s3a://b/a.tar").keys):
        with pytest.raises(ImportError, match=r's3fs.*pip install -e "\.\[s3\]"'):
            use()
