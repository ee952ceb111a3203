"""Tiled JPEGs: photos of which any crop can be cut out of the bytes, without decoding them.

The codes of a JPEG have no fixed length, so a decoder has to read all of them from the top of the photo to the crop's
last row. Restart markers stand where the codes begin anew, on a byte boundary. If one stands every k MCUs (minimum
coded units, 16 x 16 pixels in most photos) and k divides the MCUs of a row, the pieces between the markers are a grid.
The pieces under a crop, behind the photo's own header with another height and width, are a complete JPEG of that part,
for any decoder.

`tile_jpegs` adds the markers, without touching a pixel or while it makes photos small, and `cut_jpeg` cuts. To find the
pieces at once, and not by a search for their markers, it reads their lengths from a table that `tile_jpegs` puts in
front of the scan, in an APP11 segment.

Source: ITU-T T.81, sections B.2 and E.1.4.
"""

import hashlib
import math
import operator
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import Image

from labkit.data.decode import decode, max_pixels, open_image
from labkit.data.partial_jpeg import (
    APP11,
    CHROMA_REACH,
    HEIGHT_WIDTH,
    SCALES,
    SEGMENT,
    START_OF_IMAGE,
    TILE_TABLE,
    Head,
    head_of,
    header_segment,
    iter_segments,
    mcu_of,
)
from labkit.data.pixels import shrink
from labkit.data.remote import as_store
from labkit.data.stores import HasSizes, Store, change_times, changed_since, folders_without_image, read_bytes
from labkit.errors import ArgumentError, DecodeError, MissingLibraryError, WrongTypeError
from labkit.util.arguments import require_choice, require_int, require_local_path
from labkit.util.files import atomic_path, claim_folder, path_from_key, require_room, write_record
from labkit.util.parallel import map_items
from labkit.util.pictures import encode_image

MANIFEST = "tiles.json"

_NARROWEST, _BEST, _WIDEST = 16, 64, 192  # pixels of a piece
_RST0, _EOI = 0xD0, 0xD9  # second bytes
_MAX_LENGTH = 0xFFFF  # of a piece in the table, and of a segment
_LENGTHS, _PAIR = np.dtype("<u2"), np.dtype(np.uint16)
_NARROW = 4  # pixels of the widest photo whose chroma libjpeg repeats, where it interpolates that of wider ones
_QUALITY = 90  # of JPEGs that are made small
_TIMEOUT_S = 60

Box = tuple[int, int, int, int]  # top, left, height, width


class Tiling(NamedTuple):
    """The pieces of a tiled JPEG.

    head: What stands before them.
    piece_width: Pixels of a piece that does not touch the right edge. It is as high as an MCU.
    shape: Rows and columns of pieces.
    markers: Offsets in the file of the markers behind the pieces, row by row, int64 (1 + rows * columns,). The first
        number is as if one stood in front of the scan.
    """

    head: Head
    piece_width: int
    shape: tuple[int, int]
    markers: np.ndarray


