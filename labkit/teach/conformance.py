"""The oracle set: small files that tell decoders apart, and what each decoder makes of them.

Every file shows the same picture, so the right answer is known before any decoder runs.
"""

import contextlib
import io
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps

from labkit.data import DECODERS, DecodeError, decode, missing_decoders

WIDTH, HEIGHT = 95, 63  # odd, so that subsampled chroma has an edge to get wrong


@cache
def picture() -> Image.Image:
    """The picture that every oracle file shows: 95 x 63, RGB."""
    from skimage import data

    return Image.fromarray(data.coffee()).resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


@cache
def oracle_files() -> dict[str, bytes]:
    """Files that every decoder must read, by name: JPEG, PNG and WebP in all the forms met in the wild."""
    return {**_jpegs(), **_exif(), **_pngs(), "webp.webp": _save(picture(), "WEBP", quality=95)}


def broken_files() -> dict[str, bytes]:
    """Files that every decoder must refuse with `DecodeError`, by name."""
    whole = {"jpeg": _save(picture(), "JPEG"), "png": _save(picture(), "PNG"), "webp": _save(picture(), "WEBP")}
    cut = {
        f"truncated at {share:.0%}.{kind}": data[: int(len(data) * share)]
        for kind, data in whole.items()
        for share in (0.01, 0.1, 0.5, 0.9)
    }
    return {
        **cut,
        "without its last two bytes.jpeg": whole["jpeg"][:-2],
        "empty.jpeg": b"",
        "text renamed.jpeg": b"this is not an image\n" * 40,
        "bomb.png": _bomb(),
        "bad chunk.png": _bad_chunk(whole["png"]),
    }


def reference(data: bytes) -> np.ndarray:
    """What Pillow alone makes of `data`: uint8, shape (H, W, 3), upright. The oracle, sharing no code with `decode`."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        return np.stack([np.asarray(image) // 256] * 3, axis=-1).astype(np.uint8)
    return np.asarray(image.convert("RGB"))


def conformance(files: dict[str, bytes] | None = None, *, by_default: bool = False) -> pd.DataFrame:
    """What each decoder makes of each file.

    Args:
        files: Name -> encoded bytes; default `oracle_files()`, and `broken_files()` unless `by_default`.
        by_default: Call each library as its first example does, without labkit's contract.

    Returns:
        DataFrame: file, decoder, outcome (`same`, `differs`, `refused`), shape, mean_abs_diff (of 255, against
        Pillow; NaN where shapes differ or nothing was decoded).
    """
    if files is None:  # broken files kill some libraries, and this process with them: see child_exits
        files = oracle_files() if by_default else {**oracle_files(), **broken_files()}
    calls = {name: call for name, call in _calls(by_default).items() if name not in missing_decoders()}
    with _quiet_stderr():
        rows = [
            {"file": name, "decoder": decoder, **_outcome(data, call)}
            for name, data in files.items()
            for decoder, call in calls.items()
        ]
    return pd.DataFrame(rows)


def child_exits(data: bytes, decoders: Iterable[str], *, by_default: bool = False) -> dict[str, int]:
    """Decode in a child process for each decoder, and say how the child ended.

    Returns:
        Decoder -> exit code: 0 where the image was decoded or refused, a negative signal number where the
        process was killed (-11: segmentation fault).
    """
    context = multiprocessing.get_context("forkserver")  # imports torch once, then forks: a tenth of a spawn each
    context.set_forkserver_preload([__name__])
    exits = {}
    for decoder in decoders:
        child = context.Process(target=_decode_in_child, args=(data, decoder, by_default))
        child.start()
        child.join()
        exits[decoder] = child.exitcode
    return exits


def _decode_in_child(data: bytes, decoder: str, by_default: bool) -> None:
    with _quiet_stderr(), contextlib.suppress(Exception):
        _calls(by_default)[decoder](data)


@contextlib.contextmanager
def _quiet_stderr():
    """Silence what C libraries print about damaged files, straight to file descriptor 2."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def default_call(data: bytes, decoder: str) -> np.ndarray:
    """Decode as the library's first example does: uint8 or uint16, channels last. Raises what the library raises."""
    return _calls(by_default=True)[decoder](data)


def _outcome(data: bytes, call: Callable[[bytes], np.ndarray]) -> dict:
    try:
        pixels = call(data)
    except Exception as error:
        outcome = "refused" if isinstance(error, DecodeError) or not _has_reference(data) else "differs"
        return {"outcome": outcome, "shape": type(error).__name__, "mean_abs_diff": np.nan}
    shape = " x ".join(map(str, pixels.shape))
    if not _has_reference(data) or pixels.shape != (expected := reference(data)).shape:
        return {"outcome": "differs", "shape": shape, "mean_abs_diff": np.nan}
    difference = np.abs(pixels.astype(int) - expected).mean()
    return {"outcome": "same" if difference <= 2 else "differs", "shape": shape, "mean_abs_diff": difference}


@cache
def _has_reference(data: bytes) -> bool:
    return data not in broken_files().values()


