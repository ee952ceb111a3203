"""The native loaders among the peers: the work done, the pixels prepared, and what happens to broken photos."""

import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import labkit as lk
from labkit.peers.adapters import dali as peer_dali, ffcv as peer_ffcv, spdl as peer_spdl
from labkit.peers.check import check_peer
from labkit.peers.peer import JPEG_FILES, JPEG_PACKED, RAW_PIXELS, Work
from labkit.peers.registry import missing_modules

PEERS = {peer.name: peer for module in (peer_dali, peer_ffcv, peer_spdl) for peer in module.PEERS_HERE}
CROP = v2.RandomResizedCrop(224)  # torchvision's defaults are the work's


def peer_called(name):
    peer = PEERS[name]
    if missing := missing_modules(peer):
        pytest.skip(f"{missing[0]} is missing: {peer.install}")
    return peer


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten of them in four classes; the last one is small, one is gray, and one has to be turned."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(10):
        height, width = [(300, 400), (350, 280), (60, 90)][2 if number == 9 else number % 2]
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        image = coarse.resize((width, height), Image.Resampling.BICUBIC).convert("L" if number == 4 else "RGB")
        exif = Image.Exif()
        if number == 5:
            exif[0x0112] = 6
        path = root / "abcd"[number % 4] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        image.save(path, quality=95, exif=exif)
    return root


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture
def work(photos, scratch):
    return Work(photos, scratch, batch_size=4, num_workers=2)


def test_who_is_there():
    wanted = {"DALI": JPEG_FILES, "FFCV jpg": JPEG_PACKED, "FFCV raw": RAW_PIXELS}
    wanted |= dict.fromkeys(["SPDL", "SPDL with torchvision", "SPDL with turbojpeg"], JPEG_FILES)
    if torch.cuda.is_available():
        wanted["DALI (GPU)"] = JPEG_FILES
    assert {peer.name: peer.source for peer in PEERS.values()} == wanted
    assert all(peer.antialias and peer.note and "pip install" in peer.install for peer in PEERS.values())
    assert [peer.name for peer in PEERS.values() if peer.prepare] == ["FFCV jpg", "FFCV raw"]


@pytest.mark.cuda
def test_the_work_is_done_on_the_gpu(tmp_path):
    """A real one: DALI brings its own kernels."""
    peer, work = peer_called("DALI (GPU)"), Work(tmp_path, tmp_path / "scratch", num_workers=2)
    assert check_peer(peer, work)["images"] == 140
    assert next(iter(peer.loader(replace(work, root=tmp_path / "scratch" / "check" / "pictures"))))[0].is_cuda


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("FFCV jpg", 4), *((name, batch_size) for name in ("DALI", "SPDL") for batch_size in (4, 5, 64))],
)
def test_epochs_are_whole_for_any_batch_size_and_after_one_was_left_early(name, batch_size, work):
    peer, work = peer_called(name), replace(work, batch_size=batch_size, size=32)
    for number in range(4):
        if number == 2:
            assert len(next(iter(peer.loader(work)))[0]) in (batch_size, 10 % batch_size)
        batches = [(images.clone(), labels.clone()) for images, labels in peer.loader(work)]  # FFCV's memory is reused
        assert sorted(len(images) for images, _ in batches) == sorted(
            min(batch_size, 10 - start) for start in range(0, 10, batch_size)
        )
        assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
        for images, labels in batches:
            assert (images.dtype, images.shape) == (torch.uint8, (len(labels), 3, 32, 32))
            assert images.is_contiguous(memory_format=torch.channels_last)


def test_dali_begins_no_epoch_by_itself(work, monkeypatch):
    peer_called("DALI")
    from nvidia.dali.pipeline import Pipeline

    runs, original = [], Pipeline._iter_setup  # called once a run
    monkeypatch.setattr(Pipeline, "_iter_setup", lambda self: runs.append(1) or original(self))
    epochs = peer_dali._Epochs(work, "cpu")
    for number in range(1, 4):
        assert len(list(epochs)) == 3
        assert len(runs) == 3 * number


def test_a_prepared_format_is_built_once_and_whole(work, photos, tmp_path):
    peer = peer_called("FFCV raw")
    root, scratch = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "scratch"
    work = replace(work, root=root, scratch=scratch)
    path = peer.prepare(work)
    before = path.stat()
    assert peer.prepare(work) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [file.name for file in path.parent.iterdir()] == ["photos.beton"]
    shutil.copy(root / "a" / "0.jpg", root / "b" / "new.jpg")
    assert peer.prepare(work).stat().st_mtime_ns != before.st_mtime_ns
    assert len(list(stored(path))) == 11


