"""The pixel file, version 2: raw images one after another, with an index and checksums. All numbers little-endian.

    offset       size         what
    0            8            the bytes `LKPIXELS`
    8            4            version, uint32: 2
    12           4            short side that images were resized to, in pixels, uint32
    16           8            N, number of images, uint64
    24           8            size of the index in bytes, uint64
    32           8            size of the file in bytes, uint64
    40           4            CRC-32 of the index, uint32
    44           32           SHA-256 of what the file was made from: settings, keys, sizes of the encoded images
    76           16           name of the decoder, ASCII, padded with zeros
    92           8            C, size of the block of classes in bytes, uint64
    100          24           zeros
    124          4            CRC-32 of bytes 0 to 123, uint32
    128          8 N          the index: where each image begins in the file, uint64, a multiple of 64
    128 + 8 N    8 (N + 1)    where each key begins in the block of keys, and its end, uint64
    136 + 16 N   8 N          height and width of each image, int32 pairs
    136 + 24 N   4 N          CRC-32 of each image's H x W x 3 bytes, uint32
    136 + 28 N   4 N          label of each image, int32: the number of its class
    136 + 32 N   C            the block of classes: a JSON list of their names
    ...          the rest     the block of keys, UTF-8; bytes of a file name that are not UTF-8 stay as they are
    ...          ...          each image: H rows of W pixels of red, green, blue, uint8; padded with zeros to 64 bytes

Images are in the order of the keys, the first at the next multiple of 64 after the index, with nothing in between.
The CRC is zlib's. Version 1, which is read, too, has no labels and no block of classes: an image's class is the last
folder of its key. Later versions keep bytes 0 to 11 and 124 to 127 where they are, so that this one can name them.
"""

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from labkit.core import PackedStrings
from labkit.data.labels import number_folders

MAGIC, VERSION, ALIGNMENT = b"LKPIXELS", 2, 64
LABELED_SINCE = 2  # the version

_HEADER = struct.Struct("<8sII3QI32s16sQ24x")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_BUILD = "labkit.PixelStore.build(source, path)"
REBUILD = f"remove it and build it again with {_BUILD}"


class PixelError(ValueError):
    """A file that is not a pixel store, is damaged, or holds other pixels; the message names it and the remedy."""


@dataclass(frozen=True)
class Origin:
    """What pixels were made from: two files with the same origin hold the same pixels."""

    digest: bytes
    short_side: int
    decoder: str


@dataclass(frozen=True)
class Contents:
    """Of N images: their keys, labels int64 (N,), and the classes that labels number."""

    keys: PackedStrings
    labels: np.ndarray
    classes: list[str]

    def index_bytes(self) -> int:
        """The size of their index in a file."""
        return 8 + 32 * len(self.keys) + len(self.block_of_classes()) + len(self.keys.arrays()[0])

    def block_of_classes(self) -> bytes:
        return json.dumps(self.classes).encode()


@dataclass(frozen=True)
class Index:
    """Of N images: contents, offsets int64 (N,), shapes int32 (N, 2) of (height, width), CRC-32 uint32 (N,)."""

    contents: Contents
    offsets: np.ndarray
    shapes: np.ndarray
    crcs: np.ndarray


@dataclass(frozen=True)
class Head:
    """All that comes before the pixels: the 128 bytes of the header, its content, the index, and the file's size."""

    header: bytes
    version: int
    origin: Origin
    index: Index
    file_bytes: int


