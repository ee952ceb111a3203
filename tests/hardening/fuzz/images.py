"""Fuzz targets that are handed an encoded image. An input is a byte of options and the image."""

import math
import struct
import zlib
from functools import cache
from unittest.mock import patch

import numpy as np
import simplejpeg
import torch
from PIL import Image

import labkit as lk
from labkit.course import broken_files, oracle_files
from labkit.course.oracles import png_chunk
from labkit.data import tiles
from labkit.data.decode import missing_decoders
from labkit.data.depth import decode_picture
from labkit.data.headers import read_header
from labkit.data.orientation import jpeg_orientation
from labkit.data.partial_jpeg import SCALES, WholeDecoder, open_decoder
from tests.hardening.fuzz.oracle import may_refuse, seeded, split_options, write_input
from tests.hardening.inputs import fix_png, image_bytes
from tests.image_files import encoded
from tests.memory_store import MemoryStore

_MAX_PIXELS = 1 << 20  # low, so that an input takes little time; tests/hardening/test_bombs.py tests the real limit


@cache
def image_seeds() -> dict[str, bytes]:
    """Oracle images and hostile ones; two PNGs also with checksums that are made right after each mutation."""
    formats = {"JPEG": {}, "WEBP": {}, "WEBP lossless": {"lossless": True}, "BMP": {}, "PPM": {}, "TIFF": {}}
    small = {f"small {name}": image_bytes((9, 7), name.split()[0], **options) for name, options in formats.items()}
    files = {**oracle_files(), **broken_files(), **_small_pngs(), **small}
    fixed = {name: data for name, data in files.items() if name in ("bad chunk.png", "sound.png")}
    return {name: b"\0" + data for name, data in files.items()} | {
        f"fixed {name}": b"\1" + data for name, data in fixed.items()
    }


def _small_pngs() -> dict[str, bytes]:
    """PNGs whose checksums are right and whose chunks are not, one fault in each."""
    header = struct.pack(">IIBBBBB", 5, 3, 8, 2, 0, 0, 0)
    ihdr, text = png_chunk(b"IHDR", header), png_chunk(b"tEXt", b"name\0text")
    end = png_chunk(b"IDAT", zlib.compress((b"\0" + b"abc" * 5) * 3)) + png_chunk(b"IEND", b"")
    before = {
        "sound": ihdr + text, "no IHDR": b"", "PLTE first": png_chunk(b"PLTE", bytes(15)) + ihdr,
        "text first": text + ihdr,
        "two IHDR": ihdr + png_chunk(b"IHDR", b"\0\0\0\7" + header[4:]), "short IHDR": png_chunk(b"IHDR", header[:8]),
        "depth": png_chunk(b"IHDR", header[:8] + b"\3\3" + header[10:]),
        "filter": png_chunk(b"IHDR", header[:11] + b"\1\0"),
        **{f"short {name}": ihdr + png_chunk(name.encode(), b"1") for name in ("pHYs", "iCCP", "gAMA", "cHRM", "tRNS")},
        "empty sRGB": ihdr + png_chunk(b"sRGB", b""), "empty tEXt": ihdr + png_chunk(b"tEXt", b""),
        "method of iCCP": ihdr + png_chunk(b"iCCP", b"x\0\1abc"), "iCCP": ihdr + png_chunk(b"iCCP", b"x\0\0abc"),
        "iCCP bomb": ihdr + png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2 << 20), 9)),
    }  # fmt: skip
    return {f"{name}.png": b"\x89PNG\r\n\x1a\n" + chunks + end for name, chunks in before.items()}


def _image(data: bytes) -> tuple[int, bytes]:
    options, image = split_options(data)
    return options, fix_png(image) if options & 1 and image.startswith(b"\x89PNG") else image