def _calls(by_default: bool) -> dict[str, Callable[[bytes], np.ndarray]]:
    if not by_default:
        return {name: (lambda data, name=name: _hwc(decode(data, name))) for name in DECODERS}
    return {
        "pil": lambda data: np.asarray(Image.open(io.BytesIO(data))),
        "pil_draft": lambda data: np.asarray(_draft(data)),
        "cv2": _cv2_default,
        "torchvision": _torchvision_default,
        "torchcodec": _torchcodec_default,
        "turbojpeg": _turbojpeg_default,
    }


def _hwc(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def _draft(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", image.size)
    return image


def _cv2_default(data: bytes) -> np.ndarray:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)  # BGR, as every forum answer has it
    if pixels is None:
        raise ValueError("cv2.imdecode returned nothing")
    return pixels


def _torchvision_default(data: bytes) -> np.ndarray:
    from torchvision.io import decode_image

    return _hwc(decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8)))


def _torchcodec_default(data: bytes) -> np.ndarray:
    from torchcodec.decoders import decode_image

    return _hwc(decode_image(data))


def _turbojpeg_default(data: bytes) -> np.ndarray:
    import simplejpeg

    return simplejpeg.decode_jpeg(data)


def _save(image: Image.Image, image_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def _jpegs() -> dict[str, bytes]:
    import simplejpeg

    pixels = np.asarray(picture())
    sampled = {
        f"subsampling {name}.jpeg": simplejpeg.encode_jpeg(pixels, 92, colorspace="RGB", colorsubsampling=name)
        for name in ("444", "422", "420", "440", "411")
    }
    cmyk = picture().convert("CMYK")
    return {
        **sampled,
        "progressive.jpeg": _save(picture(), "JPEG", quality=92, progressive=True),
        "grayscale.jpeg": _save(picture().convert("L"), "JPEG", quality=92),
        "cmyk.jpeg": _save(cmyk, "JPEG", quality=95),
        "ycck.jpeg": _ycck(cmyk),
        "trailing bytes.jpeg": _save(picture(), "JPEG", quality=92) + b"\xff\xda" + b"movie" * 100,
    }


def _ycck(cmyk: Image.Image) -> bytes:
    """CMYK stored as YCbCr + K: Pillow cannot write it, so the planes are converted here and the Adobe marker set."""
    cyan, magenta, yellow, black = cmyk.split()
    luma = Image.merge("RGB", [cyan, magenta, yellow]).convert("YCbCr")  # of the inverted red, green and blue
    # Pillow inverts every plane on the way out, as Adobe does: invert first, so that YCbCr is stored as it is.
    planes = [ImageOps.invert(plane) for plane in luma.split()]
    data = _save(Image.merge("CMYK", [*planes, black]), "JPEG", quality=95, subsampling=0)
    transform = data.index(b"Adobe") + 11
    return data[:transform] + b"\x02" + data[transform + 1 :]


# What a camera held in that way stores of the upright picture: the inverse of what the EXIF tag asks for.
_HELD = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def _exif() -> dict[str, bytes]:
    stored = {1: picture(), **{tag: picture().transpose(held) for tag, held in _HELD.items()}}
    files = {f"exif {tag}.jpeg": _save(stored[tag], "JPEG", quality=92, exif=exif_of(tag)) for tag in stored}
    files["exif 6.png"] = _save(stored[6], "PNG", exif=exif_of(6))
    files["exif 6.webp"] = _save(stored[6], "WEBP", quality=95, exif=exif_of(6))
    return files


def exif_of(orientation: int) -> Image.Exif:
    """An EXIF block that holds the orientation alone."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _pngs() -> dict[str, bytes]:
    rgba = picture().copy()
    rgba.putalpha(Image.linear_gradient("L").resize(rgba.size))
    palette = picture().quantize(64)
    gray16 = Image.fromarray(np.asarray(picture().convert("L")).astype(np.uint16) * 257)
    return {
        "rgb.png": _save(picture(), "PNG"),
        "gray.png": _save(picture().convert("L"), "PNG"),
        "gray alpha.png": _save(rgba.convert("LA"), "PNG"),
        "rgba.png": _save(rgba, "PNG"),
        "palette.png": _save(palette, "PNG"),
        "palette transparent.png": _save(palette, "PNG", transparency=3),
        "1-bit.png": _save(picture().convert("1"), "PNG"),
        "gray 16-bit.png": _save(gray16, "PNG"),
        "rgb 16-bit.png": _png16(np.asarray(picture())),
    }


def _chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def _png(width: int, height: int, depth: int, color: int, rows: bytes) -> bytes:
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, color, 0, 0, 0])
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _png16(pixels: np.ndarray) -> bytes:
    """A 16-bit RGB PNG, written by hand because Pillow has no such mode."""
    rows = (pixels.astype(">u2") * 257).astype(">u2").reshape(len(pixels), -1)
    return _png(pixels.shape[1], pixels.shape[0], 16, 2, b"".join(b"\0" + row.tobytes() for row in rows))


def _bomb() -> bytes:
    """A few hundred bytes that announce 400 million pixels."""
    return _png(20_000, 20_000, 8, 2, b"\0" * 1000)


def _bad_chunk(png: bytes) -> bytes:
    """A PNG whose image data fails its checksum and does not inflate: the kind that once aborted a process."""
    start = png.index(b"IDAT") + 4
    return png[:start] + b"\xff" * 64 + png[start + 64 :]
