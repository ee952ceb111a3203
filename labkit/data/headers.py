"""An image's width, height and EXIF orientation from its first bytes, without decoding it.

libjpeg-turbo (simplejpeg) reads a JPEG's frame header; PNG and still WebP state their size at a fixed offset. Any file
that is not flawless there goes to Pillow, and so does every other format: what Pillow says, or refuses, is final, but
for a JPEG that it refuses for its metadata alone.
"""

import io
import math
import os
import struct
from typing import NamedTuple
from zlib import crc32

import simplejpeg
from PIL import Image, UnidentifiedImageError

from labkit.data.decode import (
    IF_TRUSTED,
    PNG_SIGNATURE,
    PNG_TEXT_METADATA,
    has_late_metadata,
    open_without_metadata,
    pillow_orientation,
    stated_orientation,
)
from labkit.data.partial_jpeg import APP1, APPLICATION_MARKERS, segment_at

MAX_SIDE = 999_999_999  # pixels; a larger number is not a size

_PREFIX_BYTES = 4096  # one page, which holds the headers of most files
_TABLE_BYTES = 1024  # that a JPEG's tables and frame header need, once the application segments are skipped
_JPEG_FRAME = struct.Struct(">BHH")  # of a frame header: bits per sample, height, width
_FRAME_AND_TABLES = frozenset([0xC0, 0xC1, 0xC2, 0xC4, 0xDB, 0xDD])  # SOF0 to SOF2, DHT, DQT, DRI
# Chunks that Pillow reads or skips, and the fewest bytes of each that it accepts.
_PLAIN_CHUNKS = {
    b"PLTE": 0, b"tRNS": 6, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"bKGD": 0, b"tIME": 0, b"sBIT": 0,
    b"tEXt": 0,
}  # fmt: skip
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by color type
_MAX_PROFILE_BYTES = 1000  # so few cannot unpack to more than Pillow's limit


class Header(NamedTuple):
    """What a file's header states.

    width, height: Pixels as stored, not rotated. orientation: As `lk.decode` turns the image, 1 to 8; None where there
    is no size. error: Why there is none.
    """

    width: int | None = None
    height: int | None = None
    orientation: int | None = None
    error: str = ""


def read_header(path: str) -> Header:
    """Size and orientation of one image file, as Pillow states them. What Pillow refuses has an `error` and no size."""
    try:
        return _fast_header(path) or _read_with_pillow(path)
    except UnidentifiedImageError:
        is_empty = os.path.getsize(path) == 0
        return Header(error="the file is empty" if is_empty else "no image format that this Pillow reads")
    except Image.DecompressionBombError as error:
        return Header(error=f"{str(error).rstrip('.')}: {IF_TRUSTED}")
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise errors of any kind
        return Header(error=getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")


def _fast_header(path: str) -> Header | None:
    """The header of a plain JPEG, PNG or WebP; None if Pillow must decide."""
    file = os.open(path, os.O_RDONLY)  # half the time of `open`
    try:
        data = os.read(file, _PREFIX_BYTES)
        header = next((read(data, file) for start, read in _READERS.items() if data.startswith(start)), None)
    finally:
        os.close(file)
    limit = Image.MAX_IMAGE_PIXELS or math.inf  # above it, Pillow warns of a decompression bomb or refuses the file
    return header if header and 0 < (header.width or 0) * (header.height or 0) <= limit else None


class _BoundedFile(io.BufferedReader):
    """A file whose reads never ask for more memory than the file has bytes, whatever length its header states."""

    def __init__(self, path: str):
        super().__init__(io.FileIO(path))
        self._n_bytes = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, self._n_bytes))


def _read_with_pillow(path: str) -> Header:
    with _BoundedFile(path) as file, _open(file) as image:
        is_late = image.format == "PNG" and _has_late_metadata(file.fileno())
        return Header(*image.size, pillow_orientation(image, load=is_late))


def _open(file: _BoundedFile) -> Image.Image:
    try:
        return Image.open(file)
    except (UnidentifiedImageError, ValueError, SyntaxError):
        file.seek(0)
        if file.peek(4).startswith((b"\xff\xd8", PNG_SIGNATURE[:4])) and (image := open_without_metadata(file.read())):
            return image
        raise


