"""Judges of what notebooks 10 to 11b let the reader build: sizes from headers, raw pixels, markers of a JPEG."""

import io
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from labkit.course.exercises import _expect, _until_answered

_ON_SIDE = 6
_N_PHOTOS, _PHOTO_BYTES = 16, 300 * 400 * 3


def jpeg_sizes(answer: Callable[[bytes], Any]) -> None:
    """Judge `jpeg_size(data)`: width and height as shown, of JPEGs made here, against Pillow."""
    thumbnail, ordinary, xmp = (16, 12), _jpeg((64, 48)), b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    codes = ordinary[ordinary.index(b"\xff\xc4") + 4 :]  # of a Huffman table, the first of several
    files = {
        "an ordinary photo": ordinary,
        "a photo with a thumbnail in its EXIF": _jpeg((64, 48), app1=_exif(1, thumbnail)),
        "a progressive photo, whose frame is SOF2": _jpeg((64, 48), progressive=True),
        "a photo with XMP, an APP1 without EXIF": _jpeg((64, 48), app1=xmp),
        "a photo whose Huffman table, marker C4, comes before its frame": _inserted(
            ordinary, 0xC4, codes[: codes.index(b"\xff")]
        ),
        "a photo with orientation 3, upside down": _jpeg((64, 48), app1=_exif(3)),
        "a photo with orientation 6, on its side": _jpeg((64, 48), app1=_exif(_ON_SIDE)),
        **{f"a photo with orientation {n}": _jpeg((64, 48), app1=_exif(n)) for n in (2, 4, 5, 7, 8)},
        "a photo with orientation 6, and after its EXIF XMP, an APP1 that must not undo it": _inserted(
            _jpeg((64, 48), app1=xmp), 0xE1, _exif(_ON_SIDE)
        ),
        "a photo with bytes FF that fill the space before a marker": _filled(_jpeg((64, 48))),
    }
    for what, data in files.items():
        right = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
        try:
            found = tuple(answer(data))
        except Exception as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error}; {right} is right") from error
        swapped = found == right[::-1]
        _expect(found != thumbnail, f"{what}: {found} is the thumbnail's size; step over each segment by its length")
        _expect(
            not (swapped and "orientation" in what),
            f"{what}: {found} is wrong, {right} is right; orientations 5 to 8 swap width and height, no others do",
        )
        _expect(not swapped, f"{what}: {found} has height and width swapped; the frame header holds the height first")
        _expect(found == right, f"{what}: {found} is wrong, {right} is right")


