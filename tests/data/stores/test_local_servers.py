"""Servers for experiments: what they serve, and that they end."""

import contextlib
import multiprocessing
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from labkit import HttpStore, serve_folder, serve_s3


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


def test_the_folder_server_answers_ranges(image_folder, served):
    data = (image_folder / "dog/d.WebP").read_bytes()
    assert fetch(served + "dog/d.WebP") == (200, data)
    assert fetch(served + "dog/d.WebP", Range="bytes=10-19") == (206, data[10:20])
    assert fetch(served + "dog/d.WebP", Range=f"bytes={len(data)}-")[0] == 416
    assert fetch(served + "no.jpg")[0] == 404


@pytest.mark.parametrize(
    "path",
    ["/../secret", "/%2e%2e/secret", "//{image_folder}/../secret", "/{image_folder}/../secret", "/cat/../../secret"],
)
def test_the_folder_server_does_not_leave_its_folder(image_folder, served, path):
    (image_folder.parent / "secret").write_text("pa55word")
    answer = raw_get(served, path.format(image_folder=str(image_folder)))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"pa55word" not in answer


def test_latency_is_waited_for(image_folder):
    with serve_folder(image_folder, latency_ms=150) as url:
        store = HttpStore(url, keys=["dog/d.WebP"])
        start = time.perf_counter()
        assert store.read("dog/d.WebP") == (image_folder / "dog/d.WebP").read_bytes()
        assert time.perf_counter() - start >= 0.15


def listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def test_the_server_ends_with_its_block(image_folder):
    urls = []

    def failing() -> None:
        with serve_folder(image_folder) as url:
            urls.append(url)
            assert listens(url)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not listens(urls[0])


def sleep_long() -> None:
    time.sleep(300)


def test_the_server_ends_though_a_worker_lives(image_folder):
    """A forked worker has a copy of the server's pipe."""
    with serve_folder(image_folder) as url:
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


def test_the_server_ends_when_its_process_is_killed(image_folder):
    parent = subprocess.run(
        [sys.executable, "-c", ABANDONED, image_folder], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert parent.returncode == -signal.SIGKILL
    url = parent.stdout.strip()
    assert url.startswith("http://127.0.0.1:")
    for _ in range(200):
        if not listens(url):
            break
        time.sleep(0.1)
    assert not listens(url)


def test_a_folder_to_serve_must_be_one(image_folder):
    with pytest.raises(FileNotFoundError, match="no is not a folder"), serve_folder(image_folder / "no"):
        pass


@pytest.mark.parametrize("module", ["moto.server", "s3fs"])
def test_without_moto_its_extra_is_named(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[test\]"'), serve_s3({"a": tmp_path}):
        pass
