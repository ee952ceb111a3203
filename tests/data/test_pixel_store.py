"""lk.PixelStore: the pixels of torchvision's resize in the documented file, read back as they are, damage refused.

A build gives the same bytes whoever makes it and whatever is killed on the way: nothing is mixed, and nothing lost.
"""

import errno
import json
import mmap
import os
import pickle
import resource
import shutil
import struct
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from labkit import BatchLoader, FolderStore, PixelStore
from labkit.data import pixels
from labkit.errors import ItemErrors, PixelError
from labkit.util.files import atomic_path
from tests.children import in_children
from tests.killing import killed_at_every_moment

# As if its classes stood in a notebook: workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHORT_SIDE, HEADER = 24, 128
N_IMAGES = 70  # of a build, in 24 parts: three images a part, and one in the last


def build(source, path: Path, **settings) -> PixelStore:
    defaults = {"short_side": 12, "engine": "threads", "num_workers": 2, "progress": False}
    return PixelStore.build(source, path, **{**defaults, **settings})


def picture(number: int, width: int, height: int) -> Image.Image:
    """Smooth, with an edge: neither flat nor noise, which all resampling makes alike."""
    y, x = np.mgrid[:height, :width] / 8
    waves = np.stack([np.sin(x + number), np.cos(y * (1 + number)), np.sin(x * y / 5)], axis=2) * 100 + 128
    waves[: height // 3, : width // 3] = 255 - waves[: height // 3, : width // 3]
    return Image.fromarray(waves.round().astype(np.uint8))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """PNG, whose pixels no decoder disputes, of many shapes; one is smaller than the short side, one exactly it.

    One is gray, one was turned by its camera, and the name of one is broken.
    """
    root, turned = tmp_path_factory.mktemp("pictures"), Image.Exif()
    turned[274] = 6
    for folder in (folders := ("b", "é", "a c")):
        (root / folder).mkdir()
    sizes = [(60, 45), (45, 60), (97, 33), (200, 25), (24, 24), (20, 70), (1, 1), (31, 64), (312, 200)]
    for number, size in enumerate(sizes):
        name = os.fsdecode(b"\xff\xfe name.png") if number == 3 else f"{number}.png"
        picture(number, *size).save(root / folders[number % 3] / name, exif=turned if number == 0 else None)
    picture(9, 50, 40).convert("L").save(root / "b" / "gray.png")
    return root


@pytest.fixture(scope="module")
def store(pictures, tmp_path_factory) -> PixelStore:
    return build(pictures, tmp_path_factory.mktemp("store") / "new" / "all.pixels", short_side=SHORT_SIDE)


# --- what is in the file


def test_pixels_are_those_of_torchvision_and_about_those_of_pillow(pictures, store):
    """PIL decodes, torchvision v2 resizes; Pillow's own resize shares no code with that."""
    assert store.keys == FolderStore(pictures).keys()
    assert len(store) == len(store.shapes) == 10
    for index, key in enumerate(store.keys):
        pixels, shape = store.pixels(index), store.shapes[index].tolist()
        image = ImageOps.exif_transpose(Image.open(pictures / key)).convert("RGB")
        resize = v2.Resize(min(SHORT_SIDE, *image.size), antialias=True)
        expected = resize(v2.functional.to_image(image)).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(pixels, expected)
        by_pillow = image.resize(shape[::-1], Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(by_pillow, int) - pixels).max() <= 1
        assert shape == list(pixels.shape[:2])
        assert store.classes[store.labels[index]] == Path(key).parent.name
    assert store.classes == sorted({Path(key).parent.name for key in store.keys})
    assert (store.shapes.dtype, store.labels.dtype) == (np.int32, np.int64)


def test_the_file_is_as_documented(store):
    data = store.path.read_bytes()
    magic, version, short_side, n, index_bytes, file_bytes, crc = struct.unpack_from("<8sIIQQQI", data)
    assert (magic, version, short_side, n, file_bytes) == (b"LKPIXELS", 2, SHORT_SIDE, 10, len(data))
    (class_bytes,) = struct.unpack_from("<Q", data, 92)
    assert data[76:92] + data[100:124] == b"turbojpeg".ljust(40, b"\0")
    assert struct.unpack_from("<I", data, 124) == (zlib.crc32(data[:124]),)
    assert zlib.crc32(data[HEADER : HEADER + index_bytes]) == crc
    offsets = struct.unpack_from(f"<{n}Q", data, 128)
    ends = struct.unpack_from(f"<{n + 1}Q", data, 128 + 8 * n)
    shapes = struct.unpack_from(f"<{2 * n}i", data, 136 + 16 * n)
    crcs = struct.unpack_from(f"<{n}I", data, 136 + 24 * n)
    assert list(struct.unpack_from(f"<{n}i", data, 136 + 28 * n)) == store.labels.tolist()
    keys_start = 136 + 32 * n + class_bytes
    assert json.loads(data[136 + 32 * n : keys_start]) == store.classes
    block = data[keys_start : HEADER + index_bytes]
    at = -(-(HEADER + index_bytes) // 64) * 64
    for index in range(n):
        height, width = shapes[2 * index : 2 * index + 2]
        pixels = data[offsets[index] :][: height * width * 3]
        assert offsets[index] == at
        assert zlib.crc32(pixels) == crcs[index]
        assert pixels == store.pixels(index).tobytes()
        assert block[ends[index] : ends[index + 1]].decode(errors="surrogateescape") == store.keys[index]
        at += -(-len(pixels) // 64) * 64
    assert at == len(data)


def test_views_lie_at_64_bytes_and_items_are_copies(store):
    before = store.path.read_bytes()
    for index in range(-1, len(store)):
        pixels = store.pixels(index)
        assert pixels.ctypes.data % 64 == 0
        assert not pixels.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            pixels[0, 0, 0] = 1
        with pytest.raises(ValueError):
            pixels.flags.writeable = True
    image, label = store[3]
    np.testing.assert_array_equal(image.permute(1, 2, 0), store.pixels(3))
    assert (image.dtype, type(label), label) == (torch.uint8, int, store.labels[3])
    image.fill_(7)
    assert not (store[3][0] == 7).all()
    assert store.path.read_bytes() == before
    np.testing.assert_array_equal(store.pixels(np.int64(-10)), store.pixels(0))
    with pytest.raises(IndexError, match="has no image"):
        store[10]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_read_the_same_and_are_sent_no_pixels(store, method):
    """The map is there before the fork; a worker that is not forked from here makes its own."""
    crop = v2.CenterCrop(16)
    cropped = PixelStore(store.path, transform=crop)
    cropped.pixels(0)
    loader = DataLoader(cropped, batch_size=4, num_workers=2 if method == "fork" else 1, multiprocessing_context=method)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(images, torch.stack([crop(image) for image, _ in store]))
    assert labels.tolist() == store.labels.tolist()
    packed = pickle.dumps(cropped)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert again.keys == store.keys
    assert torch.equal(again[4][0], images[4])


# --- what is refused


def refused(path: Path, said: str) -> None:
    with pytest.raises(PixelError, match=said) as failure:
        PixelStore(path)
    assert str(path) in str(failure.value)
    assert "PixelStore.build(" in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1


def of_version(number: int):
    """The file with another version in it, and checksums that fit."""

    def change(data: bytes) -> bytes:
        header = data[:8] + struct.pack("<I", number) + data[12:124]
        return header + struct.pack("<I", zlib.crc32(header)) + data[HEADER:]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"\xff\xd8\xff\xe0" + bytes(1000), "is not a pixel store .*begins with b'.xff"),
        (lambda data: b"", "is not a pixel store .*it is empty"),
        (lambda data: data[:3], "is not a pixel store"),
        *((lambda data, n=n: data[:n], "is cut short") for n in (8, HEADER, -1)),
        (lambda data: data + bytes(64), "is cut short or damaged: it has"),
        *((of_version(number), f"is of version {number}, .*: remove it and build") for number in (1, 4)),
        (of_version(3), r"is damaged: its labels cannot be read \(.*; remove it and build"),
    ],
)
def test_foreign_cut_and_other_versions_files_are_refused(store, tmp_path, change, said):
    (tmp_path / "other").write_bytes(change(store.path.read_bytes()))
    refused(tmp_path / "other", said)


