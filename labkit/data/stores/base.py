"""What a store is: named bytes, such as the image files in a folder. Decoding is in `labkit.data.decoders`."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from labkit.core import IMAGE_SUFFIXES, PackedStrings, is_image, key_from_name, path_from_key
from labkit.data.blobs import Extent, evict


@runtime_checkable
class Store(Protocol):
    """Named bytes. Stores survive fork and pickling (spawn): each process opens its own files on first use."""

    def keys(self) -> Sequence[str]:
        """Names of all images, sorted, with `/` between their parts."""

    def read(self, key: str) -> bytes:
        """Encoded contents of one image. Raises KeyError for an unknown key."""


@runtime_checkable
class HasSizes(Protocol):
    """A store that knows the size of its images."""

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""


@runtime_checkable
class HasExtents(Protocol):
    """A store that knows what a disk does for a read."""

    def extents(self, key: str, first: bool) -> Iterator[Extent]:
        """What `read(key)` touches; `first`: the first read of the process."""


class ListedStore(ABC):
    """A store that lists its keys once, on the first call of `keys()`.

    Args:
        name: Where it reads from, for messages; holds no credentials.
    """

    _keys: PackedStrings | None = None
    _if_empty = "holds no image"

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> PackedStrings:
        """Relative paths of all JPEG, PNG and WebP files, sorted. Raises FileNotFoundError if there are none."""
        if self._keys is None:
            keys = PackedStrings(sorted(self._list_keys()))
            if not keys:
                raise FileNotFoundError(f"{self.name} {self._if_empty}")
            self._keys = keys
        return self._keys

    @abstractmethod
    def _list_keys(self) -> Iterable[str]:
        """Keys of all images, in any order."""


class FolderStore(ListedStore):
    """Image files under one folder, at any depth. Hidden files and folders are left out.

    Args:
        root: The folder. It is listed once, on the first call of `keys()`.

    Raises:
        FileNotFoundError: `root` is not a folder, or holds no image.

    Taught in: notebooks/01_naive_pil.ipynb
    """

    _if_empty = f"holds no image ({', '.join(IMAGE_SUFFIXES)})"

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        super().__init__(str(self.root))
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is not a folder: make photos with labkit.make_photos(root, count)")

    def __repr__(self) -> str:
        return f"FolderStore({self.root.name!r}, {len(self)} images)"

    def read(self, key: str) -> bytes:
        """Contents of the file `key`, read with one `read` call. Raises KeyError if there is none."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:  # ValueError: NUL
            raise KeyError(f"{key!r} is not a file under {self.root}") from error

    def paths(self) -> list[Path]:
        """The files in the order of `keys()`, for functions that take paths (page-cache eviction, `read_image`)."""
        return [self.root / path_from_key(key) for key in self.keys()]

    def evict(self) -> int:
        """Drop all files from the page cache; returns their bytes. Raises OSError where the system cannot."""
        return evict(self.paths())

    def sizes(self) -> np.ndarray:
        """Bytes of each file, int64, in the order of `keys()`."""
        return np.fromiter((os.stat(self._path(key)).st_size for key in self.keys()), np.int64, len(self))

    def extents(self, key: str, first: bool) -> Iterator[Extent]:
        """What a disk does for `read(key)`, for `SimulatedStore`: it opens one file and reads its bytes."""
        path = self._path(key)
        yield Extent(path, 0, os.stat(path).st_size, opens=True)

    def _path(self, key: str) -> str:
        if key.startswith("/") or ".." in key.split("/"):
            raise KeyError(f"{key!r} is outside {self.root}")
        return os.path.join(self.root, path_from_key(key))

    def _list_keys(self) -> Iterator[str]:
        return _walk_images(self.root, "")


def _walk_images(folder: os.PathLike[str] | str, prefix: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk_images(entry.path, f"{prefix}{key_from_name(entry.name)}/")
            elif is_image(entry.name):
                yield prefix + key_from_name(entry.name)
