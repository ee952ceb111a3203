"""The formats of images: all that labkit knows of each is a row of one table.

A format has suffixes, by which stores find its files; first bytes, by which anything else knows it; a check of its
end; and the decoders that read it. Pillow reads all of them, and the other decoders leave to it what they do not read,
or not safely. labkit reads what torchvision's `ImageFolder` reads. Formats that it only names, in the error for a file
of theirs, are rows with fewer columns.

Sources: ITU-T T.81, annex B; PNG, third edition; RFC 9649 (WebP); netpbm.sourceforge.net/doc/ppm.html; TIFF 6.0;
torchvision.datasets.folder, `IMG_EXTENSIONS`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.data.orientation import TIFF_ORDERS
from labkit.data.partial_jpeg import END_OF_IMAGE, START_OF_IMAGE, START_OF_SCAN, iter_segments

if TYPE_CHECKING:  # stores, which need the suffixes alone, do without Pillow
    from PIL import Image


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
        decoders: Those of `lk.DECODERS` that read it by code of their own; for the others Pillow does.
    """

    name: str
    start: re.Pattern[bytes]
    suffixes: tuple[str, ...]
    other_suffixes: tuple[str, ...] = ()
    names_in_pillow: tuple[str, ...] = ()
    is_whole: Callable[[bytes, Any], bool] = lambda data, image: True
    sample_bits: Callable[[bytes, Any], int] = lambda data, image: 8
    decoders: tuple[str, ...] = ()


def _is_whole_jpeg(data: bytes, image: Any) -> bool:
    # Within a scan FF D9 can only be the end; before the scan it may belong to an EXIF thumbnail.
    scans = (segment.start for segment in iter_segments(data) if segment.marker == START_OF_SCAN)
    return data.endswith(END_OF_IMAGE) or data.find(END_OF_IMAGE, next(scans, len(data))) >= 0


_PNG_END = b"IEND\xaeB`\x82"


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
    is_whole=_is_whole_jpeg,
    decoders=("pil_draft", "cv2", "torchvision", "torchcodec", "turbojpeg"),
)  # fmt: skip
# torchvision 0.29 crashes (SIGSEGV) on a PNG whose image data is damaged.
PNG = ImageFormat(
    "PNG", _beginning(rb"\x89PNG"), (".png",), (), ("PNG",),
    is_whole=lambda data, image: data.rfind(_PNG_END) >= 0, sample_bits=lambda data, image: data[24],
    decoders=("cv2", "torchcodec"),
)  # fmt: skip
WEBP = ImageFormat(
    "WebP", _beginning(rb"RIFF....WEBP"), (".webp",), (), ("WEBP",),
    is_whole=lambda data, image: len(data) >= 8 + int.from_bytes(data[4:8], "little"),
    decoders=("cv2", "torchvision", "torchcodec"),
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
OTHER_PLUGINS = ("GIF", "AVIF", "HEIF", "JXL", "JPEG2000")  # of `OTHER_FORMATS`, whose sizes are read
*_FIRST, _LAST = (each.name for each in FORMATS)
FORMATS_IN_WORDS = f"{', '.join(_FIRST)} or {_LAST}"


def opened_format(image: "Image.Image") -> ImageFormat:
    """The format of what Pillow opened with one of `PLUGINS`."""
    return _BY_NAME_IN_PILLOW[image.format or ""]


def format_of(data: bytes) -> ImageFormat | None:
    """The format that an image's first bytes show, also of those that labkit does not read; None if it is no image."""
    return next((each for each in (*FORMATS, *OTHER_FORMATS) if each.start.match(data)), None)