def test_any_damaged_byte_of_header_and_index_is_noticed(store, tmp_path):
    data = store.path.read_bytes()
    for position in range(0, HEADER + struct.unpack_from("<Q", data, 24)[0], 3):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        (tmp_path / "broken").write_bytes(broken)
        refused(tmp_path / "broken", "damaged: its (header|index)" if position >= 8 else "is not a pixel store")


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        PixelStore(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist: make it with labkit.PixelStore.build"):
        PixelStore(tmp_path / "nothing")


def test_a_file_that_is_cut_or_replaced_while_it_is_read_is_an_error(pictures, store, tmp_path):
    path = tmp_path / "a.pixels"
    path.write_bytes(store.path.read_bytes())
    packed, opened, mapped = pickle.dumps(PixelStore(path)), PixelStore(path), PixelStore(path)
    np.testing.assert_array_equal(mapped.pixels(0), store.pixels(0))
    os.truncate(path, 1000)
    with pytest.raises(PixelError, match=r"a\.pixels was cut to 1000 bytes since it was opened; remove it and build"):
        mapped[len(mapped) - 1]
    build(pictures, tmp_path / "q", short_side=9).path.replace(path)
    for use in (lambda: pickle.loads(packed), lambda: opened.pixels(0)):
        with pytest.raises(PixelError, match=r"is not the file that was opened: open it again"):
            use()


# --- hints to the kernel: the rows that are about to be used, and none for a file that is in memory or read in order


COUNT, SIDE = 200, 100  # 30 kB an image, so that a read-ahead of 128 KiB would show


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """A pixel file of images that differ."""
    draw, root = np.random.default_rng(0).integers, tmp_path_factory.mktemp("noise")
    (root / "images").mkdir()
    for number in range(COUNT):
        pixels = draw(0, 256, (SIDE, SIDE + number % 3, 3), np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{number:03}.png", compress_level=0)
    return build(root / "images", root / "all.pixels", short_side=SIDE, classes=[]).path


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int]]:
    """(start, size) of each hint, which the kernel gets nothing of and refuses."""
    found: list[tuple[int, int]] = []

    class Map(mmap.mmap):
        def madvise(self, advice: int, start: int, size: int) -> None:
            assert advice == mmap.MADV_WILLNEED
            found.append((start, size))
            raise OSError("no hints today")

    monkeypatch.setattr(mmap, "mmap", Map)
    return found


