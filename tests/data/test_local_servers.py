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


@pytest.mark.parametrize("path", ["/../secret", "/%2e%2e/secret", "//{folder}/../secret"])
def test_the_folder_server_does_not_leave_its_folder(folder, url, path):
    answer = raw_get(url, path.format(folder=folder))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"pa55word" not in answer


def test_servers_wait_before_each_answer(folder, url):
    pytest.importorskip("s3fs", reason='s3fs is not installed: python -m pip install -e ".[s3]"')
    with serve_s3({"photos": folder}, latency_ms=LATENCY_MS) as options:
        for store in (HttpStore(url, keys=["cat/a.jpg"]), ObjectStore("s3://photos", **options)):
            begin = time.monotonic()
            assert store.read("cat/a.jpg") == PHOTO
            assert time.monotonic() - begin >= LATENCY_MS / 1e3
    assert not listens(options["endpoint_url"])


@pytest.mark.parametrize("asked", ["", "bytes=700-80000"])
def test_a_server_of_limited_bandwidth_sends_the_same_bytes(tmp_path, asked):
    content = bytes(range(256)) * 1000
    (tmp_path / "a.bin").write_bytes(content)
    told = {"Range": asked} if asked else {}
    with serve_folder(tmp_path) as fast, serve_folder(tmp_path, bandwidth_mb_per_s=100) as slow:
        one, other = (urllib3.request("GET", url + "a.bin", headers=told) for url in (fast, slow))
    assert (one.status, one.data) == (other.status, other.data)
    assert one.headers.get("Content-Range") == other.headers.get("Content-Range")
    assert other.data in content


def test_a_connection_gets_no_more_bytes_than_its_bandwidth(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(1_000_000))
    with serve_folder(tmp_path, bandwidth_mb_per_s=4) as url:
        start = time.perf_counter()
        assert len(urllib3.request("GET", url + "a.bin").data) == 1_000_000
        assert time.perf_counter() - start >= 0.25
        with connect(url) as connection:  # one that asks for nothing but the size
            connection.sendall(b"HEAD /a.bin HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"Content-Length: 1000000" in b"".join(iter(lambda: connection.recv(65536), b""))


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


def test_servers_need_folders_and_that_of_s3_its_library(monkeypatch, folder):
    for server in (serve_folder(folder / "no"), serve_s3({"a": folder / "no"})):
        with pytest.raises(FileNotFoundError, match="no is not a folder"), server:
            pass
    monkeypatch.setattr("labkit.course.servers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[s3\]"'), serve_s3({"a": folder}):
        pass


def test_the_s3_server_answers_amazons_own_client_as_s3_does(tmp_path):
    session = pytest.importorskip("botocore.session", reason='botocore is not installed: pip install -e ".[s3]"')
    names = ("a & b/1.jpg", "a & b/2.jpg", "c/d/3.jpg", "c/4 +%.jpg", "e.jpg", "\N{SNOWMAN}.jpg")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    with serve_s3({"photos": tmp_path}) as options:
        keys = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"]}
        client = session.get_session().create_client(
            "s3", region_name="us-east-1", endpoint_url=options["endpoint_url"], **keys
        )

        def listed(**query):
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket="photos", PaginationConfig={"PageSize": 2}, **query
            )
            found = [(page.get("Contents", ()), page.get("CommonPrefixes", ())) for page in pages]
            sizes = {row["Key"]: row["Size"] for rows, _ in found for row in rows}
            return sizes, [row["Prefix"] for _, rows in found for row in rows]

        sizes = {name: len(name.encode()) for name in names}
        assert listed() == (sizes, [])
        assert listed(Prefix="c") == ({name: sizes[name] for name in names if name[0] == "c"}, [])
        assert listed(Delimiter="/") == ({name: sizes[name] for name in names[4:]}, ["a & b/", "c/"])
        assert listed(Prefix="c/", Delimiter="/") == ({names[3]: sizes[names[3]]}, ["c/d/"])
        client.put_object(Bucket="photos", Key="c/new", Body=b"written")
        assert listed(Prefix="c/n") == ({"c/new": 7}, [])
        with pytest.raises(client.exceptions.ClientError, match="NotImplemented"):
            client.create_multipart_upload(Bucket="photos", Key="e.jpg")
    assert {path.name for path in tmp_path.rglob("*.jpg")} == {name.rpartition("/")[2] for name in names}


def test_what_a_bucket_lacks_to_be_opened_is_said(folder, monkeypatch):
    """No credentials, or an option that the client does not have; neither is the network's fault."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(folder / "none"))
    with serve_s3({"photos": folder}) as options:
        with pytest.raises(PermissionError, match="s3://photos: there are no credentials; set AWS_ACCESS_KEY_ID"):
            ObjectStore("s3://photos", endpoint_url=options["endpoint_url"]).keys()
        with pytest.raises(ValueError, match=r"s3://photos cannot be opened: .*'endpoint'; check its options"):
            ObjectStore("s3://photos", **options, endpoint="x").keys()
