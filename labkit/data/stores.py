"""What a store is: named bytes, such as the image files in a folder. Decoding is in `labkit.data.decode`."""

import errno
import math
import os
import re
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from labkit.data.image_formats import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES
from labkit.errors import ArgumentError, MissingFileError, MissingKeyError, WrongTypeError
from labkit.util.arguments import kind_of, require_a, require_path
from labkit.util.files import first_folder, is_hidden, key_from_name, n_images, path_from_key, walk
from labkit.util.strings import PackedStrings


@runtime_checkable
class Store(Protocol):
    """Named bytes. Stores survive fork and pickling (spawn): each process opens its own files on first use."""

    def keys(self) -> Sequence[str]:
        """Names of all images, with `/` between their parts: sorted, or in an order that whoever made it gave."""

    def read(self, key: str) -> bytes:
        """Encoded contents of one image. Raises KeyError for an unknown key."""


def read_bytes(store: Store, key: str) -> bytes:
    """The bytes of one image, whatever a store keeps them in. Every read of a store is made here.

    Raises:
        WrongTypeError: the store gave something else than bytes. And what `store.read` raises.
    """
    return as_bytes(store.read(key), key)


def as_bytes(data: Any, key: str) -> bytes:
    """`data` as bytes, copied unless it is that: a bytearray, a memoryview, np.void (as of h5py), an array of uint8."""
    if isinstance(data, bytes):
        return data
    array = None if isinstance(data, str | list | tuple) else np.asarray(data)
    if array is not None and (
        array.dtype.kind == "V" if array.ndim == 0 else array.dtype == np.uint8 and array.ndim == 1
    ):
        return array.tobytes()
    raise WrongTypeError(f"{key!r} must lead to the bytes of an image file, got {kind_of(data)}")


@runtime_checkable
class HasSizes(Protocol):
    """A store that knows the size of its images."""

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""


@runtime_checkable
class HasTimes(Protocol):
    """A store that knows when its images were last changed."""

    def changed_at(self) -> np.ndarray:
        """Seconds since 1970, float64, in the order of `keys()`; NaN where that is unknown."""


def change_times(store: Store) -> dict[str, float]:
    """When each image was last changed, in seconds since 1970; empty if the store does not know."""
    return dict(zip(store.keys(), store.changed_at().tolist(), strict=True)) if isinstance(store, HasTimes) else {}


def changed_since(path: Path, keys: Iterable[str], times: Mapping[str, float]) -> list[str]:
    """Those of some images that were changed since a file was begun that was made of them; none without such a file.

    The file's time is that of its beginning (`atomic_path`, `dated`). An image may be the same all the same, as after a
    copy of its folder: what it gives has to be compared.
    """
    try:
        began_s = os.stat(path).st_mtime
    except FileNotFoundError:
        return []
    return [key for key in keys if times.get(key, math.nan) >= began_s]


def is_image(key: str) -> bool:
    """Whether a key names an image that labkit reads, by its suffix, and is not hidden."""
    return key.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(key)


def checked_suffixes(ignore: str | Iterable[str]) -> tuple[str, ...]:
    """Suffixes to leave out, in lower case; ValueError if one does not begin with a dot."""
    suffixes = tuple(ignore) if isinstance(ignore, Iterable) and not isinstance(ignore, str) else (ignore,)
    if wrong := [suffix for suffix in suffixes if not isinstance(suffix, str) or not re.match(r"\.\w", suffix)]:
        raise ArgumentError(f"ignore takes suffixes, such as ignore=('.gif', '.bmp'), got {wrong[0]!r}")
    return tuple(suffix.lower() for suffix in suffixes)


