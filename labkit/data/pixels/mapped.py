"""A pixel file in memory: its index read at once, its pixels mapped on first use."""

import mmap
import os
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from labkit.core import Lazy
from labkit.data.datasets import labels_of
from labkit.data.pixels.format import REBUILD, Head, PixelError, read_head


class PixelMap:
    """The images of one pixel file.

    Raises:
        FileNotFoundError: no such file.
        PixelError: foreign, cut, damaged, of a newer version, or, on first use, no more the file that was opened; cut
            since.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.head = read_head(self.path)
        self.index = self.head.index
        # Views, because an item of theirs costs a third of an array's, and no reference count as a list's does.
        self._offsets, self._shapes = memoryview(self.index.offsets), memoryview(self.index.shapes.reshape(-1))
        self.classes, self.labels = labels_of(self.index.keys)
        self._map = Lazy(partial(_mapped, self.path, self.head))

    def __len__(self) -> int:
        return len(self._offsets)

    def __reduce__(self):
        """The path: whoever gets it reads the index from there."""
        return _reopened, (self.path, self.head.header)

    def pixels(self, index: int) -> np.ndarray:
        """uint8 (H, W, 3), a read-only view of the file."""
        if index < 0:
            index += len(self._offsets)
        if not 0 <= index < len(self._offsets):
            raise IndexError(f"{self.path.name} has no image {index}: it has {len(self)}")
        shape = (self._shapes[2 * index], self._shapes[2 * index + 1], 3)
        view = self._map()
        if view.size() < len(view):  # of the file now; reading pixels that are gone would end the process (SIGBUS)
            raise PixelError(f"{self.path} was cut to {view.size()} bytes since it was opened; {REBUILD}")
        return np.ndarray(shape, np.uint8, view, self._offsets[index])

    def is_sound(self, index: int) -> bool:
        """Whether an image's pixels fit their checksum."""
        return zlib.crc32(self.pixels(index)) == int(self.index.crcs[index])


def _reopened(path: Path, header: bytes) -> PixelMap:
    pixel_map = PixelMap(path)
    _check_same(path, pixel_map.head.header == header)
    return pixel_map


def _mapped(path: Path, head: Head) -> mmap.mmap:
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _check_same(path, len(view) == head.file_bytes and view[: len(head.header)] == head.header)
    return view


def _check_same(path: Path, is_same: bool) -> None:
    """The header has the checksum of the index, and that has those of all pixels: one header, one file."""
    if not is_same:
        raise PixelError(f"{path} is not the file any more that was opened: open it again")