@pytest.fixture
def counted(monkeypatch) -> dict[str, int]:
    """What the kernel counts as read from disks, which grows by `step` from look to look, and the looks."""
    state = {"reads": 0, "step": 1, "looks": 0}

    def usage(_):
        state.update(reads=state["reads"] + state["step"], looks=state["looks"] + 1)
        return SimpleNamespace(ru_inblock=state["reads"], ru_majflt=0)

    monkeypatch.setattr(resource, "getrusage", usage)
    return state


def test_hints_cover_the_rows_begin_with_a_page_and_may_be_refused(noise, asked):
    store, data = PixelStore(noise), noise.read_bytes()
    parts = {150: (3, 40), 7: (0, 1), 8: (99, 1), 0: (0, SIDE)}
    store.read_ahead(list(parts), parts.values())
    for (index, (top, height)), (start, size) in zip(parts.items(), asked, strict=True):
        expected = store.pixels(index)[top : top + height].tobytes()
        first = data.find(expected)
        assert start == first // mmap.PAGESIZE * mmap.PAGESIZE
        assert start + size == first + len(expected)


def test_images_out_of_order_are_asked_for_and_of_a_loader_the_crops(noise, asked, counted):
    store = PixelStore(noise)
    store.read_ahead(range(10, 18), [(0, SIDE)] * 8)
    assert asked == []  # left to the kernel
    store.read_ahead([10, 12, 11, 13], [(0, SIDE)] * 4)
    assert len(asked) == 4
    for index in (3, -2, 199, 0):
        np.testing.assert_array_equal(store[index][0].permute(1, 2, 0), store.pixels(index))
    assert len(asked) == 8
    asked.clear()
    list(BatchLoader(store, size=32, batch_size=50, num_threads=1))
    assert len(asked) == COUNT
    assert np.mean([size for _, size in asked]) < 0.9 * SIDE * (SIDE + 2) * 3


