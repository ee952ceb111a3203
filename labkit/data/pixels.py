"""Decoded pixels in one file, mapped into memory.

The pixel file, versions 2 and 3: raw images one after another, with an index and checksums. All numbers little-endian.

    offset       size         what
    0            8            the bytes `LKPIXELS`
    8            4            version, uint32: 2, or 3 if labels are no class numbers
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
    136 + 28 N   4 N          label of each image, int32: the number of its class; in version 3: zeros
    136 + 32 N   C            the block of classes: a JSON list of their names; in version 3: see below
    ...          the rest     the block of keys, UTF-8; bytes of a file name that are not UTF-8 stay as they are
    ...          ...          each image: H rows of W pixels of red, green, blue, uint8; padded with zeros to 64 bytes

Images are in the order of the keys, the first at the next multiple of 64 after the index, with nothing in between.
The CRC is zlib's.

In version 3, the block of classes is a JSON object: `classes`, the list; `labels`, a list of the label of each image, a
number or a list of numbers; and `dtype`, `float32` or `int64`. Files whose labels are 32-bit integers are of version 2.
Later versions keep bytes 0 to 11 and 124 to 127 where they are, so that this one can name them.
"""

import hashlib
import json
import mmap
import os
import re
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data.dataset import sample_of, transformed
from labkit.data.decode import PixelLimit, decode, load_decoder, open_image
from labkit.data.labels import Labeled, check_same_classes, labeled, sizes_of, warn_of_no_classes
from labkit.data.remote import as_store, reads_ahead
from labkit.data.stores import Store, change_times, changed_since, read_bytes
from labkit.errors import (
    DecodeError,
    FolderError,
    ItemErrors,
    MissingFileError,
    PixelError,
    StorageError,
    WrongTypeError,
)
from labkit.util.arguments import require_callable, require_int, require_local_path
from labkit.util.files import atomic_path, file_lock, free_bytes, n_images, require_room, sibling_path
from labkit.util.parallel import check_engine, format_error, is_disk_full, map_items
from labkit.util.process import Lazy
from labkit.util.strings import PackedStrings

_MAGIC, _ALIGNMENT = b"LKPIXELS", 64
_OF_CLASSES, _OF_LABELS = 2, 3  # versions: whose labels are class numbers, and anything else
_HEADER = struct.Struct("<8sII3QI32s16sQ24x")  # then its CRC-32
_HEADER_BYTES = _HEADER.size + 4
_RECIPE = 1  # of the pixels; raised when the same images and settings give others

_MAX_PART_IMAGES = 256
_MIN_PARTS = 32  # few images are spread over the cores, too
_WIDE, _N_LOOKED_AT = 3 * 4, 8  # bytes over the square of the shorter side; images, for an estimate of all pixels
_PART_NAME = re.compile(r"(part-\d{6,}|whole)\.pixels|\.\d+-[0-9a-f]{8}\.partial")

_LOOK_EVERY = 64  # images
_QUIET_LOOKS = 2  # without a read, before the file counts as cached: two threads may look at once

_BUILD = "labkit.PixelStore.build(source, path)"
_REBUILD = f"remove it and build it again with {_BUILD}"


class _Origin(NamedTuple):
    """What pixels were made from: two files with the same origin hold the same pixels."""

    digest: bytes
    short_side: int
    decoder: str


