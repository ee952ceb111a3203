"""Encoded bytes to an RGB tensor: six decoders under one contract.

The libraries differ in how they treat EXIF orientation, alpha, 16-bit samples, CMYK and broken files. Here all do the
same, and the oracle set in `labkit.course.oracles` checks it:

- orientation is what Pillow's `ImageOps.exif_transpose` finds: in EXIF, or else in XMP, in front of the pixels or, in a
  PNG, behind them. Metadata that Pillow cannot read state nothing. For the usual JPEG the answer follows from a few
  bytes, without Pillow; where these do not settle it, Pillow decides. `sizes` asks the same function;
- alpha and palette transparency are dropped, as Pillow's `convert("RGB")` does;
- 16-bit samples keep their high byte, and a warning says so, once in each process: for a photo nothing visible is
  lost, which is why it is no error, but of 12 bits of data in 16 only 16 values are left. Gray is repeated in the
  three channels, and a palette becomes its colors: neither is to be read as labels or depths;
- a file without its end (JPEG's EOI, PNG's IEND, WebP's declared length) is an error, never a half-gray picture.

Source: Exif 2.32 (CIPA DC-008), section 4.6.4; TIFF 6.0, section 2; PNG, third edition, section 11.3.
"""

import io
import math
import os
import re
import struct
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import numpy as np
import simplejpeg
import torch
from packaging.version import Version
from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base
from torch import Tensor

from labkit.data.partial_jpeg import (
    APP1,
    APPLICATION_MARKERS,
    END_OF_IMAGE,
    FRAMES,
    START_OF_SCAN,
    bare_jpeg,
    has_all_restarts,
    has_stray_markers,
    is_progressive,
    is_scalable,
    iter_segments,
    segments_before_scan,
    without_segments,
)
from labkit.errors import ArgumentError, DecodeError, MissingLibraryError, WrongTypeError
from labkit.util.arguments import require_choice
from labkit.util.process import warn_caller

EXIF_PREFIX = b"Exif\0\0"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UNREAD_MARKERS = APPLICATION_MARKERS - {0xE0, 0xEE}  # APP0 and APP14 tell a decoder the color space
PNG_TEXT_METADATA = (b"exif\0", b"Raw profile type exif", b"XML:com.adobe.xmp")  # keywords that Pillow reads
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_CHUNK_START = 32  # bytes: length, kind, and as much of the body as holds the longest keyword
_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_SHORT = 3
_VALUE_BYTES = {1: 1, 2: 1, _SHORT: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}  # by TIFF type


