"""Images with odd names in a folder, a tar, behind a server and in object storage."""

import tarfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from labkit.course import serve_folder, serve_s3
from tests.image_files import write_images
from tests.scripted_server import serve_script


@pytest.fixture
def own_home(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder in which indexes of remote tars are kept, for processes of a fork server as well.

    One that an earlier test started has that test's environment, and multiprocessing has no public way to end it.
    """
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    forkserver._forkserver._stop()
    yield tmp_path / "home"
    forkserver._forkserver._stop()


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """To look at, not to change."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def image_tar(image_folder) -> Path:
    path = image_folder.parent / f"{image_folder.name}.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(image_folder, ".")
    return path


@pytest.fixture(scope="module")
def served(image_tar):
    """The URL of the folder; with `.tar`, that of the tar."""
    with serve_folder(image_tar.parent) as url:
        yield url + image_tar.stem


@pytest.fixture
def server():
    with serve_script() as server:
        yield server


@pytest.fixture(scope="module")
def s3(image_folder, image_tar, tmp_path_factory):
    """Options for a server with the folder under `photos/set`, and in its neighbour, a folder of tars."""
    bucket, tars = tmp_path_factory.mktemp("bucket"), tmp_path_factory.mktemp("tars")
    for name in ("set", "set2"):
        for path in image_folder.rglob("*"):
            if path.is_file() and path.name.isprintable() and "\\" not in path.name and path.stat().st_size:
                (bucket / name / path.relative_to(image_folder)).parent.mkdir(parents=True, exist_ok=True)
                (bucket / name / path.relative_to(image_folder)).write_bytes(path.read_bytes())
    (tars / "a.tar").write_bytes(image_tar.read_bytes())
    (tars / "packed.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    pytest.importorskip("s3fs", reason='s3fs is not installed: python -m pip install -e ".[s3]"')
    with serve_s3({"photos": bucket, "tars": tars}) as options:
        yield options, bucket
