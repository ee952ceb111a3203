"""Range requests, as a tar needs them, to servers that answer them well, badly or not at all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit import FolderStore, TarStore, open_store
from labkit.course import SimulatedStore
from labkit.data.blobs import open_blob
from labkit.data.simulated_disks import Disk
from labkit.data.tar import SUFFIX
from labkit.errors import TarError
from tests.image_files import KEYS, read_all
from tests.scripted_server import Handler, drop, noise, status


@pytest.fixture
def remote(server, image_tar, own_home) -> TarStore:
    server.files["/t/a.tar"] = image_tar.read_bytes()
    server.tags["/t/a.tar"] = '"1"'
    return TarStore(f"{server.url}/t/a.tar")


def test_a_tar_behind_http(image_folder, remote, server):
    oracle = FolderStore(image_folder)
    assert list(remote.keys()) == oracle.keys()
    assert len(server.asked) < 8  # one request fetches many headers
    assert read_all(remote) == read_all(oracle)
    assert remote.sizes().tolist() == oracle.sizes().tolist()
    assert remote.read("./notes.txt") == (image_folder / "notes.txt").read_bytes()
    assert repr(remote) == f"TarStore('a.tar', {len(KEYS)} images)"
    assert all(asked for _, asked in server.asked)
    assert server.connections == 1


def test_a_read_is_one_request_for_its_bytes(remote, server, image_tar):
    remote.keys()
    server.asked.clear()
    data = remote.read("dog/d.WebP")
    offset = image_tar.read_bytes().index(data)
    assert server.asked == [("/t/a.tar", f"bytes={offset}-{offset + len(data) - 1}")]
    server.asked.clear()
    assert remote.read("top.jpg") == b""
    assert server.asked == []


def test_requests_at_a_time(remote, server):
    """Through a simulated disk, too."""
    key = "dog/d.WebP"
    expected, barrier = remote.read(key), threading.Barrier(12, timeout=20)
    server.script["/t/a.tar"] = [lambda handler: barrier.wait() + 1 and handler.answer(handler.whole())] * 12
    SimulatedStore(remote, Disk("no wait")).allow_requests(12)
    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(remote.read, [key] * 12)) == {expected}


def test_the_index_is_kept_at_home(remote, server, own_home):
    remote.keys()
    (stored,) = own_home.rglob("*" + SUFFIX)
    server.asked.clear()
    TarStore(f"{server.url}/t/a.tar").keys()
    assert server.asked == [("/t/a.tar", "bytes=0-0")]
    server.tags["/t/a.tar"] = '"2"'
    TarStore(f"{server.url}/t/a.tar").keys()
    assert len(server.asked) > 2
    assert [stored] == list(own_home.rglob("*" + SUFFIX))


def test_without_a_version_no_index_is_kept(remote, server, own_home):
    """Another file of the same size may lie there next time."""
    server.tags.clear()
    remote.keys()
    assert list(own_home.rglob("*" + SUFFIX)) == []
    assert read_all(remote)


def test_a_tar_that_changes_on_the_server(remote, server):
    remote.read("dog/d.WebP")
    server.tags["/t/a.tar"] = '"2"'
    with pytest.raises(OSError, match=r"/t/a\.tar changed on the server: open it again"):
        remote.read("dog/d.WebP")


@pytest.mark.parametrize("code", [404, 410])
def test_a_tar_that_is_deleted_on_the_server_is_missing(remote, server, code):
    """While it is read, and before its first byte."""
    remote.read("dog/d.WebP")
    server.script["/t/a.tar"] = [status(code)] * 2
    for read in (lambda: remote.read("dog/d.WebP"), TarStore(f"{server.url}/t/a.tar").keys):
        with pytest.raises(FileNotFoundError, match=rf"{server.url}/t/a\.tar does not exist"):
            read()


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
def test_faults_within_a_tar_pass(image_folder, remote, server, fault):
    server.script["/t/a.tar"] = [fault, fault]
    assert len(remote.keys()) == len(KEYS)
    server.script["/t/a.tar"] = [fault, fault]
    assert remote.read("dog/d.WebP") == (image_folder / "dog/d.WebP").read_bytes()


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


NO_RANGES = "the server does not support range requests"


@pytest.mark.parametrize(
    ("content_range", "n_bytes", "said"),
    [
        *((said, 1, NO_RANGES) for said in ("", "bytes 0-0/*", "bytes 7-7/10000", "items 0-0/9")),
        ("bytes 0-2999/999999", 3000, NO_RANGES),
        ("bytes 1000-1049/999999", 50, "the server sent 50 bytes instead of the 100 requested: run again"),
    ],
)
def test_answers_other_than_the_range_that_was_asked_for(server, content_range, n_bytes, said):
    """A server may answer a part of it."""
    blob = open_blob(f"{server.url}/a.bin")
    server.script["/a.bin"] = [lambda handler: handler.say(206, bytes(n_bytes), Content_Range=content_range)] * 2
    with pytest.raises(OSError, match=rf"/a\.bin: {said}"):
        blob.read_at(1000, 100)
    if n_bytes == 1:  # as if for the first byte
        with pytest.raises(OSError, match=rf"/a\.bin: {said}"):
            blob.fingerprint()


@pytest.mark.parametrize(
    ("name", "data", "error", "said"),
    [
        ("no.tar", None, FileNotFoundError, "does not exist"),
        ("empty.tar", b"", TarError, "is not a tar"),
        ("page.tar", b"<html>login</html>", TarError, "is not a tar"),
        (
            "x.tgz", b"\x1f\x8b" + bytes(600), TarError,
            r"is compressed \(gzip\).*Download and convert it: python -m labkit convert x\.tgz ",
        ),
    ],
)  # fmt: skip
def test_places_without_a_tar(server, name, data, error, said):
    server.files[f"/{name}"], server.tags[f"/{name}"] = data, '"1"'
    with pytest.raises(error, match=rf"/{name} {said}"):
        open_store(f"{server.url}/{name}").keys()
