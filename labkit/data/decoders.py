"""Encoded bytes to an RGB tensor: six decoders under one contract.

The libraries differ in what they do with EXIF orientation, alpha, 16-bit samples, CMYK and broken files. Here they
all do the same, and the oracle set in `labkit.teach.conformance` holds them to it:

- EXIF orientation is applied; alpha and palette transparency are dropped, as Pillow's `convert("RGB")` does;
- 16-bit samples keep their high byte; gray is repeated over the three channels;
- a file without its end (JPEG's EOI, PNG's IEND, WebP's declared length) is an error, never a half-gray picture.
"""

import io
import math
from collections.abc import Callable
from functools import cache
from importlib import import_module

import numpy as np
import torch
from PIL import Image
from torch import Tensor

DECODERS = ("pil", "pil_draft", "cv2", "torchvision", "torchcodec", "turbojpeg")

# Pillow's own hard limit against decompression bombs, here held for every decoder.
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)

FORMATS = ("JPEG", "PNG", "WEBP")  # of Pillow's many: for one of the others it starts Ghostscript
_JPEG = ("JPEG", "MPO")  # MPO: a JPEG with further pictures behind it, as phones write them
_EXIF_ORIENTATION = 0x0112


class DecodeError(ValueError):
    """`data` is not a whole JPEG, PNG or WebP image; the message names the key, the decoder and the cause."""


def decode(data: bytes, decoder: str = "turbojpeg", *, key: str | None = None, short_side: int | None = None) -> Tensor:
    """Decode one image to RGB on the CPU.

    Args:
        data: Encoded file contents (JPEG, PNG or WebP).
        decoder: One of `DECODERS`. Two of them hand files that they cannot read safely to Pillow: `turbojpeg` all
            but flawless RGB and gray JPEG, `torchvision` PNG (a damaged one kills the process).
        key: Name of the file, for the error message.
        short_side: Pixels that the shorter side must keep. `pil_draft` (at 1/2, 1/4 or 1/8 of the size) and
            `turbojpeg` (at any n/8) then decode a JPEG at the smallest DCT scale that keeps them, so the result may
            be larger; the other decoders ignore it.

    Returns:
        uint8 tensor, shape (3, H, W), values 0-255, EXIF orientation applied. Most decoders fill rows of
        interleaved pixels, so the strides are channels-last; call `.contiguous()` where planes are needed.

    Raises:
        DecodeError: `data` is truncated, not an image, or has more than `MAX_PIXELS` pixels.
        ImportError: the decoder's library is missing; names the remedy.
        ValueError: unknown decoder.

    Source: ITU-T T.81 via libjpeg-turbo. Taught in: notebooks/02_read_image.ipynb
    """
    function = _load(decoder)
    try:
        header = open_image(data)
        image = function(data, header, short_side)
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{key or 'image'}: {decoder} cannot decode {len(data)} bytes: {error}") from error
    return image


def missing_decoders() -> dict[str, str]:
    """Decoders that cannot run here, each with the reason and the remedy."""
    missing = {}
    for decoder in DECODERS:
        try:
            _load(decoder)
        except ImportError as error:
            missing[decoder] = str(error)
    return missing


@cache
def _load(decoder: str) -> Callable[[bytes, Image.Image, int | None], Tensor]:
    if decoder not in DECODERS:
        raise ValueError(f"unknown decoder {decoder!r}: choose one of {', '.join(DECODERS)}")
    return globals()[f"_load_{decoder}"]()


def open_image(data: bytes) -> Image.Image:
    """Read the header only and refuse what no decoder should be handed."""
    if not data:
        raise ValueError("the file is empty")
    header = Image.open(io.BytesIO(data), formats=FORMATS)
    if header.width * header.height > MAX_PIXELS:
        raise ValueError(f"{header.width} x {header.height} pixels exceed the limit of {MAX_PIXELS}")
    if not _is_whole(data, header.format):
        raise ValueError("the file is truncated")
    return header


