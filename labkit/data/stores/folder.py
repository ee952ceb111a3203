"""Where encoded images lie. A store yields bytes by key; decoding lives in `labkit.data.decoders`."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import numpy as np

from labkit.core import IMAGE_SUFFIXES, PackedStrings, is_image, key_from_name, path_from_key, strip_credentials
from labkit.data.blobs import Extent, check_options, evict, is_url, known_schemes
from labkit.data.stores.remote import HttpStore, ObjectStore
from labkit.data.stores.simulated import SimulatedStore
from labkit.data.tar import TarStore

__all__ = [
    "IMAGE_SUFFIXES", "FolderStore", "HttpStore", "ObjectStore", "SimulatedStore", "Store", "TarStore", "open_store",
]  # fmt: skip


_TAR_NAME = re.compile(r"\.(tar(\.\w+)?|t[gbx]z2?)$", re.IGNORECASE)  # a compressed one says how to convert it


@runtime_checkable
class Store(Protocol):
    """Named bytes. Implementations survive fork and pickling (spawn): they open files lazily, per process."""

    def keys(self) -> Sequence[str]:
        """Names of all images, sorted, `/` between their parts."""

    def read(self, key: str) -> bytes:
        """Encoded contents of one image. Raises KeyError for an unknown key."""


class FolderStore:
    """Image files under one folder, at any depth.

    Args:
        root: The folder. It is listed once, on the first call of `keys()`.

    Raises:
        FileNotFoundError: `root` is not a folder, or holds no image.

    Taught in: notebooks/01_naive_pil.ipynb
    """

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        self._keys: PackedStrings | None = None
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is not a folder: make photos with labkit.make_photos(root, count)")

    def __repr__(self) -> str:
        return f"FolderStore({self.root.name!r}, {len(self.keys())} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> PackedStrings:
        """Relative paths of all JPEG, PNG and WebP files, sorted; hidden files and folders are left out."""
        if self._keys is None:
            keys = PackedStrings(sorted(_image_paths(self.root, "")))
            if not len(keys):
                raise FileNotFoundError(f"{self.root} holds no image ({', '.join(IMAGE_SUFFIXES)})")
            self._keys = keys
        return self._keys

    def read(self, key: str) -> bytes:
        """Contents of the file `key`, read with one `read` call."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:  # ValueError: NUL
            raise KeyError(f"{key!r} is not a file under {self.root}") from error

    def paths(self) -> list[Path]:
        """Files in the order of `keys()`, for what works on files (page-cache eviction, `read_image`)."""
        return [self.root / path_from_key(key) for key in self.keys()]

    def evict(self) -> int:
        """Drop all files from the page cache; returns their bytes. Raises OSError where a system cannot."""
        return evict(self.paths())

    def sizes(self) -> np.ndarray:
        """Bytes of each file, int64, in the order of `keys()`."""
        return np.fromiter((os.stat(self._path(key)).st_size for key in self.keys()), np.int64, len(self))

    def extents(self, key: str, first: bool) -> Iterator[Extent]:
        """What a disk has to touch for `read(key)`, for `SimulatedStore`: a file to open, and its bytes."""
        path = self._path(key)
        yield Extent(path, 0, os.stat(path).st_size, opens=True)

    def _path(self, key: str) -> str:
        if key.startswith("/") or ".." in key.split("/"):
            raise KeyError(f"{key!r} would leave {self.root}")
        return os.path.join(self.root, path_from_key(key))


def open_store(path_or_url: str | os.PathLike, **storage_options: Any) -> Store:
    """The store that fits a path or URL.

    A folder of images gives a `FolderStore`, a `.tar` anywhere a `TarStore`, another `http(s)://` address an
    `HttpStore`, and any other scheme that fsspec knows (`s3://bucket/prefix`) an `ObjectStore`.

    Raises:
        ValueError: nothing here reads such a place; says what is read.
        TypeError: options for a place that takes none.
    """
    place = os.fspath(path_or_url)
    check_options(place, storage_options)
    if is_url(place):
        return _open_url(place, storage_options)
    if os.path.isdir(place):
        return FolderStore(place)
    if os.path.isfile(place) and _TAR_NAME.search(place):
        return TarStore(place)
    raise ValueError(f"{place!r} is not a folder of images, a .tar or a URL, and no other store reads it")


def _open_url(url: str, storage_options: dict[str, Any]) -> Store:
    if url.partition("://")[0] not in known_schemes():
        raise ValueError(f"{strip_credentials(url)!r} is not a folder of images, a .tar or a URL of a known scheme")
    if _TAR_NAME.search(urlsplit(url).path):
        return TarStore(url, **storage_options)
    return HttpStore(url) if url.startswith(("http://", "https://")) else ObjectStore(url, **storage_options)


def _image_paths(folder: os.PathLike | str, prefix: str):
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _image_paths(entry.path, f"{prefix}{key_from_name(entry.name)}/")
            elif is_image(entry.name):
                yield prefix + key_from_name(entry.name)
