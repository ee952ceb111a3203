"""Decode only the part of a JPEG that a crop needs, at full size or at 1/2, 1/4 or 1/8 of it.

A decoder that knows the crop skips the inverse DCT and the color conversion of the columns outside it, and all work on
the rows below it. libjpeg-turbo can do this since version 3, but no Python package that contains it offers this, so the
library's C API is called here. Without libjpeg-turbo 3, `WholeDecoder` decodes everything with simplejpeg.

Source: ITU-T T.81, annex B, for the segments in front of the compressed data.
"""

import ctypes
import ctypes.util
import os
import re
import struct
import sys
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg

from labkit.errors import MissingLibraryError
from labkit.util.machine import install_command

APP1, COMMENT, START_OF_SCAN = 0xE1, 0xFE, 0xDA
APPLICATION_MARKERS = frozenset([*range(0xE0, 0xF0), COMMENT])  # APP0 to APP15, and comments
START_OF_IMAGE, END_OF_IMAGE = b"\xff\xd8", b"\xff\xd9"
_ADOBE = 0xEE  # APP14, which says how colors are coded

FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15: headers of frames, as T.81 calls an image
_PROGRESSIVE = frozenset([0xC2, 0xCA])  # Huffman, arithmetic
_SCALABLE = _PROGRESSIVE | {0xC0, 0xC1, 0xC9}  # with a DCT: also baseline and extended
# Within the data of a scan, anything but a byte FF (00 follows it), restarts, fill bytes and the end of the image.
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xd9\xff]")
# Markers with a length that may stand before a scan. Others have none, or nobody reads a file that has them.
_WITH_LENGTH = FRAMES | APPLICATION_MARKERS | {0xC4, 0xCC, *range(0xDA, 0xE0)}
_RESTARTS = 0xDD  # DRI, which states the interval
_HEAD = struct.Struct(">BBH")


class Segment(NamedTuple):
    """One segment: its marker's second byte, and the offsets of the body's start and end."""

    marker: int
    start: int
    end: int


def segment_at(data: bytes, offset: int) -> Segment | None:
    """The segment at `offset`, after any fill bytes; None where `data` ends or no marker with a length stands."""
    while len(data) >= offset + _HEAD.size:
        first, marker, length = _HEAD.unpack_from(data, offset)
        if first != 0xFF:
            return None
        if marker != 0xFF:
            is_segment = marker in _WITH_LENGTH and length >= 2
            return Segment(marker, offset + 4, offset + 2 + length) if is_segment else None
        offset += 1
    return None


def iter_segments(data: bytes) -> Iterator[Segment]:
    """The segments of a JPEG, up to its first scan header or to where no segment follows the one before it."""
    segment = segment_at(data, 2)
    while segment:
        yield segment
        segment = None if segment.marker == START_OF_SCAN else segment_at(data, segment.end)


def segments_before_scan(data: bytes) -> list[Segment]:
    """All segments up to the first scan header, and that; none if something else stands between them."""
    segments = list(iter_segments(data))
    return segments if segments and segments[-1].marker == START_OF_SCAN else []


def header_segment(segments: Iterable[Segment]) -> Segment | None:
    """The first one that states an image's size and how it is coded."""
    return next((segment for segment in segments if segment.marker in FRAMES), None)


def without_segments(data: bytes, markers: Container[int]) -> bytes | None:
    """A JPEG without the segments of these markers; None if something else stands between its segments."""
    segments = segments_before_scan(data)
    unwanted = [segment for segment in segments if segment.marker in markers]
    starts = [0, *(segment.end for segment in unwanted)]
    ends = [*(segment.start - 4 for segment in unwanted), len(data)]
    return b"".join(data[start:end] for start, end in zip(starts, ends, strict=True)) if segments else None


def bare_jpeg(data: bytes) -> bytes:
    """A JPEG's tables, header and scans alone: no metadata, and no stray bytes between the segments before its scan."""
    parts, offset = [data[:2]], 2
    while (start := data.find(b"\xff", offset)) >= 0:
        segment = segment_at(data, start)
        if segment is None:  # stray bytes, or a marker without a length
            offset = start + 1
        elif segment.marker == START_OF_SCAN:
            return b"".join([*parts, data[segment.start - 4 :]])
        else:
            if segment.marker == _ADOBE or segment.marker not in APPLICATION_MARKERS:
                parts.append(data[segment.start - 4 : segment.end])
            offset = segment.end
    return data


