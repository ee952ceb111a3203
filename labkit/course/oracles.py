"""The oracle set: small files that tell decoders apart, and the result of each decoder for each file.

All files show the same picture, so the right answer is known before any decoder runs.
"""

import contextlib
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from labkit.data.decode import DECODERS, decode, missing_decoders
from labkit.errors import ArgumentError, DecodeError
from labkit.measure.plots import SMALL_PT, WIDTH_IN, write_title
from labkit.util.pictures import encode_image

WIDTH, HEIGHT = 95, 63  # odd, so that subsampled chroma has an edge to get wrong


@cache
def picture() -> Image.Image:
    """The picture that every oracle file shows: 95 x 63, RGB."""
    from skimage import data

    return Image.fromarray(data.coffee()).resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


@cache
def oracle_files() -> dict[str, bytes]:
    """Files that every decoder must read, by name: JPEG, PNG and WebP in all forms that occur in practice."""
    return {**_jpeg_files(), **_exif_files(), **_png_files(), "webp.webp": encode_image(picture(), "WEBP", quality=95)}


def broken_files() -> dict[str, bytes]:
    """Files that every decoder must refuse with `DecodeError`, by name."""
    whole = {kind: encode_image(picture(), kind) for kind in ("jpeg", "png", "webp")}
    truncated = {
        f"truncated at {share:.0%}.{kind}": data[: int(len(data) * share)]
        for kind, data in whole.items()
        for share in (0.01, 0.1, 0.5, 0.9)
    }
    return {
        **truncated,
        "without its last two bytes.jpeg": whole["jpeg"][:-2],
        "empty.jpeg": b"",
        "text renamed.jpeg": b"this is not an image\n" * 40,
        "bomb.png": encode_png(20_000, 20_000, 8, 2, b"\0" * 1000),  # claims to hold 400 million pixels
        # A wrong checksum, and data that does not inflate: such a file has aborted a process.
        "bad chunk.png": re.sub(rb"(?s)(IDAT).{64}", rb"\1" + b"\xff" * 64, whole["png"], count=1),
    }


