"""check_peer: fakes that do the work pass, and fakes that get a part of it wrong are told which.

And what the loaders are given: pictures that tell how they were cropped, small photos, formats that are made once.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from labkit import FolderStore
from labkit.course import Peer
from labkit.errors import DecodeError, PeerError
from labkit.peers.check import check_peer, make_probe_pictures, picture_key, read_crops
from labkit.peers.peer import JPEG_FILES, MEAN, RAW_PIXELS, STD, Work, labeled_photos, prepare_once
from labkit.peers.photos import make_small_photos, repeat_photos


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Work:
    folder = tmp_path_factory.mktemp("peers")
    return Work(make_probe_pictures(folder / "check" / "pictures"), folder, num_workers=2)


# --- the pictures, against torchvision's crops with known boxes


def cut(work: Work, number: int, box: tuple[int, int, int, int], antialias: bool = True) -> torch.Tensor:
    picture = F.pil_to_tensor(Image.open(work.root / picture_key(number)))
    return F.resized_crop(picture, *box, [224, 224], antialias=antialias)


@pytest.mark.parametrize("flipped", [False, True])
def test_a_crop_tells_its_picture_its_box_and_its_flip(work, flipped):
    boxes = [(0, 0, 600, 800), (100, 250, 300, 350), (330, 500, 180, 220), (17, 3, 571, 640)]
    crops = torch.stack([cut(work, number * 17, box) for number, box in enumerate(boxes)])
    seen = read_crops(crops.flip(-1) if flipped else crops)
    assert seen.number.tolist() == [0, 17, 34, 51]
    np.testing.assert_allclose(seen.height, [box[2] / 600 for box in boxes], rtol=0.03)
    np.testing.assert_allclose(seen.width, [box[3] / 800 for box in boxes], rtol=0.03)
    assert seen.flipped.tolist() == [flipped] * 4
    assert not seen.upside_down.any()


# --- the check


@cache
def decoded(root: Path) -> list[tuple[torch.Tensor, int]]:
    photos = labeled_photos(Work(root, root))
    return [(F.pil_to_tensor(Image.open(path).convert("RGB")), label) for path, label in photos]


def epoch(work: Work, *, antialias=True, shuffle=True, flip=0.5, crop=True, spoil=None, seed=None, **crops):
    """The work in plain torchvision; `spoil` gets the list of samples and gives another."""
    if seed is not None:
        torch.manual_seed(seed)
    size = (work.size, work.size)
    cropped = v2.RandomResizedCrop(size, antialias=antialias, **crops) if crop else v2.Resize(size)
    transform = v2.Compose([cropped, v2.RandomHorizontalFlip(flip)])
    photos = decoded(work.root)
    order = torch.randperm(len(photos)).tolist() if shuffle else range(len(photos))
    samples = [(transform(photos[index][0]), photos[index][1]) for index in order]
    samples = spoil(samples) if spoil else samples
    for start in range(0, len(samples), work.batch_size):
        images, labels = zip(*samples[start : start + work.batch_size], strict=True)
        yield torch.stack(images), torch.tensor(labels)


def fake(loader=None, source=JPEG_FILES, **settings) -> Peer:
    return Peer("fake", source, True, "pip install fake", (), loader=loader or partial(epoch, **settings))


def on_images(change):
    return lambda samples: [(change(image), label) for image, label in samples]


def move_labels(samples):
    images, labels = zip(*samples, strict=True)
    return list(zip(images, labels[1:] + labels[:1], strict=True))


def normalised(image, mean=MEAN, std=STD):
    return F.normalize(F.to_dtype(image, torch.float32, scale=True), list(mean), list(std))


@pytest.mark.exhaustive
def test_who_does_the_work_passes_and_may_drop_a_batch_if_it_says_so(work):
    peer = fake(spoil=lambda samples: samples[:64])
    with pytest.raises(PeerError, match="never came"):
        check_peer(peer, work)
    found = check_peer(replace(peer, drops_last=True), work)
    assert found["images"] == 2 * 64
    assert 0.33 < found["area"] < 0.53
    peer = fake(lambda work: [(torch.zeros(1, 3, 224, 224, dtype=torch.uint8), torch.zeros(1))])
    with pytest.raises(PeerError, match="uint8, not float32"):
        check_peer(peer, replace(work, dtype="float32"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spoil": lambda samples: samples[1:]}, "never came"),
        ({"spoil": lambda samples: [samples[1], *samples[1:]]}, "more than once"),
        ({"spoil": move_labels}, "labels"),
        ({"spoil": on_images(lambda image: image.flip(0))}, "colors"),
        ({"spoil": on_images(lambda image: image[:, :200])}, "shape"),
        ({"spoil": on_images(lambda image: image.flip(1))}, "upside down"),
        ({"shuffle": False}, "nothing is shuffled"),
        ({"seed": 0}, "same order"),
        ({"crop": False}, "area of crops hardly varies"),
        ({"scale": (0.5, 1.0)}, "crops cover"),
        ({"ratio": (0.4, 2.5)}, "crops have aspect ratio"),
        ({"flip": 0.0}, "0% of the images are flipped"),
        ({"antialias": False}, "does not antialias"),
    ],
)
def test_who_gets_it_wrong_is_told_what(work, settings, message):
    with pytest.raises(PeerError, match=message):
        check_peer(fake(**settings), work)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: image / 255, "undone, mean and deviation of red, green and blue are"),
        (lambda image: image.float(), "undone, they are .* not within 0 to 255"),
        (partial(normalised, mean=(0.0, 0.0, 0.0)), "floats are not normalized"),
        (partial(normalised, mean=MEAN[::-1], std=(0.3, 0.2, 0.3)), "floats are not normalized|colors"),
    ],
)
def test_floats_that_are_normalised_otherwise_are_refused(work, change, message):
    with pytest.raises(PeerError, match=message):
        check_peer(fake(spoil=on_images(change)), replace(work, dtype="float32"))


@cache
def few_crops(root: Path) -> list[list[tuple[torch.Tensor, int]]]:
    """As a raw format that holds crops cut beforehand: two of each picture."""
    crop = v2.RandomResizedCrop((224, 224), antialias=True)
    return [[(crop(image), label) for _ in range(2)] for image, label in decoded(root)]


def of_few_crops(work):
    choices = [crops[torch.randint(len(crops), ())] for crops in few_crops(work.root)]
    flip, order = v2.RandomHorizontalFlip(), torch.randperm(len(choices)).tolist()
    images, labels = zip(*[(flip(choices[index][0]), choices[index][1]) for index in order], strict=True)
    return zip(torch.stack(images).split(64), torch.tensor(labels).split(64), strict=True)


def of_one_crop_a_batch(work):
    crop = v2.Compose([v2.RandomResizedCrop((224, 224), antialias=True), v2.RandomHorizontalFlip()])
    photos = decoded(work.root)
    for indices in torch.randperm(len(photos)).split(work.batch_size):
        images, labels = zip(*[photos[index] for index in indices], strict=True)
        yield crop(torch.stack(images)), torch.tensor(labels)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("peer", "batch_size", "message"),
    [
        (fake(of_few_crops, RAW_PIXELS), 64, "two epochs cut the same crops"),
        (fake(of_one_crop_a_batch), 4, r"few distinct crops: \d+ among 140"),
    ],
)
def test_crops_that_are_not_drawn_anew_are_found(work, peer, batch_size, message):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pytest.raises(PeerError, match=message):
            check_peer(peer, replace(work, batch_size=batch_size))


# --- what loaders read


@pytest.fixture
def photos(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate([(300, 400), (500, 280), (60, 90)]):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)
    return tmp_path / "photos"


def test_small_photos_have_the_short_side_and_the_pixels_and_are_kept(photos, tmp_path):
    small = FolderStore(make_small_photos(photos, tmp_path / "small", 128))
    assert small.keys() == FolderStore(photos).keys()
    for path, size in zip(small.paths(), [(171, 128), (90, 60), (128, 229)], strict=True):
        image = Image.open(path)
        assert image.format == "JPEG"
        assert np.abs(np.subtract(image.size, size)).max() <= 1
        original = Image.open(photos / path.relative_to(small.root)).resize(image.size, Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(image, float) - np.asarray(original, float)).mean() < 3
    (small.root / "a/0.jpg").write_bytes(b"kept")
    (small.root / "b/1.jpg").unlink()
    (photos / "b/1.jpg").write_bytes(b"no photo")
    with pytest.raises(DecodeError, match=r"b/1\.jpg"):
        make_small_photos(photos, small.root, 128)
    assert (small.root / "a/0.jpg").read_bytes() == b"kept"
    assert not (small.root / "b/1.jpg").exists()


def test_a_repeated_photo_has_several_names_and_one_content(photos, tmp_path):
    for _ in range(2):  # a rerun changes nothing
        repeated = FolderStore(repeat_photos(photos, tmp_path / "repeated", 3))
    assert list(repeated.keys())[:4] == ["a/0-0.jpg", "a/0-1.jpg", "a/0-2.jpg", "a/2-0.jpg"]
    assert len(repeated.keys()) == 9
    for key in repeated.keys():  # noqa: SIM118
        assert repeated.read(key) == (photos / f"{key[:3]}.jpg").read_bytes()
    assert (tmp_path / "repeated/a/0-0.jpg").samefile(photos / "a/0.jpg")


def test_a_format_is_made_once_for_the_same_photos_and_whole(photos, tmp_path):
    own, built = Work(photos, tmp_path / "scratch"), []

    def build(folder):
        built.append(folder)
        (folder / "data").write_text(str(len(built)))
        if len(built) == 1:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        prepare_once(own, "fake", build)
    assert not (own.scratch / "fake").exists()
    (built[0] / "half").touch()
    assert prepare_once(own, "fake", build) == prepare_once(own, "fake", build) == own.scratch / "fake"
    assert [path.name for path in (own.scratch / "fake").iterdir()] == ["data"]
    (photos / "b/1.jpg").write_bytes(b"another")
    prepare_once(own, "fake", build)
    assert (own.scratch / "fake" / "data").read_text() == "3"
    prepare_once(replace(own, short_side=9), "fake", build)
    assert len(built) == 4
