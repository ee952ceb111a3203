"""Decoded pixels in one file, mapped into memory.

The pixel file, version 2: raw images one after another, with an index and checksums. All numbers little-endian.

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

Have the kernel read the images of a pixel file before they are touched, while they come from a disk.

A pixel file in memory: its index read at once, its pixels mapped on first use.

The parts of a pixel file that is being built: each is a small pixel file, whole or absent, made by one worker.

Build a pixel file: make its parts in a folder beside it, then join them under its name.

Images decoded and resized once, then read as raw pixels from one memory-mapped file.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data.decode import DecodeError, decode, load_decoder
from labkit.data.labels import (
    Labeled,
    check_same_classes,
    labels_of,
    number_folders,
    warn_of_innermost_folders,
    warn_of_no_classes,
)
from labkit.data.remote import open_store
from labkit.data.stores import HasSizes, Store
from labkit.util.arguments import require_int
from labkit.util.files import atomic_path, check_same_job, file_lock, foreign_names, sibling_path
from labkit.util.parallel import ItemErrors, check_engine, format_error, map_items
from labkit.util.process import Lazy
from labkit.util.strings import PackedStrings

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


if sys.platform != "win32":
    import resource

_WILL_NEED: int = getattr(mmap, "MADV_WILLNEED", -1)
CAN_ADVISE = _WILL_NEED >= 0  # not on Windows
_LOOK_EVERY = 64  # images
_QUIET_LOOKS = 2  # without a read, before the file counts as cached: two threads may look at once


class DiskReads:
    """Whether this process reads from disks, by the kernel's counters.

    A hint for an image that is in memory would cost as much as a twentieth of the work on it. The counters are looked
    at once in 64 images, and hints count as reads where they bring pages in.
    """

    def __init__(self) -> None:
        self._images_left, self._seen = 0, -1
        self._quiet_looks = 0 if CAN_ADVISE else _QUIET_LOOKS

    def go_on(self, n_images: int) -> bool:
        """Whether there were reads lately. `n_images`: how many images will be used."""
        if self._images_left <= 0 and CAN_ADVISE:
            self._images_left = _LOOK_EVERY
            seen = _count_reads()
            self._quiet_looks = self._quiet_looks + 1 if seen == self._seen else 0
            self._seen = seen
        self._images_left -= n_images
        return self._quiet_looks < _QUIET_LOOKS


def _count_reads() -> int:
    """Blocks that this process had read from disks, and its page faults that waited for one."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_majflt


def will_need(view: mmap.mmap, start: int, size: int) -> None:
    """Begin to read a range of a mapped file, without waiting for it.

    Source: madvise(2), MADV_WILLNEED.
    """
    before = start % mmap.PAGESIZE  # a range begins with a page
    with suppress(OSError):  # only a hint: what the kernel refuses is read when it is touched
        advise(view, start - before, before + size)


def advise(view: mmap.mmap, start: int, size: int) -> None:
    """The system call; `start` is a multiple of the page size."""
    view.madvise(_WILL_NEED, start, size)


def are_consecutive(indices: Sequence[int]) -> bool:
    """Whether the kernel sees that images are read in their order, and reads ahead by itself. One image shows none."""
    first, count = indices[0], len(indices)
    return count > 1 and indices[-1] - first == count - 1 and list(indices) == list(range(first, first + count))


