"""`data_scripts/download.py`: Imagenette by torchvision, whole or not at all. A local server stands in for its own."""

import hashlib

import pytest
from torchvision.datasets import Imagenette

from labkit import course
from tests.paths import contents, run_script
from tests.tars import make_tar

NAME = "imagenette2-160"
LABELS = ("n01440764", "n02102040")
FILES = {
    f"{NAME}/{split}/{label}/1.JPEG": b"jpeg" for split in ("train", "val") for label in ("n01440764", "n02102040")
}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    path = tmp_path / "served" / f"{NAME}.tgz"
    path.parent.mkdir()
    make_tar(path, FILES, "w:gz")
    with course.serve_folder(path.parent) as url:
        md5 = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (f"{str(url).rstrip('/')}/{path.name}", md5))
        yield path


def test_the_set_is_downloaded_counted_and_left_alone_by_a_rerun(archive, tmp_path):
    ran = run_script("download", tmp_path / "sets")
    assert ran.stdout.strip() == f"{tmp_path / 'sets' / NAME}: 2 images in train, 2 images in val"
    assert set(contents(tmp_path / "sets")) == set(FILES)
    archive.unlink()
    assert run_script("download", tmp_path / "sets").stdout == ran.stdout


def test_the_half_set_of_a_killed_extraction_is_not_taken_for_whole(archive, tmp_path):
    half = tmp_path / "sets" / f".{NAME}.partial" / NAME / "train" / "n01440764"
    half.mkdir(parents=True)
    assert "2 images in train" in run_script("download", tmp_path / "sets").output
    assert set(contents(tmp_path / "sets")) == set(FILES)


def test_a_wrong_archive_leaves_no_set(archive, tmp_path):
    archive.write_bytes(archive.read_bytes() + b"x")
    ran = run_script("download", tmp_path / "sets")
    assert ran.exit_code != 0
    assert not (tmp_path / "sets" / NAME).exists()


def test_an_unknown_size_is_named(tmp_path):
    ran = run_script("download", tmp_path, "--size", "huge")
    assert ran.exit_code == 2
    assert "size must be one of full, 320px, 160px, got 'huge'" in ran.output