@overload
def aligned(size: int) -> int: ...
@overload
def aligned(size: np.ndarray) -> np.ndarray: ...
def aligned(size: int | np.ndarray) -> int | np.ndarray:
    """The next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def image_bytes(shapes: np.ndarray) -> np.ndarray:
    """Bytes of each image, int64, without padding."""
    return shapes.astype(np.int64).prod(axis=1) * 3


def laid_out(contents: Contents, shapes: np.ndarray, crcs: np.ndarray, index_bytes: int) -> tuple[Index, int]:
    """The index of these images, and the size of their file."""
    sizes = aligned(image_bytes(shapes))
    ends = aligned(HEADER_BYTES + index_bytes) + np.cumsum(sizes)
    return Index(contents, ends - sizes, shapes, crcs), int(ends[-1])


def packed_head(origin: Origin, index: Index, file_bytes: int) -> bytes:
    """Header and index as bytes of the file."""
    contents, classes = index.contents, index.contents.block_of_classes()
    block, key_offsets = contents.keys.arrays()
    columns = [(index.offsets, "<u8"), (key_offsets, "<u8"), (index.shapes, "<i4"), (index.crcs, "<u4")]
    columns.append((contents.labels, "<i4"))
    rows = b"".join([*(array.astype(kind).tobytes() for array, kind in columns), classes, block.tobytes()])
    fields = (origin.short_side, len(contents.keys), len(rows), file_bytes, zlib.crc32(rows), origin.digest)
    header = _HEADER.pack(MAGIC, VERSION, *fields, origin.decoder.encode(), len(classes))
    return header + _CHECKSUM.pack(zlib.crc32(header)) + rows


def read_head(path: Path) -> Head:
    """Read and check header and index of a file; of its pixels, check only that they are all there.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut, damaged, or of a newer version.
    """
    try:
        with open(path, "rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
            _check_header(path, header)
            (
                _, version, short_side, n_images, index_bytes, file_bytes, crc, digest, decoder, class_bytes
            ) = _HEADER.unpack_from(header)  # fmt: skip
            if size != file_bytes:
                state = "is cut short" if size < file_bytes else "is damaged"
                raise PixelError(f"{path} {state}: it has {size} bytes, not {file_bytes}; {REBUILD}")
            if not 8 + 28 * n_images <= index_bytes <= file_bytes - HEADER_BYTES:
                raise PixelError(f"{path} is damaged: its index is not one of {n_images} images; {REBUILD}")
            rows = file.read(index_bytes)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: make it with {_BUILD}") from None
    except IsADirectoryError:
        raise PixelError(f"{path} is a folder, not a pixel store: name a file") from None
    if zlib.crc32(rows) != crc:
        raise PixelError(f"{path} is damaged: its index does not match its checksum; {REBUILD}")
    index = _unpack_index(path, rows, n_images, file_bytes, class_bytes if version >= LABELED_SINCE else None)
    origin = Origin(digest, short_side, decoder.rstrip(b"\0").decode("ascii", "backslashreplace"))
    return Head(header, version, origin, index, file_bytes)


def _check_header(path: Path, header: bytes) -> None:
    if not header.startswith(MAGIC):
        begins = f"it begins with {header[:8]!r}" if header else "it is empty"
        raise PixelError(f"{path} is not a pixel store ({begins}): make one, under another name, with {_BUILD}")
    if len(header) < HEADER_BYTES:
        raise PixelError(f"{path} is cut short: it has {len(header)} bytes; {REBUILD}")
    if zlib.crc32(header[: _HEADER.size]) != _CHECKSUM.unpack_from(header, _HEADER.size)[0]:
        raise PixelError(f"{path} is damaged: its header does not match its checksum; {REBUILD}")
    version = _HEADER.unpack_from(header)[1]
    if not 1 <= version <= VERSION:
        raise PixelError(
            f"{path} is of version {version}, this labkit reads 1 to {VERSION}: update labkit, or {REBUILD}"
        )


def _unpack_index(path: Path, rows: bytes, n_images: int, file_bytes: int, class_bytes: int | None) -> Index:
    """The index, if every image is where the format puts it: no view reaches beyond the file or into another image.

    `class_bytes` is the size of the block of classes, or None for version 1, which has none.
    """
    start = 8 + 28 * n_images
    try:
        offsets = np.frombuffer(rows, "<u8", n_images).astype(np.int64)
        key_offsets = np.frombuffer(rows, "<u8", n_images + 1, 8 * n_images).astype(np.int64)
        shapes = np.frombuffer(rows, "<i4", 2 * n_images, 8 + 16 * n_images).astype(np.int32).reshape(n_images, 2)
        crcs = np.frombuffer(rows, "<u4", n_images, 8 + 24 * n_images).astype(np.uint32)
        if class_bytes is None:
            keys = _unpack_keys(rows, start, key_offsets)
            contents = Contents(keys, *_innermost_folders(keys))
        else:
            keys = _unpack_keys(rows, start + 4 * n_images + class_bytes, key_offsets)
            contents = Contents(keys, *_unpack_labels(rows[start:], n_images, class_bytes))
    except (ValueError, RecursionError) as error:
        raise PixelError(f"{path} is damaged: its index is not one of {n_images} images; {REBUILD}") from error
    bytes_in_all = 3 * shapes.prod(axis=1, dtype=np.float64).sum()  # integers would overflow
    if n_images and np.min(shapes) > 0 and bytes_in_all <= file_bytes:
        index, size = laid_out(contents, shapes, crcs, len(rows))
        if size == file_bytes and np.array_equal(index.offsets, offsets):
            return index
    raise PixelError(f"{path} is damaged: its index does not match its images, or leads out of the file; {REBUILD}")


def _unpack_keys(rows: bytes, start: int, offsets: np.ndarray) -> PackedStrings:
    if start > len(rows):
        raise ValueError("the index ends before its keys")
    block = np.frombuffer(rows, np.uint8, -1, start).copy()  # else all of `rows` stays in memory
    return PackedStrings.from_arrays(block, offsets)


def _unpack_labels(rows: bytes, n_images: int, class_bytes: int) -> tuple[np.ndarray, list[str]]:
    """Labels and classes from the columns that begin with them; ValueError if they are none."""
    labels = np.frombuffer(rows, "<i4", n_images).astype(np.int64)
    classes = json.loads(rows[4 * n_images : 4 * n_images + class_bytes])
    is_list = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not is_list or not ((labels >= 0) & (labels < max(1, len(classes)))).all():
        raise ValueError("labels are not numbers of classes")
    labels.setflags(write=False)
    return labels, classes


def _innermost_folders(keys: PackedStrings) -> tuple[np.ndarray, list[str]]:
    """Labels and classes as labkit made them until version 2."""
    classes, labels = number_folders((key.split("/")[-2] if "/" in key else "" for key in keys), len(keys))
    labels.setflags(write=False)
    return labels, classes
