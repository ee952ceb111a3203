"""Servers for experiments: what they serve, how late, and that they end."""

import contextlib
import multiprocessing
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import urllib3

from labkit import HttpStore, ObjectStore
from labkit.course import serve_folder, serve_s3


def connect(url: str) -> socket.socket:
    parts = urllib3.util.parse_url(url)
    return socket.create_connection((parts.host, parts.port), timeout=20)


def listens(url: str) -> bool:
    with contextlib.suppress(OSError), connect(url):
        return True
    return False


def raw_get(url: str, path: str) -> bytes:
    """A path as it stands, which other clients would tidy."""
    with connect(url) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


PHOTO = bytes(range(256)) * 40
LATENCY_MS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with one photo, beside a secret."""
    folder = tmp_path_factory.mktemp("served") / "set"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "a.jpg").write_bytes(PHOTO)
    (folder.parent / "secret").write_text("pa55word")
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with serve_folder(folder, latency_ms=LATENCY_MS) as url:
        yield url


@pytest.mark.parametrize(
    ("key", "asked", "status", "answered"),
    [
        ("cat/a.jpg", None, 200, PHOTO),
        ("cat/a.jpg", "10-19", 206, PHOTO[10:20]),
        ("cat/a.jpg", f"{len(PHOTO)}-", 416, None),
        ("no.jpg", None, 404, None),
    ],
)
def test_the_folder_server_answers_ranges(url, key, asked, status, answered):
    answer = urllib3.request("GET", url + key, headers={"Range": f"bytes={asked}"} if asked else {})
    assert answer.status == status
    assert answered is None or answer.data == answered


@pytest.mark.parametrize(
    "path", ["/../secret", "/%2e%2e/secret", "//{folder}/../secret", "/{folder}/../secret", "/cat/../../secret"]
)
def test_the_folder_server_does_not_leave_its_folder(folder, url, path):
    answer = raw_get(url, path.format(folder=folder))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"pa55word" not in answer


def test_the_folder_server_waits_before_each_answer(url):
    store = HttpStore(url, keys=["cat/a.jpg"])
    begin = time.monotonic()
    assert store.read("cat/a.jpg") == PHOTO
    assert time.monotonic() - begin >= LATENCY_MS / 1e3


@pytest.mark.slow
def test_the_s3_server_waits_before_each_answer(folder):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    with serve_s3({"photos": folder}, latency_ms=200) as options:
        begin = time.monotonic()
        assert ObjectStore("s3://photos", **options).read("cat/a.jpg") == PHOTO
        assert time.monotonic() - begin >= 0.2
    assert not listens(options["endpoint_url"])


def test_a_server_ends_with_its_block_though_a_worker_lives(folder):
    """A forked worker has a copy of the server's pipe."""
    with pytest.raises(ZeroDivisionError), serve_folder(folder) as url:  # noqa: PT012
        worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        worker.start()
        assert listens(url)
        raise ZeroDivisionError
    assert not listens(url)
    worker.kill()
    worker.join()


ABANDONED = """
import os, signal, sys
from labkit.course import serve_folder
with serve_folder(sys.argv[1]) as url:
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_when_its_process_is_killed(folder):
    command = [sys.executable, "-c", ABANDONED, folder]
    parent = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    url = parent.stdout.strip()
    assert url.startswith("http://127.0.0.1:")
    with contextlib.suppress(ConnectionError), connect(url) as connection:
        assert connection.recv(1) == b""  # it comes when the server ends, or an error after 20 s
    assert not listens(url)


def test_a_folder_to_serve_must_be_one(folder):
    with pytest.raises(FileNotFoundError, match="no is not a folder"), serve_folder(folder / "no"):
        pass


@pytest.mark.parametrize("module", ["moto.server", "s3fs"])
def test_without_moto_its_extra_is_named(monkeypatch, folder, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[test\]"'), serve_s3({"a": folder}):
        pass
