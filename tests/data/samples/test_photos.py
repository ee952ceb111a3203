"""The photo set: the same bytes always, whole files only, and sizes as the profile says."""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from labkit.data import samples
from labkit.data.samples import MANIFEST, PHOTOGRAPHS, PROFILES, make_photos, photo_bytes, photo_key
from tests import paths
from tests.paths import SCRIPTS, run_script

COUNT = 10  # one of every class, and a second of the first


def make(root: Path, count: int = COUNT, **options) -> Path:
    return make_photos(root, count, progress=False, **options)


def contents(root: Path) -> dict[str, bytes]:
    """Every file under `root`, hidden ones included, but for the manifest."""
    return {name: data for name, data in paths.contents(root).items() if name != MANIFEST}


def assert_whole(root: Path, count: int = COUNT) -> None:
    assert contents(root) == {photo_key(number): photo_bytes(number) for number in range(count)}
    rows = json.loads((root / MANIFEST).read_text())["photos"]
    found = {row["key"]: (row["bytes"], row["sha256"]) for row in rows}
    assert found == {key: (len(data), hashlib.sha256(data).hexdigest()) for key, data in contents(root).items()}


def test_files_and_checksums(photo_set):
    assert_whole(photo_set, 24)
    assert {path.name for path in photo_set.iterdir() if path.is_dir()} == set(PHOTOGRAPHS)


def test_same_bytes_for_any_count_and_any_threads(tmp_path):
    for count, num_threads in ((3, 1), (COUNT, 4)):
        make(tmp_path, count, num_threads=num_threads)
        assert_whole(tmp_path, count)


def test_number_and_seed_change_the_bytes():
    same_class = len(PHOTOGRAPHS)
    assert len({photo_bytes(0), photo_bytes(same_class), photo_bytes(0, seed=1)}) == 3


def test_photos_decode(photo_set):
    for path in photo_set.glob("*/*.jpg"):
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert np.asarray(image).std() > 5  # something is on it


def times(root: Path, pattern: str = "*.j*") -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob(pattern)}


def test_a_rerun_makes_only_what_is_missing(tmp_path):
    root = make(tmp_path / "set")
    before = times(tmp_path, "*")
    make(root)
    assert times(tmp_path, "*") == before
    lost, short = [root / photo_key(1), root / photo_key(4)], root / photo_key(7)
    for path in lost:
        path.unlink()
    short.write_bytes(short.read_bytes()[:100])
    left = times(root)
    make(root)
    assert_whole(root)
    assert {path for path, time in times(root).items() if left.get(path) != time} == {*lost, short, root / MANIFEST}


def test_after_an_interruption_whole_files_are_kept(tmp_path, monkeypatch):
    root, photos = tmp_path / "set", map(photo_bytes, range(4))
    with monkeypatch.context() as patch:
        patch.setattr(samples, "photo_bytes", Mock(side_effect=[*photos, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            make(root, num_threads=1)
    assert json.loads((root / MANIFEST).read_text())["photos"] == []
    before = times(root)
    del before[root / MANIFEST]
    assert len(before) >= 4
    make(root)
    assert_whole(root)
    assert times(root).items() >= before.items()


def test_killed_before_the_manifest_was_in_place(tmp_path):
    (tmp_path / f".{MANIFEST}.12345.partial").write_bytes(b"half")
    make(tmp_path, 2)
    assert {photo_key(0), photo_key(1)} <= contents(tmp_path).keys()


def assert_refused(root: Path, said: str, **options) -> None:
    before = contents(root)
    with pytest.raises(ValueError, match=said) as failure:
        make(root, **{"count": 24, **options})
    assert str(root) in str(failure.value)
    assert contents(root) == before


@pytest.mark.parametrize("other", [{"profile": "camera"}, {"seed": 1}, {"count": 23}])
def test_another_set_is_not_mixed_in(photo_set, other):
    assert_refused(photo_set, "choose another folder", **other)


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    assert_refused(tmp_path, "choose a new folder")


WITHOUT_BYTES = b'{"settings": {"profile": "imagenet", "seed": 0}, "photos": [{"key": "astronaut/000000.jpg"}]}'


@pytest.mark.parametrize("manifest", [b"{", b"[]", b"{}", b"\xff\xfe", b"null", WITHOUT_BYTES])
def test_a_corrupt_manifest_is_named(tmp_path, manifest):
    (tmp_path / MANIFEST).write_bytes(manifest)
    assert_refused(tmp_path, "is damaged")


@pytest.mark.parametrize(("options", "said"), [({"count": 0}, "count must be"), ({"profile": "x"}, "imagenet, camera")])
def test_bad_arguments(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        make(tmp_path / "set", **options)
    assert not (tmp_path / "set").exists()


@pytest.mark.exhaustive
def test_imagenet_files_weigh_what_imagenets_do():
    encoded = [photo_bytes(number) for number in range(200)]
    assert np.mean([len(data) for data in encoded]) == pytest.approx(110_000, rel=0.2)
    # Every size of the profile has a share of 4 % or more: 200 photos show them all.
    assert {Image.open(io.BytesIO(data)).size for data in encoded} == set(PROFILES["imagenet"].sizes)


def test_camera_sizes():
    for number in range(2):
        data = photo_bytes(number, profile="camera")
        assert Image.open(io.BytesIO(data)).size in PROFILES["camera"].sizes
        assert len(data) > 500_000


@pytest.mark.exhaustive
def test_two_processes_making_the_same_set(tmp_path):
    root = tmp_path / "set"
    both = [subprocess.Popen([sys.executable, SCRIPTS / "make_photos.py", root, str(COUNT)]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert_whole(root)


def test_the_script_makes_a_set_of_a_seed(tmp_path):
    assert run_script("make_photos", tmp_path / "set", 2, "--seed", 3, "--num-threads", 1).exit_code == 0
    assert contents(tmp_path / "set") == {photo_key(number): photo_bytes(number, seed=3) for number in range(2)}