def orientation_of(data: bytes, image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8, of a JPEG, PNG or WebP.

    Args:
        data: The encoded bytes.
        image: The same, opened by Pillow. Its pixels are decoded if only that shows what a PNG has behind them.
    """
    is_late = image.format == "PNG" and has_late_metadata(lambda n, at: data[at : at + n], len(data))
    return pillow_orientation(image, load=is_late)


def pillow_orientation(image: Image.Image, *, load: bool) -> int:
    """The orientation as Pillow finds it, 1 to 8; 1 where it finds none, or only damaged metadata.

    Args:
        image: An opened image.
        load: Decode the pixels first, for the metadata behind them.
    """
    try:
        if load:
            image.load()
        # Of the base class: a PNG's own would decode the pixels whenever no EXIF stands in front of them.
        orientation = Image.Image.getexif(image).get(Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # Pillow's readers of metadata raise errors of any kind
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def open_without_metadata(data: bytes) -> Image.Image | None:
    """A JPEG or PNG that Pillow does not open for what stands in its metadata, opened without them, or None.

    The `info` of a JPEG has EXIF with the orientation that the metadata state, and nothing else of them.
    """
    is_jpeg = data.startswith(b"\xff\xd8")
    bare = without_segments(data, _UNREAD_MARKERS) if is_jpeg else _without_png_metadata(data)
    if bare is None:
        return None
    try:
        image = Image.open(io.BytesIO(bare), formats=("JPEG", "PNG"))
    except (UnidentifiedImageError, ValueError, SyntaxError):
        return None
    if is_jpeg:
        exif = Image.Exif()
        exif[Base.Orientation] = jpeg_orientation(data) or 1
        image.info["exif"] = exif.tobytes()
    return image


def _without_png_metadata(data: bytes) -> bytes | None:
    """A PNG with only the chunks that its pixels need; None if it is not a PNG, whose first chunk is its header."""
    if not data.startswith(PNG_SIGNATURE) or data[12:16] != b"IHDR":
        return None
    kept, offset = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while offset + 12 <= len(data):
        end = offset + 12 + int.from_bytes(data[offset : offset + 4], "big")
        kind = data[offset + 4 : offset + 8]
        if kind[:1].isupper() or kind == b"tRNS":  # the case of the first letter says whether a chunk is needed
            kept.append(data[offset:end])
        offset = end
    return b"".join(kept)


def jpeg_orientation(data: bytes) -> int | None:
    """The orientation of a whole JPEG, 1 to 8, without Pillow; None if Pillow must decide."""
    segments = segments_before_scan(data)
    blocks = [(data[start:end], end - start) for marker, start, end in segments if marker == APP1]
    return stated_orientation(blocks) if segments else None


def stated_orientation(blocks: Iterable[tuple[bytes, int]]) -> int | None:
    """What the APP1 segments of a JPEG state, 1 to 8: 1 if there are none; None if Pillow must decide.

    Args:
        blocks: Of each segment in front of the first scan, the first bytes or all, and the number of all.
    """
    n_exif, orientation, may_be_in_xmp = 0, 0, False
    for block, n_bytes in blocks:
        if block.startswith(EXIF_PREFIX):
            n_exif += 1
            found = _tiff_orientation(block[len(EXIF_PREFIX) :], n_bytes - len(EXIF_PREFIX))
            if found is None or n_exif > 1:  # Pillow joins several
                return None
            orientation = found
        else:
            may_be_in_xmp |= len(block) < n_bytes or b"tiff:Orientation" in block
    return None if may_be_in_xmp and not orientation else orientation or 1


def _tiff_orientation(tiff: bytes, n_bytes: int) -> int | None:
    """Orientation in the first directory of a TIFF block, 1 to 8; 0 if it has none, None if Pillow must decide.

    Args:
        tiff: The first bytes of the block, or all.
        n_bytes: The number of all.
    """
    order = _TIFF_ORDERS.get(tiff[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, start)
        entries = tiff[start + 2 : start + 2 + 12 * count]
        for tag, kind, n_values, value in struct.iter_unpack(f"{order}HHI4s", entries):
            if tag == Base.Orientation:
                (number,) = struct.unpack_from(f"{order}H", value)
                return None if (kind, n_values) != (_SHORT, 1) else number if 1 <= number <= 8 else 1
            size = _VALUE_BYTES.get(kind, n_bytes) * n_values
            if size > 4 and struct.unpack(f"{order}I", value)[0] + size > n_bytes:  # Pillow reads no further
                return None
    except struct.error:  # the directory is outside the bytes at hand
        return None
    return 0 if len(entries) == 12 * count else None


def has_late_metadata(read: Callable[[int, int], bytes], n_bytes: int, offset: int = 8) -> bool:
    """Whether a PNG may have EXIF or XMP behind its pixels, as many programs write them.

    Args:
        read: `read(n, offset)` gives up to n bytes of the file.
        n_bytes: Of the file.
        offset: Where a chunk begins, in front of the pixels or at their first.
    """
    is_behind = False
    while len(start := read(_CHUNK_START, offset)) >= 12:
        length, kind = int.from_bytes(start[:4], "big"), start[4:8]
        if kind == b"IEND":
            return False
        if is_behind and _is_metadata(kind, start[8:]):
            return True
        if kind == b"IDAT" and not is_behind:
            is_behind = True
            # Nearly all writers give all chunks of pixels but the last the same length: go to where the last but one
            # is, if nothing stands behind them.
            last = offset + ((n_bytes - offset - 12) // (length + 12) - 1) * (length + 12)
            offset = last if last > offset and read(8, last) == start[:8] else offset
        offset += length + 12
    return False


def _is_metadata(kind: bytes, body: bytes) -> bool:
    return kind == b"eXIf" or (kind in _PNG_TEXTS and body.startswith(PNG_TEXT_METADATA))


IF_TRUSTED = (
    "if you trust the file, set PIL.Image.MAX_IMAGE_PIXELS = None, or to half the pixels that an image may have"
)


def max_pixels() -> float:
    """Pixels that an image may have: Pillow's own hard limit against decompression bombs, applied to every decoder.

    It is twice `PIL.Image.MAX_IMAGE_PIXELS` as that is now; none where it is None.
    """
    return math.inf if Image.MAX_IMAGE_PIXELS is None else 2 * Image.MAX_IMAGE_PIXELS


class PixelLimit:
    """Pillow's limit, which what holds this takes along into the processes that it is pickled for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _limit_of, (Image.MAX_IMAGE_PIXELS, os.getpid())


def _limit_of(pixels: int | None, process: int) -> PixelLimit:
    if os.getpid() != process:
        Image.MAX_IMAGE_PIXELS = pixels
    return PixelLimit()


FORMATS = ("JPEG", "PNG", "WEBP")  # of Pillow's many: for some of the others it starts Ghostscript
_JPEG_FORMATS = ("JPEG", "MPO")  # MPO: a JPEG followed by further pictures, as phones write them
# Axes of (3, H, W) to flip, by EXIF orientation; from 5 on, after height and width have changed places.
_FLIPPED_AXES: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


class BitDepthWarning(UserWarning):
    """An image has more bits than are kept."""


_has_warned = False


def warn_of_lost_bits(data: bytes, key: str | None) -> None:
    """Warn, once in each process, if a PNG has samples of 16 bits, of which only the high eight are kept."""
    global _has_warned
    if not _has_warned and data[24:25] == b"\x10" and data.startswith(PNG_SIGNATURE):
        _has_warned = True
        try:
            warn_caller(
                f"{key or 'an image'} has 16 bits a channel, of which the high 8 are kept, here and in all others like "
                "it: right for photos, and a loss for depths, labels or measurements. Read those with all their bits "
                "in a data set of your own, by "
                "np.asarray(PIL.Image.open(io.BytesIO(store.read(key))))",
                BitDepthWarning,
            )
        except BitDepthWarning:  # where it is an error, each such image is one
            _has_warned = False
            raise


def decode(data: bytes, decoder: str = "turbojpeg", *, key: str | None = None, short_side: int | None = None) -> Tensor:
    """Decode one image to RGB on the CPU.

    Args:
        data: Encoded file contents (JPEG, PNG or WebP).
        decoder: One of `DECODERS`. Three of them pass files that they cannot read safely to Pillow: `turbojpeg` all
            but flawless RGB and gray JPEG, `torchvision` PNG (a damaged one kills the process) and animations,
            and `torchcodec` PNG and WebP with EXIF and, before 0.17, PNG with a transparent color. Of an animation
            comes the first picture.
        key: Name of the file, for the error message.
        short_side: Pixels that the shorter side must keep. `pil_draft` (at 1/2, 1/4 or 1/8 of the size) and
            `turbojpeg` (at any n/8) then decode a JPEG at the smallest DCT scale that keeps them, so the result may
            be larger; a lossless JPEG has no such scale and comes whole, and the other decoders ignore it.

    Returns:
        uint8 tensor, shape (3, H, W), values 0-255, EXIF orientation applied. Most decoders fill rows of
        interleaved pixels, so the strides are channels-last; call `.contiguous()` where planes are needed.

    This is for photos. Of a PNG of 16 bits a channel the high 8 are kept, and a palette becomes its colors. Read masks,
    depths and other data as they are stored: `np.asarray(PIL.Image.open(io.BytesIO(data)))`.

    >>> image = lk.decode(lk.FolderStore("photos").read("astronaut/000000.jpg"), "pil")
    >>> image.dtype, image.shape[0]
    (torch.uint8, 3)

    Raises:
        DecodeError: `data` is truncated, not an image, or has more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels.
        ImportError: the decoder's library is missing; names the remedy.
        ValueError: unknown decoder.

    Warns:
        BitDepthWarning: the first image with 16 bits a channel, once in each process; names it and the remedy.
            `warnings.simplefilter("error", labkit.data.decode.BitDepthWarning)` refuses every such image.

    Source: ITU-T T.81 via libjpeg-turbo. Taught in: notebooks/02_read_image.ipynb
    """
    function = load_decoder(decoder)
    data = _as_bytes(data)
    try:
        header = open_image(data)
        image = function(data, header, short_side)
        if header.format in _JPEG_FORMATS and decoder != "turbojpeg":
            _refuse_cut_scan(data, image)
        image = _turned(image, orientation_of(data, header))
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{key or 'image'}: {decoder} cannot decode {len(data)} bytes: {error}") from error
    if header.format == "PNG":
        warn_of_lost_bits(data, key)
    return image


def _as_bytes(data: Any) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return data if isinstance(data, bytes) else bytes(data)
    raise WrongTypeError(
        f"data must be the bytes of an encoded image, such as Path(file).read_bytes(), got {type(data).__name__}"
    )


def missing_decoders() -> dict[str, str]:
    """Decoders that cannot run here, each with the reason and the remedy."""
    missing = {}
    for decoder in DECODERS:
        try:
            load_decoder(decoder)
        except ImportError as error:
            missing[decoder] = str(error)
    return missing


@cache
def load_decoder(decoder: str) -> Callable[[bytes, Image.Image, int | None], Tensor]:
    """The function of a decoder, its library imported. Raises ImportError and ValueError as `decode` does."""
    function, library, remedy = _DECODERS[require_choice("decoder", decoder, DECODERS)]
    try:
        return partial(function, resolve_name(library))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        cause = next(iter(str(error).splitlines()), "")  # torchcodec's error has two hundred lines
        raise MissingLibraryError(f"{library} is not usable here ({cause}): {remedy}") from error


def open_image(data: bytes) -> Image.Image:
    """Read the header only, and refuse what must not reach any decoder."""
    if not data:
        raise ArgumentError("the file is empty")
    header = open_any(data)
    if header.width * header.height > max_pixels():
        raise ArgumentError(f"{header.width} x {header.height} pixels exceed the limit of {max_pixels()}: {IF_TRUSTED}")
    if not _is_complete(data, header.format):
        raise ArgumentError("the file is truncated")
    if header.format in _JPEG_FORMATS and not has_all_restarts(data):
        raise ArgumentError("a part of its data is lost: its restart markers are not in turn")
    return header


def open_any(data: bytes) -> Image.Image:
    """`open_image`, also of what is truncated or has too many pixels."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ArgumentError(f"{str(error).rstrip('.')}: {IF_TRUSTED}") from error
    except (UnidentifiedImageError, ValueError, SyntaxError) as error:  # what Pillow's readers of metadata raise
        if header := open_without_metadata(data):
            return header
        if isinstance(error, UnidentifiedImageError):
            raise ArgumentError(f"it is {_kind_of(data)}, and not a readable JPEG, PNG or WebP") from error
        raise


# First bytes of what is often named .jpg and is something else.
_OTHER_KINDS = (
    (rb"\x1f\x8b", "a gzip file, as a server sends that compresses images: have it send them as they are"),
    (rb"GIF8", "a GIF"), (rb"BM", "a BMP"), (rb"II\*\0|MM\0\*", "a TIFF"), (rb"....ftypavi[fs]", "an AVIF"),
    (rb"....ftyp(hei|hev|mif)", "a HEIC"), (rb"\s*<(!DOCTYPE|html)", "a web page"), (rb"\s*<svg", "an SVG"),
    (rb"version https://git-lfs", "a pointer of Git LFS, whose file `git lfs pull` brings"), (rb"\Z", "an empty file"),
    (rb"\xff\xd8", "a damaged JPEG"), (rb"\x89PNG", "a damaged PNG"), (rb"RIFF....WEBP", "a damaged WebP"),
    (rb"\0{16}", "a file of zeros"), (rb"\xff\x0a|\0\0\0\x0cJXL", "a JPEG XL"), (rb"\0\0\0\x0cjP  ", "a JPEG 2000"),
)  # fmt: skip


def _kind_of(data: bytes) -> str:
    frame = next((segment for segment in iter_segments(data) if segment.marker in FRAMES), None)
    n_bits = data[frame.start] if frame and data.startswith(b"\xff\xd8") and frame.end <= len(data) else 8
    if n_bits in (12, 16):
        return f"a JPEG of {n_bits} bits a sample"
    names = (name for start, name in _OTHER_KINDS if re.match(start, data, re.DOTALL | re.IGNORECASE))
    return next(names, f"unknown bytes that begin with {data[:8]!r}")


def _is_complete(data: bytes, image_format: str | None) -> bool:
    """Whether the end of the file is there: some decoders paint what is missing gray and report no error."""
    if image_format in _JPEG_FORMATS:
        # Within a scan FF D9 can only be the end; before the scan it may belong to an EXIF thumbnail.
        scans = (segment.start for segment in iter_segments(data) if segment.marker == START_OF_SCAN)
        return data.endswith(END_OF_IMAGE) or data.find(END_OF_IMAGE, next(scans, len(data))) >= 0
    if image_format == "PNG":
        return data.rfind(b"IEND\xaeB`\x82") >= 0
    return len(data) >= 8 + int.from_bytes(data[4:8], "little")


def _refuse_cut_scan(data: bytes, image: Tensor) -> None:
    """Raise where the data of a JPEG end before its last block, though its end marker is there.

    libjpeg fills what is missing with one color, and tells so by a warning, which of all decoders simplejpeg alone
    passes on. So it is asked where the last corner is of one color, as it is in few photos, and for progressive files,
    in which any scan may be cut.
    """
    corner = image[:, -4:, -4:]
    if torch.equal(corner, corner[:, :1, :1].expand_as(corner)) or is_progressive(data):
        try:
            # The bare one: it tells the first warning alone, which would be of metadata or stray bytes before the scan.
            simplejpeg.decode_jpeg(bare_jpeg(data), "GRAY", fastdct=True, fastupsample=True)
        except ValueError as error:
            if _CUT in str(error):
                raise ArgumentError(_CUT_SCAN) from error


_CUT, _CUT_SCAN = "premature end of data", "the file is truncated: its data end before the last row"


def _to_chw(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _turned(image: Tensor, orientation: int) -> Tensor:
    """The image (3, H, W) as EXIF's orientation, 1 to 8, says that it is to be shown."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    axes = _FLIPPED_AXES[orientation]
    return image.flip(axes) if axes else image


def _scaled_size(data: bytes, header: Image.Image, short_side: int | None) -> tuple[int, int] | None:
    """(width, height) with the shorter side at `short_side`, or None if the image is not larger or cannot be scaled."""
    if not short_side or min(header.size) <= short_side or not is_scalable(data):
        return None
    scale = short_side / min(header.size)
    return math.ceil(header.width * scale), math.ceil(header.height * scale)


def _decode_pil(_: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    return _to_chw(np.array(rgb_of(load_pixels(data, header))))


def load_pixels(data: bytes, header: Image.Image) -> Image.Image:
    """An opened image with its pixels, whatever Pillow says of the metadata behind those of a PNG."""
    try:
        header.load()
    except (ValueError, SyntaxError):
        header = (open_without_metadata(data) if header.format == "PNG" else None) or header
        header.load()
    return header


def rgb_of(image: Image.Image) -> Image.Image:
    """An image as RGB, of 16-bit gray the high bytes."""
    if image.mode.startswith("I"):  # convert("RGB") alone would clip it to white
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _decode_pil_draft(_: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if size := _scaled_size(data, header, short_side):
        header.draft(None, size)
    return _decode_pil(_, data, header, short_side)


def _decode_cv2(cv2: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    # OpenCV returns the rows in front of an error. An APNG's first picture may not be the one that the others give, and
    # before 4.13 a damaged one ends the process.
    is_jpeg = header.format in _JPEG_FORMATS
    if has_stray_markers(data) if is_jpeg else b"acTL" in data[: data.find(b"IDAT")]:
        return _decode_pil(None, data, header, short_side)
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise ArgumentError("cv2.imdecode returned nothing")
    return _to_chw(pixels)


def _decode_torchvision(decode_image: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    # torchvision 0.29 crashes (SIGSEGV) on a PNG whose image data is damaged, and refuses an animated WebP.
    if header.format == "PNG" or getattr(header, "is_animated", False):
        return _decode_pil(None, data, header, short_side)
    # bytearray: torch warns about tensors over read-only memory.
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")


def _decode_torchcodec(decode_image: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if header.format == "PNG" and "transparency" in header.info and _torchcodec_writes_alpha():
        return _decode_pil(None, data, header, short_side)
    stored = _without_exif(data, header)
    if stored is None:
        return _decode_pil(None, data, header, short_side)
    image = decode_image(stored)
    return image[0] if image.ndim == 4 else image


def _without_exif(data: bytes, header: Image.Image) -> bytes | None:
    """The file without the EXIF by which TorchCodec would turn the image, or refuse it; None if it stays in.

    TorchCodec reads EXIF by other rules than Pillow, and cannot be told to leave it. It stays in PNG and WebP, and in a
    JPEG with stray bytes between its segments.
    """
    if header.format not in _JPEG_FORMATS:
        return None if "exif" in header.info else data
    return without_segments(data, {APP1})


@cache
def _torchcodec_writes_alpha() -> bool:
    """Whether TorchCodec writes four channels into three for a PNG with a tRNS chunk.

    Source: https://github.com/meta-pytorch/torchcodec/issues/1731
    """
    return Version(version("torchcodec")) < Version("0.17")


def _decode_turbojpeg(decode_jpeg: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if header.format not in _JPEG_FORMATS:
        return _decode_pil(None, data, header, short_side)
    if header.mode in ("RGB", "L"):
        width, height = _scaled_size(data, header, short_side) or (0, 0)
        try:
            return _to_chw(decode_jpeg(data, "RGB", min_height=height, min_width=width))
        except ValueError as error:
            if _CUT in str(error):
                raise ArgumentError(_CUT_SCAN) from error
    # Another warning (stray bytes between markers, say) or an error: Pillow tells them apart. strict=False does not: it
    # also ignores an error that follows a warning, and returns memory that nothing was decoded into.
    image = _decode_pil_draft(None, data, header, short_side)
    _refuse_cut_scan(data, image)
    return image


# Each with its library, which the function gets first, and the remedy if that is missing.
_DECODERS = {
    "pil": (_decode_pil, "PIL", "pip install pillow"),
    "pil_draft": (_decode_pil_draft, "PIL", "pip install pillow"),
    "cv2": (_decode_cv2, "cv2", "pip install opencv-python-headless"),
    "torchvision": (_decode_torchvision, "torchvision.io:decode_image", "pip install torchvision"),
    "torchcodec": (
        _decode_torchcodec, "torchcodec.decoders:decode_image",
        f"pip install -U 'torchcodec>=0.16' (a build for torch {torch.__version__})",
    ),
    "turbojpeg": (_decode_turbojpeg, "simplejpeg:decode_jpeg", "pip install simplejpeg"),
}  # fmt: skip
#: Names of the decoders that `decode` and `ImageDataset` accept, whether installed here or not: `missing_decoders`.
DECODERS = tuple(_DECODERS)
