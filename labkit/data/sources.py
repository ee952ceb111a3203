"""Stores of images that lie elsewhere than in files of their own: in memory, in a table's rows, in a folder of shards.

`lk.open_store` finds the one that fits. Those that know labels have them as `labels`, in the order of `keys()`, and the
names that these index into as `classes`; whatever takes a store then takes its labels from there.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from labkit.data.blobs import LocalBlob
from labkit.data.image_formats import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, format_of
from labkit.data.stores import ListedStore, as_bytes, images_among, is_image
from labkit.data.tar import LABEL_SUFFIXES, TarIndex, label_places, label_suffix, read_index, read_labels
from labkit.errors import (
    ArgumentError,
    MissingFileError,
    MissingKeyError,
    MissingLibraryError,
    TarError,
    WrongTypeError,
)
from labkit.util.arguments import require_a, require_file
from labkit.util.files import first_folder, is_hidden
from labkit.util.process import Lazy
from labkit.util.strings import PackedStrings

_MANIFEST, _UNFINISHED = "manifest.json", "unfinished"  # of `write_shards`


class MappingStore(ListedStore):
    """Images in memory: a mapping of names to the bytes of image files, in its own order.

    Args:
        files: Any mapping of strings to bytes. It is read on each access, and not copied; what is added later is no
            key. Forked workers share it, spawned ones get a copy each.
        ignore: Suffixes of keys to leave out.

    >>> lk.open_store({"cat/1.jpg": b"..."}).read("cat/1.jpg")
    b'...'
    """

    sorts_keys = False

    def __init__(self, files: Mapping[str, Any], *, ignore: str | Iterable[str] = ()):
        super().__init__("the mapping", ignore)
        self._files = files

    def read(self, key: str) -> bytes:
        """The bytes of one key. Raises KeyError for an unknown one, TypeError if its value is something else."""
        try:
            return as_bytes(self._files[key], key)
        except KeyError:
            raise MissingKeyError(f"{key!r} is not in {self.name}") from None

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        return np.fromiter((len(self.read(key)) for key in self.keys()), np.int64)

    def _list_keys(self) -> list[str]:
        if wrong := [key for key in self._files if not isinstance(key, str)]:
            raise WrongTypeError(f"keys must be the images' names, such as 'cat/1.jpg', got {wrong[0]!r:.100}")
        kept = _readable(self._files, self._ignore, self.name)
        left_out = set(self._files) - set(kept)
        for _ in images_among(left_out, self._ignore, self.name, self._folders):
            pass
        self._folders |= dict.fromkeys(map(first_folder, kept))  # here a name needs no suffix
        return kept


def _readable(names: Iterable[str], ignore: tuple[str, ...], place: str) -> list[str]:
    """All names but those to `ignore`; ValueError where some are of formats that labkit does not decode."""
    kept = [name for name in names if not name.lower().endswith(ignore)]
    for _ in images_among(kept, (), place):
        pass
    return kept


# Tables.


class ParquetStore(ListedStore):
    """The image files in the rows of a Parquet file, as Hugging Face `datasets` writes it.

    The images are a column of bytes, or of a struct with `bytes` and perhaps `path`. A key is a row's number, with the
    suffix of its format: `"000012.jpg"`. The columns of images and labels are read into memory, once for all threads
    and forks; a spawned worker reads the file again.

    Args:
        path: The file.
        image_column: Default: the only column of images.
        label_column: Default: the only `ClassLabel`, or the column `label`, if there is one. Names of its classes are
            found if `datasets` wrote the file.
        ignore: Suffixes to leave out.

    Raises:
        FileNotFoundError: no such file.
        ImportError: pyarrow is missing.
        ValueError: it is no Parquet file; or no such column, or several that may be meant; lists them.
    """

    sorts_keys = False  # the rows have an order

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        ignore: str | Iterable[str] = (),
    ):
        self.path = require_file("path", path, "name a file in it")
        schema = _open_parquet(self.path).schema_arrow
        columns = list(schema.names)
        of_images = [name for name in columns if _is_of_images(schema.field(name).type)]
        image = _choose_column(of_images, image_column, columns, "images", "image_column")
        if image not in of_images:
            raise ArgumentError(
                f"{f'column {image!r}' if image else 'no column'} of {self.path} holds images, which are bytes, or a "
                f"struct with bytes; the columns are {', '.join(columns)}. Paths are not followed: open the folder of "
                "the files, as lk.FolderStore(folder), and pass labels="
            )
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = {name: feature["names"] for name, feature in features.items() if "names" in feature}
        of_labels = list(names) or [name for name in columns if name == "label"]
        label = _choose_column(of_labels, label_column, columns, "labels", "label_column")
        super().__init__(str(self.path), ignore)
        self.classes: list[str] | None = names.get(label or "")
        self._columns = Lazy(partial(_read_columns, self.path, str(image), label))

    def read(self, key: str) -> bytes:
        """The bytes in one row. Raises KeyError for an unknown key, or a row without bytes."""
        data = self._columns()[0][self._row(key)].as_py()
        if data is None:
            raise MissingKeyError(
                f"{key!r} of {self.name} has no image: its row holds no bytes. If it holds the path of a file, open "
                "the folder of these files, as lk.FolderStore(folder), and pass labels="
            )
        return data

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        import pyarrow.compute

        sizes = pyarrow.compute.fill_null(pyarrow.compute.binary_length(self._columns()[0]), 0)
        return sizes.to_numpy().astype(np.int64)[[self._row(key) for key in self.keys()]]

    @cached_property
    def sizes_crc32(self) -> int:
        """A checksum of all sizes: keys are row numbers, and do not tell one order of the rows from another."""
        return zlib.crc32(self.sizes().tobytes())

    @cached_property
    def labels(self) -> Sequence[Any] | None:
        """The label of each image, in the order of `keys()`; None if the table has none."""
        column = self._columns()[2]
        labels = None if column is None else column.to_pylist()
        if labels is None or (self.classes and all(label in (None, -1) for label in labels)):  # test sets
            return None
        return [labels[self._row(key)] for key in self.keys()]

    def _row(self, key: str) -> int:
        number = key.partition(".")[0] if isinstance(key, str) else ""
        row = int(number) if number.isdecimal() else len(self._suffixes)
        if row >= len(self._suffixes) or self._key(row) != key:
            raise MissingKeyError(f"{key!r} is not in {self.name}")
        return row

    def _key(self, row: int) -> str:
        return f"{row:0{max(6, len(str(len(self._suffixes) - 1)))}}{self._suffixes[row]}"

    def _list_keys(self) -> list[str]:
        return _readable(map(self._key, range(len(self._suffixes))), self._ignore, self.name)

    @cached_property
    def _suffixes(self) -> PackedStrings:
        """Of each row's image: that of its path, or else of the format that its bytes begin with."""
        import pyarrow.compute

        data, paths, _ = self._columns()
        heads = pyarrow.compute.binary_slice(data, 0, 12).to_pylist()
        suffixes = []
        for head, path in zip(heads, paths.to_pylist() if paths else [None] * len(heads), strict=True):
            suffix = os.path.splitext(path or "")[1].lower()
            if suffix not in IMAGE_SUFFIXES + OTHER_IMAGE_SUFFIXES:
                found = format_of(head or b"")
                suffix = found.suffixes[0] if found else ""
            suffixes.append(suffix)
        return PackedStrings(suffixes)


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingLibraryError(f"{path} cannot be read without pyarrow: python -m pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ArgumentError(f"{path} is not a Parquet file, or is damaged: {error}") from error


def _read_columns(path: Path, image: str, label: str | None) -> tuple[Any, Any, Any]:
    """Arrow columns: the images' bytes; their paths, and their labels, or None."""
    table = _open_parquet(path).read(columns=[image, *([label] if label else [])])
    flat = table.select([image]).flatten()
    parts = dict(zip(flat.column_names, flat.columns, strict=True))
    data = parts.get(f"{image}.bytes", parts.get(image))
    return data, parts.get(f"{image}.path"), table.column(label) if label else None


def _is_of_images(kind: Any) -> bool:
    """Whether an Arrow type is bytes, or a struct with bytes."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_of_images(kind.field(place).type)
    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def _choose_column(
    candidates: list[str], asked: str | None, columns: Sequence[str], what: str, option: str
) -> str | None:
    """The column that was asked for, or the only candidate; None without one. ValueError lists the columns."""
    if asked is not None and asked not in columns:
        raise ArgumentError(f"there is no column {asked!r} for {option}: the columns are {', '.join(columns)}")
    if asked is None and len(candidates) > 1:
        raise ArgumentError(
            f"{len(candidates)} columns hold {what} ({', '.join(candidates)}): name one, as "
            f"lk.open_store(..., {option}={candidates[0]!r})"
        )
    return asked if asked is not None else next(iter(candidates), None)


# Shards.


def holds_shards(folder: str) -> bool:
    """Whether a folder holds uncompressed tars, and neither images nor folders that may hold some."""
    has_tars = False
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if is_image(entry.name) or (entry.name != _UNFINISHED and entry.is_dir()):
                return False
            has_tars = has_tars or entry.name.lower().endswith(".tar")
    return has_tars


class ShardStore(ListedStore):
    """The images in a folder of tars, by name: WebDataset's shards, as `write_shards` makes them, or any others.

    Images are read one by one, in any order; `lk.read_shards` reads shards from their start to their end. The members
    of all tars are listed once, by their headers, as `TarStore` does. A name that is in several tars is preceded by
    that of its tar.

    Labels are those of `TarStore`. The classes are those of the manifest, if there is one.

    Args:
        root: The folder.
        ignore: Suffixes of images to leave out.

    Raises:
        FileNotFoundError: `write_shards` has not finished, a tar of its manifest is missing, or no tar holds an image.
        TarError: a tar is cut or damaged, or has changed since its members were listed.
        ValueError: a damaged manifest; images that labkit does not decode and `ignore` does not name; or, on the first
            look at `labels`, as `TarStore`.
    """

    _if_empty = f"holds tars without an image ({', '.join(IMAGE_SUFFIXES)})"

    def __init__(self, root: str | os.PathLike, *, ignore: str | Iterable[str] = ()):
        self.root = Path(root)
        super().__init__(str(self.root), ignore)
        manifest = self.root / _MANIFEST
        if not manifest.exists() and (self.root / _UNFINISHED).is_dir():
            raise MissingFileError(f"{manifest} does not exist: run write_shards to its end")
        try:
            about = json.loads(manifest.read_bytes()) if manifest.exists() else {}
            is_ours = "shards" in about
            self.classes: list[str] | None = about["classes"] if is_ours else None
            names = [os.path.basename(row["name"]) for row in about["shards"]] if is_ours else os.listdir(self.root)
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{manifest} is no manifest of shards: move it away, or write them again") from error
        tars = sorted(name for name in names if name.lower().endswith(".tar") and not is_hidden(name))
        self._tars = [_Tar.of(self.root / name) for name in tars]

    def read(self, key: str) -> bytes:
        """A member's bytes. Raises KeyError for an unknown one, TarError if its tar has changed."""
        self.keys()
        images = self._images()
        try:
            row = images.row(require_a(str, "key", key, "one of the store's keys(), a string"))
        except KeyError:
            raise MissingKeyError(f"{key!r} is no image in the tars of {self.name}") from None
        return self._tars[self._tar_of[row]].read(images.offsets[row].item(), images.sizes[row].item(), key)

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        self.keys()
        return self._images().sizes

    def changed_at(self) -> np.ndarray:
        """When the tar of each image was last changed, in seconds since 1970, float64, in the order of `keys()`."""
        self.keys()
        return np.array([os.stat(tar.path).st_ctime for tar in self._tars])[self._tar_of]

    @cached_property
    def labels(self) -> Sequence[Any] | None:
        """The label of each image, in the order of `keys()`; None if the tars hold none."""
        keys = self.keys()
        places = list(zip(self._tar_of.tolist(), *self._labels.T.tolist(), strict=True))
        return read_labels(
            self.name, keys, self._suffix, places, lambda key, place: self._tars[place[0]].read(place[1], place[2], key)
        )

    def _list_keys(self) -> list[str]:
        keys, parts = [], []
        for number, tar in enumerate(self._tars):
            index = read_index(LocalBlob(tar.path))
            names = chain(index.names, (f"{folder}/" for folder in index.folders))
            images = list(images_among(names, self._ignore, str(tar.path), self._folders))
            keys += images
            own = [index.row(image) for image in images]
            parts.append(
                (np.full(len(images), number), index.offsets[own], index.sizes[own], label_places(index, images))
            )
        tar_of, offsets, sizes, labels = map(np.concatenate, zip(*parts, strict=True))
        self._suffix = label_suffix(labels)
        if len(set(keys)) < len(keys):
            key, times = Counter(keys).most_common(1)[0]
            if self._suffix is None:
                raise ArgumentError(
                    f"{times} tars in {self.name} have an image {key!r}, and none has labels: give the images names of "
                    "their own, or read the tars one after the other, by lk.TarStore"
                )
            keys = [f"{self._tars[tar].path.stem}/{key}" for tar, key in zip(tar_of.tolist(), keys, strict=True)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self._tar_of = tar_of[order]
        self._labels = labels[order][:, LABEL_SUFFIXES.index(self._suffix or ".cls")]
        keys = [keys[row] for row in order]
        self._images = Lazy(partial(TarIndex, PackedStrings(keys), offsets[order], sizes[order]))
        return keys


class _Tar(NamedTuple):
    """A tar that is opened for each read: there may be more of them than a process may hold open."""

    path: Path
    version: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> "_Tar":
        LocalBlob(path).fingerprint()  # an error of labkit's if it is missing
        return cls(path, _version(os.stat(path)))

    def read(self, offset: int, size: int, key: str) -> bytes:
        if offset < 0:
            raise TarError(f"{self.path}: {key!r} is a link to nothing, or a sparse file: unpack the tar by `tar -xf`")
        descriptor, data = os.open(self.path, os.O_RDONLY), b""
        try:
            if _version(os.fstat(descriptor)) != self.version:
                raise TarError(f"{self.path} has changed since its members were listed: open the store again")
            while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
                data += more
        finally:
            os.close(descriptor)
        return data


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
