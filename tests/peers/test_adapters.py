"""Each loader of the comparison does the work; and what the native ones among them do with odd photos."""

import functools
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

from labkit.course import PEERS
from labkit.peers.adapters import spdl
from labkit.peers.adapters.own import DATALOADER, NAIVE, OWN
from labkit.peers.check import check_peer
from labkit.peers.peer import CLASSES, PROFILES, RAW_PIXELS, Work, missing_modules


def peer_called(name):
    peer = PEERS[name]
    if missing := missing_modules(peer):
        pytest.skip(f"{missing[0]} is missing: {peer.install}")
    return peer


@pytest.fixture
def loaders_end():
    """Adapters keep their loaders, and those their workers: each has a process of its own outside of these tests."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("labkit.peers.adapters."):
            for kept in vars(module).values():
                getattr(kept, "cache_clear", bool)()


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Work:
    """`check_peer` makes its pictures."""
    folder = tmp_path_factory.mktemp("peers")
    return Work(folder, folder, num_workers=2)


CHECKED_CLASSES = [name for name in CLASSES if name not in {*PROFILES, "jpeg256-uint8", "camera-uint8"}]
OWN_ROWS = [NAIVE, DATALOADER, *OWN]
IN_THIS_PROCESS = [
    "torchvision v1", "torchvision v2", "Albumentations", "torchdata StatefulDataLoader", "WebDataset",
    "Hugging Face datasets",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.usefixtures("loaders_end")
@pytest.mark.parametrize(
    ("name", "class_name"),
    [(name, of) for name, peer in PEERS.items() for of in CHECKED_CLASSES if CLASSES[of].admits(peer)],
)
def test_each_adapter_does_the_work(name, class_name, checked):
    peer = peer_called(name)
    found = check_peer(peer, replace(checked, dtype=CLASSES[class_name].dtype))
    assert found["images"] == 140 or peer.drops_last
    if peer.source == RAW_PIXELS or name == "turboloader tar":  # averaged before they are sampled
        assert not peer.antialias or found["grain"] < 3.6
    else:
        assert peer.antialias is None or (found["grain"] < 3.6) == peer.antialias


@pytest.mark.exhaustive
@pytest.mark.usefixtures("loaders_end")
@pytest.mark.parametrize(
    ("number", "class_name"),
    [(number, of) for number, peer in enumerate(OWN_ROWS) for of in CHECKED_CLASSES if CLASSES[of].admits(peer)],
)
def test_each_own_row_does_the_work(number, class_name, checked):
    peer = OWN_ROWS[number]
    found = check_peer(peer, replace(checked, dtype=CLASSES[class_name].dtype))
    assert found["images"] == 140
    assert 0.33 < found["area"] < 0.53
    assert found["grain"] < 3.6 or not peer.antialias


# --- native ones: most are no wheel that pip finds everywhere


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


@pytest.mark.cuda
def test_the_work_is_done_on_the_gpu(tmp_path):
    """A real one: DALI brings its own kernels."""
    peer, work = peer_called("DALI (GPU)"), Work(tmp_path, tmp_path / "scratch", num_workers=2)
    assert check_peer(peer, work)["images"] == 140
    assert next(iter(peer.loader(replace(work, root=tmp_path / "scratch" / "check" / "pictures"))))[0].is_cuda


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("FFCV jpg", 4), *((name, batch_size) for name in ("DALI", "SPDL") for batch_size in (4, 64))],
)
def test_epochs_are_whole_for_any_batch_size_and_after_one_was_left_early(name, batch_size, work):
    peer, work = peer_called(name), replace(work, batch_size=batch_size, size=32)
    for number in range(4):
        if number == 2:
            assert len(next(iter(peer.loader(work)))[0]) in (batch_size, 10 % batch_size)
        batches = [(images.clone(), labels.clone()) for images, labels in peer.loader(work)]  # FFCV's memory is reused
        wanted = sorted(min(batch_size, 10 - start) for start in range(0, 10, batch_size))
        assert sorted(len(images) for images, _ in batches) == wanted
        assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
        for images, labels in batches:
            assert (images.dtype, images.shape) == (torch.uint8, (len(labels), 3, 32, 32))
            assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("loaders_end")
@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_each_names_torchvision_as_its_decoder_if_it_decodes_with_it(name, work, monkeypatch):
    """Notebook 13 counts them: they differ in what is around the decoder alone."""
    peer, decoded, decode = peer_called(name), [], torchvision.io.decode_image

    @functools.wraps(decode)
    def counted(*arguments, **options):
        decoded.append(1)
        return decode(*arguments, **options)

    monkeypatch.setattr("torchvision.io.decode_image", counted)
    assert sum(len(images) for images, _ in peer.loader(replace(work, num_workers=0))) == 10
    assert (len(decoded) == 10) == (peer.decoder == "torchvision")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("height", "width"), [(375, 500), (100, 1000), (1, 1)])
def test_spdl_draws_torchvisions_crops(height, width):
    """By its function for that, since SPDL is not installed where this is tested most."""
    draw, crop = random.Random(0), v2.RandomResizedCrop(224)  # torchvision's defaults are the work's
    ours = np.array([spdl._draw_crop(height, width, draw) for _ in range(4000)])
    top, left, own_height, own_width = ours.T
    assert ((top >= 0) & (left >= 0) & (top + own_height <= height) & (left + own_width <= width)).all()
    torch.manual_seed(0)
    image = torch.zeros(1, height, width)
    theirs = np.array([[crop.make_params([image])[name] for name in ("top", "left", "height", "width")] for _ in ours])
    for own, their in zip(ours.T, theirs.T, strict=True):
        spread = max(own.std(), their.std(), 1e-9)
        assert abs(own.mean() - their.mean()) < 0.1 * spread + 1e-9
        assert abs(own.std() - their.std()) < 0.1 * spread + 1e-9
        assert abs(np.quantile(own, [0.1, 0.5, 0.9]) - np.quantile(their, [0.1, 0.5, 0.9])).max() <= 0.2 * spread + 1
