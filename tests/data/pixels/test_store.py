"""PixelStore: the pixels of torchvision's resize, in the documented file, read back as they are, damage refused."""

import json
import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from labkit import FolderStore, PixelStore
from labkit.course import PixelError, evict
from labkit.data.blobs import resident_fraction

SHORT_SIDE = 24
HEADER = 128


def picture(number: int, width: int, height: int) -> Image.Image:
    """Smooth, with an edge: neither flat nor noise, which all resampling makes alike."""
    y, x = np.mgrid[:height, :width] / 8
    waves = np.stack([np.sin(x + number), np.cos(y * (1 + number)), np.sin(x * y / 5)], axis=2) * 100 + 128
    waves[: height // 3, : width // 3] = 255 - waves[: height // 3, : width // 3]
    return Image.fromarray(waves.round().astype(np.uint8))


def build(source: Path, path: Path, short_side: int = SHORT_SIDE) -> PixelStore:
    return PixelStore.build(source, path, short_side=short_side, engine="threads", progress=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """PNG, whose pixels no decoder disputes, of many shapes; one is smaller than the short side, one exactly it.

    One is gray, one was turned by its camera, and the name of one is broken.
    """
    root, turned = tmp_path_factory.mktemp("images"), Image.Exif()
    turned[274] = 6
    for folder in (folders := ("b", "é", "a c")):
        (root / folder).mkdir()
    sizes = [(60, 45), (45, 60), (97, 33), (200, 25), (24, 24), (20, 70), (1, 1), (31, 64), (512, 300)]
    for number, size in enumerate(sizes):
        name = os.fsdecode(b"\xff\xfe name.png") if number == 3 else f"{number}.png"
        picture(number, *size).save(root / folders[number % 3] / name, exif=turned if number == 0 else None)
    picture(9, 50, 40).convert("L").save(root / "b" / "gray.png")
    return root


@pytest.fixture(scope="module")
def store(images, tmp_path_factory) -> PixelStore:
    return build(images, tmp_path_factory.mktemp("store") / "new" / "all.pixels")


def test_pixels_are_those_of_torchvision_and_about_those_of_pillow(images, store):
    """PIL decodes, torchvision v2 resizes; Pillow's own resize shares no code with that."""
    assert len(store) == len(store.shapes) == 10
    for key, pixels, shape in zip(store.keys, map(store.pixels, range(10)), store.shapes.tolist(), strict=True):
        image = ImageOps.exif_transpose(Image.open(images / key)).convert("RGB")
        resize = v2.Resize(min(SHORT_SIDE, *image.size), antialias=True)
        expected = resize(v2.functional.to_image(image)).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(pixels, expected)
        by_pillow = image.resize(shape[::-1], Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(by_pillow, int) - pixels).max() <= 1
        assert shape == list(pixels.shape[:2])
    assert store.shapes.dtype == np.int32


def test_keys_and_labels_are_those_of_the_folders(images, store):
    assert store.keys == FolderStore(images).keys()
    assert store.classes == sorted({Path(key).parent.name for key in store.keys})
    assert store.labels.dtype == np.int64
    assert [store.classes[label] for label in store.labels] == [Path(key).parent.name for key in store.keys]


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


def test_views_lie_at_64_bytes_and_cannot_be_written(store):
    for index in range(-1, len(store)):
        pixels = store.pixels(index)
        assert pixels.ctypes.data % 64 == 0
        assert not pixels.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            pixels[0, 0, 0] = 1
        with pytest.raises(ValueError):
            pixels.flags.writeable = True


def test_items_are_copies(store):
    before = store.path.read_bytes()
    image, label = store[3]
    np.testing.assert_array_equal(image.permute(1, 2, 0), store.pixels(3))
    assert (image.dtype, type(label), label) == (torch.uint8, int, store.labels[3])
    image.fill_(7)
    assert not (store[3][0] == 7).all()
    assert store.path.read_bytes() == before


def test_an_index_beyond_the_end(store):
    np.testing.assert_array_equal(store.pixels(-10), store.pixels(0))
    np.testing.assert_array_equal(store.pixels(np.int64(2)), store.pixels(2))
    for index in (10, -11):
        with pytest.raises(IndexError, match="has no image"):
            store[index]
    assert len(list(store)) == 10


def test_the_transform_is_handed_the_image(store):
    bright = PixelStore(store.path, transform=lambda image: int(image.max()))
    assert bright[0] == (int(store.pixels(0).max()), int(store.labels[0]))


def refused(path: Path, said: str) -> None:
    with pytest.raises(PixelError, match=said) as failure:
        PixelStore(path)
    assert str(path) in str(failure.value)
    assert "PixelStore.build(" in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"\xff\xd8\xff\xe0" + bytes(1000), "is not a pixel store .*begins with b'.xff"),
        (lambda data: b"a/b.jpg" + bytes(1529), "is not a pixel store .*begins with"),
        (lambda data: b"", "is not a pixel store .*it is empty"),
        (lambda data: data[:3], "is not a pixel store"),
        *((lambda data, n=n: data[:n], "is cut short") for n in (8, 20, HEADER - 1, HEADER, HEADER + 40, 1000, -1)),
        (lambda data: data + bytes(64), "is cut short or damaged: it has"),
        *(
            (lambda data, n=n: patched(data, 8, "<I", n), f"is of version {n}, .*: remove it and build")
            for n in (0, 1, 3)
        ),
    ],
)
def test_foreign_cut_and_damaged_files_are_refused(store, tmp_path, change, said):
    (tmp_path / "other").write_bytes(change(store.path.read_bytes()))
    refused(tmp_path / "other", said)


