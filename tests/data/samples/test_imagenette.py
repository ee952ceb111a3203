"""Imagenette's download, against a server on this machine."""

import hashlib
import io
import os
import runpy
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from torchvision.datasets import Imagenette
from typer.testing import CliRunner

from labkit import FolderStore
from labkit.data.samples import imagenette as download
from labkit.data.samples.imagenette import count_images, download_imagenette
from tests.paths import REPO

NAME = "imagenette2-160"
SCRIPT = REPO / "data_scripts" / "download.py"
MEMBERS = [
    f"{split}/{wnid}/{n}.JPEG" for split in ("train", "val") for wnid in ("n01440764", "n03888257") for n in "ab"
]
MEMBERS.append("train/n01440764/c.JPEG")  # so that the two splits differ in number


def tarball() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for number, member in enumerate(MEMBERS):
            jpeg = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 0, 0)).save(jpeg, "JPEG")
            info = tarfile.TarInfo(f"{NAME}/{member}")
            info.size = len(jpeg.getvalue())
            tar.addfile(info, io.BytesIO(jpeg.getvalue()))
    return buffer.getvalue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body[: server.sent])

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    """Serves `body` under any path; `sent` bytes of it, if cut short. `paths` are the requests so far."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.status, self.sent, self.paths = tarball(), 200, None, []
        self.url = f"http://127.0.0.1:{self.server_port}/{NAME}.tgz"

    def handle_error(self, request, client_address):
        pass  # clients that hang up are no news


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        # The fake archive's own md5 in place of the real one's: the check itself stays.
        md5 = hashlib.md5(server.body).hexdigest()
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (server.url, md5))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_whole(root: Path) -> None:
    assert os.listdir(root) == [NAME]  # no archive, no temporary folder
    assert files(root / NAME) == sorted(MEMBERS)
    assert count_images(root) == {"train": 5, "val": 4}


def assert_fails(root: Path, url: str, cause: str) -> None:
    with pytest.raises(OSError, match=cause) as failure:
        download_imagenette(root)
    assert url in str(failure.value)
    assert "--url" in str(failure.value)
    assert not (root / NAME).exists()
    assert files(root) == []


@pytest.mark.parametrize("name", ["data", "-dash ;$(id) '{a,b}*?[x]\n\U0001f600%41", "\udcff", "x" * 255])
def test_the_set_is_downloaded_and_readable(server, tmp_path, name):
    root = tmp_path / "new" / name
    assert download_imagenette(root) == root / NAME
    assert_whole(root)
    assert len(FolderStore(root / NAME / "train").keys()) == 5


def test_a_rerun_asks_for_nothing(server, tmp_path):
    download_imagenette(tmp_path)
    n_requests = len(server.paths)
    assert n_requests > 0
    download_imagenette(tmp_path)
    assert len(server.paths) == n_requests
    assert_whole(tmp_path)


def test_a_mirror_has_another_address_but_the_same_md5(server, tmp_path):
    mirror = server.url.replace(NAME, "mirrored")
    download_imagenette(tmp_path, url=mirror)
    assert set(server.paths) == {"/mirrored.tgz"}
    assert_whole(tmp_path)


def test_wrong_md5(server, tmp_path):
    server.body = server.body[:-1] + b"x"
    assert_fails(tmp_path, server.url, "md5 is not")


def test_a_server_that_stalls(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.data.samples.imagenette._TIMEOUT_S", 0.2)
    with socket.socket() as mute:  # accepts, and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/{NAME}.tgz"
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (url, "0"))
        assert_fails(tmp_path, url, "timed out")


def test_not_found(server, tmp_path):
    server.status = 404
    assert_fails(tmp_path, server.url, "404")


def test_body_cut_short(server, tmp_path):
    server.sent = len(server.body) // 2
    assert_fails(tmp_path, server.url, "md5 is not")


def test_nobody_answers(tmp_path, monkeypatch):
    with socket.socket() as silent:  # bound but not listening
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{NAME}.tgz"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (url, "0"))
        assert_fails(tmp_path, url, "refused")


def test_not_an_address(server, tmp_path, monkeypatch):
    monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (f"no-scheme/{NAME}.tgz", "0"))
    assert_fails(tmp_path, "no-scheme", "not an HTTP URL")


def test_after_a_failure_a_rerun_succeeds(server, tmp_path):
    server.sent = len(server.body) // 2
    with pytest.raises(OSError):
        download_imagenette(tmp_path)
    server.sent = None
    download_imagenette(tmp_path)
    assert_whole(tmp_path)


def test_killed_while_downloading(server, tmp_path):
    left = tmp_path / f".{NAME}.partial"
    left.mkdir()
    (left / f"{NAME}.tgz").write_bytes(server.body[:100])
    download_imagenette(tmp_path)
    assert_whole(tmp_path)


def test_killed_while_extracting(server, tmp_path):
    left = tmp_path / f".{NAME}.partial"
    half = left / NAME / "train" / "n01440764" / "stray.JPEG"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    (left / f"{NAME}.tgz").write_bytes(server.body)
    download_imagenette(tmp_path)
    assert server.paths == []  # the archive was there whole
    assert_whole(tmp_path)


def test_an_extraction_that_fails_leaves_no_half_set(server, tmp_path, monkeypatch):
    def half(archive, plan, tree, progress):
        with tarfile.open(archive) as tar:
            tar.extract(tar.next(), tree)
        raise OSError("disk full")

    real = download.unpack
    monkeypatch.setattr(download, "unpack", half)
    with pytest.raises(OSError, match="disk full"):
        download_imagenette(tmp_path)
    monkeypatch.setattr(download, "unpack", real)
    assert not (tmp_path / NAME).exists()
    n_requests = len(server.paths)
    download_imagenette(tmp_path)
    assert len(server.paths) == n_requests
    assert_whole(tmp_path)


def test_unknown_size(tmp_path):
    with pytest.raises(ValueError, match="full, 320px, 160px"):
        download_imagenette(tmp_path, size="64px")


def test_half_a_set_is_not_counted(server, tmp_path):
    (tmp_path / NAME / "train" / "n01440764").mkdir(parents=True)
    with pytest.raises(OSError, match="remove it") as failure:
        count_images(tmp_path)
    assert str(tmp_path / NAME) in str(failure.value)


def run_script(*arguments):
    return CliRunner().invoke(runpy.run_path(str(SCRIPT))["app"], [str(argument) for argument in arguments])


def test_the_script_counts_the_images(server, tmp_path):
    result = run_script(tmp_path, "--url", server.url.replace(NAME, "mirrored"))
    assert result.exit_code == 0
    assert "5 images in train, 4 images in val" in result.stdout
    assert set(server.paths) == {"/mirrored.tgz"}
    assert_whole(tmp_path)


@pytest.mark.parametrize(("options", "said"), [([], "404"), (["--size", "64px"], "size must be")])
def test_the_script_fails_in_one_line(server, tmp_path, options, said):
    server.status = 404
    result = run_script(tmp_path, *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
