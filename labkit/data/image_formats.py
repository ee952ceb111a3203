"""The formats of images: all that labkit knows of each is a row of one table.

A format has suffixes, by which stores find its files; first bytes, by which anything else knows it; a check of its
end; perhaps a reader of its header that does without Pillow; and the decoders that read it. Pillow reads all of them,
and the other decoders leave to it what they do not read, or not safely. labkit reads what torchvision's `ImageFolder`
reads. Formats that it only names, in the error for a file of theirs, are rows with fewer columns.

Sources: ITU-T T.81, annex B; PNG, third edition; RFC 9649 (WebP); netpbm.sourceforge.net/doc/ppm.html; TIFF 6.0;
torchvision.datasets.folder, `IMG_EXTENSIONS`.
"""

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import simplejpeg

from labkit.data.orientation import PNG_TEXT_METADATA, TIFF_ORDERS, has_late_metadata, stated_orientation
from labkit.data.partial_jpeg import (
    APP1,
    APPLICATION_MARKERS,
    END_OF_IMAGE,
    START_OF_IMAGE,
    START_OF_SCAN,
    iter_segments,
    segment_at,
)

if TYPE_CHECKING:  # stores, which need the suffixes alone, do without Pillow
    from PIL import Image

PREFIX_BYTES = 4096  # one page, which holds the headers of most files


class Header(NamedTuple):
    """What a file's header states.

    width, height: Pixels as stored, not rotated. orientation: As `lk.decode` turns the image, 1 to 8; None where there
    is no size. error: Why there is none.
    """

    width: int | None = None
    height: int | None = None
    orientation: int | None = None
    error: str = ""


@dataclass(frozen=True, eq=False)
class ImageFormat:
    """One format.

    Attributes:
        name: As users know it.
        start: What its files begin with.
        suffixes: By which stores find its files, in lower case; the first one is for a file that needs a name.
        other_suffixes: Of files that are left to be converted or renamed, as `ImageFolder` does not find them either.
        names_in_pillow: That of the plug-in, and other values of `format` of what it opens; none if labkit does not
            read it.
        is_whole: Whether the end of a file is there, from its bytes and what Pillow opened: some decoders paint what is
            missing gray and report no error.
        sample_bits: Bits of a sample, from the same two.
        read_header: The size and orientation, from the first bytes and an open file; None if Pillow must decide, as it
            does for whatever is not plain, and for formats without such a reader.
        decoders: Those of `lk.DECODERS` that read it by code of their own; for the others Pillow does.
    """

    name: str
    start: re.Pattern[bytes]
    suffixes: tuple[str, ...]
    other_suffixes: tuple[str, ...] = ()
    names_in_pillow: tuple[str, ...] = ()
    is_whole: Callable[[bytes, Any], bool] = lambda data, image: True
    sample_bits: Callable[[bytes, Any], int] = lambda data, image: 8
    read_header: Callable[[bytes, int], Header | None] = lambda data, file: None
    decoders: tuple[str, ...] = ()


# JPEG

_TABLE_BYTES = 1024  # that a JPEG's tables and frame header need, once the application segments are skipped
_JPEG_FRAME = struct.Struct(">BHH")  # of a frame header: bits per sample, height, width
_FRAME_AND_TABLES = frozenset([0xC0, 0xC1, 0xC2, 0xC4, 0xDB, 0xDD])  # SOF0 to SOF2, DHT, DQT, DRI


def _is_whole_jpeg(data: bytes, image: Any) -> bool:
    # Within a scan FF D9 can only be the end; before the scan it may belong to an EXIF thumbnail.
    scans = (segment.start for segment in iter_segments(data) if segment.marker == START_OF_SCAN)
    return data.endswith(END_OF_IMAGE) or data.find(END_OF_IMAGE, next(scans, len(data))) >= 0


def _read_jpeg(data: bytes, file: int) -> Header | None:
    """Skip the application segments, thumbnails included, and leave the frame header to libjpeg-turbo."""
    offset, data, blocks = 2, data[2:], []
    while (segment := segment_at(data, 0)) and segment.marker in APPLICATION_MARKERS:
        if segment.marker == APP1:
            blocks.append((data[segment.start : segment.end], segment.end - segment.start))
        offset += segment.end
        data = data[segment.end :] if len(data) >= segment.end + _TABLE_BYTES else os.pread(file, PREFIX_BYTES, offset)
    orientation = stated_orientation(blocks)
    return _read_jpeg_frame(data, orientation) if orientation else None


def _read_jpeg_frame(data: bytes, orientation: int) -> Header | None:
    """The size, from a JPEG without its application segments."""
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(START_OF_IMAGE + data)
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