def images_among(
    names: Iterable[str], ignore: tuple[str, ...], place: str, folders: dict[str, Counter[str] | None] | None = None
) -> Iterator[str]:
    """Select the names of images; hidden ones and those with suffixes to `ignore` are left out.

    Args:
        names: Of files; and of folders, which end with a slash.
        ignore: Suffixes in lower case.
        place: Where the names are from, for messages.
        folders: Filled with the first folder of each name that is not hidden: None where there is an image in it, else
            how many files of each suffix there are.

    Raises:
        ValueError: at the end, where there are images that labkit does not decode; counts them, and names `place`.
    """
    others: Counter[str] = Counter()
    for name in names:
        suffix = os.path.splitext(name)[1].lower()
        if is_hidden(name):
            continue
        is_used = suffix in IMAGE_SUFFIXES and suffix not in ignore
        if folders is not None:
            _note_folder(folders, name, suffix, is_used)
        if is_used:
            yield name
        elif suffix in ignore:
            continue
        elif suffix in OTHER_IMAGE_SUFFIXES:
            others[suffix] += 1
    if others:
        counts = ", ".join(f"{n_files} {suffix}" for suffix, n_files in others.most_common())
        raise ArgumentError(
            f"{place} holds {n_images(others.total())} with suffixes that labkit does not read ({counts}; it reads "
            f"{', '.join(IMAGE_SUFFIXES)}): convert them, or leave them out, as "
            f"lk.open_store(root, ignore={tuple(sorted(others))!r})"
        )


def _note_folder(folders: dict[str, Counter[str] | None], name: str, suffix: str, is_image: bool) -> None:
    if not (folder := first_folder(name)):
        return
    if is_image:
        folders[folder] = None
    elif (found := folders.setdefault(folder, Counter())) is not None and not name.endswith("/"):
        found[suffix] += 1


class ListedStore(ABC):
    """A store that lists its keys once, on the first call of `keys()`.

    Args:
        name: Where it reads from, for messages; holds no credentials.
        ignore: Suffixes to leave out.

    Attributes:
        sorts_keys: Whether names are found and sorted, so that nobody gave their order. See `labels` of `ImageDataset`.
    """

    sorts_keys = True
    _keys: PackedStrings | None = None
    _if_empty = "holds no image"

    def __init__(self, name: str, ignore: str | Iterable[str] = ()):
        self.name, self._ignore = name, checked_suffixes(ignore)
        self._folders: dict[str, Counter[str] | None] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} images)"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> PackedStrings:
        """Relative paths of all images, by their suffixes (`IMAGE_SUFFIXES`), sorted.

        Raises:
            FileNotFoundError: there are none.
            ValueError: there are images of other formats, such as GIF, that `ignore` does not name; counts them.
        """
        if self._keys is None:
            keys = PackedStrings(sorted(self._list_keys()) if self.sorts_keys else self._list_keys())
            if not keys:
                raise MissingFileError(f"{self.name} {self._why_empty()}")
            self._keys = keys
        return self._keys

    def _why_empty(self) -> str:
        """What there is in place of images, and what to do, where there are none."""
        return self._if_empty

    def folders_without_image(self) -> dict[str, Counter[str]]:
        """The first folders in which no key is: how many files of each suffix there are in it, `""` for none."""
        self.keys()
        return {folder: found for folder, found in sorted(self._folders.items()) if found is not None}

    def changed_at(self) -> np.ndarray:
        """When each image was last changed, in seconds since 1970, float64, in the order of `keys()`; NaN if unknown.

        Of a local file that is the time of its inode, which neither a copy nor a renaming keeps, as they may keep the
        time of modification.
        """
        return np.full(len(self), os.stat(self.name).st_ctime if os.path.isfile(self.name) else np.nan)

    @abstractmethod
    def _list_keys(self) -> Iterable[str]:
        """Keys of all images, in any order. `images_among` notes in `_folders` where there are none."""


def folders_without_image(source: Any) -> dict[str, Counter[str]]:
    """The first folders of a store without an image in them, as `ListedStore.folders_without_image` gives them."""
    return source.folders_without_image() if hasattr(source, "folders_without_image") else {}


def _read_whole(descriptor: int, size: int) -> bytes:
    """What is in an open file of about `size` bytes, by one call of `read`, unless it grows or the disk gives less."""
    data = os.read(descriptor, size + 1)  # one byte more shows its end
    if len(data) == size:
        return data
    parts = [data]
    while parts[-1]:
        parts.append(os.read(descriptor, 1 << 20))
    return b"".join(parts)


