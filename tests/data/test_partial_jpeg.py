"""Decoding a part of a JPEG gives the pixels that decoding all of it gives, and anything else is left to others."""

import re
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

import labkit as lk
from labkit.course.oracles import broken_files, oracle_files
from labkit.data.partial_jpeg import (
    LIBRARY_VARIABLE,
    REMEDY,
    RegionDecoder,
    WholeDecoder,
    load_library,
    open_decoder,
)
from tests.image_files import encoded
from tests.memory_store import MemoryStore

needs_library = pytest.mark.skipif(isinstance(open_decoder(), WholeDecoder), reason=REMEDY)
each_decoder = pytest.mark.parametrize("decoder", [pytest.param(RegionDecoder, marks=needs_library), WholeDecoder])
SUBSAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


def jpeg(height: int, width: int, subsampling: str = "420") -> bytes:
    """Smooth, colored and noisy: every coefficient counts."""
    rows, columns = np.mgrid[:height, :width] / 20
    waves = [np.sin(rows * a + columns * b) for a, b in ((1, 2), (3, -1), (-2, 2.5))]
    noise = np.random.default_rng(0).normal(0, 20, (height, width, 3))
    pixels = np.clip(128 + 90 * np.stack(waves, 2) + noise, 0, 255).astype(np.uint8)
    if subsampling == "progressive":
        return encoded(Image.fromarray(pixels), progressive=True, quality=90)
    if subsampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[:, :, :1].copy(), colorspace="Gray", quality=90)
    return simplejpeg.encode_jpeg(pixels, quality=90, colorsubsampling=subsampling)


def whole(data: bytes, scale: int = 1) -> np.ndarray:
    """All pixels at 1/scale, by the library alone."""
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    least = {"min_height": -(-height // scale), "min_width": -(-width // scale)} if scale > 1 else {}
    return simplejpeg.decode_jpeg(data, "RGB", **least)


def random_crops(height: int, width: int, n: int):
    draw = np.random.default_rng(height)
    for _ in range(n):
        crop_height, crop_width = draw.integers(1, height + 1), draw.integers(1, width + 1)
        top, left = draw.integers(0, height - crop_height + 1), draw.integers(0, width - crop_width + 1)
        yield tuple(map(int, (top, left, crop_height, crop_width)))


@needs_library
@pytest.mark.parametrize("subsampling", [*SUBSAMPLINGS, "progressive"])
@pytest.mark.parametrize(
    ("size", "scale"),
    [*((size, 1) for size in [(97, 131), (1, 1)]), *(((333, 470), scale) for scale in (2, 4, 8))],
)
def test_a_crop_has_the_pixels_of_the_whole_image(subsampling, size, scale):
    data, decoder = jpeg(*size, subsampling), RegionDecoder()
    assert decoder.header(data) == size
    expected = whole(data, scale)
    for crop in [(0, 0, *size), *random_crops(*size, 25)]:
        pixels, box = decoder.decode(data, crop, scale)
        assert box[2:] == (crop[2] / scale, crop[3] / scale)
        first = [round(crop[axis] / scale - box[axis]) for axis in (0, 1)]
        assert first == [crop[axis] / scale - box[axis] for axis in (0, 1)]
        height, width = pixels.shape[:2]
        # Its edge, which the crop does not reach, was made without the pixels beside it.
        inner = tuple(slice(int(box[axis]), int(np.ceil(box[axis] + box[axis + 2]))) for axis in (0, 1))
        there = expected[first[0] : first[0] + height, first[1] : first[1] + width]
        np.testing.assert_array_equal(pixels[inner], there[inner])


@needs_library
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_both_decoders_agree(scale):
    parts = [decoder().decode(jpeg(150, 210), (16, 32, 64, 96), scale) for decoder in (RegionDecoder, WholeDecoder)]
    corners = [[int(number) for number in part.place] for part in parts]
    crops = zip(parts, corners, strict=True)
    np.testing.assert_array_equal(*(part.pixels[y : y + h, x : x + w] for part, (y, x, h, w) in crops))


@each_decoder
def test_what_is_no_plain_jpeg_is_not_taken(decoder):
    others = [data for data in oracle_files().values() if not data.startswith(b"\xff\xd8")]
    assert len(others) > 3
    for data in [*others, encoded(Image.new("CMYK", (20, 20))), b"", b"\xff\xd8", b"text" * 50]:
        assert decoder().header(data) is None
        assert decoder().decode(data, (0, 0, 1, 1)) is None


@each_decoder
def test_damage_is_seen_and_spoils_no_later_image(decoder):
    data, one_decoder = jpeg(200, 200), decoder()
    middle = len(data) // 2
    for damaged in (data[:300], data[:middle] + b"\xff\xd9" + data[middle:]):
        assert one_decoder.decode(damaged, (0, 0, 200, 200)) is None
        np.testing.assert_array_equal(one_decoder.decode(data, (0, 0, 200, 200)).pixels, whole(data))
    for broken in broken_files().values():
        assert one_decoder.decode(broken, (0, 0, 8, 8)) is None or broken.startswith(b"\xff\xd8")


@needs_library
def test_each_thread_may_have_a_decoder():
    data = [jpeg(80 + 8 * number, 100, SUBSAMPLINGS[number % 6]) for number in range(12)]
    expected = list(map(whole, data))

    def decode_all(_):
        decoder = RegionDecoder()
        for image, pixels in [*zip(data, expected, strict=True)] * 10:
            np.testing.assert_array_equal(decoder.decode(image, (0, 0, *decoder.header(image))).pixels, pixels)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(decode_all, range(4)))


@needs_library
@pytest.mark.parametrize("n_scans", [1, 9, 10])
def test_a_progressive_jpeg_that_lacks_scans_is_decoded_whole(n_scans, tmp_path):
    """libjpeg guesses what is missing from the blocks around, which a crop's edge does not have."""
    data = jpeg(200, 200, "progressive")
    starts = [match.start() for match in re.finditer(rb"\xff\xda", data)]
    assert len(starts) == 10
    kept = data if n_scans == 10 else data[: data.rindex(b"\xff\xc4", 0, starts[n_scans])] + b"\xff\xd9"
    assert RegionDecoder().header(kept) == ((200, 200) if n_scans == 10 else None)
    assert n_scans == 10 or RegionDecoder().header(kept + data) is None  # scans behind the end are none
    store = MemoryStore({"a/1.jpg": kept, "b/1.jpg": kept})
    options = {"size": 64, "batch_size": 2, "antialias": False, "seed": n_scans}
    pixels = lk.PixelStore.build(store, tmp_path / "x.pixels", short_side=200, progress=False)
    ((images, _),) = lk.BatchLoader(store, **options, scaled_decoding=False)
    ((whole_images, _),) = lk.BatchLoader(pixels, **options)
    assert torch.equal(images, whole_images)


@pytest.fixture
def looked_up_anew():
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.parametrize("named", ["/nowhere/libturbojpeg.so", find_library("c")], ids=["missing", "older"])
def test_without_the_library_that_is_named_everything_is_decoded_whole(monkeypatch, looked_up_anew, named):
    """Any library that lacks the functions of version 3 is an older one."""
    monkeypatch.setenv(LIBRARY_VARIABLE, named)
    with pytest.raises(ImportError, match=r'version 3 was found: .*pip install -e "\.\[fast\]"'):
        RegionDecoder()
    assert isinstance(open_decoder(), WholeDecoder)