def is_scalable(data: bytes) -> bool:
    """Whether libjpeg-turbo can decode these bytes at a reduced size: a JPEG of 8 bits a sample with a DCT.

    A lossless JPEG has no coefficients to leave out: libjpeg-turbo before 3.1.4 scales one all the same and writes
    behind its buffer, which ends the process.

    Source: https://github.com/libjpeg-turbo/libjpeg-turbo/releases/tag/3.1.4
    """
    header = header_segment(iter_segments(data))
    return header is not None and header.marker in _SCALABLE and data[header.start : header.start + 1] == b"\x08"


def is_progressive(data: bytes) -> bool:
    """Whether a JPEG has several scans, each of which refines the whole image."""
    return any(segment.marker in _PROGRESSIVE for segment in iter_segments(data))


def has_stray_markers(data: bytes) -> bool:
    """Whether a marker stands where a sequential JPEG has only the data of its scan.

    A decoder that gives rows as they come meets it behind the rows that it gave already: libjpeg then stops with an
    error, and OpenCV returns what it has. The scans of a progressive JPEG are all read before its first row.
    """
    if is_progressive(data):
        return False
    segments = segments_before_scan(data)
    start = segments[-1].end if segments else 0
    end = data.find(END_OF_IMAGE, start)
    return not segments or _MARKER_IN_SCAN.search(data, start, end if end >= 0 else len(data)) is not None


