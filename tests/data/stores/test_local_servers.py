"""Servers for experiments: what they serve, and that they end."""

import contextlib
import multiprocessing
import signal
import socket
import subprocess
import sys
import time

import pytest
import urllib3

from labkit import HttpStore, ObjectStore
from labkit.course import serve_folder, serve_s3


def connect(url: str) -> socket.socket:
    parts = urllib3.util.parse_url(url)
    return socket.create_connection((parts.host, parts.port), timeout=20)


def raw_get(url: str, path: str) -> bytes:
    """A path as it stands, which other clients would tidy."""
    with connect(url) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_the_folder_server_answers_ranges(image_folder, served):
    data = (image_folder / "dog/d.WebP").read_bytes()
    for key, asked, status, answered in (
        ("dog/d.WebP", None, 200, data),
        ("dog/d.WebP", "10-19", 206, data[10:20]),
        ("dog/d.WebP", f"{len(data)}-", 416, None),
        ("no.jpg", None, 404, None),
    ):
        answer = urllib3.request("GET", f"{served}/{key}", headers={"Range": f"bytes={asked}"} if asked else {})
        assert answer.status == status
        assert answered is None or answer.data == answered


def test_the_s3_server_waits_before_each_answer(tmp_path):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    (tmp_path / "a.jpg").write_bytes(b"photo")
    with serve_s3({"photos": tmp_path}, latency_ms=500) as options:
        begin = time.monotonic()
        assert ObjectStore("s3://photos", **options).read("a.jpg") == b"photo"
        assert time.monotonic() - begin >= 0.5


@pytest.mark.parametrize(
    "path",
    ["/../secret", "/%2e%2e/secret", "//{image_folder}/../secret", "/{image_folder}/../secret", "/cat/../../secret"],
)
def test_the_folder_server_does_not_leave_its_folder(image_folder, path):
    (image_folder.parent / "secret").write_text("pa55word")
    with serve_folder(image_folder) as url:
        answer = raw_get(url, path.format(image_folder=str(image_folder)))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"pa55word" not in answer


def test_latency_is_waited_for(image_folder):
    with serve_folder(image_folder, latency_ms=150) as url:
        store = HttpStore(url, keys=["dog/d.WebP"])
        start = time.perf_counter()
        assert store.read("dog/d.WebP") == (image_folder / "dog/d.WebP").read_bytes()
        assert time.perf_counter() - start >= 0.15


def listens(url: str) -> bool:
    with contextlib.suppress(OSError), connect(url):
        return True
    return False


def test_the_server_ends_with_its_block(image_folder):
    with pytest.raises(ZeroDivisionError), serve_folder(image_folder) as url:  # noqa: PT012
        assert listens(url)
        raise ZeroDivisionError
    assert not listens(url)


def test_the_server_ends_though_a_worker_lives(image_folder):
    """A forked worker has a copy of the server's pipe."""
    with serve_folder(image_folder) as url:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
        worker.start()
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


def test_the_server_ends_when_its_process_is_killed(image_folder):
    command = [sys.executable, "-c", ABANDONED, image_folder]
    parent = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    url = parent.stdout.strip()
    assert url.startswith("http://127.0.0.1:")
    for _ in range(200):
        if not listens(url):
            return
        time.sleep(0.1)
    pytest.fail("the server still listens after 20 s")


def test_a_folder_to_serve_must_be_one(image_folder):
    with pytest.raises(FileNotFoundError, match="no is not a folder"), serve_folder(image_folder / "no"):
        pass


@pytest.mark.parametrize("module", ["moto.server", "s3fs"])
def test_without_moto_its_extra_is_named(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[test\]"'), serve_s3({"a": tmp_path}):
        pass