class PixelMap(Labeled):
    """The images of one pixel file; `PixelStore` documents its attributes.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut, damaged, of a newer version, or, on first use, replaced or cut since it was opened.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.head = read_head(self.path)
        contents, self.shapes = self.head.index.contents, self.head.index.shapes
        self.keys, self.labels, self.classes = contents.keys, contents.labels, contents.classes
        # Views: reading an item takes a third of the time of an array's, and writes no reference count as a list does.
        self._offsets, self._sides = self.head.index.offsets.data, self.shapes.reshape(-1).data
        self._view = Lazy(partial(_map_file, self.path, self.head))
        self._disk_reads, self._copied = DiskReads(), -2  # the image that was copied last
        self._read_from_file = {*vars(self), "_read_from_file"}

    def __len__(self) -> int:
        return len(self._offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a path; whoever unpickles it reads the index from there."""
        added = {name: value for name, value in vars(self).items() if name not in self._read_from_file}
        return _open_by_path, (type(self), self.path, self.head.header), added

    def pixels(self, index: int) -> np.ndarray:
        """One image, uint8 (H, W, 3) RGB: a read-only view of the file, at a multiple of 64 bytes, nothing copied."""
        if index < 0:
            index += len(self._offsets)
        if not 0 <= index < len(self._offsets):
            raise IndexError(f"{self.path.name} has no image {index}: it has {len(self)}")
        shape = (self._sides[2 * index], self._sides[2 * index + 1], 3)
        view = self._view()
        if view.size() < len(view):  # the file's size now; reading pixels beyond it would end the process (SIGBUS)
            raise PixelError(f"{self.path} was cut to {view.size()} bytes since it was opened; {REBUILD}")
        return np.ndarray(shape, np.uint8, view, self._offsets[index])

    def copy_of(self, index: int) -> np.ndarray:
        """One image, uint8 (H, W, 3) RGB, a copy; of a random order, too, the disk reads little more than the image."""
        pixels = self.pixels(index)
        if self._disk_reads.go_on(1):
            index %= len(self._offsets)
            if index != self._copied + 1:
                self._begin_to_read(index, 0, len(pixels))
            self._copied = index
        return pixels.copy()

    def read_ahead(self, indices: Sequence[int], rows: Iterable[tuple[int, int]]) -> None:
        """Begin to read parts of images that are about to be used, all at a time; what is in memory is not read again.

        Else the first touch of a page reads what lies around it: as much as the disk's read-ahead, which may be
        megabytes, of which a random order uses one image. Consecutive images are left to the kernel.

        Args:
            indices: Of the images, each at least 0.
            rows: The first row of each part, and the number of rows.
        """
        if self._disk_reads.go_on(len(indices)) and not are_consecutive(indices):
            for index, (top, height) in zip(indices, rows, strict=True):
                self._begin_to_read(index, top, height)

    def _begin_to_read(self, index: int, top: int, height: int) -> None:
        row_bytes = 3 * self._sides[2 * index + 1]
        will_need(self._view(), self._offsets[index] + top * row_bytes, height * row_bytes)

    def is_sound(self, index: int) -> bool:
        """Whether an image's pixels match their checksum."""
        return zlib.crc32(self.pixels(index).data) == int(self.head.index.crcs[index])


def _open_by_path(kind: type[PixelMap], path: Path, header: bytes) -> PixelMap:
    pixel_map = kind.__new__(kind)
    PixelMap.__init__(pixel_map, path)
    _check_same_file(path, pixel_map.head.header == header)
    return pixel_map


def _map_file(path: Path, head: Head) -> mmap.mmap:
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _check_same_file(path, len(view) == head.file_bytes and view[: len(head.header)] == head.header)
    return view


def _check_same_file(path: Path, is_same: bool) -> None:
    """The header holds the checksum of the index, which holds those of all pixels: it identifies the file."""
    if not is_same:
        raise PixelError(f"{path} is not the file that was opened: open it again")


_MAX_PART_IMAGES = 256
_RECIPE = 1  # of the pixels; raised when the same images and settings give others
_MIN_PARTS = 32  # few images are spread over the cores, too


@dataclass(frozen=True)
class Part:
    """Consecutive images, and what they are made of."""

    name: str
    keys: list[str]
    origin: Origin

    def __str__(self) -> str:
        return f"{self.name} ({self.keys[0]} to {self.keys[-1]})"