def packed_pixels(functions: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """Judge `pack(photos, folder)` and `crop(folder, number, top, left, height, width)` of raw pixels."""
    pack, crop = map(_until_answered, functions)
    with tempfile.TemporaryDirectory() as scratch:
        folder, moved = Path(scratch, "pixels"), Path(scratch, "moved")
        held_bytes = _peak_bytes(lambda: pack(_photos(_N_PHOTOS), str(folder)))
        _expect(folder.is_dir(), "pack has not made the folder")
        _expect(
            held_bytes < 5 * _PHOTO_BYTES,
            f"pack held {held_bytes / _PHOTO_BYTES:.0f} of {_N_PHOTOS} photos in memory at once; write each one before "
            "the next is made",
        )
        pack(_photos(3), str(Path(scratch, "others")))  # what only variables remember is that of these from now on
        shutil.move(folder, moved)
        photos, box = list(_photos(_N_PHOTOS)), (20, 40, 30, 50)
        for number in (0, 1, _N_PHOTOS - 1):
            try:
                found = np.asarray(crop(str(moved), number, *box))
            except Exception as error:
                told = f"crop(folder, {number}, ...) in a folder that was moved raised {type(error).__name__}: {error}"
                raise AssertionError(f"{told}; all that crop needs has to be read from files in the folder") from error
            _judge_crop(found, photos, number, box)
        held_bytes = _peak_bytes(lambda: crop(str(moved), 0, *box))
        _expect(held_bytes < _PHOTO_BYTES, "crop read more than one photo's bytes; np.memmap reads what is touched")


def restart_markers(count: Callable[[bytes], Any]) -> None:
    """Judge `restart_markers(data)`: how many restart markers the scan of a JPEG has."""
    thumbnail = _jpeg((160, 112), restart_marker_blocks=2)
    hint = "FF 00 is a byte FF of the codes, FF D9 the end; step over each segment by its length, 2 + length bytes"
    for size, interval in (((512, 384), 4), ((160, 96), 1), ((160, 96), 0)):
        data = _jpeg(size, app1=_exif(1, thumbnail), quality=98, restart_marker_blocks=interval)
        n_mcus = -(-size[0] // 16) * -(-size[1] // 16)
        right, found = -(-n_mcus // interval) - 1 if interval else 0, count(data)
        what = f"a photo of {n_mcus} MCUs with a marker after every {interval}" if interval else "one without markers"
        is_thumbnail = found == _n_markers(data) != right
        _expect(not is_thumbnail, f"{what}: {found} counts markers of the thumbnail inside EXIF; {hint}")
        _expect(found == right, f"{what}: {found!r} is wrong, {right} is right; {hint}")
    data = _jpeg((160, 96), restart_marker_blocks=1)
    commented = _inserted(data, 0xFE, b"\xff\xda" + 3 * b"\xff\xd0")
    right, found = _n_markers(data), count(_inserted(commented, 0xE1, _exif(1, thumbnail)))
    told = f"a photo with FF DA in a comment gave {found}, and {right} is right"
    _expect(found == right, f"{told}; a search finds bytes FF DA that begin no scan: walk to it by the lengths")


def _judge_crop(found: np.ndarray, photos: list[np.ndarray], number: int, box: tuple[int, int, int, int]) -> None:
    top, left, height, width = box
    right = photos[number][top : top + height, left : left + width]
    told = f"a crop of photo {number} has the shape {found.shape}, and {right.shape} is right: height x width x 3"
    _expect(found.shape == right.shape, told)
    told = f"a crop of photo {number} has other pixels than the photo there; an array is height x width x 3"
    _expect(np.array_equal(found, right), f"{told}, and a pixel has three bytes")


def _photos(n: int) -> Iterator[np.ndarray]:
    """Photos of two shapes, made one at a time."""
    random = np.random.default_rng(n)
    for number in range(n):
        shape = (300, 400, 3) if number % 2 else (400, 300, 3)
        yield random.integers(0, 256, shape, np.uint8)


def _peak_bytes(work: Callable[[], Any]) -> int:
    """The most memory that Python and NumPy held for a piece of work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _jpeg(size: tuple[int, int], *, app1: bytes = b"", **options: Any) -> bytes:
    """A JPEG that is dark at the upper left and bright at the lower right, with grain."""
    width, height = size
    slope = np.add.outer(np.linspace(0, 90, height), np.linspace(0, 120, width))[..., None]
    pixels = (slope + np.random.default_rng(0).integers(0, 40, (height, width, 3))).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", subsampling="4:2:0", **{"quality": 90, **options})
    return _inserted(file.getvalue(), 0xE1, app1) if app1 else file.getvalue()


def _inserted(data: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG with one more segment, the first."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content + data[2:]


def _exif(orientation: int, thumbnail: tuple[int, int] | bytes = b"") -> bytes:
    """An EXIF segment with an orientation, and with a thumbnail, a JPEG of a size or given, in its second directory."""
    small = _jpeg(thumbnail) if isinstance(thumbnail, tuple) else thumbnail
    entries = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 26 if small else 0)
    if small:
        entries += struct.pack("<HHHIIHHIII", 2, 0x0201, 4, 1, 56, 0x0202, 4, 1, len(small), 0) + small
    return b"Exif\0\0" + b"II" + struct.pack("<HI", 42, 8) + entries


def _filled(data: bytes) -> bytes:
    """A JPEG with bytes FF before its first marker and its frame's, which the standard allows (T.81, B.1.1.2)."""
    frame = data.index(b"\xff\xc0")
    return data[:2] + b"\xff" + data[2:frame] + b"\xff" * 3 + data[frame:]


def _n_markers(data: bytes) -> int:
    return sum(data.count(bytes([0xFF, 0xD0 + number])) for number in range(8))