def test_a_broken_photo_is_named_and_nothing_is_left(work, photos, tmp_path):
    peer, root = peer_called("FFCV jpg"), shutil.copytree(photos, tmp_path / "photos")
    (root / "b" / "1.jpg").write_bytes((root / "b" / "1.jpg").read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"b/1\.jpg: turbojpeg cannot decode 2000 bytes"):
        peer.prepare(replace(work, root=root, scratch=tmp_path / "scratch"))
    assert [path.name for path in (tmp_path / "scratch").iterdir() if not path.name.startswith(".")] == []


def stored(path):
    """Images and labels of a .beton, read without FFCV's loader."""
    from ffcv.reader import Reader

    reader, data = Reader(str(path), {}), np.fromfile(path, np.uint8)
    for row in reader.metadata:
        image, label = row[0], row[1]
        start, n_bytes = int(image["data_ptr"]), int(image["height"]) * int(image["width"]) * 3
        yield int(image["mode"]), data[start : start + n_bytes], int(image["height"]), int(image["width"]), int(label)


def test_raw_pixels_are_those_of_a_pixel_store(work, photos):
    found = list(stored(peer_called("FFCV raw").prepare(replace(work, short_side=128))))
    store = lk.FolderStore(photos)
    assert [label for *_, label in found] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    for key, (mode, pixels, height, width, _) in zip(store.keys(), found, strict=True):
        whole = lk.decode(store.read(key))
        small = v2.functional.resize(whole, [128], antialias=True) if min(whole.shape[1:]) > 128 else whole
        assert mode == 1
        assert (height, width) == tuple(small.shape[1:])
        assert np.array_equal(pixels.reshape(height, width, 3), small.permute(1, 2, 0).numpy())


def test_jpegs_are_the_whole_photos(work, photos):
    found = list(stored(peer_called("FFCV jpg").prepare(work)))
    store = lk.FolderStore(photos)
    for key, (mode, data, height, width, _) in zip(store.keys(), found, strict=True):
        whole = lk.decode(store.read(key))  # upright
        assert mode == 0
        assert (height, width) == tuple(whole.shape[1:])
        again = lk.decode(data.tobytes()[: data.tobytes().find(b"\xff\xd9") + 2])
        assert (again.float() - whole.float()).square().mean() < 65  # PSNR above 30 dB, after quality 90


def test_pages_hold_the_largest_photo(tmp_path, monkeypatch):
    """FFCV's writer would wait for ever."""
    peer_called("FFCV raw")
    monkeypatch.setattr(peer_ffcv, "_MIN_PAGE_SIZE", 2**21)  # FFCV's least
    root = tmp_path / "photos" / "a"
    root.mkdir(parents=True)
    Image.effect_noise((1500, 900), 50).convert("RGB").save(root / "0.jpg")
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # meant for a process of its own
    peer_ffcv._write(Work(tmp_path / "photos", tmp_path, short_side=900), "raw", tmp_path)
    found = stored(tmp_path / "photos.beton")
    assert [(height, width) for _, _, height, width, _ in found] == [(900, 1500)]


BROKEN = """
    import sys
    from pathlib import Path
    from labkit.peers.adapters import {module}
    from labkit.peers.peer import Work
    (peer,) = [peer for peer in {module}.PEERS_HERE if peer.name == {name!r}]
    print(sum(len(images) for images, _ in peer.loader(Work(Path(sys.argv[1]), Path("unused"), batch_size=4))))
"""


@pytest.mark.parametrize(
    ("name", "module", "message"), [("DALI", "dali", "image_random_crop"), ("SPDL", "spdl", "failed")]
)
def test_what_is_no_image_is_an_error(name, module, message, photos, tmp_path):
    peer_called(name)
    root = shutil.copytree(photos, tmp_path / "photos")
    (root / "b" / "1.jpg").write_bytes(b"not an image" * 100)
    script = textwrap.dedent(BROKEN).format(name=name, module=module)
    # In a process of its own: DALI may crash where it is torn down after an error.
    child = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=120)
    assert child.returncode != 0
    assert child.stdout == ""
    assert message in child.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("height", "width"), [(375, 500), (100, 1000), (1000, 100), (1, 1)])
def test_spdl_draws_torchvisions_crops(height, width):
    import random

    draw = random.Random(0)
    ours = np.array([peer_spdl._draw_crop(height, width, draw) for _ in range(4000)])
    top, left, own_height, own_width = ours.T
    assert ((top >= 0) & (left >= 0) & (top + own_height <= height) & (left + own_width <= width)).all()
    torch.manual_seed(0)
    image = torch.zeros(1, height, width)
    theirs = np.array([[CROP.make_params([image])[name] for name in ("top", "left", "height", "width")] for _ in ours])
    for own, their in zip(ours.T, theirs.T, strict=True):
        spread = max(own.std(), their.std(), 1e-9)
        assert abs(own.mean() - their.mean()) < 0.1 * spread + 1e-9
        assert abs(own.std() - their.std()) < 0.1 * spread + 1e-9
        assert abs(np.quantile(own, [0.1, 0.5, 0.9]) - np.quantile(their, [0.1, 0.5, 0.9])).max() <= 0.2 * spread + 1
