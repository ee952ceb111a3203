"""Made photos, made depths and the downloaded set: the same bytes always, whole files only, no mixed sets."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from skimage import data as skimage_data
from torchvision.datasets import Imagenette

import labkit as lk
from labkit import course
from labkit.data import samples
from labkit.data.samples import PHOTOGRAPHS, PROFILES, pair_names, photo_key
from labkit.errors import ItemErrors
from tests.paths import contents, run_script, times
from tests.tars import make_tar

COUNT = 10  # one photo of every class, and a second of the first
make_photos = partial(lk.make_photos, progress=False)
make_depth = partial(course.make_depth, num_workers=1, progress=False)
photo_bytes, pair_bytes = cache(samples.photo_bytes), cache(samples.pair_bytes)


def assert_whole(root: Path, count: int = COUNT) -> None:
    """All photos are there, nothing else, and the manifest states the checksum of each."""
    found = {name: data for name, data in contents(root).items() if not name.endswith(".partial")}
    rows = json.loads(found.pop("manifest.json"))["photos"]
    assert found == {photo_key(number): photo_bytes(number) for number in range(count)}
    stated = {row["key"]: (row["bytes"], row["sha256"]) for row in rows}
    assert stated == {key: (len(data), hashlib.sha256(data).hexdigest()) for key, data in found.items()}


# Photos.


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Photos made in two runs, to look at, not to change."""
    root = make_photos(tmp_path_factory.mktemp("photos"), 3, num_threads=1)
    return make_photos(root, COUNT, num_threads=4)


def test_photos_are_the_same_bytes_for_any_count_and_threads(photos):
    assert_whole(photos)
    assert len({photo_bytes(0), photo_bytes(len(PHOTOGRAPHS)), photo_bytes(0, seed=1)}) == 3


def test_a_rerun_makes_only_the_photos_that_are_missing(tmp_path):
    (tmp_path / ".manifest.json.12345.partial").write_bytes(b"half")  # of a killed run
    make_photos(tmp_path, 1)
    blocked = tmp_path / photo_key(2)
    blocked.mkdir(parents=True)  # where a file should be
    with pytest.raises(ItemErrors, match=photo_key(2)):
        make_photos(tmp_path, 4)
    assert len(json.loads((tmp_path / "manifest.json").read_text())["photos"]) == 1
    blocked.rmdir()
    kept = times(tmp_path)
    make_photos(tmp_path, 4)
    assert_whole(tmp_path, 4)
    after = times(tmp_path)
    assert {name for name in after if after[name] != kept.get(name)} == {photo_key(2), "manifest.json"}
    make_photos(tmp_path, 4)
    assert times(tmp_path) == after
    lost, short = tmp_path / photo_key(1), tmp_path / photo_key(3)
    lost.unlink()
    short.write_bytes(short.read_bytes()[:100])
    kept = times(tmp_path)
    make_photos(tmp_path, 4)
    assert_whole(tmp_path, 4)
    remade = {name for name, time in times(tmp_path).items() if kept.get(name) != time}
    assert remade == {photo_key(1), photo_key(3), "manifest.json"}


def assert_refused(root: Path, said: str, **options) -> None:
    before = contents(root)
    with pytest.raises(ValueError, match=said) as failure:
        make_photos(root, **{"count": COUNT, **options})
    assert str(root) in str(failure.value)
    assert contents(root) == before


@pytest.mark.parametrize("other", [{"profile": "camera"}, {"seed": 1}])
def test_another_set_of_photos_is_not_mixed_in(photos, other):
    assert_refused(photos, "choose another folder", **other)


def test_a_folder_that_holds_more_photos_keeps_them(tmp_path):
    """As after a reader's own experiment: a notebook that needs fewer goes on with what is there."""
    make_photos(tmp_path, 4)
    before = contents(tmp_path)
    assert make_photos(tmp_path, 2) == tmp_path
    assert contents(tmp_path) == before
    (tmp_path / photo_key(1)).unlink()
    make_photos(tmp_path, 2)
    assert contents(tmp_path) == before


