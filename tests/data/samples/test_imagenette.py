"""Imagenette's download, against a server on this machine."""

import hashlib
import os
import socket
import tarfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from torchvision.datasets import Imagenette

from labkit import FolderStore
from labkit.data.samples import imagenette as download
from labkit.data.samples.imagenette import count_images, download_imagenette
from tests.image_files import encoded
from tests.paths import contents, run_script
from tests.serving import Quiet, serving
from tests.tars import make_tar

NAME = "imagenette2-160"
MEMBERS = [
    f"{split}/{wnid}/{n}.JPEG" for split in ("train", "val") for wnid in ("n01440764", "n03888257") for n in "ab"
]
MEMBERS.append("train/n01440764/c.JPEG")  # so that the two splits differ in number


@pytest.fixture(scope="module")
def tarball(tmp_path_factory) -> bytes:
    images = {f"{NAME}/{member}": encoded(Image.new("RGB", (8, 8), (n, 0, 0))) for n, member in enumerate(MEMBERS)}
    return make_tar(tmp_path_factory.mktemp("tar") / "a.tgz", images, "w:gz").read_bytes()


@pytest.fixture
def server(monkeypatch, tarball):
    """Serves `body` under any path; `sent` bytes of it, if cut short. `paths` are the requests so far."""
    server = SimpleNamespace(body=tarball, status=200, sent=None, paths=[])

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self):
            server.paths.append(self.path)
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.body)))
            self.end_headers()
            self.wfile.write(server.body[: server.sent])

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/{NAME}.tgz"
        # The fake archive's own md5 in place of the real one's: the check itself stays.
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (server.url, hashlib.md5(server.body).hexdigest()))
        yield server


def assert_whole(root: Path) -> None:
    assert os.listdir(root) == [NAME]  # no archive, no temporary folder
    assert set(contents(root / NAME)) == set(MEMBERS)
    assert count_images(root) == {"train": 5, "val": 4}


def assert_fails(root: Path, url: str, cause: str) -> None:
    with pytest.raises(OSError, match=cause) as failure:
        download_imagenette(root)
    assert url in str(failure.value)
    assert "--url" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (root / NAME).exists()
    assert contents(root) == {}


@pytest.mark.parametrize("name", ["data", "-dash ;$(id) '{a,b}*?[x]\n\U0001f600%41", "\udcff", "x" * 255])
def test_the_set_is_downloaded_and_readable(server, tmp_path, name):
    root = tmp_path / "new" / name
    assert download_imagenette(root) == root / NAME
    assert_whole(root)
    assert len(FolderStore(root / NAME / "train").keys()) == 5


def test_a_rerun_asks_for_nothing(server, tmp_path):
    for _ in range(2):
        download_imagenette(tmp_path)
        assert server.paths == [f"/{NAME}.tgz"]
    assert_whole(tmp_path)


@pytest.mark.parametrize(
    ("fault", "cause"), [({"body": b"x" * 500}, "md5 is not"), ({"status": 404}, "404"), ({"sent": 500}, "md5 is not")]
)
def test_a_server_that_fails_and_recovers(server, tarball, tmp_path, fault, cause):
    vars(server).update(fault)
    assert_fails(tmp_path, server.url, cause)
    vars(server).update(body=tarball, status=200, sent=None)
    download_imagenette(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.parametrize(
    ("listens", "place", "cause"),
    [(True, "http://{}", "timed out"), (False, "http://{}", "refused"), (False, "no-scheme", "not an HTTP URL")],
)
def test_nobody_answers(tmp_path, monkeypatch, listens, place, cause):
    monkeypatch.setattr(download, "_TIMEOUT_S", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listens:  # accepts, and never answers
            mute.listen()
        url = place.format(f"127.0.0.1:{mute.getsockname()[1]}") + f"/{NAME}.tgz"
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (url, "0"))
        assert_fails(tmp_path, url, cause)


@pytest.mark.parametrize("sent", [100, None])
def test_killed_while_downloading_or_extracting(server, tmp_path, sent):
    left = tmp_path / f".{NAME}.partial"
    stray = left / "tree" / NAME / "train" / "n01440764" / "stray.JPEG"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half")
    (left / f"{NAME}.tgz").write_bytes(server.body[:sent])
    download_imagenette(tmp_path)
    assert len(server.paths) == (0 if sent is None else 1)  # none, where the archive was there whole
    assert_whole(tmp_path)


def test_an_extraction_that_fails_leaves_no_half_set(server, tmp_path, monkeypatch):
    def half(archive, plan, tree, progress):
        with tarfile.open(archive) as tar:
            tar.extract(tar.next(), tree)
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(download, "unpack", half)
        with pytest.raises(OSError, match="disk full"):
            download_imagenette(tmp_path)
    assert not (tmp_path / NAME).exists()
    n_requests = len(server.paths)
    download_imagenette(tmp_path)
    assert len(server.paths) == n_requests
    assert_whole(tmp_path)


def test_half_a_set_is_not_counted(server, tmp_path):
    (tmp_path / NAME / "train" / "n01440764").mkdir(parents=True)
    with pytest.raises(OSError, match="remove it") as failure:
        count_images(tmp_path)
    assert str(tmp_path / NAME) in str(failure.value)


def test_the_script_counts_the_images(server, tmp_path):
    """From a mirror, which has another address and the same md5."""
    result = run_script("download", tmp_path, "--url", server.url.replace(NAME, "mirrored"))
    assert result.exit_code == 0
    assert "5 images in train, 4 images in val" in result.stdout
    assert server.paths == ["/mirrored.tgz"]
    assert_whole(tmp_path)