def _is_whole(data: bytes, image_format: str | None) -> bool:
    """Whether the end of the file is there: some decoders paint what is missing gray and say nothing."""
    if image_format in _JPEG:
        # Inside a scan FF D9 can only be the end; before it, it may belong to an EXIF thumbnail.
        return data.endswith(b"\xff\xd9") or data.find(b"\xff\xd9", _scan_start(data)) >= 0
    if image_format == "PNG":
        return data.rfind(b"IEND\xaeB`\x82") >= 0
    return len(data) >= 8 + int.from_bytes(data[4:8], "little")


def _scan_start(data: bytes) -> int:
    """Offset of a JPEG's first SOS marker, or the length of `data` where there is none."""
    offset = 2
    while offset + 4 <= len(data):
        if data[offset + 1] == 0xDA:
            return offset
        padding = data[offset + 1] == 0xFF  # any number of FF may stand before a marker
        offset += 1 if padding else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return len(data)


def _to_chw(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _orient(image: Tensor, header: Image.Image) -> Tensor:
    """Undo the camera's rotation, as the EXIF tag 274 (1 to 8) states it."""
    orientation = header.getexif().get(_EXIF_ORIENTATION, 1)
    if orientation not in range(2, 9):
        return image
    if orientation >= 5:
        image = image.transpose(1, 2)
    flipped = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation, ())
    return image.flip(flipped) if flipped else image


def _scaled_size(header: Image.Image, short_side: int | None) -> tuple[int, int] | None:
    """(width, height) with the shorter side at `short_side`, or None where there is nothing to shrink."""
    if not short_side or min(header.size) <= short_side:
        return None
    scale = short_side / min(header.size)
    return math.ceil(header.width * scale), math.ceil(header.height * scale)


def _pil_rgb(header: Image.Image) -> Tensor:
    if header.mode.startswith("I"):  # 16-bit gray: convert("RGB") would clip it to white
        gray = (np.asarray(header).astype(np.uint16) >> 8).astype(np.uint8)
        return _to_chw(np.repeat(gray[..., None], 3, axis=2))
    return _to_chw(np.array(header.convert("RGB")))


def _load_pil():
    return lambda data, header, short_side: _orient(_pil_rgb(header), header)


def _load_pil_draft():
    def run(data, header, short_side):
        if wanted := _scaled_size(header, short_side):
            header.draft(None, wanted)
        return _orient(_pil_rgb(header), header)

    return run


def _load_cv2():
    cv2 = _import("cv2", "pip install opencv-python-headless")
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION

    def run(data, header, short_side):
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if pixels is None:
            raise ValueError("cv2.imdecode returned nothing")
        return _orient(_to_chw(pixels), header)

    return run


def _load_torchvision():
    io_module = _import("torchvision.io", "pip install torchvision")

    def run(data, header, short_side):
        if header.format == "PNG":  # torchvision 0.29 dies of SIGSEGV on a PNG whose image data is damaged
            return _orient(_pil_rgb(header), header)
        # bytearray: torch warns about tensors over read-only memory.
        image = io_module.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
        return _orient(image, header)

    return run


def _load_torchcodec():
    remedy = f"pip install -U 'torchcodec>=0.16' (a build for torch {torch.__version__})"
    decoders = _import("torchcodec.decoders", remedy)
    if not hasattr(decoders, "decode_image"):
        raise ImportError(f"this torchcodec has no decode_image: {remedy}")

    def run(data, header, short_side):
        image = decoders.decode_image(data)  # applies EXIF by itself
        return image[0] if image.ndim == 4 else image

    return run


def _load_turbojpeg():
    simplejpeg = _import("simplejpeg", "pip install simplejpeg")

    def run(data, header, short_side):
        if header.format not in _JPEG or header.mode not in ("RGB", "L"):
            return _orient(_pil_rgb(header), header)
        width, height = _scaled_size(header, short_side) or (0, 0)
        try:
            pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
        except ValueError:
            # A warning (stray bytes between markers, say) or an error: Pillow tells them apart. strict=False does not:
            # behind a warning it takes an error for one too, and returns memory that nothing was decoded into.
            return _load("pil_draft")(data, header, short_side)
        return _orient(_to_chw(pixels), header)

    return run


def _import(module: str, remedy: str):
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        why = next(iter(str(error).splitlines()), "")  # torchcodec's has two hundred
        raise ImportError(f"{module} is not usable here ({why}): {remedy}") from error