WITHOUT_BYTES = b'{"settings": {"profile": "imagenet", "seed": 0}, "photos": [{"key": "astronaut/000000.jpg"}]}'


@pytest.mark.parametrize("manifest", [b"{", WITHOUT_BYTES], ids=repr)
def test_a_damaged_manifest_is_named(tmp_path, manifest):
    (tmp_path / "manifest.json").write_bytes(manifest)
    assert_refused(tmp_path, r"manifest\.json is damaged")


@pytest.mark.exhaustive
def test_imagenet_files_weigh_what_imagenets_do():
    encoded = [photo_bytes(number) for number in range(200)]
    assert np.mean([len(data) for data in encoded]) == pytest.approx(110_000, rel=0.2)
    # Every size of the profile has a share of 4 % or more: 200 photos show them all.
    assert {Image.open(io.BytesIO(data)).size for data in encoded} == set(PROFILES["imagenet"].sizes)


def test_the_script_makes_photos_of_a_seed(tmp_path):
    assert run_script("make_photos", tmp_path / "set", 2, "--seed", 3, "--num-threads", 1).exit_code == 0
    found = contents(tmp_path / "set")
    assert {key: found[key] for key in map(photo_key, range(2))} == {
        photo_key(number): photo_bytes(number, seed=3) for number in range(2)
    }


# Pairs of photo and depth.