_PACKED = (".tar", ".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".lz4", ".zip")


class FolderStore(ListedStore):
    r"""Image files under one folder, at any depth. Links are followed, but never in a circle.

    Hidden files and folders are left out, and so is what a system keeps for itself, such as `@eaDir` and `__MACOSX`.

    Args:
        root: The folder. It is listed once, on the first call of `keys()`.
        ignore: Suffixes of files to leave out, such as `(".gif", ".avif")`, which labkit does not decode.

    Raises:
        FileNotFoundError: `root` is not a folder, or holds no image.
        ValueError: it holds images that labkit does not decode and `ignore` does not name (on the first call of
            `keys()`); counts them by suffix.
        OSError: a folder cannot be listed.

    >>> store = lk.FolderStore("photos")
    >>> store.read(store.keys()[0])[:2]
    b'\xff\xd8'

    Taught in: notebooks/02_read_image.ipynb
    """

    _if_empty = f"holds no image ({', '.join(IMAGE_SUFFIXES)})"

    def __init__(self, root: str | os.PathLike, *, ignore: str | Iterable[str] = ()):
        self.root = Path(require_path("root", root, what="a folder of images, such as 'data/train'"))
        super().__init__(str(self.root), ignore)
        if not self.root.is_dir():
            raise MissingFileError(
                f"{self.root} is not a folder (looked for in {os.getcwd()}): check the path; "
                "lk.make_photos(root, count) makes photos to try things on"
            )

    def __repr__(self) -> str:
        return f"FolderStore({self.root.name!r}, {len(self)} images)"

    def read(self, key: str) -> bytes:
        """Contents of the file `key`, read with one `read` call. Raises KeyError if there is none."""
        try:
            # A pipe without a writer would be waited for. O_NONBLOCK changes nothing for a file.
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode):
                    return _read_whole(descriptor, status.st_size)
            finally:
                os.close(descriptor)
            cause: Exception | None = None
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: NUL
            cause = error
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ELOOP):  # of a socket, and of a link to itself
                raise
            cause = error
        raise MissingKeyError(f"{key!r} is not a file under {self.root}") from cause

    def paths(self) -> list[Path]:
        """The files in the order of `keys()`, for functions that take paths, such as `read_image`."""
        return [self.root / path_from_key(key) for key in self.keys()]

    def sizes(self) -> np.ndarray:
        """Bytes of each file, int64, in the order of `keys()`."""
        return np.fromiter(map(self._size, self.keys()), np.int64, len(self))

    def changed_at(self) -> np.ndarray:
        """When each file was last changed or put there, in seconds since 1970, float64, in the order of `keys()`."""
        return np.fromiter((self._status(key).st_ctime for key in self.keys()), np.float64, len(self))

    def _size(self, key: str) -> int:
        return self._status(key).st_size

    def _status(self, key: str) -> os.stat_result:
        try:
            status = os.stat(self._path(key))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            is_link = os.path.islink(self._path(key))
            state = "is a link to nothing: restore what it leads to" if is_link else "is gone: restore the file"
            raise MissingFileError(f"{key!r} under {self.root} {state}, or list the folder again without it") from error
        if not stat.S_ISREG(status.st_mode):
            raise MissingFileError(f"{key!r} under {self.root} is not a file, but a pipe or the like: move it away")
        return status

    def _path(self, key: str) -> str:
        require_a(str, "key", key, "one of the store's keys(), a string")
        if key.startswith("/") or ".." in key.split("/"):
            raise MissingKeyError(f"{key!r} is outside {self.root}")
        return os.path.join(self.root, path_from_key(key))

    def _list_keys(self) -> Iterator[str]:
        return images_among(self._list_files(), self._ignore, self.name, self._folders)

    def _why_empty(self) -> str:
        files = [name.rpartition("/")[2].lower() for name in self._list_files() if not name.endswith("/")]
        counts = Counter(os.path.splitext(name)[1] or "without suffix" for name in files)
        if not counts:
            return self._if_empty
        found = f"{self._if_empty}, but {', '.join(f'{number} {suffix}' for suffix, number in counts.most_common(5))}"
        if ".parquet" in counts:
            return (
                f"{found}: one Parquet file is opened by its own path; join several before, as "
                "pyarrow.parquet.write_table(pyarrow.parquet.read_table(folder), 'photos.parquet')"
            )
        if any(name.endswith(_PACKED) for name in files):
            return f"{found}: open one by its own path, whose error says how to unpack it"
        return found

    def _list_files(self) -> Iterator[str]:
        for folder in walk(self.root):
            if folder.error:
                raise folder.error
            # A link to nothing is a key, too: reading it says so.
            yield from (key_from_name(folder.prefix + name) for name in (*folder.files, *folder.broken))
            if not folder.prefix:
                yield from (key_from_name(f"{name}/") for name in folder.folders)