@seeded(image_seeds)
def decoders(data: bytes) -> None:
    """Every decoder gives uint8 (3, H, W), upright and of the header's size, or DecodeError with the key."""
    options, image = _image(data)
    short_side = (options >> 1) or None
    shapes = {}
    with patch.object(Image, "MAX_IMAGE_PIXELS", _MAX_PIXELS // 2):
        for decoder in set(lk.DECODERS) - missing_decoders().keys():
            with may_refuse(lk.DecodeError, names="a b.jpg: "):
                pixels = lk.decode(image, decoder, key="a b.jpg", short_side=short_side)
                assert (pixels.dtype, pixels.ndim, pixels.shape[0]) == (torch.uint8, 3, 3)
                if short_side is None or decoder not in ("pil_draft", "turbojpeg"):
                    shapes[decoder] = tuple(pixels.shape[1:])
    with patch.object(Image, "MAX_IMAGE_PIXELS", _MAX_PIXELS // 2):
        with may_refuse(lk.DecodeError, names="c/a b.jpg"):
            lk.PILDataset(MemoryStore({"c/a b.jpg": image}))[0]
        for column in ("rgb", "depth"):
            with may_refuse(lk.DecodeError, names=column):
                decode_picture(image, column)
    if shapes:
        assert len(set(shapes.values())) == 1, shapes
        with patch.object(Image, "MAX_IMAGE_PIXELS", None):
            header = read_header(str(write_input("decoded", image)))  # its size is Pillow's: see `headers`
        upright = (header.height, header.width)[:: -1 if (header.orientation or 1) >= 5 else 1]
        assert upright == shapes.popitem()[1], (header, shapes)


@seeded(image_seeds)
def headers(data: bytes) -> None:
    """The header's size and orientation are those that Pillow states.

    What Pillow refuses has an error, or is a JPEG or PNG that it refuses for its metadata, with the size in a header.
    """
    _, image = _image(data)
    path, size = write_input("header", image), None
    with may_refuse(names=path):
        header = read_header(str(path))
        try:
            with Image.open(path) as theirs:
                size, orientation = theirs.size, _orientation_by_pillow(theirs)
                if theirs.format == "TIFF" and orientation and orientation >= 5:
                    size = size[::-1]  # Pillow's is that of the turned image
        except MemoryError:  # of a length that the header states: labkit's reads are bounded by the file's own
            return
        except Exception:
            size = None
    if size is not None:
        assert (header.width, header.height) == size, (header, size)
        assert header.orientation == orientation or orientation is None, (header, orientation)
        assert jpeg_orientation(image) in (None, header.orientation), header
    elif not header.error:
        in_jpeg = struct.pack(">BHH", 8, header.height, header.width)
        in_png = struct.pack(">II", header.width, header.height)
        assert image[16:24] == in_png if image.startswith(b"\x89PNG") else in_jpeg in image, header
    else:
        assert header.width is None
    assert "struct" not in header.error
    assert not header.error.startswith(("error:", "IndexError", "KeyError")), header


def _orientation_by_pillow(image: Image.Image) -> int | None:
    """What `exif_transpose` would do, or None where it fails or its pixels cannot be decoded."""
    try:
        if image.format == "PNG":
            image.load()
        orientation = image.getexif().get(0x0112, 1)
    except Exception:
        return None
    return orientation if orientation in range(1, 9) else 1


@seeded(image_seeds)
def regions(data: bytes) -> None:
    """Part of a JPEG is the same part of all of it, at every scale; damage gives None."""
    options, image = _image(data)
    draw = np.random.default_rng(options)
    for decoder in (open_decoder(), WholeDecoder()):
        frame = decoder.header(image)
        if frame is None or frame.height * frame.width > _MAX_PIXELS:
            continue
        assert min(frame) >= 1
        top, left = int(draw.integers(frame.height)), int(draw.integers(frame.width))
        crop = (top, left, int(draw.integers(1, frame.height - top + 1)), int(draw.integers(1, frame.width - left + 1)))
        for scale in SCALES:
            whole = decoder.decode(image, (0, 0, *frame), scale)
            expected = None if whole is None else whole.pixels.copy()
            part = decoder.decode(image, crop, scale)
            if part is not None and expected is not None:
                _check_part(part, crop, scale, expected)


@cache
def tiled_seeds() -> dict[str, bytes]:
    """Small tiled JPEGs, with a table and without, and the image seeds."""
    small = {}
    for name, mode, subsampling in (("4:2:0", "RGB", 2), ("4:4:4", "RGB", 0), ("gray", "L", -1)):
        pixels = np.random.default_rng(0).integers(0, 256, (24, 64, 3), np.uint8)
        image = Image.fromarray(pixels).convert(mode)
        small[name] = encoded(image, subsampling=subsampling, restart_marker_blocks=2, quality=50)
        small[f"{name} and table"] = tiles._with_table(small[name], tiles.tiling_of(small[name]))
    return {f"tiled {name}": b"\0" + data for name, data in small.items()} | image_seeds()


@seeded(tiled_seeds)
def cuts(data: bytes) -> None:
    """What is cut out of a JPEG that libjpeg-turbo reads without a warning has the pixels of the whole."""
    options, image = _image(data)
    tiling = tiles.tiling_of(image)
    if tiling is None:
        assert tiles.cut_jpeg(image, (0, 0, 1, 1)) == (image, (0, 0, 1, 1))
        return
    height, width = tiling.head.height, tiling.head.width
    draw = np.random.default_rng(options)
    top, left = int(draw.integers(height)), int(draw.integers(width))
    box = top, left, int(draw.integers(1, height - top + 1)), int(draw.integers(1, width - left + 1))
    part, (y, x, *size) = tiles.cut_jpeg(image, box)
    assert tuple(size) == box[2:]
    if height * width > _MAX_PIXELS:
        return
    try:
        whole = simplejpeg.decode_jpeg(image)
    except (ValueError, KeyError):
        return
    found = simplejpeg.decode_jpeg(part)[y : y + size[0], x : x + size[1]]
    np.testing.assert_array_equal(found, whole[top : top + size[0], left : left + size[1]])


def _check_part(part, crop, scale, whole) -> None:
    """The crop's own pixels are those of the whole image; beside them lies what only interpolation reads."""
    assert part.pixels.dtype == np.uint8
    top, left, height, width = part.place
    origin = crop[0] / scale - top, crop[1] / scale - left
    assert origin == (int(origin[0]), int(origin[1])), origin
    inside = slice(math.floor(top), math.ceil(top + height)), slice(math.floor(left), math.ceil(left + width))
    assert part.pixels[inside].size, part.place
    np.testing.assert_array_equal(part.pixels[inside], whole[int(origin[0]) :, int(origin[1]) :][inside])