N_PAIRS = 3
NAMES = [name for number in range(N_PAIRS) for name in pair_names(number)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Three pairs and their tar, to look at, not to change."""
    return make_depth(tmp_path_factory.mktemp("made") / "-a {0..3}\n#é%41", N_PAIRS, tar=True)


def files_of(root: Path) -> dict[str, bytes]:
    """Without the index that `TarStore` keeps beside a tar."""
    return {name: data for name, data in contents(root).items() if not name.endswith("index.npz")}


def test_pairs_are_laid_out_and_listed_as_in_hypersim(made):
    assert NAMES[:2] == ["ai_001_001/rgb_cam_00_fr0000.png", "ai_001_001/depth_plane_cam_00_fr0000.png"]
    own = {"filename_list_train.txt", "train.tar", "settings.json"}
    assert set(files_of(made)) == own | {f"train/{name}" for name in NAMES}
    lines = (made / "filename_list_train.txt").read_text().splitlines()
    assert lines == [f"{rgb} {depth}" for rgb, depth in zip(NAMES[::2], NAMES[1::2], strict=True)]
    assert len({pair_names(number) for number in range(100_000)}) == 100_000
    assert pair_names(99_900)[0] == "ai_002_001/rgb_cam_00_fr0000.png"


def test_a_pair_is_one_window_of_the_photo_and_of_its_true_depths():
    photo, _, disparity = skimage_data.stereo_motorcycle()
    is_known = np.isfinite(disparity)
    true_mm = np.where(is_known, 193.001 * 994.978 / (np.where(is_known, disparity, 0) + 31.086), 0)
    photo, true_mm = Image.fromarray(photo), Image.fromarray(np.rint(true_mm).astype(np.uint16))
    mirrored = set()
    for number in range(4):
        rgb, depth = (Image.open(io.BytesIO(data)) for data in pair_bytes(number))
        assert (rgb.mode, rgb.size, depth.mode, depth.size) == ("RGB", (1024, 768), "I;16", (1024, 768))
        box, is_mirrored = samples.choose_window(np.random.default_rng([0, number]), photo, (1024, 768))
        cut = partial(samples.cut_window, size=(1024, 768), box=box, mirrored=is_mirrored)
        assert np.array_equal(depth, cut(true_mm, resample=Image.Resampling.NEAREST))
        shown = cut(photo, resample=Image.Resampling.LANCZOS)
        assert np.corrcoef(np.asarray(rgb.convert("L")).ravel(), np.asarray(shown.convert("L")).ravel())[0, 1] > 0.99
        assert 0.5 < (np.asarray(depth) > 0).mean() < 1
        mirrored.add(is_mirrored)
    assert mirrored == {True, False}
    for files in zip(pair_bytes(0), pair_bytes(1), pair_bytes(0, seed=1), strict=True):
        assert len(set(files)) == 3


def test_the_tar_is_gnu_tars(made, tmp_path):
    if not shutil.which("tar") or b"GNU tar" not in subprocess.check_output(["tar", "--version"]):
        pytest.skip("GNU tar is the oracle")
    options = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--mode=u=rwX,go=rX"]
    subprocess.run(["tar", *options, "-cf", tmp_path / "x.tar", "."], cwd=made / "train", check=True)
    assert (made / "train.tar").read_bytes() == (tmp_path / "x.tar").read_bytes()


def test_the_pairs_are_what_depth_pairs_reads(made):
    path = made / "filename_list_train.txt"
    one = lk.DepthPairs(lk.FolderStore(made / "train"), path, flip_p=0)[2]
    other = lk.DepthPairs(lk.TarStore(made / "train.tar"), path, flip_p=0, fast=True)[2]
    assert one["rgb_norm"].shape == (3, 480, 640)
    assert 2 < one["depth_raw_linear"][one["valid_mask_raw"]].mean() < 5
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def test_a_rerun_makes_only_the_pairs_that_are_missing_and_no_half_tar(made, tmp_path, monkeypatch):
    copied = shutil.copytree(made, tmp_path / "set")  # which keeps times
    make_depth(copied, N_PAIRS, tar=True)
    before = times(copied)
    assert before["train.tar"][0] == (made / "train.tar").stat().st_mtime_ns
    for name in (f"train/{pair_names(1)[1]}", "train.tar"):
        (copied / name).unlink()
    (half := copied / "train/ai_001_001/.1-abcd.partial").touch()  # of a killed run
    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "addfile", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_depth(copied, N_PAIRS, tar=True)
    half.unlink()
    assert set(files_of(copied)) == set(files_of(made)) - {"train.tar"}
    half.touch()
    make_depth(copied, N_PAIRS, tar=True)
    half.unlink()
    assert files_of(copied) == files_of(made)
    remade = {name for name, time in times(copied).items() if before[name] != time and name.endswith(".png")}
    assert remade == {f"train/{name}" for name in pair_names(1)}


def test_the_script_makes_pairs(made, tmp_path):
    assert run_script("make_depth", tmp_path / "set", 3, "--tar", "--num-workers", 1).exit_code == 0
    assert files_of(tmp_path / "set") == files_of(made)


# Imagenette, which torchvision downloads: a local server stands in for its own.

IMAGENETTE = "imagenette2-160"
WNIDS = ("n01440764", "n02102040")
FILES = {f"{IMAGENETTE}/{split}/{wnid}/1.JPEG": b"jpeg" for split in ("train", "val") for wnid in WNIDS}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    path = make_tar(tmp_path / "served" / f"{IMAGENETTE}.tgz", FILES, "w:gz")
    with course.serve_folder(path.parent) as url:
        md5 = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(Imagenette._ARCHIVES, "160px", (f"{str(url).rstrip('/')}/{path.name}", md5))
        yield path


def test_a_set_is_downloaded_whole_counted_and_left_alone_by_a_rerun(archive, tmp_path):
    half = tmp_path / "sets" / f".{IMAGENETTE}.partial" / IMAGENETTE / "train" / "n01440764"
    half.mkdir(parents=True)  # of a killed extraction
    ran = run_script("download", tmp_path / "sets")
    assert ran.stdout.strip() == f"{tmp_path / 'sets' / IMAGENETTE}: 2 images in train, 2 images in val"
    assert set(contents(tmp_path / "sets")) == set(FILES)
    archive.unlink()
    assert run_script("download", tmp_path / "sets").stdout == ran.stdout


def test_a_wrong_archive_leaves_no_set(archive, tmp_path):
    archive.write_bytes(archive.read_bytes() + b"x")
    assert run_script("download", tmp_path / "sets").exit_code != 0
    assert not (tmp_path / "sets" / IMAGENETTE).exists()