def reference(data: bytes) -> np.ndarray:
    """Decode `data` with Pillow alone: uint8, shape (H, W, 3), upright. It shares no code with `decode`."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        return np.stack([np.asarray(image) // 256] * 3, axis=-1).astype(np.uint8)
    return np.asarray(image.convert("RGB"))


def conformance(files: dict[str, bytes] | None = None, *, by_default: bool = False) -> pd.DataFrame:
    """Decode each file with each decoder, and compare the results with Pillow's.

    Args:
        files: Name -> encoded bytes; default `oracle_files()`, and `broken_files()` unless `by_default`.
        by_default: Call each library as in its first example, and Pillow as torchvision's `ImageFolder` does, without
            labkit's contract.

    Returns:
        DataFrame: file, decoder, outcome (`same`, `differs`, `refused`), shape, mean_abs_diff (of 255, against
        Pillow; NaN if the shapes differ or nothing was decoded).
    """
    if files is None:  # broken files crash some libraries, and this process with them
        files = oracle_files() if by_default else {**oracle_files(), **broken_files()}
    calls = {name: call for name, call in _decode_calls(by_default).items() if name not in missing_decoders()}
    with _quiet_stderr():
        rows = [
            {"file": name, "decoder": decoder, **_compare_with_reference(data, call)}
            for name, data in files.items()
            for decoder, call in calls.items()
        ]
    return pd.DataFrame(rows)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence the messages about damaged files that C libraries write directly to file descriptor 2."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _compare_with_reference(data: bytes, call: Callable[[bytes], np.ndarray]) -> dict:
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


def _decode_ours(decoder: str, data: bytes) -> np.ndarray:
    return _to_array(decode(data, decoder))


def _decode_calls(by_default: bool) -> dict[str, Callable[[bytes], np.ndarray]]:
    if not by_default:
        return {name: partial(_decode_ours, name) for name in DECODERS}
    return {
        "pil": lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),  # as ImageFolder's loader does
        "pil_draft": _decode_pil_draft,
        "cv2": _decode_cv2,
        "torchvision": _decode_torchvision,
        "torchcodec": _decode_torchcodec,
        "turbojpeg": _decode_turbojpeg,
    }


def _to_array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def _decode_pil_draft(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", image.size)
    return np.asarray(image)


def _decode_cv2(data: bytes) -> np.ndarray:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)  # BGR, as in every forum answer
    if pixels is None:
        raise ArgumentError("cv2.imdecode returned nothing")
    return pixels


def _decode_torchvision(data: bytes) -> np.ndarray:
    from torchvision.io import decode_image

    return _to_array(decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8)))


def _decode_torchcodec(data: bytes) -> np.ndarray:
    from torchcodec.decoders import decode_image  # type: ignore[attr-defined]  # public, but not marked so

    return _to_array(decode_image(data))


def _decode_turbojpeg(data: bytes) -> np.ndarray:
    import simplejpeg

    return simplejpeg.decode_jpeg(data)


def _jpeg_files() -> dict[str, bytes]:
    import simplejpeg

    pixels = np.asarray(picture())
    subsampled = {
        f"subsampling {name}.jpeg": simplejpeg.encode_jpeg(pixels, 92, colorspace="RGB", colorsubsampling=name)
        for name in ("444", "422", "420", "440", "411")
    }
    cmyk = picture().convert("CMYK")
    return {
        **subsampled,
        "progressive.jpeg": encode_image(picture(), "JPEG", quality=92, progressive=True),
        "grayscale.jpeg": encode_image(picture().convert("L"), "JPEG", quality=92),
        "cmyk.jpeg": encode_image(cmyk, "JPEG", quality=95),
        "ycck.jpeg": _encode_ycck(cmyk),
        "trailing bytes.jpeg": encode_image(picture(), "JPEG", quality=92) + b"\xff\xda" + b"movie" * 100,
    }


def _encode_ycck(cmyk: Image.Image) -> bytes:
    """CMYK stored as YCbCr + K. Pillow cannot write it: the planes are converted here and the Adobe marker is set."""
    cyan, magenta, yellow, black = cmyk.split()
    luma = Image.merge("RGB", [cyan, magenta, yellow]).convert("YCbCr")  # of the inverted red, green and blue
    # Pillow inverts every plane when it saves, as Adobe does: invert first, so that YCbCr is stored unchanged.
    planes = [ImageOps.invert(plane) for plane in luma.split()]
    data = encode_image(Image.merge("CMYK", [*planes, black]), "JPEG", quality=95, subsampling=0)
    transform = data.index(b"Adobe") + 11
    return data[:transform] + b"\x02" + data[transform + 1 :]


# EXIF orientation -> how a camera held that way stores an upright picture: the inverse of what the tag asks for.
_STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def _exif_files() -> dict[str, bytes]:
    stored = {1: picture(), **{tag: picture().transpose(turn) for tag, turn in _STORED_AS.items()}}
    files = {f"exif {tag}.jpeg": encode_image(stored[tag], "JPEG", quality=92, exif=exif_of(tag)) for tag in stored}
    files["exif 6.png"] = encode_image(stored[6], "PNG", exif=exif_of(6))
    files["exif 6 as text.png"] = _exif_as_text(files["exif 6.png"])
    files["exif 6.webp"] = encode_image(stored[6], "WEBP", quality=95, exif=exif_of(6))
    return files


def exif_of(orientation: int) -> Image.Exif:
    """An EXIF block with nothing but the orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _exif_as_text(data: bytes) -> bytes:
    """The PNG `data` with its eXIf chunk as ImageMagick wrote it before that chunk existed: text, in hexadecimal."""
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    profile = b"Exif\0\0" + data[start + 8 : end - 4]
    text = b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n%8d\n%s\n" % (len(profile), profile.hex().encode()))
    return data[:start] + png_chunk(b"zTXt", text) + data[end:]


