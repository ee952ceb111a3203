"""Encoded bytes to an RGB tensor: six decoders under one contract.

The libraries differ in how they treat EXIF orientation, alpha, 16-bit samples, CMYK and broken files. Here all do the
same, and the oracle set in `labkit.course.oracles` checks it:

- orientation is what Pillow's `ImageOps.exif_transpose` finds (`labkit.data.orientation`);
- alpha and palette transparency are dropped, as Pillow's `convert("RGB")` does;
- 16-bit samples keep their high byte, and a warning says so, once in each process: for a photo nothing visible is
  lost, which is why it is no error, but of 12 bits of data in 16 only 16 values are left. Gray is repeated in the
  three channels, and a palette becomes its colors: neither is to be read as labels or depths;
- samples of more than 16 bits, signed ones and floats are refused: they are measurements, of which no range is known
  that would make a photo of them;
- a file without its end is an error, never a half-gray picture (`labkit.data.image_formats`).
"""

import io
import math
import os
import re
from collections.abc import Callable
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

from labkit.data.image_formats import (
    FORMATS,
    FORMATS_IN_WORDS,
    JPEG,
    PLUGINS,
    PNG,
    TIFF,
    format_of,
    opened_format,
)
from labkit.data.orientation import open_without_metadata, orientation_of
from labkit.data.partial_jpeg import (
    APP1,
    FRAMES,
    bare_jpeg,
    has_all_restarts,
    has_stray_markers,
    is_progressive,
    is_scalable,
    iter_segments,
    without_segments,
)
from labkit.errors import ArgumentError, DecodeError, MissingLibraryError, WrongTypeError
from labkit.util.arguments import require_choice
from labkit.util.process import warn_caller

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


# Axes of (3, H, W) to flip, by EXIF orientation; from 5 on, after height and width have changed places.
_FLIPPED_AXES: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


class BitDepthWarning(UserWarning):
    """An image has more bits than are kept."""


_has_warned = False


def warn_of_lost_bits(bits: int, key: str | None) -> None:
    """Warn, once in each process, if an image has samples of more than eight bits, of which the high eight are kept."""
    global _has_warned
    if bits > 8 and not _has_warned:
        _has_warned = True
        try:
            warn_caller(
                f"{key or 'an image'} has {bits} bits a channel, of which the high 8 are kept, here and in all others "
                "like it: right for photos, and a loss for depths, labels or measurements. Read those with all their "
                "bits in a data set of your own, by "
                "np.asarray(PIL.Image.open(io.BytesIO(store.read(key))))",
                BitDepthWarning,
            )
        except BitDepthWarning:  # where it is an error, each such image is one
            _has_warned = False
            raise