# PNG

_PNG_BEGIN = b"\r\n\x1a\n\0\0\0\rIHDR"  # behind the first four bytes
_PNG_END = b"IEND\xaeB`\x82"
# Chunks that Pillow reads or skips, and the fewest bytes of each that it accepts.
_PLAIN_CHUNKS = {
    b"PLTE": 0, b"tRNS": 6, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"bKGD": 0, b"tIME": 0, b"sBIT": 0,
    b"tEXt": 0,
}  # fmt: skip
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by color type
_MAX_PROFILE_BYTES = 1000  # so few cannot unpack to more than Pillow's limit


def has_late_metadata_in(file: int, offset: int = 8) -> bool:
    """Whether an open PNG may have EXIF or XMP behind its pixels; a chunk begins at `offset`."""
    return has_late_metadata(lambda n, at: os.pread(file, n, at), os.fstat(file).st_size, offset)


def _read_png(data: bytes, file: int) -> Header | None:
    """The size, after checking every chunk before the pixels, as Pillow does."""
    if data[4:16] != _PNG_BEGIN or len(data) < 33 or data[24] not in _PNG_DEPTHS.get(data[25], ()) or data[27]:
        return None
    at = 8
    while (kind := data[at + 4 : at + 8]) != b"IDAT":
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        is_sound = crc32(data[at + 4 : end]) == int.from_bytes(data[end : end + 4], "big")
        if not is_sound or (at > 8 and not _is_plain_chunk(kind, data[at + 8 : end])):
            return None
        at = end + 4
    if has_late_metadata_in(file, at):
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return Header(width, height, 1)


def _is_plain_chunk(kind: bytes, body: bytes) -> bool:
    if kind == b"iCCP":  # name, zero, method 0, profile
        return len(body) <= _MAX_PROFILE_BYTES and body.partition(b"\0")[2].startswith(b"\0")
    return len(body) >= _PLAIN_CHUNKS.get(kind, len(body) + 1) and not body.startswith(PNG_TEXT_METADATA)


# WebP


def _read_webp(data: bytes, file: int) -> Header | None:
    """The size of a complete file with one chunk; alpha, profiles, metadata and animation need more than one."""
    whole, kind, chunk = struct.unpack("<I4x4sI", data[4:20].ljust(16))
    if whole != 12 + chunk + chunk % 2 or os.fstat(file).st_size < whole + 8:
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


# What Pillow alone decodes