def has_all_restarts(data: bytes) -> bool:
    """Whether the restart markers of a JPEG are in turn, and of a single scan as many as its image has intervals.

    libjpeg only warns where one is missing or at another's place, and paints what it does not find.

    Source: ITU-T T.81, sections B.2.4.4 and E.1.4
    """
    segments = segments_before_scan(data)
    interval = next((data[segment.start : segment.end] for segment in segments if segment.marker == _RESTARTS), b"")
    if not any(interval):
        return True
    scan = segments[-1]
    codes = np.frombuffer(data, np.uint8)[scan.end :]
    seconds = codes[np.flatnonzero(codes[:-1] == 0xFF) + 1]
    markers = seconds[(seconds >= 0xD0) & (seconds <= START_OF_SCAN) & (seconds != 0xD8)]
    markers = markers[: int(np.argmax(np.append(markers, END_OF_IMAGE[1]) == END_OF_IMAGE[1]))]
    for numbers in np.split(markers, np.flatnonzero(markers == START_OF_SCAN)):
        numbers = numbers[numbers != START_OF_SCAN] & 7
        if not np.array_equal(numbers, np.arange(len(numbers)) & 7):
            return False
    header = header_segment(segments)
    if header is None or header.end < header.start + 6:
        return True  # which is another damage
    _, height, width, n_components = struct.unpack_from(">BHHB", data, header.start)
    factors = data[header.start + 7 : header.end : 3] if n_components > 1 else b"\x11"
    if header.marker in _PROGRESSIVE or data[scan.start] != n_components or not height or 0 in factors:
        return True
    mcu_width, mcu_height = (8 * max(factor >> 4 for factor in factors), 8 * max(factor & 15 for factor in factors))
    n_intervals = -(-(-(-width // mcu_width) * -(-height // mcu_height)) // int.from_bytes(interval))
    return n_intervals - 1 <= len(markers) <= n_intervals  # some encoders put one behind the last interval


def has_all_scans(data: bytes) -> bool:
    """Whether the scans of a progressive JPEG give all bits of all its coefficients.

    Where some are missing, libjpeg guesses them from the blocks around each block, which a crop's edge does not have.

    Source: ITU-T T.81, annex G; libjpeg-turbo, jdcoefct.c, `smoothing_ok`
    """
    segments = segments_before_scan(data)
    header = header_segment(segments)
    if header is None:
        return False
    missing = {component: set(range(64)) for component in data[header.start + 6 : header.end : 3]}
    offset = segments[-1].start
    end = data.find(END_OF_IMAGE, offset)  # no decoder reads the scans behind it
    end = end if end >= 0 else len(data)
    while offset < end:
        n_components = data[offset]
        body = data[offset + 1 : offset + 4 + 2 * n_components]
        if len(body) == 2 * n_components + 3 and body[-1] & 15 == 0:  # down to the lowest bit
            for component in body[: 2 * n_components : 2]:
                missing.get(component, set()).difference_update(range(body[-3], body[-2] + 1))
        found = data.find(b"\xff\xda", offset, end)
        offset = found + 4 if found >= 0 else end
    return not any(missing.values())


# Markers with their first byte, 0xFF, as `head_of` compares them.
APP11, _FF_APP1, _SOF0, _SOF1, _DRI, _SOS = 0xFFEB, 0xFFE1, 0xFFC0, 0xFFC1, 0xFFDD, 0xFFDA
_SKIPPED = frozenset([0xFFC4, *range(0xFFDB, 0xFFFF)]) - {_FF_APP1, _DRI}  # DHT, and DQT to COM
TILE_TABLE = b"labkit tiles\0"  # with which the segments of a tiled JPEG's table begin
SEGMENT, HEIGHT_WIDTH = struct.Struct(">HH"), struct.Struct(">HH")  # marker and length; height and width


class Head(NamedTuple):
    """What stands before the scan of a sequential JPEG.

    height, width: Pixels of the photo, as stored.
    mcu_height, mcu_width: Pixels of an MCU.
    restart_interval: MCUs between two markers; 0 without any.
    data: All bytes before the scan, without the table.
    sides_at: Offset of height and width in them.
    table: Lengths of the pieces, two bytes each; empty without any.
    end: Offset of the scan in the file.
    may_be_turned: Whether a segment is there that may state an orientation.
    """

    height: int
    width: int
    mcu_height: int
    mcu_width: int
    restart_interval: int
    data: bytes
    sides_at: int
    table: bytes
    end: int
    may_be_turned: bool


def head_of(data: bytes) -> Head | None:
    """The head of an ordinary JPEG, read at once; None of any other, for a decoder to look at.

    Ordinary are 8 bits a sample, one or three components, Huffman codes and a single scan, tiled or not.
    """
    header_at = restart_interval = table_at = 0
    table, may_be_turned = b"", False
    at, read = 2, SEGMENT.unpack_from
    try:
        marker, length = read(data, at)
        while marker != _SOS:
            if marker == APP11 and data.startswith(TILE_TABLE, at + 4):
                table_at, table = table_at or at, table + data[at + 4 + len(TILE_TABLE) : at + 2 + length]
            else:
                table_at, table = 0, b""  # it stands right in front of the scan
                if marker in (_SOF0, _SOF1) and not header_at:
                    header_at = at
                elif marker == _DRI:
                    restart_interval = data[at + 4] << 8 | data[at + 5]
                elif marker == _FF_APP1:
                    may_be_turned = True
                elif marker not in _SKIPPED:
                    return None
            at += 2 + length
            marker, length = read(data, at)
        n_components = data[header_at + 9]
        if not header_at or data[:2] != START_OF_IMAGE or data[header_at + 4] != 8 or data[at + 4] != n_components:
            return None
        height, width = HEIGHT_WIDTH.unpack_from(data, header_at + 5)
        mcu = mcu_of(data[header_at + 10 : header_at + 10 + 3 * n_components])
    except (struct.error, IndexError):
        return None
    if mcu is None or not height or not width:
        return None
    end = at + 2 + length
    without_table = data[: table_at or at] + data[at:end]
    return Head(height, width, *mcu, restart_interval, without_table, header_at + 5, table, end, may_be_turned)


@lru_cache(maxsize=64)
def mcu_of(components: bytes) -> tuple[int, int] | None:
    """Height and width of an MCU, in pixels, from the components of a header."""
    if len(components) == 3:
        return 8, 8
    factors = components[1::3] if len(components) == 9 else b""
    sides = [max((factor & 15 for factor in factors), default=0), max((factor >> 4 for factor in factors), default=0)]
    return (8 * sides[0], 8 * sides[1]) if all(sides) else None


LIBRARY_VARIABLE = "LABKIT_LIBTURBOJPEG"
REMEDY = f"{install_command('fast')}, or name a libturbojpeg of version 3 in {LIBRARY_VARIABLE}"

# libjpeg-turbo has no SIMD code for other scales (7/8, 3/4, ...): they take longer than full size.
SCALES = (1, 2, 4, 8)

_SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLORSPACE = 4, 5, 6, 7, 8  # TJPARAM
_IS_PROGRESSIVE, _IS_LOSSLESS = 12, 15
_DECOMPRESS, _RGB = 1, 0  # TJINIT, TJPF
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)  # pixels of a minimum coded unit, by TJSAMP
CHROMA_REACH = 2  # columns and rows around a pixel from which its chroma is interpolated


class JpegHeader(NamedTuple):
    """What a JPEG's header states: the size of the image, in pixels."""

    height: int
    width: int


class Part(NamedTuple):
    """Decoded pixels and where in them the box lies that was asked for.

    pixels: uint8 (height, width, 3) RGB, valid until the decoder is used again.
    place: Top, left, height, width of the box in these pixels; whole numbers at full size.
    """

    pixels: np.ndarray
    place: tuple[float, float, float, float]


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "xywh"]


class _Fraction(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


_FRACTIONS = {scale: _Fraction(1, scale) for scale in SCALES}


class RegionDecoder:
    """Decodes parts of 8-bit RGB and gray JPEGs into its own memory, without the GIL. Use one per thread.

    The pixels equal those of the whole decoded image, bit for bit, at any scale.

    Raises:
        ImportError: libjpeg-turbo 3 is missing; names the remedy.

    Source: ITU-T T.81 via libjpeg-turbo (tj3SetCroppingRegion). Taught in: notebooks/11_prepare_once.ipynb
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._allocate(0)
        self._open()

    def _allocate(self, n_bytes: int) -> None:
        self._memory = np.empty(n_bytes, np.uint8)
        self._address = self._memory.ctypes.data

    def _open(self) -> None:
        """Replace the handle: after an error libjpeg-turbo keeps tables that corrupt later images."""
        self._handle = self._library.tj3Init(_DECOMPRESS)
        if not self._handle:
            raise MemoryError("libjpeg-turbo could not create a decoder")
        self._destroy = weakref.finalize(self, self._library.tj3Destroy, self._handle)

    def _reset(self) -> None:
        self._destroy()
        self._open()

    def header(self, data: bytes) -> JpegHeader | None:
        """Size of the image, or None if it is not a JPEG of which this decoder can read a part alone."""
        handle, get = self._handle, self._library.tj3Get
        if self._library.tj3DecompressHeader(handle, data, len(data)) != 0:
            self._reset()
            return None
        known = 0 <= get(handle, _SUBSAMPLING) < len(_BLOCK_WIDTHS) and 0 <= get(handle, _COLORSPACE) <= 2
        if not known or get(handle, _PRECISION) != 8 or get(handle, _IS_LOSSLESS) == 1:
            return None
        if get(handle, _IS_PROGRESSIVE) == 1 and not has_all_scans(data):
            return None
        return JpegHeader(get(handle, _HEIGHT), get(handle, _WIDTH))

    def decode(
        self, data: bytes | bytearray, box: tuple[int, int, int, int], scale: int = 1, *, from_corner: bool = False
    ) -> Part | None:
        """Decode what a box needs.

        Args:
            data: A JPEG of which `header` or `head_of` gave the size.
            box: Top, left, height and width in pixels of the full image.
            scale: One of `SCALES`: 2 for an image of half the height and half the width.
            from_corner: Let the pixels begin where the image does, for whoever counts from there. Those above the box
                and left of it are then of some earlier image, and nothing is spent on them.

        Returns:
            The pixels, or None if the data are damaged, or cannot be decoded in parts.
        """
        library, handle, n_bytes = self._library, self._handle, len(data)
        source = data if isinstance(data, bytes) else ctypes.byref(ctypes.c_char.from_buffer(data))
        if library.tj3DecompressHeader(handle, source, n_bytes) != 0:
            self._reset()
            return None
        subsampling = library.tj3Get(handle, _SUBSAMPLING)
        if not 0 <= subsampling < len(_BLOCK_WIDTHS):
            return None
        top, height = _expand_to_chroma(box[0], box[2], library.tj3Get(handle, _HEIGHT), scale)
        left, width = _expand_to_chroma(box[1], box[3], library.tj3Get(handle, _WIDTH), scale)
        width += (before := left % -(-_BLOCK_WIDTHS[subsampling] // scale))
        left -= before
        y, x = (0, 0) if from_corner else (top, left)  # of the first pixel
        rows, columns = top + height - y, left + width - x
        if len(self._memory) < rows * columns * 3:
            self._allocate(rows * columns * 3)
        target = self._address + ((top - y) * columns + left - x) * 3
        failed = (
            library.tj3SetScalingFactor(handle, _FRACTIONS[scale])
            or library.tj3SetCroppingRegion(handle, _Region(left, top, width, height))
            or library.tj3Decompress8(handle, source, n_bytes, target, columns * 3, _RGB)
        )
        if failed:
            self._reset()
            return None
        pixels = np.ndarray((rows, columns, 3), np.uint8, self._memory)
        return Part(pixels, (box[0] / scale - y, box[1] / scale - x, box[2] / scale, box[3] / scale))


class WholeDecoder:
    """A `RegionDecoder` that decodes the whole image, with simplejpeg."""

    def header(self, data: bytes) -> JpegHeader | None:
        """Size of the image, or None if it is not a JPEG that this decoder can read at each scale."""
        if not is_scalable(data):
            return None
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError):  # KeyError: a subsampling that simplejpeg has no name for, such as 4:4:1
            return None
        return JpegHeader(height, width) if colorspace in ("RGB", "YCbCr", "Gray") else None

    def decode(
        self, data: bytes | bytearray, box: tuple[int, int, int, int], scale: int = 1, *, from_corner: bool = False
    ) -> Part | None:
        """Decode the whole image; arguments and result as for `RegionDecoder.decode`."""
        data = bytes(data)
        header = self.header(data)
        if header is None:
            return None
        height, width = (-(-side // scale) if scale > 1 else 0 for side in header)
        try:
            pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return None
        # The same margins as in a region, so that it makes no difference to rounding where in the photo a box lies.
        top, rows = _expand_to_chroma(box[0], box[2], header.height, scale)
        left, columns = _expand_to_chroma(box[1], box[3], header.width, scale)
        y, x = (0, 0) if from_corner else (top, left)
        place = (box[0] / scale - y, box[1] / scale - x, box[2] / scale, box[3] / scale)
        return Part(pixels[y : top + rows, x : left + columns], place)


def open_decoder() -> RegionDecoder | WholeDecoder:
    """The fastest decoder that works here."""
    try:
        return RegionDecoder()
    except ImportError:
        return WholeDecoder()


@cache
def load_library() -> ctypes.CDLL:
    """libturbojpeg 3: as named by the environment, installed by pip, or the system's own."""
    for path in _candidate_paths():
        with suppress(OSError, AttributeError):  # not a library; one before version 3 lacks these functions
            return _declare_functions(ctypes.CDLL(path))
    raise MissingLibraryError(f"no libturbojpeg of version 3 was found: {REMEDY}")


def _candidate_paths() -> list[str]:
    if path := os.environ.get(LIBRARY_VARIABLE):
        return [path]
    packaged = []
    with suppress(PackageNotFoundError):
        packaged = [str(file.locate()) for file in files("turbojpeg") or () if "libturbojpeg" in file.name]
    in_prefix = [str(path) for path in sorted(Path(sys.prefix, "lib").glob("libturbojpeg.*"))]  # as with conda
    return [*packaged, *in_prefix, *filter(None, [ctypes.util.find_library("turbojpeg")])]


def _declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare argument types, without which ctypes truncates pointers to 32 bits."""
    handle, number, data = ctypes.c_void_p, ctypes.c_int, (ctypes.c_void_p, ctypes.c_size_t)
    # PyDLL keeps the GIL: releasing it for less than microseconds costs more than it gives, as other threads wake up.
    quick = ctypes.PyDLL(library._name, handle=library._handle)
    for source, name, *types in (
        (library, "tj3Init", number),
        (library, "tj3Destroy", handle),
        (quick, "tj3Get", handle, number),
        (quick, "tj3DecompressHeader", handle, *data),
        (quick, "tj3SetScalingFactor", handle, _Fraction),
        (quick, "tj3SetCroppingRegion", handle, _Region),
        (library, "tj3Decompress8", handle, *data, ctypes.c_void_p, number, number),
    ):
        function = getattr(source, name)
        function.argtypes = types
        setattr(library, name, function)
    library.tj3Init.restype, library.tj3Destroy.restype = handle, None
    return library


def _expand_to_chroma(start: int, length: int, limit: int, scale: int) -> tuple[int, int]:
    """First pixel and number of pixels, both scaled, that hold a box and the pixels that its edge depends on."""
    first = max(0, start // scale - CHROMA_REACH)
    end = min(-(-limit // scale), -(-(start + length) // scale) + CHROMA_REACH)
    return first, end - first