class PixelStore(Labeled, Dataset):
    """Raw RGB images and their labels in one file, as `PixelStore.build` writes it.

    Nothing is decoded: reading an image is a look-up and, in `pixels`, not even a copy. The price is disk space,
    H x W x 3 bytes per image, and detail: what the resize took away is gone for every epoch. While images come from a
    disk, those out of order are asked for before they are touched; else the kernel would read all around them, too.

    Args:
        path: The file. Its index is read now; its pixels are mapped into memory on first use, in each process.
        transform: Called with the uint8 (3, H, W) tensor; its result replaces the image.

    Items: `(image, label)`; image uint8 (3, H, W) RGB (or what `transform` made of it), a copy that may be written to;
    its strides are channels-last, as those of `decode`. Labels are those of `ImageDataset`, as `build` got them.
    Images have different sizes: for batches, let the transform crop.

    Attributes:
        path: The file.
        keys: Names of the images, a sequence.
        shapes: int32 (N, 2), height and width of each image.
        classes: Names of the classes, as `build` made them.
        class_to_idx: Class -> label.
        labels: The label of each image, as `ImageDataset` has them; read-only.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut or damaged, or of another version of the format; names the file and the remedy. Damaged
            pixels are not looked for. A later cut is noticed before each image is read; if the file is cut within those
            microseconds, the process ends (SIGBUS), as with any mapped file.

    >>> image, label = lk.PixelStore("photos.pixels")[0]

    The format is documented in `labkit.data.pixels`. Taught in: notebooks/11_prepare_once.ipynb
    """

    sorts_keys = True  # for all that the file tells

    def __init__(self, path: str | os.PathLike, *, transform: Callable[[Tensor], Any] | None = None):
        require_callable("transform", transform)
        self.transform = transform
        self._open(require_local_path("path", path))
        if self.classes == [""]:  # only here: workers, too, open the file again
            warn_of_no_classes(str(path), len(self))

    def _open(self, path: Path) -> None:
        """Read and check header and index; of the pixels, check only that they are all there."""
        try:
            with open(path, "rb") as file:
                header, size = file.read(_HEADER_BYTES), os.fstat(file.fileno()).st_size
                rows = file.read(_read_header(path, header, size)[4])
        except FileNotFoundError:
            raise MissingFileError(f"{path} does not exist: make it with {_BUILD}") from None
        except IsADirectoryError:
            raise FolderError(f"{path} is a folder, not a pixel store: make one of its images with {_BUILD}") from None
        _, version, short_side, n, _, _, crc, digest, decoder, class_bytes = _HEADER.unpack_from(header)
        if zlib.crc32(rows) != crc:
            raise PixelError(f"{path} is damaged: its index does not match its checksum; {_REBUILD}")

        def column(kind: str, count: int, start: int) -> np.ndarray:
            return np.frombuffer(rows, kind, count, start)

        self.path, self._header = path, header
        self._origin = _Origin(digest, short_side, decoder.rstrip(b"\0").decode())
        offsets = column("<u8", n, 0).astype(np.int64)
        key_offsets = column("<u8", n + 1, 8 * n).astype(np.int64)
        self.shapes = column("<i4", 2 * n, 8 + 16 * n).astype(np.int32).reshape(n, 2)
        self._crcs = column("<u4", n, 8 + 24 * n).astype(np.uint32)
        keys_start = 8 + 32 * n + class_bytes
        try:
            block = json.loads(rows[8 + 32 * n : keys_start])
            if version == _OF_CLASSES:
                block = {"classes": block, "labels": column("<i4", n, 8 + 28 * n), "dtype": "int64"}
            self.classes, self.labels = block["classes"], np.array(block["labels"], block["dtype"])
            self.labels.setflags(write=False)
        except (KeyError, TypeError, ValueError) as error:
            raise PixelError(f"{path} is damaged: its labels cannot be read ({error}); {_REBUILD}") from error
        # A copy of the keys, else all of `rows` stays in memory.
        self.keys = PackedStrings.from_arrays(column("u1", -1, keys_start).copy(), key_offsets)
        # Views: reading an item takes a third of the time of an array's, and writes no reference count as a list does.
        self._offsets, self._sides = offsets.data, self.shapes.reshape(-1).data
        self._view = Lazy(partial(_map_file, path, header, size))
        self._disk_reads = _DiskReads()

    @classmethod
    def build(
        cls,
        source: Any,
        path: str | os.PathLike,
        *,
        short_side: int = 256,
        decoder: str = "turbojpeg",
        classes: Sequence[str] | None = None,
        labels: Any = None,
        keys: Iterable[str] | None = None,
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
        sizes and settings is returned as it is. An image that was replaced since by one of the same size is an error,
        where the store knows the times of its files, as all of labkit's do but mappings and some servers. Of a store of
        your own without `sizes()` only the keys are compared.

        Args:
            source: A store, or the path or URL of one, for `open_store`.
            path: The file to write; missing folders are made.
            short_side: Pixels.
            decoder: One of `labkit.DECODERS`.
            classes, labels, keys: As for `ImageDataset`. The file keeps classes and labels.
            engine, num_workers, address: As in `labkit.map_items`. Threads are as fast as processes here, and start
                at once: decoders and resizing release the GIL.
            progress: Show a live bar.

        Raises:
            PixelError: something else is at `path`, or pixels of other images, or the same pixels with other classes or
                labels, or the source holds no image; names the file and the remedy.
            ItemErrors: images could not be read or decoded; has their keys. No file is written, but the parts without
                such images are kept for a rerun.
            OSError: the disk has no room for the pixels twice, as a few of the images tell; says how much is needed and
                free. Or it is full; names the file, and how many parts are done. Nothing more is decoded.
            TypeError, ValueError: unknown decoder or engine, `short_side` below 1, or labels, keys or folders that
                cannot be used, as for `ImageDataset`.

        >>> store = lk.PixelStore.build("photos", "photos.pixels")

        Source: H x W x 3 bytes in row order, the layout that NumPy and OpenCV read.
        Taught in: notebooks/11_prepare_once.ipynb
        """
        short_side = require_int("short_side", short_side)
        check_engine(engine, num_workers, address)
        load_decoder(decoder)  # an unknown or a missing one is one error here, not one for each image
        store = as_store(source)
        path = require_local_path("path", path).absolute()  # other processes may have another working folder
        chosen, names, labels = labeled(store, keys, classes, labels)
        if not chosen:
            raise PixelError(f"{path} is not built: the source holds no image")
        block = _label_block(names, labels)
        origin, parts = _plan_parts(store, chosen, short_side, decoder)
        folder = sibling_path(path, ".parts")
        times = change_times(store) if path.exists() or folder.exists() else {}
        parts = [replace(part, is_stale=bool(changed_since(folder / part.name, part.keys, times))) for part in parts]
        with file_lock(sibling_path(path, ".lock", hidden=True)):
            if path.exists():
                found, remedy = cls(path), "choose another path, or move that file away"
                if found._origin != origin:
                    raise PixelError(
                        f"{path} holds other pixels (short_side {found._origin.short_side}, "
                        f"decoder {found._origin.decoder!r}), or is of other images: {remedy}"
                    )
                check_same_classes(str(path), found.classes, names, remedy, error=PixelError)
                if _label_block(found.classes, found.labels) != block:
                    pairs = zip(chosen, map(str, found.labels.tolist()), map(str, labels.tolist()), strict=True)
                    differing = [
                        f"of {key}, {there:.50} in place of {here:.50}" for key, there, here in pairs if there != here
                    ]
                    raise PixelError(
                        f"{path} has {len(differing)} labels that are not those asked for ({differing[0]}): {remedy}"
                    )
                _check_changed(found, store, changed_since(path, chosen, times), remedy)
            else:
                done = sum((folder / part.name).stat().st_size for part in parts if (folder / part.name).is_file())
                if (
                    free_bytes(path.parent) < 2 * len(chosen) * _WIDE * short_side**2 - done
                ):  # else no image is looked at
                    require_room(path.parent, 2 * _estimated_bytes(store, chosen, short_side) - done)
                failures: dict[str, str] = {}
                for failed in map_items(
                    partial(_make_part, store, folder),
                    parts,
                    engine=engine,
                    num_workers=num_workers,
                    address=address,
                    progress=progress,
                    description="pixels",
                    unit="part",
                ):
                    failures |= failed
                if failures:
                    raise ItemErrors(failures, [None] * len(chosen))
                made = (PixelStore(folder / part.name) for part in parts)
                images = (part.pixels(number) for part in made for number in range(len(part)))
                whole = folder / "whole.pixels"
                try:
                    _write_file(whole, origin, chosen, block, images)
                    with open(whole, "rb") as file:  # all is on the disk before it gets its name
                        os.fsync(file.fileno())
                    began_ns = min((folder / part.name).stat().st_mtime_ns for part in parts)
                    os.utime(whole, ns=(began_ns, began_ns))
                    whole.replace(path)
                except OSError as error:
                    if not is_disk_full(error):
                        raise
                    raise StorageError(
                        f"the disk is full ({error}): all {len(parts)} parts are done, and {path.name} needs as much "
                        "room again. Make room, then run the same again: it goes on with what is there"
                    ) from error
            if folder.exists():  # with what killed runs left, too
                for name in filter(_PART_NAME.fullmatch, os.listdir(folder)):
                    (folder / name).unlink(missing_ok=True)
                with suppress(OSError):  # a dying worker of a killed run may still write there
                    folder.rmdir()
        return cls(path)

    def __len__(self) -> int:
        return len(self._offsets)

    def __repr__(self) -> str:
        return f"PixelStore({self.path.name!r}, {len(self)} images)"

    def __getstate__(self) -> tuple[Path, bytes, Callable[[Tensor], Any] | None]:
        """Pickled as a path; whoever unpickles it reads the index from there."""
        return self.path, self._header, self.transform

    def __setstate__(self, state: tuple[Path, bytes, Callable[[Tensor], Any] | None]) -> None:
        path, header, self.transform = state
        self._open(path)
        _check_same_file(path, self._header == header)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        pixels = self.pixels(index)
        self.read_ahead([index % len(self)], [(0, len(pixels))])
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        return sample_of(transformed(self.transform, image, f"image {index}"), self.labels, index)

    def pixels(self, index: int) -> np.ndarray:
        """One image, uint8 (H, W, 3) RGB: a read-only view of the file, at a multiple of 64 bytes, nothing copied."""
        if not hasattr(index, "__index__"):
            raise WrongTypeError(f"an index must be an integer from 0 to {len(self) - 1}, got {index!r:.100}")
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path.name} has no image {index}: it has {len(self)}")
        if index < 0:
            index += len(self)
        shape = (self._sides[2 * index], self._sides[2 * index + 1], 3)
        view = self._view()
        if view.size() < len(view):  # the file's size now; reading pixels beyond it would end the process (SIGBUS)
            raise PixelError(f"{self.path} was cut to {view.size()} bytes since it was opened; {_REBUILD}")
        return np.ndarray(shape, np.uint8, view, self._offsets[index])

    def read_ahead(self, indices: Sequence[int], rows: Iterable[tuple[int, int]]) -> None:
        """Begin to read parts of images that are about to be used, all at a time; what is in memory is not read again.

        Else the first touch of a page reads what lies around it: as much as the disk's read-ahead, which may be
        megabytes, of which a random order uses one image. Consecutive images are left to the kernel.

        Args:
            indices: Of the images, each at least 0.
            rows: The first row of each part, and the number of rows.
        """
        if not self._disk_reads.are_likely(len(indices)):
            return
        if len(indices) > 1 and list(indices) == list(range(indices[0], indices[0] + len(indices))):
            return
        for index, (top, height) in zip(indices, rows, strict=True):
            row_bytes = 3 * self._sides[2 * index + 1]
            start = self._offsets[index] + top * row_bytes
            before = start % mmap.PAGESIZE  # what is asked for begins with a page
            with suppress(OSError):  # only a hint: madvise(2), MADV_WILLNEED
                _advise(self._view(), start - before, before + height * row_bytes)

    def _is_sound(self, index: int) -> bool:
        """Whether an image's pixels match their checksum."""
        return zlib.crc32(self.pixels(index).data) == int(self._crcs[index])


def _map_file(path: Path, header: bytes, size: int) -> mmap.mmap:
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _check_same_file(path, len(view) == size and view[: len(header)] == header)
    return view


def _check_same_file(path: Path, is_same: bool) -> None:
    """The header holds the checksum of the index, which holds those of all pixels: it identifies the file."""
    if not is_same:
        raise PixelError(f"{path} is not the file that was opened: open it again")


class _DiskReads:
    """Whether this process reads from disks, by the kernel's counters.

    A hint for an image that is in memory would cost as much as a twentieth of the work on it. The counters are looked
    at once in 64 images, and hints count as reads where they bring pages in.
    """

    def __init__(self) -> None:
        self._images_left, self._seen, self._quiet_looks = 0, -1, 0

    def are_likely(self, n_images: int) -> bool:
        """Whether there were reads lately. `n_images`: how many images will be used."""
        if self._images_left <= 0:
            self._images_left, seen = _LOOK_EVERY, _count_reads()
            self._quiet_looks = self._quiet_looks + 1 if seen == self._seen else 0
            self._seen = seen
        self._images_left -= n_images
        return self._quiet_looks < _QUIET_LOOKS


def _count_reads() -> int:
    """Blocks that this process had read from disks, and its page faults that waited for one."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_majflt


def _advise(view: mmap.mmap, start: int, size: int) -> None:
    """The system call; `start` is a multiple of the page size."""
    view.madvise(mmap.MADV_WILLNEED, start, size)


# The file's header and index.


def _read_header(path: Path, header: bytes, size: int) -> tuple:
    """The fields of a header; PixelError if it is of no pixel store, or the file has another size than it says."""
    if not header.startswith(_MAGIC):
        begins = f"it begins with {header[:8]!r}" if header else "it is empty"
        raise PixelError(f"{path} is not a pixel store ({begins}): make one, under another name, with {_BUILD}")
    if struct.pack("<I", zlib.crc32(header[: _HEADER.size])) != header[_HEADER.size :]:
        raise PixelError(f"{path} is cut short or damaged: its header does not match its checksum; {_REBUILD}")
    fields = _HEADER.unpack_from(header)
    version, file_bytes = fields[1], fields[5]
    if version not in (_OF_CLASSES, _OF_LABELS):
        known = f"versions {_OF_CLASSES} and {_OF_LABELS}"
        raise PixelError(f"{path} is of version {version}, this labkit reads {known}: {_REBUILD}")
    if size != file_bytes:
        raise PixelError(f"{path} is cut short or damaged: it has {size} bytes, not {file_bytes}; {_REBUILD}")
    return fields


def _write_file(
    path: Path,
    origin: _Origin,
    keys: PackedStrings,
    labels: tuple[int, bytes, bytes],
    images: Iterable[np.ndarray],
) -> None:
    """Write a pixel file in one pass: leave space for header and index, write the images, then fill that in."""
    key_block, key_offsets = keys.arrays()
    version, label_column, class_block = labels
    index_bytes = 8 + 32 * len(keys) + len(class_block) + len(key_block)
    offsets, shapes, crcs = [], [], []
    with atomic_path(path, dated=True) as half, open(half, "wb") as file:
        file.seek(_HEADER_BYTES + index_bytes)
        file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
        for pixels in images:
            offsets.append(file.tell())
            shapes.append(pixels.shape[:2])
            crcs.append(zlib.crc32(pixels.data))
            file.write(pixels.data)
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
        file_bytes = file.tell()
        columns = [(offsets, "<u8"), (key_offsets, "<u8"), (shapes, "<i4"), (crcs, "<u4")]
        rows = b"".join(np.asarray(column, kind).tobytes() for column, kind in columns)
        rows += label_column + class_block + key_block.tobytes()
        sizes = (len(keys), index_bytes, file_bytes, zlib.crc32(rows))
        decoder = origin.decoder.encode()
        header = _HEADER.pack(_MAGIC, version, origin.short_side, *sizes, origin.digest, decoder, len(class_block))
        file.truncate(file_bytes)
        file.seek(0)
        file.write(header + struct.pack("<I", zlib.crc32(header)) + rows)


def _label_block(classes: list[str], labels: np.ndarray) -> tuple[int, bytes, bytes]:
    """The version of a file with such labels, its column of labels, and its block of classes."""
    if labels.ndim == 1 and labels.dtype == np.int64 and np.array_equal(labels, labels.astype(np.int32)):
        return _OF_CLASSES, labels.astype("<i4").tobytes(), json.dumps(classes).encode()
    content = {"classes": classes, "labels": labels.tolist(), "dtype": str(labels.dtype)}
    return _OF_LABELS, bytes(4 * len(labels)), json.dumps(content).encode()


# Building: parts, each a small pixel file, whole or absent, are made in a folder next to the file, then joined.


@dataclass(frozen=True)
class _Part:
    """Consecutive images, and what they are made of."""

    name: str
    keys: list[str]
    origin: _Origin
    is_stale: bool = False  # an image is newer than what an earlier run made of it
    pixel_limit: PixelLimit = field(default_factory=PixelLimit)  # of this process

    def __str__(self) -> str:
        return f"{self.name} ({self.keys[0]} to {self.keys[-1]})"


def _plan_parts(store: Store, chosen: Sequence[str], short_side: int, decoder: str) -> tuple[_Origin, list[_Part]]:
    """The origin of all images, and the parts, each with an origin of its own: a changed image spoils only its part."""
    keys = list(chosen)
    sizes: Sequence[int | None] = sizes_of(store, keys) or [None] * len(keys)
    count = min(_MAX_PART_IMAGES, -(-len(keys) // _MIN_PARTS))  # whatever the number of workers: a rerun may have more

    def origin(slot: slice) -> _Origin:
        digest = hashlib.sha256(json.dumps([_RECIPE, short_side, decoder]).encode())
        for key, size in zip(keys[slot], sizes[slot], strict=True):
            digest.update(f"\0{key}\0{size}".encode(errors="surrogateescape"))
        return _Origin(digest.digest(), short_side, decoder)

    slots = [slice(first, first + count) for first in range(0, len(keys), max(1, count))]
    parts = [_Part(f"part-{number:06d}.pixels", keys[slot], origin(slot)) for number, slot in enumerate(slots)]
    return origin(slice(None)), parts


def _estimated_bytes(store: Store, keys: Sequence[str], short_side: int) -> int:
    """Bytes of all pixels, as far as a few images, of equal distances in the list, stand for the others."""
    numbers, n_bytes = range(0, len(keys), -(-len(keys) // _N_LOOKED_AT)), 0.0
    try:
        for number in numbers:
            with open_image(read_bytes(store, keys[number])) as image:
                scale = min(1.0, short_side / min(image.size))
                n_bytes += 3 * image.width * image.height * scale**2
    except Exception:  # what cannot be read is told when its turn comes
        return 0
    return int(n_bytes / len(numbers) * len(keys))


def _make_part(store: Store, folder: Path, part: _Part) -> dict[str, str]:
    """Write a part, unless it is there.

    Returns:
        Key -> error text of images that could not be read; if there is one, the part is not written.
    """
    path = folder / part.name
    with suppress(FileNotFoundError, PixelError):
        made = PixelStore(path)
        # After a loss of power a file may be incomplete.
        if not part.is_stale and made._origin == part.origin and all(map(made._is_sound, range(len(made)))):
            return {}
    # The whole file has labels: a part's pixels do not depend on them.
    no_labels = _label_block([], np.zeros(len(part.keys), np.int64))
    try:
        _write_file(path, part.origin, PackedStrings(part.keys), no_labels, _load_images(store, part))
    except ItemErrors as error:
        return error.failures
    return {}


def _check_changed(found: PixelStore, store: Store, changed: list[str], remedy: str) -> None:
    """Compare images that may be other ones by now, as the times of their files say, with their pixels; PixelError."""
    if not changed:
        return
    began_s, rows = time.time(), {key: row for row, key in enumerate(found.keys)}

    def is_same(key: str) -> bool:
        with suppress(DecodeError, KeyError, OSError):
            image = decode(read_bytes(store, key), found._origin.decoder, key=key)
            return np.array_equal(shrink(image, found._origin.short_side), found.pixels(rows[key]))
        return False

    sound = map_items(is_same, changed, engine="threads", progress=False)
    if replaced := [key for key, same in zip(changed, sound, strict=True) if not same]:
        raise PixelError(
            f"{found.path} holds other pixels of {n_images(len(replaced))} that were replaced since, such as "
            f"{replaced[0]!r}: {remedy}"
        )
    with suppress(OSError):  # another user's file
        os.utime(found.path, (began_s, began_s))


def _load_images(store: Store, part: _Part) -> Iterator[np.ndarray]:
    """The part's images; those that cannot be read are left out, and named in an error after the last one."""
    failures = {}
    for key, read in zip(part.keys, reads_ahead(store, part.keys), strict=True):
        try:
            yield shrink(decode(read(), part.origin.decoder, key=key), part.origin.short_side)
        except (DecodeError, KeyError, OSError) as error:
            failures[key] = format_error(error)
    if failures:
        raise ItemErrors(failures, [None] * len(part.keys))


def shrink(image: Tensor, short_side: int) -> np.ndarray:
    """Resize a uint8 (3, H, W) tensor to (H, W, 3) pixels whose shorter side is at most `short_side`."""
    from torchvision.transforms.v2 import functional  # takes a second to load, and readers do not need it

    if min(image.shape[1:]) > short_side:
        image = functional.resize(image, [short_side], antialias=True)
    return image.permute(1, 2, 0).contiguous().numpy()


__all__ = ["PixelError", "PixelStore"]
