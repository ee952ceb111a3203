"""Encoded bytes to an RGB tensor: six decoders under one contract.

The libraries differ in how they treat EXIF orientation, alpha, 16-bit samples, CMYK and broken files. Here all do the
same, and the oracle set in `labkit.teach.conformance` checks it:

- orientation is applied as Pillow finds it: in EXIF, in XMP, in a PNG's text; damaged metadata state none;
- alpha and palette transparency are dropped, as Pillow's `convert("RGB")` does;
- 16-bit samples keep their high byte; gray is repeated in the three channels;
- a file without its end (JPEG's EOI, PNG's IEND, WebP's declared length) is an error, never a half-gray picture.
"""

import io
import math
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from labkit.core import require_choice
from labkit.data.jpeg_segments import (
    APP1,
    END_OF_IMAGE,
    START_OF_SCAN,
    is_scalable,
    iter_segments,
    without_segments,
)
from labkit.data.upright import open_without_metadata, orientation_of

# Pillow's own hard limit against decompression bombs, applied to every decoder.
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)

FORMATS = ("JPEG", "PNG", "WEBP")  # of Pillow's many: for some of the others it starts Ghostscript
_JPEG_FORMATS = ("JPEG", "MPO")  # MPO: a JPEG followed by further pictures, as phones write them
# Axes of (3, H, W) to flip, by EXIF orientation; from 5 on, after height and width have changed places.
_FLIPPED_AXES: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


class DecodeError(ValueError):
    """`data` is not a complete JPEG, PNG or WebP image; the message names the key, the decoder and the cause."""


def decode(data: bytes, decoder: str = "turbojpeg", *, key: str | None = None, short_side: int | None = None) -> Tensor:
    """Decode one image to RGB on the CPU.

    Args:
        data: Encoded file contents (JPEG, PNG or WebP).
        decoder: One of `DECODERS`. Three of them pass files that they cannot read safely to Pillow: `turbojpeg` all
            but flawless RGB and gray JPEG, `torchvision` PNG (a damaged one kills the process) and animations,
            and `torchcodec` PNG and WebP with EXIF and, before 0.17, PNG with a transparent colour. Of an animation
            comes the first picture.
        key: Name of the file, for the error message.
        short_side: Pixels that the shorter side must keep. `pil_draft` (at 1/2, 1/4 or 1/8 of the size) and
            `turbojpeg` (at any n/8) then decode a JPEG at the smallest DCT scale that keeps them, so the result may
            be larger; a lossless JPEG has no such scale and comes whole, and the other decoders ignore it.

    Returns:
        uint8 tensor, shape (3, H, W), values 0-255, EXIF orientation applied. Most decoders fill rows of
        interleaved pixels, so the strides are channels-last; call `.contiguous()` where planes are needed.

    Raises:
        DecodeError: `data` is truncated, not an image, or has more than `MAX_PIXELS` pixels.
        ImportError: the decoder's library is missing; names the remedy.
        ValueError: unknown decoder.

    Source: ITU-T T.81 via libjpeg-turbo. Taught in: notebooks/02_read_image.ipynb
    """
    function = load_decoder(decoder)
    try:
        header = open_image(data)
        image = function(data, header, short_side)
        return _turned(image, orientation_of(data, header))
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{key or 'image'}: {decoder} cannot decode {len(data)} bytes: {error}") from error


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
        raise ImportError(f"{library} is not usable here ({cause}): {remedy}") from error


def open_image(data: bytes) -> Image.Image:
    """Read the header only, and refuse what must not reach any decoder."""
    if not data:
        raise ValueError("the file is empty")
    header = _open(data)
    if header.width * header.height > MAX_PIXELS:
        raise ValueError(f"{header.width} x {header.height} pixels exceed the limit of {MAX_PIXELS}")
    if not _is_complete(data, header.format):
        raise ValueError("the file is truncated")
    return header


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if header := open_without_metadata(data):
            return header
        raise


def _is_complete(data: bytes, image_format: str | None) -> bool:
    """Whether the end of the file is there: some decoders paint what is missing gray and report no error."""
    if image_format in _JPEG_FORMATS:
        # Within a scan FF D9 can only be the end; before the scan it may belong to an EXIF thumbnail.
        scans = (segment.start for segment in iter_segments(data) if segment.marker == START_OF_SCAN)
        return data.endswith(END_OF_IMAGE) or data.find(END_OF_IMAGE, next(scans, len(data))) >= 0
    if image_format == "PNG":
        return data.rfind(b"IEND\xaeB`\x82") >= 0
    return len(data) >= 8 + int.from_bytes(data[4:8], "little")


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
    if header.mode.startswith("I"):  # 16-bit gray: convert("RGB") would clip it to white
        gray = (np.asarray(header).astype(np.uint16) >> 8).astype(np.uint8)
        return _to_chw(np.repeat(gray[..., None], 3, axis=2))
    return _to_chw(np.array(header.convert("RGB")))


def _decode_pil_draft(_: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    if size := _scaled_size(data, header, short_side):
        header.draft(None, size)
    return _decode_pil(_, data, header, short_side)


def _decode_cv2(cv2: Any, data: bytes, header: Image.Image, short_side: int | None) -> Tensor:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise ValueError("cv2.imdecode returned nothing")
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
    if header.format not in _JPEG_FORMATS or header.mode not in ("RGB", "L"):
        return _decode_pil(None, data, header, short_side)
    width, height = _scaled_size(data, header, short_side) or (0, 0)
    try:
        pixels = decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError:
        # A warning (stray bytes between markers, say) or an error: Pillow tells them apart. strict=False does not: it
        # also ignores an error that follows a warning, and returns memory that nothing was decoded into.
        return _decode_pil_draft(None, data, header, short_side)
    return _to_chw(pixels)


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
