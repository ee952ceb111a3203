"""Made pairs of photo and depth: true depths, the same bytes always, whole sets only."""

import io
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from skimage import data as skimage_data

from labkit import DepthPairs, FolderStore, TarStore
from labkit.course import make_depth
from labkit.data import samples as depth_photos
from labkit.data.samples import pair_bytes, pair_names
from tests import paths
from tests.paths import run_script

make = partial(make_depth, num_workers=1, progress=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Three pairs and their tar, to look at, not to change."""
    return make(tmp_path_factory.mktemp("made") / "set", 3, tar=True)


@pytest.fixture
def copied(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "set")


def contents(root: Path) -> dict[str, bytes]:
    """Every file under `root`, but for the index that `TarStore` keeps beside a tar."""
    return {name: data for name, data in paths.contents(root).items() if not name.endswith("index.npz")}


def test_layout_and_list(made):
    names = [name for number in range(3) for name in pair_names(number)]
    assert names[:2] == ["ai_001_001/rgb_cam_00_fr0000.png", "ai_001_001/depth_plane_cam_00_fr0000.png"]
    assert set(contents(made)) == {
        "filename_list_train.txt", "train.tar", "settings.json", *(f"train/{name}" for name in names)
    }  # fmt: skip
    lines = (made / "filename_list_train.txt").read_text().splitlines()
    assert lines == [f"{names[2 * number]} {names[2 * number + 1]}" for number in range(3)]
    assert len({pair_names(number) for number in range(100_000)}) == 100_000
    assert pair_names(99_900)[0] == "ai_002_001/rgb_cam_00_fr0000.png"


def test_pictures_are_hypersims_kind_and_depths_are_true(made):
    disparity = skimage_data.stereo_motorcycle()[2]
    true_mm = {0, *np.rint(193.001 * 994.978 / (disparity[np.isfinite(disparity)] + 31.086)).astype(int).tolist()}
    for number in range(3):
        rgb, depth = (Image.open(made / "train" / name) for name in pair_names(number))
        assert (rgb.mode, rgb.size, depth.mode, depth.size) == ("RGB", (1024, 768), "I;16", (1024, 768))
        found = set(np.unique(np.asarray(depth)).tolist())
        assert found <= true_mm
        assert len(found) > 1000
        assert 0.5 < (np.asarray(depth) > 0).mean() < 1


def test_photo_and_depth_show_the_same_window(monkeypatch):
    """Over a picture that grows brighter with its depth, in both directions, the two stay in step."""
    rows, columns = np.mgrid[:500, :741]
    level = (columns / 741 * 150 + rows / 500 * 50 + 20).astype(np.uint8)
    pair = Image.fromarray(np.repeat(level[..., None], 3, 2)), Image.fromarray(level.astype(np.uint16) * 100)
    monkeypatch.setattr(depth_photos, "_load_stereo_pair", lambda: pair)
    slopes = set()
    for number in range(4):
        rgb, depth = (np.asarray(Image.open(io.BytesIO(data))).astype(float) for data in pair_bytes(number))
        assert np.corrcoef(rgb[..., 0].ravel(), depth.ravel())[0, 1] > 0.99
        slopes.add(depth[0, 0] < depth[0, -1])
    assert slopes == {True, False}  # some are mirrored


def test_number_and_seed_change_both_files():
    for files in zip(pair_bytes(0), pair_bytes(1), pair_bytes(0, seed=1), strict=True):
        assert len(set(files)) == 3


@pytest.mark.exhaustive
def test_same_bytes_for_any_count_and_any_workers(made, tmp_path):
    other = make(tmp_path / "set", 1, engine="threads", num_workers=None)
    assert contents(other / "train").items() <= contents(made / "train").items()
    make(other, 3, tar=True, num_workers=2)
    assert contents(other) == contents(made)


def test_the_tar_is_gnu_tars(made, tmp_path):
    if not shutil.which("tar") or b"GNU tar" not in subprocess.check_output(["tar", "--version"]):
        pytest.skip("GNU tar is the oracle")
    options = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--mode=u=rwX,go=rX"]
    subprocess.run(["tar", *options, "-cf", tmp_path / "x.tar", "."], cwd=made / "train", check=True)
    assert (made / "train.tar").read_bytes() == (tmp_path / "x.tar").read_bytes()


def test_the_set_is_what_depth_pairs_reads(made):
    path = made / "filename_list_train.txt"
    sample = DepthPairs(TarStore(made / "train.tar"), path)[2]
    assert sample["rgb_norm"].shape == (3, 480, 640)
    assert 2 < sample["depth_raw_linear"][sample["valid_mask_raw"]].mean() < 5
    one = DepthPairs(FolderStore(made / "train"), path, flip_p=0)[2]
    other = DepthPairs(TarStore(made / "train.tar"), path, flip_p=0, fast=True)[2]
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def test_a_rerun_makes_only_what_is_missing(made, copied):
    make(copied, 3, tar=True)
    before = {path: path.stat().st_mtime_ns for path in copied.glob("train/*/*.png")}
    assert (copied / "train.tar").stat().st_mtime_ns == (made / "train.tar").stat().st_mtime_ns  # copytree keeps it
    for name in (f"train/{pair_names(1)[1]}", "train.tar"):
        (copied / name).unlink()
    half = copied / "train/ai_001_001/.1-abcd.partial"  # of a killed run
    half.touch()
    make(copied, 3, tar=True)
    half.unlink()
    assert contents(copied) == contents(made)
    remade = {path for path, stamp in before.items() if path.stat().st_mtime_ns != stamp}
    assert remade == {copied / "train" / name for name in pair_names(1)}


def test_nothing_is_left_of_an_interrupted_tar(made, copied, monkeypatch):
    (copied / "train.tar").unlink()
    monkeypatch.setattr(tarfile.TarFile, "addfile", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make(copied, 3, tar=True)
    assert set(contents(copied)) == set(contents(made)) - {"train.tar"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, r"other depth pairs \(seed 0, not 1\)"),
        ({"count": 2}, "3 depth pairs, more than 2"),
        ({"count": 0}, "count must be an integer >= 1"),
    ],
)
def test_another_set_is_not_mixed_in(made, options, said):
    before = contents(made)
    with pytest.raises(ValueError, match=said):
        make(made, **{"count": 3, **options})
    assert contents(made) == before


def test_the_script_makes_a_set(made, tmp_path):
    assert run_script("make_depth", tmp_path / "set", 3, "--tar", "--num-workers", 1).exit_code == 0
    assert contents(tmp_path / "set") == contents(made)


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    result = run_script("make_depth", tmp_path, 1)
    assert result.exit_code == 2
    assert "choose a new folder" in result.stderr
    assert result.stderr.count("\n") == 1
    assert contents(tmp_path) == {"thesis.txt": b"important"}