def _is_whole_bmp(data: bytes, image: Any) -> bool:
    codec, _, offset, args = image.tile[0]
    if codec != "raw":
        return True  # Pillow's decoder of runs refuses too few
    bits = int.from_bytes(data[24:26] if data[14] == _OLDEST_BMP else data[28:30], "little")
    last_row = -(-image.width * bits // 8)  # which some writers do not pad
    return len(data) >= offset + args[1] * (image.height - 1) + last_row


_OLDEST_BMP = 12  # bytes of its header, in which the sides take half the room


def _is_whole_ppm(data: bytes, image: Any) -> bool:
    codec, _, offset, _ = image.tile[0]
    row_bytes = {"1": -(-image.width // 8), "I": 2 * image.width}.get(image.mode, image.width * len(image.getbands()))
    return codec != "raw" or len(data) >= offset + row_bytes * image.height


def _ppm_sample_bits(data: bytes, image: Any) -> int:
    args = image.tile[0][3]
    is_scaled = image.mode == "RGB" and isinstance(args, tuple) and args[1] > 255  # by the largest value, in the header
    return 16 if image.mode == "I" or is_scaled else 8


def _is_whole_tiff(data: bytes, image: Any) -> bool:
    """Whether all strips or tiles, and what says where they are, lie within the file.

    Some writers leave out the sizes of strips, or give the last one that of the others: where nothing is compressed,
    a strip is as long as its rows.
    """
    tags = image.tag_v2
    offsets = tags.get(_TILE_OFFSETS) or tags.get(_STRIP_OFFSETS, ())
    sizes = tags.get(_TILE_SIZES) or tags.get(_STRIP_SIZES, ())
    if tags.get(_COMPRESSION) == 1 and offsets and _STRIP_OFFSETS in tags:
        width, height, bits = tags[_WIDTH], tags[_HEIGHT], tags.get(_BITS, (1,))  # Pillow's sides may be turned already
        row_bytes = -(-width * (sum(bits) if tags.get(_PLANES, 1) == 1 else bits[0]) // 8)
        n_rows = max(1, min(tags.get(_ROWS, height), height))
        last_rows = height - n_rows * (-(-height // n_rows) - 1)
        sizes = [*(sizes or [n_rows * row_bytes] * len(offsets))]
        sizes[-1] = min(sizes[-1], last_rows * row_bytes)
    return len(offsets) == len(sizes) and all(at + size <= len(data) for at, size in zip(offsets, sizes, strict=True))


def _tiff_sample_bits(data: bytes, image: Any) -> int:
    return max(image.tag_v2.get(_BITS, (1,)))


_WIDTH, _HEIGHT = 256, 257  # tags
_BITS, _COMPRESSION, _STRIP_OFFSETS, _ROWS, _STRIP_SIZES, _PLANES = 258, 259, 273, 278, 279, 284
_TILE_OFFSETS, _TILE_SIZES = 324, 325


def _beginning(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


JPEG = ImageFormat(
    "JPEG", _beginning(START_OF_IMAGE + rb"\xff"), (".jpg", ".jpeg"), (".jpe", ".jfif"),
    ("JPEG", "MPO"),  # MPO: a JPEG followed by further pictures, as phones write them
    is_whole=_is_whole_jpeg, read_header=_read_jpeg,
    decoders=("pil_draft", "cv2", "torchvision", "torchcodec", "turbojpeg"),
)  # fmt: skip
# torchvision 0.29 crashes (SIGSEGV) on a PNG whose image data is damaged.
PNG = ImageFormat(
    "PNG", _beginning(rb"\x89PNG"), (".png",), (), ("PNG",),
    is_whole=lambda data, image: data.rfind(_PNG_END) >= 0, sample_bits=lambda data, image: data[24],
    read_header=_read_png, decoders=("cv2", "torchcodec"),
)  # fmt: skip
WEBP = ImageFormat(
    "WebP", _beginning(rb"RIFF....WEBP"), (".webp",), (), ("WEBP",),
    is_whole=lambda data, image: len(data) >= 8 + int.from_bytes(data[4:8], "little"),
    read_header=_read_webp, decoders=("cv2", "torchvision", "torchcodec"),
)  # fmt: skip
BMP = ImageFormat("BMP", _beginning(rb"BM"), (".bmp",), (), ("BMP",), is_whole=_is_whole_bmp)
PPM = ImageFormat(
    "PPM", _beginning(rb"P[1-6]\s"), (".ppm", ".pgm"), (".pbm", ".pnm"), ("PPM",),
    is_whole=_is_whole_ppm, sample_bits=_ppm_sample_bits,
)  # fmt: skip
TIFF = ImageFormat(
    "TIFF", _beginning(b"|".join(map(re.escape, TIFF_ORDERS)) + rb"|II\+\0|MM\0\+"), (".tif", ".tiff"), (), ("TIFF",),
    is_whole=_is_whole_tiff, sample_bits=_tiff_sample_bits,
)  # fmt: skip

FORMATS = (JPEG, PNG, WEBP, BMP, PPM, TIFF)  # that labkit reads
OTHER_FORMATS = (
    ImageFormat("GIF", _beginning(rb"GIF8"), (".gif",)),
    ImageFormat("AVIF", _beginning(rb"....ftypavi[fs]"), (".avif",)),
    ImageFormat("HEIC", _beginning(rb"....ftyp(hei|hev|mif)"), (".heic", ".heif")),
    ImageFormat("JPEG XL", _beginning(rb"\xff\x0a|\0\0\0\x0cJXL"), (".jxl",)),
    ImageFormat("JPEG 2000", _beginning(rb"\0\0\0\x0cjP  "), (".jp2",)),
)

IMAGE_SUFFIXES = tuple(suffix for each in FORMATS for suffix in each.suffixes)
OTHER_IMAGE_SUFFIXES = tuple(
    suffix
    for each in (*FORMATS, *OTHER_FORMATS)
    for suffix in (each.other_suffixes if each in FORMATS else each.suffixes)
)
_BY_NAME_IN_PILLOW = {name: each for each in FORMATS for name in each.names_in_pillow}
PLUGINS = tuple(each.names_in_pillow[0] for each in FORMATS)  # of Pillow's many: for some others it starts Ghostscript
*_FIRST, _LAST = (each.name for each in FORMATS)
FORMATS_IN_WORDS = f"{', '.join(_FIRST)} or {_LAST}"


def opened_format(image: "Image.Image") -> ImageFormat:
    """The format of what Pillow opened with one of `PLUGINS`."""
    return _BY_NAME_IN_PILLOW[image.format or ""]


def format_of(data: bytes) -> ImageFormat | None:
    """The format that an image's first bytes show, also of those that labkit does not read; None if it is no image."""
    return next((each for each in (*FORMATS, *OTHER_FORMATS) if each.start.match(data)), None)