def _has_late_metadata(file: int, offset: int = 8) -> bool:
    return has_late_metadata(lambda n, at: os.pread(file, n, at), os.fstat(file).st_size, offset)


def _read_jpeg(data: bytes, file: int) -> Header | None:
    """Skip the application segments, thumbnails included, and leave the frame header to libjpeg-turbo."""
    offset, data, blocks = 2, data[2:], []
    while (segment := segment_at(data, 0)) and segment.marker in APPLICATION_MARKERS:
        if segment.marker == APP1:
            blocks.append((data[segment.start : segment.end], segment.end - segment.start))
        offset += segment.end
        data = data[segment.end :] if len(data) >= segment.end + _TABLE_BYTES else os.pread(file, _PREFIX_BYTES, offset)
    orientation = stated_orientation(blocks)
    return _read_jpeg_frame(data, orientation) if orientation else None


def _read_jpeg_frame(data: bytes, orientation: int) -> Header | None:
    """The size, from a JPEG without its application segments."""
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(b"\xff\xd8" + data)
    except (ValueError, KeyError):  # KeyError: a subsampling that simplejpeg has no name for, such as 4:4:1
        return None
    frame = data.find(_JPEG_FRAME.pack(8, height, width))  # 8 bits per sample: Pillow refuses another depth
    is_plain = frame >= 4 and data.find(b"\xff\xe1", 0, frame) < 0 and _is_scan_next(data, frame - 4)
    return Header(width, height, orientation) if is_plain else None


def _is_scan_next(data: bytes, at: int) -> bool:
    """Whether only tables stand between a frame header and the first scan, and no EXIF, which may."""
    try:
        while data[at] == 0xFF and data[at + 1] in _FRAME_AND_TABLES:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    except IndexError:
        return False
    return data.startswith(b"\xff\xda", at)


def _read_png(data: bytes, file: int) -> Header | None:
    """The size, after checking every chunk before the pixels, as Pillow does."""
    if data[8:16] != b"\0\0\0\rIHDR" or len(data) < 33 or data[24] not in _PNG_DEPTHS.get(data[25], ()) or data[27]:
        return None
    at = 8
    while (kind := data[at + 4 : at + 8]) != b"IDAT":
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        is_sound = crc32(data[at + 4 : end]) == int.from_bytes(data[end : end + 4], "big")
        if not is_sound or (at > 8 and not _is_plain_chunk(kind, data[at + 8 : end])):
            return None
        at = end + 4
    if _has_late_metadata(file, at):
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return Header(width, height, 1)


def _is_plain_chunk(kind: bytes, body: bytes) -> bool:
    if kind == b"iCCP":  # name, zero, method 0, profile
        return len(body) <= _MAX_PROFILE_BYTES and body.partition(b"\0")[2].startswith(b"\0")
    return len(body) >= _PLAIN_CHUNKS.get(kind, len(body) + 1) and not body.startswith(PNG_TEXT_METADATA)


def _read_webp(data: bytes, file: int) -> Header | None:
    """The size of a complete file with one chunk; alpha, profiles, metadata and animation need more than one."""
    whole, form, kind, chunk = struct.unpack("<I4s4sI", data[4:20].ljust(16))
    is_whole = whole == 12 + chunk + chunk % 2 and os.fstat(file).st_size >= whole + 8
    if form != b"WEBP" or not is_whole:
        return None
    if kind == b"VP8 ":
        return _read_webp_lossy(data, chunk)
    bits = int.from_bytes(data[21:25], "little")
    if kind != b"VP8L" or data[20:21] != b"\x2f" or bits >> 29:  # signature and version
        return None
    return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1)


def _read_webp_lossy(data: bytes, chunk: int) -> Header | None:
    tag = int.from_bytes(data[20:23], "little")
    # It must be a visible key frame of a known profile, with its first partition inside the chunk.
    if data[23:26] != b"\x9d\x01\x2a" or tag & 0b11001 != 0b10000 or tag >> 5 >= chunk:
        return None
    width, height = struct.unpack_from("<HH", data, 26)
    return Header(width & 0x3FFF, height & 0x3FFF, 1)  # the two high bits request scaling


# By the first bytes of a file.
_READERS = {b"\xff\xd8\xff": _read_jpeg, b"\x89PNG\r\n\x1a\n": _read_png, b"RIFF": _read_webp}