def patched(data: bytes, position: int, kind: str, value: int) -> bytes:
    """The file with another number in it, and checksums that fit."""
    data = bytearray(data)
    struct.pack_into(kind, data, position, value)
    index_bytes = struct.unpack_from("<Q", data, 24)[0]
    struct.pack_into("<I", data, 40, zlib.crc32(data[HEADER : HEADER + index_bytes]))
    struct.pack_into("<I", data, 124, zlib.crc32(data[:124]))
    return bytes(data)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        PixelStore(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist: make it with labkit.PixelStore.build"):
        PixelStore(tmp_path / "nothing")


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_crash(store, tmp_path):
    path = tmp_path / "a.pixels"
    path.write_bytes(store.path.read_bytes())
    pixels = PixelStore(path)
    assert np.array_equal(pixels.pixels(0), store.pixels(0))
    os.truncate(path, 1000)
    with pytest.raises(PixelError, match=r"a\.pixels was cut to 1000 bytes since it was opened; remove it and build"):
        pixels[len(pixels) - 1]


def test_any_damaged_byte_of_header_and_index_is_noticed(store, tmp_path):
    data = store.path.read_bytes()
    end = HEADER + struct.unpack_from("<Q", data, 24)[0]
    for position in range(end):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        (tmp_path / "broken").write_bytes(broken)
        refused(tmp_path / "broken", "damaged: its (header|index)" if position >= 8 else "is not a pixel store")


def test_verify_names_the_damaged_images(store, tmp_path):
    store.verify(progress=False)
    data = bytearray(store.path.read_bytes())
    offsets = struct.unpack_from("<10Q", data, 128)
    for index in (2, 7):
        data[offsets[index] + 2] ^= 16
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(PixelError, match=r"damaged is damaged in 2 of 10 images .*build it again") as failure:
        PixelStore(tmp_path / "damaged").verify(progress=False)
    assert f"({store.keys[2]}, {store.keys[7]})" in str(failure.value)


def test_a_pickle_is_small_and_reads_the_file(store):
    store.pixels(0)
    packed = pickle.dumps(store)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    np.testing.assert_array_equal(again.pixels(4), store.pixels(4))
    assert again.keys == store.keys


def test_a_pickle_of_another_file_is_refused(images, store, tmp_path):
    path = tmp_path / "p"
    path.write_bytes(store.path.read_bytes())
    packed, opened = pickle.dumps(PixelStore(path)), PixelStore(path)
    build(images, tmp_path / "q", short_side=9).path.replace(path)
    for use in (lambda: pickle.loads(packed), lambda: opened.pixels(0)):
        with pytest.raises(PixelError, match=r"is not the file that was opened: open it again"):
            use()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_s_loader_reads_it_in_workers(store, method):
    """The map is there before the fork; a spawned worker makes its own."""
    crop = v2.CenterCrop(16)
    cropped = PixelStore(store.path, transform=crop)
    expected = torch.stack([crop(image) for image, _ in store])
    cropped.pixels(0)
    loader = DataLoader(cropped, batch_size=4, num_workers=2 if method == "fork" else 1, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(torch.cat([images for images, _ in batches]), expected)
    assert torch.cat([labels for _, labels in batches]).tolist() == store.labels.tolist()


def test_it_can_be_evicted_before_it_is_mapped(store):
    opened = PixelStore(store.path)
    assert resident_fraction([opened.path]) > 0
    assert evict([opened.path]) == store.path.stat().st_size
    np.testing.assert_array_equal(opened.pixels(8), store.pixels(8))