def tiling_of(data: bytes, head: Head | None = None) -> Tiling | None:
    """The pieces of a JPEG, whose `head` may be known; None if it is not tiled, or if a marker is not in its place."""
    head = head or head_of(data)
    if head is None or not head.restart_interval or len(data) < head.end + 4:
        return None
    n_columns, rest = divmod(-(-head.width // head.mcu_width), head.restart_interval)
    n_rows = -(-head.height // head.mcu_height)
    markers = None if rest or n_rows * n_columns < 2 else _markers_of(data, head, n_rows * n_columns)
    if markers is None:
        return None
    return Tiling(head, head.mcu_width * head.restart_interval, (n_rows, n_columns), markers)


def _markers_of(data: bytes, head: Head, n_pieces: int) -> np.ndarray | None:
    """Offsets of the markers: by the table, if it is right, else by a search for them."""
    markers = np.empty(n_pieces + 1, np.int64)
    markers[0] = head.end - 2
    if len(head.table) == 2 * n_pieces:
        markers[1:] = np.frombuffer(head.table, _LENGTHS)
        if _are_markers(data, np.add.accumulate(markers, out=markers)):
            return markers
    codes = np.frombuffer(data, np.uint8, offset=head.end)
    found = np.flatnonzero(codes[:-1] == 0xFF)
    second = codes[found + 1]
    found = found[(second & 0xF8 == _RST0) | (second == _EOI)][:n_pieces]
    if len(found) < n_pieces:
        return None
    markers[1:] = found + head.end
    return markers if _are_markers(data, markers) else None


def _are_markers(data: bytes, markers: np.ndarray) -> bool:
    """Whether RST0 to RST7 in turn, and at last the end of the image, stand at all offsets but the first."""
    if markers[-1] > len(data) - 2:
        return False
    pairs = np.ndarray((len(data) - 1,), _PAIR, data, 0, (1,))  # two bytes from each offset on
    return pairs[markers[1:]].tobytes() == _numbered(len(markers) - 1).tobytes()


@lru_cache(maxsize=1024)
def _numbered(n_pieces: int) -> np.ndarray:
    """The markers behind the pieces of a photo, as two bytes each: uint16 (n_pieces,)."""
    second = _RST0 | np.arange(n_pieces) & 7
    second[-1] = _EOI
    return np.stack([np.full(n_pieces, 0xFF), second], axis=1).astype(np.uint8).view(np.uint16).ravel()


def cut_jpeg(data: bytes, box: Box, *, scale: int = 1) -> tuple[bytes, Box]:
    """The bytes of a JPEG that holds `box`, and where the box lies in it, for any decoder.

    Inside the box its pixels are those of the whole photo, bit for bit. What is not tiled comes back as it is, with the
    same box, so that a data set may hold both::

        data, (top, left, height, width) = lk.cut_jpeg(data, box)
        pixels = simplejpeg.decode_jpeg(data)[top : top + height, left : left + width]

    Damage in a part of the file that the box does not need goes unnoticed.

    Args:
        data: A file's bytes.
        box: Top, left, height and width, in pixels as stored, which EXIF has not turned. Pillow, simplejpeg and
            torchvision decode those; for OpenCV pass `IMREAD_IGNORE_ORIENTATION`.
        scale: 2, 4 or 8 where the bytes will be decoded at 1/2, 1/4 or 1/8 of the size, which needs wider margins. The
            box stays in pixels of full size.

    Returns:
        The bytes of a JPEG, with the header of the whole photo, and the box in its pixels.

    Raises:
        ValueError: the box has no pixel, or leads out of the photo (of a tiled one; others are not read).

    >>> lk.cut_jpeg(tiled, (100, 200, 64, 64))[1]  # doctest: +SKIP
    (4, 8, 64, 64)

    Source: ITU-T T.81, section E.1.4. Taught in: notebooks/11b_crop_by_bytes.ipynb
    """
    if not isinstance(data, bytes):
        raise WrongTypeError(f"cut_jpeg takes the bytes of a file, got {type(data).__name__}")
    require_choice("scale", scale, SCALES)
    try:
        top, left, height, width = map(operator.index, box)
    except TypeError:
        raise WrongTypeError(f"box must be four integers (top, left, height, width), got {box!r}") from None
    tiling = tiling_of(data)
    if tiling is None:
        return data, (top, left, height, width)
    rows, columns = tiling.head.height, tiling.head.width
    if min(top, left, height - 1, width - 1) < 0 or top + height > rows or left + width > columns:
        raise ArgumentError(
            f"the box (top, left, height, width) must lie in the photo, {rows} pixels high and {columns} wide as "
            f"stored, got {box!r}"
        )
    part, box = cut(data, tiling, (top, left, height, width), scale)
    return bytes(part), box


def cut(data: bytes, tiling: Tiling, box: Box, scale: int) -> tuple[bytes | bytearray, Box]:
    """`cut_jpeg`, of a tiling that is known and a box that lies in it."""
    head, piece_width, (n_rows, n_columns), markers = tiling
    (top, left, height, width), margin, mcu_height = box, CHROMA_REACH * scale, head.mcu_height
    first_row = max(0, top - margin) // mcu_height
    end_row = min(n_rows, -(-(top + height + margin) // mcu_height))
    least = min(_NARROW * scale + 1, head.width)
    first = max(0, min(left - margin, head.width - least)) // piece_width
    end = min(n_columns, -(-max(left + width + margin, least) // piece_width))
    if end_row - first_row == n_rows and end - first == n_columns:
        return data, box
    y, x = first_row * mcu_height, first * piece_width
    header = bytearray(head.data)
    HEIGHT_WIDTH.pack_into(
        header, head.sides_at, min(head.height, end_row * mcu_height) - y, min(head.width, end * piece_width) - x
    )
    before = markers[:-1].reshape(n_rows, n_columns)[first_row:end_row, first:end]
    behind = markers[1:].reshape(n_rows, n_columns)[first_row:end_row, first:end]
    view = memoryview(data)[2:]  # counted from the end of each marker
    rows = [view[one:other] for one, other in zip(before[:, 0].tolist(), behind[:, -1].tolist(), strict=True)]
    made = bytearray().join([header, *rows])
    at = (behind - before).ravel()
    at[0] += len(header) - 2
    np.add.accumulate(at, out=at)
    np.ndarray((len(made) - 1,), _PAIR, made, 0, (1,))[at] = _numbered(len(at))
    return made, (top - y, left - x, height, width)


def tile_jpegs(
    source: Any,
    root: str | os.PathLike,
    *,
    short_side: int | None = None,
    quality: int | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> Path:
    """Write the images of a store into a folder, its JPEGs tiled: `BatchLoader` and `cut_jpeg` then read crops alone.

    No pixel changes, and EXIF, ICC profile and comments stay. What follows the picture in its file, such as the video
    of a motion photo, is left out. The codes are optimized on the way, which takes as many bytes off as markers and
    table add. Progressive photos become sequential ones. Each file is written whole, and a rerun goes on with what is
    there, and makes anew what was replaced since. `write_shards` makes shards of the folder.

    With `short_side` the photos are made small as well: decoded, turned upright, resized with antialiasing as
    `PixelStore.build` does, and encoded with markers at once, which needs no jpegtran. Gray stays
    gray, of color the chroma is halved (4:2:0), as Pillow and OpenCV do, and the ICC profile stays, but no other
    metadata. A JPEG whose shorter side is not longer is copied, so that it is not encoded a second time.

    A piece is as high as an MCU (8 or 16 pixels) and about 64 pixels wide: narrower ones take more bytes, and of wider
    ones a crop needs more. Its MCUs must divide those of a row; of the divisors that give 16 to 192 pixels the one
    nearest to 64 counts. Where there is none, as in a row of 61 MCUs of 8 pixels, or where a file is no JPEG of 8 bits,
    one or three components and Huffman codes, or is damaged, it is copied as it is. `tiles.json` lists these with the
    reason.

    Args:
        source: A store, or a path or URL of one, as `lk.open_store` takes it.
        root: Folder to fill; made if missing.
        short_side: Pixels of the shorter side, as in 256 for crops of 224. Default: as it is.
        quality: Of the JPEGs that are made small, 1 to 100. Default: 90.
        num_workers: Threads. Default: one per usable core.
        progress: Show a progress bar.

    Returns:
        `root` as a Path.

    Raises:
        ImportError: jpegtran is missing, and no `short_side` given; names the packages.
        ValueError: `root` holds something else, or images of other names or sizes, or of another `short_side` or
            `quality`; or one of these two is out of range, or `quality` is given alone.
        ItemErrors: some images could not be read or written; names them, the others are written.
        OSError: the disk has no room for them, as far as the store knows their sizes; says how much is needed and free.

    >>> lk.tile_jpegs("photos", "tiled", progress=False)  # doctest: +SKIP
    PosixPath('tiled')

    """
    store, root = as_store(source), require_local_path("root", root)
    make, settings = _maker(short_side, quality)
    keys = list(store.keys())
    sizes = store.sizes().tolist() if isinstance(store, HasSizes) else []
    digest = hashlib.sha256("\0".join([*keys, *map(str, sizes)]).encode(errors="surrogateescape"))
    origin = {"names_and_sizes_sha256": digest.hexdigest(), **settings}
    times = change_times(store) if (root / MANIFEST).exists() else {}
    claim_folder(root, MANIFEST, {"source": origin}, what="tiled images", key="source")
    for folder in folders_without_image(store):  # a class whose images labkit does not read is one there, too
        (root / path_from_key(folder)).mkdir(exist_ok=True)
    if short_side is None:  # small ones take less, but nobody knows how much
        missing = (size for key, size in zip(keys, sizes, strict=False) if not (root / path_from_key(key)).exists())
        require_room(root, sum(missing))
    reasons = map_items(
        partial(_tile, store, root, make, times), keys, engine="threads", num_workers=num_workers, progress=progress,
        description="tiles", unit="image",
    )  # fmt: skip
    copied = {key: reason for key, reason in zip(keys, reasons, strict=True) if reason}
    record = {"source": origin, "n_tiled": len(keys) - len(copied), "copied": copied}
    write_record(root / MANIFEST, record, indent=1)
    return root


_Make = Callable[[bytes], bytes]  # of an image, the tiled one


def _maker(short_side: int | None, quality: int | None) -> tuple[_Make, dict[str, int]]:
    """What makes a file, and its settings."""
    if short_side is None:
        if quality is not None:
            raise ArgumentError(f"quality={quality!r} is for photos that are made small: pass short_side as well")
        return partial(_tiled, _transform()), {}
    quality = require_int("quality", _QUALITY if quality is None else quality)
    if quality > 100:
        raise ArgumentError(f"quality must be an integer from 1 to 100, got {quality}")
    short_side = require_int("short_side", short_side)
    settings = {"short_side": short_side, "quality": quality}
    return partial(_small, short_side=short_side, quality=quality), settings


DAMAGED = "it is damaged"  # begins such a reason


class _CannotTile(Exception):
    """Why a file stays as it is."""


def _tile(store: Store, root: Path, make: _Make, times: dict[str, float], key: str) -> str:
    """Write one image, unless it is there and not older than its source; returns why it is not tiled, or nothing."""
    path = root / path_from_key(key)
    is_there = path.exists() and not changed_since(path, [key], times)
    if is_there and (tiling := tiling_of(path.read_bytes())) and tiling.head.table:
        return ""
    reason = ""
    with atomic_path(path, dated=True) as half:
        made = data = read_bytes(store, key)
        try:
            made = make(data)
        except _CannotTile as error:
            reason = str(error)
        half.write_bytes(made)
    return reason


def _small(data: bytes, *, short_side: int, quality: int) -> bytes:
    """A JPEG made small, with markers and table."""
    if not data.startswith(START_OF_IMAGE):
        raise _CannotTile("it is no JPEG")
    try:
        pixels = decode(data)
    except DecodeError as error:
        raise _CannotTile(f"{DAMAGED}: {error.__cause__}") from None
    if min(pixels.shape[1:]) <= short_side:
        raise _CannotTile(f"its shorter side has {min(pixels.shape[1:])} pixels, not more than {short_side}")
    source, small = open_image(data), shrink(pixels, short_side)
    is_gray = source.mode == "L"
    options: dict[str, Any] = {} if is_gray else {"subsampling": "4:2:0"}
    if source.mode != "CMYK":  # the profile of inks says nothing of RGB
        options["icc_profile"] = source.info.get("icc_profile")
    image, mcu_width = Image.fromarray(small[..., 0] if is_gray else small), 8 if is_gray else 16
    interval = restart_interval(image.width, mcu_width) or -(-image.width // mcu_width)
    made = encode_image(image, "JPEG", quality=quality, optimize=True, restart_marker_blocks=interval, **options)
    tiling = tiling_of(made)
    return _with_table(made, tiling) if tiling else made  # a single piece


def _tiled(transform: "_Transform", data: bytes) -> bytes:
    """A JPEG with markers and table, and the same pixels."""
    made = transform(data, _restart_interval_of(data))
    tiling = tiling_of(made)
    if tiling is None:
        raise _CannotTile("its markers are not where they should be")
    made = _with_table(made, tiling)
    try:
        is_same = torch.equal(decode(data), decode(made))
    except DecodeError as error:
        raise _CannotTile(f"{DAMAGED}: {error}") from None
    if not is_same:  # as where scans are missing, whose coefficients libjpeg guesses in a progressive JPEG alone
        raise _CannotTile("with markers it would be another picture")
    return made


def _restart_interval_of(data: bytes) -> int:
    """MCUs of a piece for a photo of which any crop is as likely as another."""
    header = header_segment(iter_segments(data))
    if not data.startswith(START_OF_IMAGE) or header is None or len(data) < header.start + 6:
        raise _CannotTile("it is no JPEG")
    n_bits, height, width, n_components = struct.unpack_from(">BHHB", data, header.start)
    mcu = mcu_of(data[header.start + 6 : header.start + 6 + 3 * n_components])
    if header.marker > 0xC2 or n_bits != 8 or mcu is None:
        raise _CannotTile("it is no JPEG of 8 bits with Huffman codes in one or three components")
    if height * width > max_pixels():
        raise _CannotTile(f"it has {height * width} pixels, more than the {max_pixels():.0f} that labkit decodes")
    interval = restart_interval(width, mcu[1])
    if interval is None:
        raise _CannotTile(
            f"its {-(-width // mcu[1])} columns of {mcu[1]} pixels cannot be parted evenly into pieces of "
            f"{_NARROWEST} to {_WIDEST} pixels"
        )
    return interval


def restart_interval(width: int, mcu_width: int) -> int | None:
    """MCUs from one restart marker to the next with which a JPEG is tiled best; None if there is no good number.

    Args:
        width: Of the photo, in pixels.
        mcu_width: Of an MCU in pixels: 16 where chroma is halved (4:2:0, 4:2:2), else 8.
    """
    n_mcus = -(-width // mcu_width)
    intervals = [k for k in range(1, n_mcus) if n_mcus % k == 0 and _NARROWEST <= k * mcu_width <= _WIDEST]
    return min(intervals, key=lambda k: abs(math.log(k * mcu_width / _BEST)), default=None)


def _with_table(data: bytes, tiling: Tiling) -> bytes:
    """A tiled JPEG with the table of its pieces in front of its scan."""
    lengths = np.diff(tiling.markers)
    if lengths.max() > _MAX_LENGTH:
        return data
    table, head = lengths.astype("<u2").tobytes(), tiling.head
    step = _MAX_LENGTH // 2 * 2 - 2 - len(TILE_TABLE)
    bodies = [TILE_TABLE + table[at : at + step] for at in range(0, len(table), step)]
    scan = head.data.rfind(b"\xff\xda")
    segments = [SEGMENT.pack(APP11, 2 + len(body)) + body for body in bodies]
    return b"".join([head.data[:scan], *segments, head.data[scan:], data[head.end :]])


_Transform = Callable[[bytes, int], bytes]  # of a JPEG and the MCUs of a piece


def _transform() -> _Transform:
    """What adds restart markers here."""
    if program := shutil.which("jpegtran"):
        with suppress(_CannotTile):
            if tiling_of(_by_program(program, simplejpeg.encode_jpeg(np.zeros((16, 64, 3), np.uint8)), 1)):
                return partial(_by_program, program)  # another jpegtran may differ
    raise MissingLibraryError(
        "no jpegtran that adds restart markers to JPEGs was found: install that of libjpeg-turbo (apt-get install "
        "libjpeg-turbo-progs, brew install jpeg-turbo, conda install libjpeg-turbo)"
    )


def _by_program(program: str, data: bytes, interval: int) -> bytes:
    command = [program, "-restart", f"{interval}B", "-optimize", "-copy", "all"]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _CannotTile(f"{program} took more than {_TIMEOUT_S} s for it") from None
    if done.returncode:
        raise _CannotTile(f"{DAMAGED}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
