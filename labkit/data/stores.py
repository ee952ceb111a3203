"""Where encoded images lie. A store yields bytes by key; decoding lives in `labkit.data.decode`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


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
        self._keys: list[str] | None = None
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is not a folder: make photos with labkit.make_photos(root, count)")

    def __repr__(self) -> str:
        return f"FolderStore({self.root.name!r}, {len(self.keys())} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Relative paths of all JPEG, PNG and WebP files, sorted; hidden files and folders are left out."""
        if self._keys is None:
            self._keys = sorted(_image_paths(self.root, ""))
            if not self._keys:
                raise FileNotFoundError(f"{self.root} holds no image ({', '.join(IMAGE_SUFFIXES)})")
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
        return [self.root / key for key in self.keys()]

    def _path(self, key: str) -> str:
        if key.startswith("/") or ".." in key.split("/"):
            raise KeyError(f"{key!r} would leave {self.root}")
        return os.path.join(self.root, key)


def open_store(path_or_url: str | os.PathLike) -> Store:
    """The store that fits: a folder of images gives a `FolderStore`.

    Raises:
        ValueError: nothing here reads such a place; says what is read.
    """
    if os.path.isdir(path_or_url):
        return FolderStore(path_or_url)
    raise ValueError(f"{os.fspath(path_or_url)!r} is not a folder of images, and no other store reads it")


def _image_paths(folder: os.PathLike | str, prefix: str):
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _image_paths(entry.path, f"{prefix}{entry.name}/")
            elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                yield prefix + entry.name