def decode(data: bytes, decoder: str = "turbojpeg", *, key: str | None = None, short_side: int | None = None) -> Tensor:
    """Decode one image to RGB on the CPU.

    Args:
        data: Encoded file contents: JPEG, PNG, WebP, BMP, PPM, PGM or TIFF.
        decoder: One of `DECODERS`. All pass BMP, PPM, PGM and TIFF to Pillow, and three of them further files that they
            cannot read safely: `turbojpeg` all but flawless RGB and gray JPEG, `torchvision` PNG (a damaged one kills
            the process) and animations, and `torchcodec` PNG and WebP with EXIF and, before 0.17, PNG with a
            transparent color. Of several pictures in a file comes the first.
        key: Name of the file, for the error message.
        short_side: Pixels that the shorter side must keep. `pil_draft` (at 1/2, 1/4 or 1/8 of the size) and
            `turbojpeg` (at any n/8) then decode a JPEG at the smallest DCT scale that keeps them, so the result may
            be larger; a lossless JPEG has no such scale and comes whole, and the other decoders ignore it.

    Returns:
        uint8 tensor, shape (3, H, W), values 0-255, EXIF orientation applied. Most decoders fill rows of
        interleaved pixels, so the strides are channels-last; call `.contiguous()` where planes are needed.

    This is for photos. Of 16 bits a channel the high 8 are kept, and a palette becomes its colors. Read masks,
    depths and other data as they are stored: `np.asarray(PIL.Image.open(io.BytesIO(data)))`.

    >>> image = lk.decode(lk.FolderStore("photos").read("astronaut/000000.jpg"), "pil")
    >>> image.dtype, image.shape[0]
    (torch.uint8, 3)

    Raises:
        DecodeError: `data` is truncated, not an image, has more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels, or has
            floats, signed numbers or 32 bits a channel.
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
        found = opened_format(header)
        bits = found.sample_bits(data, header)
        image = (function if decoder in found.decoders else _by_pillow)(data, header, short_side)
        if found is JPEG and decoder != "turbojpeg":
            _refuse_cut_scan(data, image)
        image = _turned(image, orientation_of(data, header))
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{key or 'image'}: {decoder} cannot decode {len(data)} bytes: {error}") from error
    warn_of_lost_bits(bits, key)
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
    _refuse_bomb(*header.size)
    found = opened_format(header)
    if not found.is_whole(data, header):
        raise ArgumentError("the file is truncated")
    if found is JPEG and not has_all_restarts(data):
        raise ArgumentError("a part of its data is lost: its restart markers are not in turn")
    return header


def _refuse_bomb(width: int, height: int) -> None:
    if width * height > max_pixels():
        raise ArgumentError(f"{width} x {height} pixels exceed the limit of {max_pixels()}: {IF_TRUSTED}")


def open_any(data: bytes) -> Image.Image:
    """`open_image`, also of what is truncated or of a size that Pillow only warns of."""
    try:
        header: Any = Image.open(io.BytesIO(data), formats=PLUGINS)
    except Image.DecompressionBombError as error:
        raise ArgumentError(f"{str(error).rstrip('.')}: {IF_TRUSTED}") from error
    except (UnidentifiedImageError, ValueError, SyntaxError) as error:  # what Pillow's readers of metadata raise
        if header := open_without_metadata(data):
            return header
        if isinstance(error, UnidentifiedImageError):
            raise ArgumentError(f"it is {_kind_of(data)}, and not a readable {FORMATS_IN_WORDS}") from error
        raise
    if opened_format(header) is TIFF:  # whose tiles may be larger than the picture, and are decoded whole
        _refuse_bomb(header.tag_v2.get(Base.TileWidth, 0), header.tag_v2.get(Base.TileLength, 0))
    return header


# First bytes of what is often named .jpg and is no picture.
_OTHER_KINDS = (
    (rb"\x1f\x8b", "a gzip file, as a server sends that compresses images: have it send them as they are"),
    (rb"\s*<(!DOCTYPE|html)", "a web page"), (rb"\s*<svg", "an SVG"), (rb"\Z", "an empty file"),
    (rb"version https://git-lfs", "a pointer of Git LFS, whose file `git lfs pull` brings"),
    (rb"\0{16}", "a file of zeros"),
)  # fmt: skip


def _kind_of(data: bytes) -> str:
    frame = next((segment for segment in iter_segments(data) if segment.marker in FRAMES), None)
    found = format_of(data)
    n_bits = data[frame.start] if frame and found is JPEG and frame.end <= len(data) else 8
    if n_bits in (12, 16):
        return f"a JPEG of {n_bits} bits a sample"
    if found:
        return f"a damaged {found.name}" if found in FORMATS else f"a{'n' * (found.name[0] in 'AEIO')} {found.name}"
    names = (name for start, name in _OTHER_KINDS if re.match(start, data, re.DOTALL | re.IGNORECASE))
    return next(names, f"unknown bytes that begin with {data[:8]!r}")


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


def _by_pillow(data: bytes, header: Image.Image, short_side: int | None = None) -> Tensor:
    return _to_chw(np.array(load_rgb(data, header)))


def _decode_pil(_: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    return _by_pillow(data, header)


def load_pixels(data: bytes, header: Image.Image) -> Image.Image:
    """An opened image with its pixels, whatever Pillow says of the metadata behind those of a PNG."""
    try:
        header.load()
    except (ValueError, SyntaxError):
        header = (open_without_metadata(data) if opened_format(header) is PNG else None) or header
        header.load()
    return header


def load_rgb(data: bytes, header: Image.Image) -> Image.Image:
    """The pixels of an opened image as RGB, of more than 8 bits a sample the high ones."""
    found = opened_format(header)
    bits, image = found.sample_bits(data, header), load_pixels(data, header)
    if image.mode == "F" or (found is TIFF and image.mode == "I"):  # convert("RGB") would clip them to black or white
        raise ArgumentError(
            "its samples are floats, signed, or of 32 bits, and so no photo's: read it in a data set of your own, by "
            "np.asarray(PIL.Image.open(io.BytesIO(store.read(key))))"
        )
    if image.mode.startswith("I"):  # convert("RGB") alone would clip it to white
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> bits - 8).astype(np.uint8))
    return image.convert("RGB")


def _decode_pil_draft(_: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if size := _scaled_size(data, header, short_side):
        header.draft(None, size)
    return _decode_pil(_, data, header, short_side)


def _decode_cv2(cv2: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    # OpenCV returns the rows in front of an error. An APNG's first picture may not be the one that the others give, and
    # before 4.13 a damaged one ends the process.
    is_jpeg = opened_format(header) is JPEG
    if has_stray_markers(data) if is_jpeg else b"acTL" in data[: data.find(b"IDAT")]:
        return _by_pillow(data, header)
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise ArgumentError("cv2.imdecode returned nothing")
    return _to_chw(pixels)


def _decode_torchvision(decode_image: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if getattr(header, "is_animated", False):  # torchvision 0.29 refuses an animated WebP
        return _by_pillow(data, header)
    # bytearray: torch warns about tensors over read-only memory.
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")


def _decode_torchcodec(decode_image: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if opened_format(header) is PNG and "transparency" in header.info and _torchcodec_writes_alpha():
        return _by_pillow(data, header)
    stored = _without_exif(data, header)
    if stored is None:
        return _by_pillow(data, header)
    image = decode_image(stored)
    return image[0] if image.ndim == 4 else image


def _without_exif(data: bytes, header: Image.Image) -> bytes | None:
    """The file without the EXIF by which TorchCodec would turn the image, or refuse it; None if it stays in.

    TorchCodec reads EXIF by other rules than Pillow, and cannot be told to leave it. It stays in PNG and WebP, and in a
    JPEG with stray bytes between its segments.
    """
    if opened_format(header) is not JPEG:
        return None if "exif" in header.info else data
    return without_segments(data, {APP1})


@cache
def _torchcodec_writes_alpha() -> bool:
    """Whether TorchCodec writes four channels into three for a PNG with a tRNS chunk.

    Source: https://github.com/meta-pytorch/torchcodec/issues/1731
    """
    return Version(version("torchcodec")) < Version("0.17")


def _decode_turbojpeg(decode_jpeg: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
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