def test_a_file_in_memory_is_not_asked_for_until_a_disk_is_read(noise, asked, counted):
    """The kernel's counters are looked at once in 64 images, and believed when two looks found no read."""
    store, found = PixelStore(noise), []
    for step in (0, 0, 0, 0, 0, 1, 1, 0, 0, 0):
        counted["step"] = step
        asked.clear()
        for _ in range(8):
            store.read_ahead([5] * 8, [(0, 1)] * 8)
        found.append(len(asked))
    assert found == [64, 64, 0, 0, 0, 64, 64, 64, 0, 0]
    assert counted["looks"] == 10


# --- building


def save(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = (20 - number % 7, 16 + number % 5, 3)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, size, np.uint8)).save(path)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number in range(N_IMAGES):
        save(root / "ab"[number % 2] / f"{number:02d}.png", number)
    return root


@pytest.fixture
def own_images(images, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(images, tmp_path / "images"))


@pytest.fixture(scope="module")
def expected(images, tmp_path_factory) -> bytes:
    """An undisturbed build, in this thread."""
    return build(images, tmp_path_factory.mktemp("expected") / "p", num_workers=1).path.read_bytes()


class CountingStore(FolderStore):
    """Remembers what was read, and takes its time."""

    def __init__(self, root: Path, delay_s: float = 0):
        super().__init__(root)
        self.delay_s, self.was_read = delay_s, []

    def read(self, key: str) -> bytes:
        time.sleep(self.delay_s)
        self.was_read.append(key)
        return super().read(key)


def parts_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def part(path: Path, number: int) -> Path:
    return parts_of(path) / f"part-{number:06d}.pixels"


@pytest.fixture
def stopped(own_images, tmp_path) -> Path:
    """A build that was interrupted when all parts were there."""
    interrupted = patch.object(os, "fsync", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        build(own_images, tmp_path / "out" / "p")
    assert len(os.listdir(parts_of(tmp_path / "out" / "p"))) == 25  # and the whole one, which has no name yet
    return tmp_path / "out" / "p"


LOCAL = pytest.param("local", 2, marks=pytest.mark.exhaustive)
RAY = pytest.param("ray", None, marks=pytest.mark.alone)  # Ray waits half a minute for its own start, and no longer


@pytest.mark.parametrize(("engine", "num_workers"), [("threads", 3), LOCAL, RAY])
def test_the_bytes_are_the_same_for_any_engine(images, expected, tmp_path, engine, num_workers):
    if engine == "ray":
        pytest.importorskip("ray", reason='Ray is not installed: python -m pip install -e ".[cluster]"')
    assert build(images, tmp_path / "p", engine=engine, num_workers=num_workers).path.read_bytes() == expected
    assert os.listdir(tmp_path) == ["p"]


def damage_parts(images: Path, path: Path) -> None:
    whole, flipped = part(path, 1).read_bytes(), bytearray(part(path, 5).read_bytes())
    flipped[-500] ^= 1
    others = {1: whole[:-1], 2: b"", 4: whole[:-100] + b"?" + whole[-99:], 5: flipped, 6: part(path, 7).read_bytes()}
    for number, data in others.items():
        part(path, number).write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "settings", "remade"),
    [
        (lambda images, path: [part(path, number).unlink() for number in (3, 11)], {}, [3, 11]),
        (damage_parts, {}, [1, 2, 4, 5, 6]),
        (lambda images, path: save(images / "a" / "06.png", 10), {}, [1]),
        (lambda images, path: None, {"short_side": 9}, range(24)),
    ],
)
def test_a_rerun_takes_the_parts_that_are_its_own_and_whole(own_images, stopped, tmp_path, spoil, settings, remade):
    spoil(own_images, stopped)
    (parts_of(stopped) / "thesis.txt").write_text("mine")
    undisturbed = build(own_images, tmp_path / "q", **settings).path.read_bytes()
    store = CountingStore(own_images)
    assert build(store, stopped, **settings).path.read_bytes() == undisturbed
    assert sorted(store.was_read) == [key for number in remade for key in store.keys()[3 * number : 3 * number + 3]]
    assert os.listdir(parts_of(stopped)) == ["thesis.txt"]