def plan_parts(store: Store, short_side: int, decoder: str) -> tuple[Origin, list[Part]]:
    """The origin of all images, and the parts, each with an origin of its own: a changed image spoils only its part."""
    keys = list(store.keys())
    sizes = store.sizes().tolist() if isinstance(store, HasSizes) else [None] * len(keys)
    count = min(_MAX_PART_IMAGES, -(-len(keys) // _MIN_PARTS))  # whatever the number of workers: a rerun may have more

    def origin(slot: slice) -> Origin:
        digest = hashlib.sha256(json.dumps([_RECIPE, short_side, decoder]).encode())
        for key, size in zip(keys[slot], sizes[slot], strict=True):
            digest.update(f"\0{key}\0{size}".encode(errors="surrogateescape"))
        return Origin(digest.digest(), short_side, decoder)

    slots = [slice(first, first + count) for first in range(0, len(keys), max(1, count))]
    parts = [Part(f"part-{number:06d}.pixels", keys[slot], origin(slot)) for number, slot in enumerate(slots)]
    return origin(slice(None)), parts


def make_part(store: Store, folder: Path, part: Part) -> dict[str, str]:
    """Write a part, unless it is there.

    Returns:
        Key -> error text of images that could not be read; if there is one, the part is not written.
    """
    path = folder / part.name
    if _is_made(path, part.origin):
        return {}
    try:
        _write_part(path, part, _load_images(store, part))
    except ItemErrors as error:
        return error.failures
    return {}


def pixels_start(contents: Contents) -> int:
    """Where the first image begins in a new file."""
    return aligned(HEADER_BYTES + contents.index_bytes())


def fill_in_head(file: BinaryIO, origin: Origin, contents: Contents, shapes: np.ndarray, crcs: np.ndarray) -> None:
    """Write header and index of a file that has all its images."""
    index, file_bytes = laid_out(contents, shapes, crcs, contents.index_bytes())
    file.truncate(file_bytes)
    file.seek(0)
    file.write(packed_head(origin, index, file_bytes))


def shrink(image: Tensor, short_side: int) -> np.ndarray:
    """Resize a uint8 (3, H, W) tensor to (H, W, 3) pixels whose shorter side is at most `short_side`."""
    from torchvision.transforms.v2 import functional  # takes a second to load, and readers do not need it

    if min(image.shape[1:]) > short_side:
        image = functional.resize(image, [short_side], antialias=True)
    return image.permute(1, 2, 0).contiguous().numpy()


def _is_made(path: Path, origin: Origin) -> bool:
    """Whether the part is there, of this origin, and intact: after a loss of power a file may be incomplete."""
    with suppress(FileNotFoundError, PixelError):
        part = PixelMap(path)
        return part.head.origin == origin and all(map(part.is_sound, range(len(part))))
    return False


def _load_images(store: Store, part: Part) -> Iterator[np.ndarray]:
    """The part's images; those that cannot be read are left out, and named in an error after the last one."""
    failures = {}
    for key in part.keys:
        try:
            yield shrink(decode(store.read(key), part.origin.decoder, key=key), part.origin.short_side)
        except (DecodeError, KeyError, OSError) as error:
            failures[key] = format_error(error)
    if failures:
        raise ItemErrors(failures, [None] * len(part.keys))


def _write_part(path: Path, part: Part, images: Iterable[np.ndarray]) -> None:
    """Write a pixel file in one pass: leave space for header and index, write the images, then fill that in."""
    # Labels are those of the whole file: the pixels of a part do not depend on them.
    contents = Contents(PackedStrings(part.keys), np.zeros(len(part.keys), np.int64), [])
    shapes, crcs = [], []
    with atomic_path(path) as partial, open(partial, "wb") as file:
        file.seek(pixels_start(contents))
        for image in images:
            file.write(image.data)
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            shapes.append(image.shape[:2])
            crcs.append(zlib.crc32(image.data))
        fill_in_head(file, part.origin, contents, np.array(shapes), np.array(crcs))


_WHOLE = "whole.pixels"
_OWN_NAMES = re.compile(r"(part-\d{6,}|whole)\.pixels|\.\d+-[0-9a-f]{8}\.partial")
_COPY_BYTES = 1 << 24


def build_pixels(
    source: Store | str | os.PathLike,
    path: str | os.PathLike,
    short_side: int,
    decoder: str,
    classes: Sequence[str] | None,
    options: dict,
) -> None:
    """What `PixelStore.build` does; `options` are those of `map_items`."""
    require_int("short_side", short_side)
    check_engine(options["engine"], options["num_workers"], options["address"])
    load_decoder(decoder)  # an unknown or a missing one is one error here, not one for each image
    store = source if isinstance(source, Store) else open_store(source)
    path = Path(path).absolute()  # other processes may have another working folder
    origin, parts = plan_parts(store, short_side, decoder)
    if not parts:
        raise PixelError(f"{path} is not built: the source holds no image")
    keys = PackedStrings(key for part in parts for key in part.keys)
    classes, labels = labels_of(keys, classes, source=store)
    contents = Contents(keys, labels, classes)
    folder = sibling_path(path, ".parts")
    with file_lock(sibling_path(path, ".lock", hidden=True)):
        if foreign := foreign_names(folder, _is_own_name):  # the folder will be removed
            raise PixelError(f"{folder} holds {foreign[0]!r}, which no build wrote: move it, or choose another path")
        if not _is_built(path, origin, contents):
            _make_parts(store, folder, parts, options)
            _join_parts(path, folder, origin, parts, contents)
        _remove_parts(folder)


def _is_built(path: Path, origin: Origin, contents: Contents) -> bool:
    """Whether `path` holds these very pixels and labels. Raises PixelError where it holds anything else."""
    if not path.exists():
        return False
    head, remedy = read_head(path), "choose another path, or remove it"
    found, asked = asdict(head.origin), asdict(origin)
    is_same_source = found.pop("digest") == asked.pop("digest")
    if found == asked and not is_same_source:
        found, asked = {"source": "another"}, {"source": "this one"}
    check_same_job(path, found, asked, what="pixels", remedy=remedy, error=PixelError)
    check_same_classes(str(path), head.index.contents.classes, contents.classes, remedy, error=PixelError)
    if not np.array_equal(head.index.contents.labels, contents.labels):
        raise PixelError(f"{path} has other labels, those of an earlier version of labkit: {remedy}")
    return True


def _make_parts(store: Store, folder: Path, parts: list[Part], options: dict) -> None:
    failures_by_part = map_items(partial(make_part, store, folder), parts, description="pixels", unit="part", **options)
    failures = {key: text for each in failures_by_part for key, text in each.items()}
    if failures:
        raise ItemErrors(failures, [None] * sum(len(part.keys) for part in parts))


def _join_parts(path: Path, folder: Path, origin: Origin, parts: list[Part], contents: Contents) -> None:
    """Join all parts in one file, which is synced to disk before it gets its name."""
    indices = [read_head(folder / part.name).index for part in parts]
    shapes, crcs = (np.concatenate([getattr(index, name) for index in indices]) for name in ("shapes", "crcs"))
    with atomic_path(folder / _WHOLE) as half, open(half, "wb") as file:
        file.seek(pixels_start(contents))
        for part, index in zip(parts, indices, strict=True):
            with open(folder / part.name, "rb", buffering=0) as part_file:
                part_file.seek(int(index.offsets[0]))
                _append(file, part_file)
        fill_in_head(file, origin, contents, shapes, crcs)
        file.flush()
        os.fsync(file.fileno())
    (folder / _WHOLE).replace(path)


def _append(file: BinaryIO, part_file: BinaryIO) -> None:
    """Append the rest of a part, by a copy inside the kernel if that is possible."""
    with contextlib.suppress(AttributeError, OSError):
        while os.copy_file_range(part_file.fileno(), file.fileno(), _COPY_BYTES):
            pass
    shutil.copyfileobj(part_file, file, _COPY_BYTES)  # what the kernel did not copy
    file.flush()  # the kernel writes behind Python's buffer


def _is_own_name(name: str) -> bool:
    return _OWN_NAMES.fullmatch(name) is not None


def _remove_parts(folder: Path) -> None:
    """Remove the parts, and what killed runs left."""
    if folder.exists():
        for name in filter(_is_own_name, os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a dying worker of a killed run may still write there
            folder.rmdir()


__all__ = ["PixelError", "PixelStore"]

_MAX_NAMED = 10


class PixelStore(PixelMap, Dataset):
    """Raw RGB images and their labels in one file, as `PixelStore.build` writes it.

    Nothing is decoded: reading an image is a look-up and, in `pixels`, not even a copy. The price is disk space,
    H x W x 3 bytes per image, and detail: what the resize took away is gone for every epoch. While images come from a
    disk, those out of order are asked for before they are touched; else the kernel would read all around them, too.

    Args:
        path: The file. Its index is read now; its pixels are mapped into memory on first use, in each process.
        transform: Called with the uint8 (3, H, W) tensor; its result replaces the image.

    Items: `(image, label)`; image uint8 (3, H, W) RGB (or what `transform` made of it), a copy that may be written to;
    its strides are channels-last, as those of `decode`. Label: an int index into `classes`.
    Images have different sizes: for batches, let the transform crop.

    Attributes:
        path: The file. The kernel does not evict what a process has mapped and touched: for a cold read, `evict` it
            before the store that reads it is opened, with all earlier ones gone.
        keys: Names of the images, a sequence.
        shapes: int32 (N, 2), height and width of each image.
        classes: Names of the classes, as `build` made them. A file that an earlier version of labkit built keeps its
            labels; where these are not those that `build` gives now, a `LabelWarning` says so.
        class_to_idx: Class -> label.
        labels: int64 (N,), the label of each image; read-only.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut or damaged, or of a newer version; names the file and the remedy. Only `verify`, which
            reads all pixels, finds damaged ones. A later cut is noticed before each image is read; if the file is cut
            within those microseconds, the process ends (SIGBUS), as with any mapped file.

    The format is documented in `labkit.data.pixels`. Taught in: notebooks/11b_raw_pixels.ipynb
    """

    def __init__(self, path: str | os.PathLike, *, transform: Callable[[Tensor], Any] | None = None):
        super().__init__(path)
        self.transform = transform
        self._tell_of_labels()

    def _tell_of_labels(self) -> None:
        """Warn of labels that are all 0, or of an earlier version. Only here: workers, too, open the file again."""
        if self.classes == [""]:
            warn_of_no_classes(str(self.path), len(self))
        elif self.head.version < LABELED_SINCE:
            first = [key.partition("/")[0] for key in self.keys]
            if [self.classes[label] for label in self.labels] != first:
                warn_of_innermost_folders(str(self.path))

    @classmethod
    def build(
        cls,
        source: Store | str | os.PathLike,
        path: str | os.PathLike,
        *,
        short_side: int = 256,
        decoder: str = "turbojpeg",
        classes: Sequence[str] | None = None,
        engine: str = "threads",
        num_workers: int | None = None,
        address: str | None = None,
        progress: bool = True,
    ) -> "PixelStore":
        """Decode all images of a store, resize them, and write their pixels to one file.

        Each is decoded at full size, EXIF orientation applied, and resized with antialiasing as torchvision v2's
        `Resize(short_side)` does. An image whose shorter side is smaller keeps its size: enlarging it would add no
        detail, and a training loader's crop resizes what it takes anyway.

        The file gets its name only when it is whole. Until then finished parts are in `<path>.parts`, so that a rerun
        after an interruption or a kill makes what is missing; this needs disk space for the pixels twice. The same
        images and settings give the same bytes, for any engine and number of workers. A file of the same keys, file
        sizes and settings is returned as it is; an image replaced by another one of the same size is not noticed.

        Args:
            source: A store, or the path or URL of one, for `open_store`.
            path: The file to write; missing folders are made.
            short_side: Pixels.
            decoder: One of `labkit.DECODERS`.
            classes: Names that labels index into, as for `ImageDataset`. The file keeps them, and the labels.
            engine, num_workers, address: As in `labkit.map_items`. Threads are as fast as processes here, and start
                at once: decoders and resizing release the GIL.
            progress: Show a live bar.

        Raises:
            PixelError: something else is at `path`, or the same pixels with other classes, or the source holds no
                image; names the file and the remedy.
            ItemErrors: images could not be read or decoded; has their keys. No file is written, but the parts without
                such images are kept for a rerun.
            ValueError: unknown decoder or engine, `short_side` below 1, or folders that cannot be classes, as for
                `ImageDataset`.

        Source: H x W x 3 bytes in row order, the layout that NumPy and OpenCV read.
        Taught in: notebooks/11b_raw_pixels.ipynb
        """

        options = {"engine": engine, "num_workers": num_workers, "address": address, "progress": progress}
        build_pixels(source, path, short_side, decoder, classes, options)
        return cls(path)

    def __repr__(self) -> str:
        return f"PixelStore({self.path.name!r}, {len(self)} images)"

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = torch.from_numpy(self.copy_of(index)).permute(2, 0, 1)
        return (self.transform(image) if self.transform else image), int(self.labels[index])

    def verify(self, *, progress: bool = True) -> None:
        """Read all pixels and check their checksums.

        Raises:
            PixelError: some are damaged; names the images and the remedy.
        """
        sound = map_items(
            self.is_sound, range(len(self)), engine="threads", progress=progress, description="verify", unit="image"
        )
        damaged = [self.keys[position] for position, is_sound in enumerate(sound) if not is_sound]
        if damaged:
            named = ", ".join(damaged[:_MAX_NAMED]) + (", ..." if len(damaged) > _MAX_NAMED else "")
            raise PixelError(f"{self.path} is damaged in {len(damaged)} of {len(self)} images ({named}): {REBUILD}")
