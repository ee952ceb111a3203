"""Judges of what notebooks 10 to 11b let the reader build: sizes from headers, raw pixels, markers of a JPEG."""

import io
import shutil
import struct
import sys
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

    def jpeg_size(data: bytes) -> Any:
        found = _that_ends(answer)(data)
        return tuple(found) if isinstance(found, list) else found

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
        "an extended photo, whose frame is SOF1": ordinary.replace(b"\xff\xc0", b"\xff\xc1", 1),
        "a photo with orientation 3, upside down": _jpeg((64, 48), app1=_exif(3)),
        "a photo with orientation 6, on its side": _jpeg((64, 48), app1=_exif(_ON_SIDE)),
        **{f"a photo with orientation {n}": _jpeg((64, 48), app1=_exif(n)) for n in (2, 4, 5, 7)},
        "a photo with orientation 6, and after its EXIF XMP, an APP1 that must not undo it": _inserted(
            _jpeg((64, 48), app1=xmp), 0xE1, _exif(_ON_SIDE)
        ),
        "a photo with orientation 8, most significant byte first": _jpeg((64, 48), app1=_exif(8, order=">")),
        "a photo with bytes FF that fill the space before a marker": _filled(_jpeg((64, 48))),
    }
    for what, data in files.items():
        right = _opened(data).size
        cure = "; step over each FF before a marker" if "fill" in what else ""
        try:
            found = jpeg_size(data)
        except Exception as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error}; {right} is right{cure}") from error
        swapped = found == right[::-1]
        _expect(found != thumbnail, f"{what}: {found} is the thumbnail's size; step over each segment by its length")
        _expect(
            not (swapped and "orientation" in what),
            f"{what}: {found} is wrong, {right} is right; orientations 5 to 8 swap width and height, no others do",
        )
        _expect(not swapped, f"{what}: {found} has height and width swapped; the frame header holds the height first")
        _expect(found == right, f"{what}: {found} is wrong, {right} is right{cure}")


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
    for size, interval in (((512, 384), 4), ((160, 96), 1), ((160, 96), 0)):
        data = _jpeg(size, app1=_exif(1, thumbnail), quality=98, restart_marker_blocks=interval)
        n_mcus = -(-size[0] // 16) * -(-size[1] // 16)
        right = -(-n_mcus // interval) - 1 if interval else 0
        scan = data[data.rindex(b"\xff\xda") :]
        what, found = f"a photo of {n_mcus} MCUs with a marker after every {interval}", _counted(count, data)
        if not interval:
            what = f"a photo of {n_mcus} MCUs without restart markers"
        _expect(
            found - right - scan.count(b"\xff\x00") not in (0, 1, 2),
            f"{what}: {found} counts FF 00 too, which is a byte FF of the codes and no marker; {right} is right",
        )
        n_before = _n_markers(data) - right
        _expect(
            found not in (right + n_before, right + n_before + 1, right + n_before + 2, _n_markers(thumbnail)),
            f"{what}: {found} counts markers of the thumbnail inside EXIF; step over each segment by its length",
        )
        _expect(found != right + 1, f"{what}: {found} counts the end of the image, FF D9, too; {right} is right")
        _expect(found == right, f"{what}: {found!r} is wrong, {right} is right")
    data, comment = _jpeg((160, 96), restart_marker_blocks=1), b"\xff\xda" + 3 * b"\xff\xd0"
    for what, more in {
        "FF DA in a comment, a segment after EXIF,": _inserted(
            _inserted(data, 0xFE, comment), 0xE1, _exif(1, thumbnail)
        ),
        "a second JPEG after its end, as phones write a preview,": data + _jpeg((160, 112)),
    }.items():
        found, right = _counted(count, more), _n_markers(data)
        told = f"a photo with {what} gave {found}, and {right} is right"
        _expect(found == right, f"{told}; a search finds bytes FF DA that begin no scan: walk to it by the lengths")


def _counted(count: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return _that_ends(count)(data)
    except (IndexError, struct.error) as error:
        told = f"the walk did not end at the scan ({type(error).__name__}: {error}); from one marker to the next it is"
        raise AssertionError(f"{told} 2 + length bytes: a length counts its own two bytes, not the marker's") from error


def _that_ends(answer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`answer`, stopped after more lines than any walk through the bytes needs."""

    def run(data: bytes) -> Any:
        n_left = 100_000 + 20 * len(data)

        def trace(*_: object) -> Any:
            nonlocal n_left
            n_left -= 1
            if n_left < 0:
                raise IndexError("it no longer moves on; add each segment's length to the place, and 2 of its marker")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return answer(data)
        finally:
            sys.settrace(before)

    return run


def _judge_crop(found: np.ndarray, photos: list[np.ndarray], number: int, box: tuple[int, int, int, int]) -> None:
    top, left, height, width = box
    rows, columns = photos[number].shape[:2]
    everything = np.concatenate([photo.ravel() for photo in photos])
    start = sum(photo.size // 3 for photo in photos[:number])  # a count of pixels, taken for one of bytes
    from_pixels = everything[start : start + 3 * rows * columns].reshape(rows, columns, 3)
    right = photos[number][top : top + height, left : left + width]
    what = f"a crop of photo {number}"
    _expect(
        number == 0 or not np.array_equal(found, from_pixels[top : top + height, left : left + width]),
        f"{what} begins at a third of its byte: starts count bytes, and a pixel has three",
    )
    swapped = photos[number][left : left + width, top : top + height]
    as_columns = photos[number].reshape(columns, rows, 3)[top : top + height, left : left + width]
    _expect(
        found.shape == right.shape and not np.array_equal(found, as_columns),
        f"{what} has rows and columns swapped: an array is height x width x 3"
        if found.shape == swapped.shape or np.array_equal(found, as_columns)
        else f"{what} has the shape {found.shape}, and {right.shape} is right",
    )
    _expect(np.array_equal(found, right), f"{what} has other pixels than the photo there")


def _photos(n: int) -> Iterator[np.ndarray]:
    """Photos of two shapes, made one at a time."""
    random = np.random.default_rng(n)
    for number in range(n):
        shape = (300, 400, 3) if number % 2 else (400, 300, 3)
        yield random.integers(0, 256, shape, np.uint8)


def _peak_bytes(work: Callable[[], Any]) -> int:
    """The most memory that Python and NumPy held for a piece of work."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
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


def _exif(orientation: int, thumbnail: tuple[int, int] | bytes = b"", order: str = "<") -> bytes:
    """An EXIF segment with an orientation, and with a thumbnail, a JPEG of a size or given, in its second directory."""
    small = _jpeg(thumbnail) if isinstance(thumbnail, tuple) else thumbnail
    entries = struct.pack(f"{order}HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 26 if small else 0)
    if small:
        entries += struct.pack(f"{order}HHHIIHHIII", 2, 0x0201, 4, 1, 56, 0x0202, 4, 1, len(small), 0) + small
    return b"Exif\0\0" + (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8) + entries


def _filled(data: bytes) -> bytes:
    """A JPEG with bytes FF before its first marker and its frame's, which the standard allows (T.81, B.1.1.2)."""
    frame = data.index(b"\xff\xc0")
    return data[:2] + b"\xff" + data[2:frame] + b"\xff" * 3 + data[frame:]


def _opened(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def _n_markers(data: bytes) -> int:
    return sum(data.count(bytes([0xFF, 0xD0 + number])) for number in range(8))