def test_a_store_that_is_there_is_returned(images, tmp_path):
    before = os.stat(build(images, tmp_path / "p").path)
    parts_of(tmp_path / "p").mkdir()
    part(tmp_path / "p", 0).write_bytes(b"killed before it was removed")
    store = CountingStore(images)
    assert build(store, tmp_path / "p").keys == store.keys()
    assert store.was_read == []
    assert os.stat(tmp_path / "p").st_mtime_ns == before.st_mtime_ns
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"short_side": 9}, None),
        ({"decoder": "pil"}, None),
        ({}, partial(save, number=10)),
        ({}, Path.unlink),
        ({}, "foreign"),
    ],
)
def test_what_is_other_or_foreign_is_refused_and_not_overwritten(own_images, tmp_path, settings, change):
    said = r"p holds other pixels \(short_side 12, decoder 'turbojpeg'\), or is of other images: choose another path"
    path = build(own_images, tmp_path / "p").path
    if change == "foreign":
        shutil.copy(own_images / "a" / "00.png", path)
        said = r"p is not a pixel store .*under another name"
    elif change:
        change(own_images / "a" / "00.png")
    before = path.read_bytes()
    with pytest.raises(PixelError, match=said):
        build(own_images, path, **settings)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["images", "p"]


def test_images_that_cannot_be_read_are_named(own_images, tmp_path):
    store = CountingStore(own_images)
    sizes, good = store.sizes(), {key: store.read(key) for key in ("a/04.png", "a/06.png", "b/07.png")}
    store.sizes = lambda: sizes
    (own_images / "a" / "04.png").write_bytes(good["a/04.png"][:-20])
    (own_images / "a" / "06.png").unlink()
    (own_images / "b" / "07.png").write_bytes(b"not an image")
    with pytest.raises(ItemErrors, match="3 of 70 items failed") as failure:
        build(store, tmp_path / "p")
    failures = failure.value.failures
    assert list(failures) == list(good)
    assert "DecodeError: a/04.png: turbojpeg cannot decode" in failures["a/04.png"]
    assert "KeyError" in failures["a/06.png"]
    assert not (tmp_path / "p").exists()
    for key, data in good.items():
        (own_images / key).write_bytes(data)
    store.was_read.clear()
    assert len(build(store, tmp_path / "p")) == N_IMAGES
    assert len(store.was_read) == 3 * 3


def test_where_a_disk_is_full_nothing_more_is_decoded(own_images, tmp_path, monkeypatch):
    path, store = tmp_path / "p", CountingStore(own_images)
    written = []

    def fill_up(part, **options):
        written.append(part)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(part))
        return atomic_path(part, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pixels, "atomic_path", fill_up)
        said = r"the disk is full \(part-.*part-0000\d\d\.pixels'\): 4 of \d+ parts are done.*run the same again"
        with pytest.raises(OSError, match=said):
            build(store, path)
    assert len(store.was_read) < N_IMAGES / 2
    store.was_read.clear()
    assert len(build(store, path)) == N_IMAGES
    assert 0 < len(store.was_read) < N_IMAGES  # what was done was kept


forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.mark.exhaustive
@forks
def test_killed_at_any_moment(tmp_path):
    for number in range(2):
        save(tmp_path / "images" / "a" / f"{number}.png", number)
    expected = build(tmp_path / "images", tmp_path / "expected", num_workers=1).path.read_bytes()
    path, was_there = tmp_path / "p", []
    for _ in killed_at_every_moment(partial(build, tmp_path / "images", path, num_workers=1)):
        assert not path.exists() or path.read_bytes() == expected
        was_there.append(path.exists())
        assert build(tmp_path / "images", path, num_workers=1).path.read_bytes() == expected
        assert sorted(os.listdir(tmp_path)) == ["expected", "images", "p"]
        path.unlink()
    assert len(was_there) > 40
    assert was_there == sorted(was_there)  # first it is not there, then it is
    assert {False, True} == set(was_there)


@forks
def test_two_processes_that_build_the_same_file(images, expected, tmp_path):
    in_children("fork", build, *[(CountingStore(images, 0.02), tmp_path / "p")] * 2)
    assert (tmp_path / "p").read_bytes() == expected
    assert os.listdir(tmp_path) == ["p"]
