"""A pixel file in memory: its index read at once, its pixels mapped on first use."""

import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from labkit.core import Lazy
from labkit.data.labels import Labeled
from labkit.data.pixels.format import REBUILD, Head, PixelError, read_head
from labkit.data.pixels.read_ahead import DiskReads, are_consecutive, will_need


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