def _png_files() -> dict[str, bytes]:
    rgba = picture().copy()
    rgba.putalpha(Image.linear_gradient("L").resize(rgba.size))
    palette = picture().quantize(64)
    gray16 = Image.fromarray(np.asarray(picture().convert("L")).astype(np.uint16) * 257)
    return {
        "rgb.png": encode_image(picture(), "PNG"),
        "gray.png": encode_image(picture().convert("L"), "PNG"),
        "gray alpha.png": encode_image(rgba.convert("LA"), "PNG"),
        "rgba.png": encode_image(rgba, "PNG"),
        "palette.png": encode_image(palette, "PNG"),
        "palette transparent.png": encode_image(palette, "PNG", transparency=3),
        "1-bit.png": encode_image(picture().convert("1"), "PNG"),
        "gray 16-bit.png": encode_image(gray16, "PNG"),
        "rgb 16-bit.png": _encode_png16(np.asarray(picture())),
    }


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG: length, kind, body and checksum."""
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def encode_png(width: int, height: int, depth: int, color: int, rows: bytes) -> bytes:
    """A PNG with these compressed `rows`; `depth` and `color` as in its header."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, color, 0, 0, 0])
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _encode_png16(pixels: np.ndarray) -> bytes:
    """A 16-bit RGB PNG, built by hand because Pillow has no such mode."""
    rows = (pixels.astype(">u2") * 257).astype(">u2").reshape(len(pixels), -1)
    return encode_png(pixels.shape[1], pixels.shape[0], 16, 2, b"".join(b"\0" + row.tobytes() for row in rows))


def plot_pictures(files: Sequence[str], decoders: Sequence[str]) -> Figure:
    """Draw oracle files (rows) as decoded by each library's first example (columns), next to the right answer.

    The shape is written under each picture, or the error of a library that refuses the file.
    """
    figure, axes = plt.subplots(
        len(files), len(decoders) + 1, figsize=(WIDTH_IN, 0.4 + 1.05 * len(files)),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for row, name in enumerate(files):
        data = oracle_files()[name]
        _show(axes[row, 0], reference(data), "upright RGB")
        axes[row, 0].set_ylabel(name.replace(" ", "\n", 1), rotation=0, ha="right", va="center")
        for column, decoder in enumerate(decoders, 1):
            _show_decoded(axes[row, column], data, decoder)
    for axis, title in zip(axes[0], ["what it shows", *decoders], strict=True):
        axis.set_title(title, fontsize=SMALL_PT)
    found = conformance({name: oracle_files()[name] for name in files}, by_default=True)
    write_title(figure, _describe_agreement(found[found["decoder"].isin(list(decoders))]), of_photos=False)
    return figure


def _describe_agreement(table: pd.DataFrame) -> str:
    """Which decoder gives the right pixels of most files, and which of the fewest."""
    same = (table["outcome"] == "same").groupby(table["decoder"], sort=False).sum()
    n_files = table["file"].nunique()
    best, worst = ([name for name in same.index if same[name] == limit] for limit in (same.max(), same.min()))
    told = f"{' and '.join(best)}: the right pixels of {same.max()} of {n_files} files"
    return told if best == worst else f"{told}; {' and '.join(worst)}: those of {same.min()}"


def _show_decoded(ax: Axes, data: bytes, decoder: str) -> None:
    try:
        pixels = _decode_calls(by_default=True)[decoder](data)
    except Exception as error:
        ax.text(0.5, 0.5, "refused", ha="center", va="center", transform=ax.transAxes)
        _strip_axes(ax, type(error).__name__)
        return
    _show(ax, pixels, " x ".join(map(str, pixels.shape)) + ("" if pixels.dtype == np.uint8 else f"\n{pixels.dtype}"))


def _show(ax: Axes, pixels: np.ndarray, caption: str) -> None:
    if pixels.dtype != np.uint8:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] in (1, 2):
        pixels = pixels[..., 0]
    # The four channels of a CMYK file are shown as RGBA, which a network would take them for.
    ax.imshow(pixels, cmap="gray", vmin=0, vmax=255)
    _strip_axes(ax, caption)


def _strip_axes(ax: Axes, caption: str) -> None:
    ax.set(xticks=[], yticks=[])
    ax.set_xlabel(caption, fontsize=SMALL_PT)
    for spine in ax.spines.values():
        spine.set_visible(False)
