"""Stores of images that lie elsewhere than in files of their own: in memory, in a table's rows, in a folder of shards.

`lk.open_store` finds the one that fits. Those that know labels have them as `labels`, in the order of `keys()`, and the
names that these index into as `classes`; whatever takes a store then takes its labels from there.
"""

import json
import os
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from labkit.data.blobs import LocalBlob
from labkit.data.stores import ListedStore
from labkit.data.tar import TarIndex, read_index
from labkit.errors import (
    ArgumentError,
    MissingFileError,
    MissingKeyError,
    MissingLibraryError,
    TarError,
    WrongTypeError,
)
from labkit.util.arguments import kind_of, require_a, require_file
from labkit.util.files import (
    IMAGE_SUFFIXES,
    OTHER_IMAGE_SUFFIXES,
    first_folder,
    images_among,
    is_hidden,
    is_image,
    n_images,
)
from labkit.util.process import Lazy
from labkit.util.strings import PackedStrings

_MANIFEST, _UNFINISHED = "manifest.json", "unfinished"  # of `write_shards`
_SUFFIXES = {
    b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp", b"GIF8": ".gif", b"BM": ".bmp", b"II*\0": ".tif",
    b"MM\0*": ".tif",
}  # fmt: skip


class MappingStore(ListedStore):
    """Images in memory: a mapping of names to the bytes of image files.

    Args:
        files: Any mapping of strings to bytes. It is read on each access, and not copied; what is added later is no
            key. Forked workers share it, spawned ones get a copy each.
        ignore: Suffixes of keys to leave out.

    >>> lk.open_store({"cat/1.jpg": b"..."}).read("cat/1.jpg")
    b'...'
    """

    def __init__(self, files: Mapping[str, Any], *, ignore: str | Iterable[str] = ()):
        super().__init__("the mapping", ignore)
        self._files = files

    def read(self, key: str) -> bytes:
        """The bytes of one key. Raises KeyError for an unknown one, TypeError if its value is something else."""
        try:
            data = self._files[key]
        except KeyError:
            raise MissingKeyError(f"{key!r} is not in {self.name}") from None
        if not isinstance(data, bytes | bytearray | memoryview):
            raise WrongTypeError(f"{key!r} must lead to the bytes of an image file, got {kind_of(data)}")
        return bytes(data)

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        return np.fromiter((memoryview(self._files[key]).nbytes for key in self.keys()), np.int64)

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


class RowStore(ListedStore):
    """Images in the rows of a table. A key is a row's number, with the suffix of its format: `"000012.jpg"`.

    Args:
        name: For messages.
        ignore: Suffixes to leave out.
        classes: The names that labels index into; None if labels are something else, or there are none.
    """

    def __init__(self, name: str, ignore: str | Iterable[str], classes: Sequence[str] | None):
        super().__init__(name, ignore)
        self.classes = None if classes is None else list(classes)

    def read(self, key: str) -> bytes:
        """The bytes in one row, or of the file whose path is there. Raises KeyError for an unknown key."""
        data, path = self._cell(self._row(key))
        if data is None and path:
            return Path(path).read_bytes()
        if data is None:
            raise MissingKeyError(f"{key!r} of {self.name} has no image: its row holds none")
        return data

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        sizes = self._all_sizes()[[self._row(key) for key in self.keys()]]
        for number in np.flatnonzero(sizes < 0).tolist():  # only their paths are in the table
            _, path = self._cell(self._row(self.keys()[number]))
            sizes[number] = os.path.getsize(path) if path else 0
        return sizes

    @cached_property
    def sizes_crc32(self) -> int:
        """A checksum of all sizes: keys are row numbers, and do not tell one order of the rows from another."""
        return zlib.crc32(self.sizes().tobytes())

    @cached_property
    def labels(self) -> Sequence[Any] | None:
        """The label of each image, in the order of `keys()`; None if the table has none."""
        labels = self._labels()
        is_unlabeled = labels is None or (self.classes and all(label in (None, -1) for label in labels))  # test sets
        return None if labels is None or is_unlabeled else [labels[self._row(key)] for key in self.keys()]

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
        known = IMAGE_SUFFIXES + OTHER_IMAGE_SUFFIXES
        suffixes = [os.path.splitext(path or "")[1].lower() for path in self._paths()]
        if not all(suffix in known for suffix in suffixes):
            pairs = zip(suffixes, self._heads(), strict=True)
            suffixes = [suffix if suffix in known else _suffix_of(head) for suffix, head in pairs]
        return PackedStrings(suffixes)

    @abstractmethod
    def _cell(self, row: int) -> tuple[bytes | None, str | None]:
        """A row's bytes, and its path."""

    @abstractmethod
    def _paths(self) -> list[str | None]:
        """The paths of all rows; None where there is none."""

    @abstractmethod
    def _heads(self) -> list[bytes]:
        """The first bytes of all rows; none where there are none."""

    @abstractmethod
    def _all_sizes(self) -> np.ndarray:
        """Bytes of all rows, int64; -1 where there are none."""

    @abstractmethod
    def _labels(self) -> Sequence[Any] | None:
        """The labels of all rows."""


def _suffix_of(head: bytes) -> str:
    return next((suffix for start, suffix in _SUFFIXES.items() if head.startswith(start)), "")


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


def _image_column(candidates: list[str], asked: str | None, columns: Sequence[str], place: str) -> str:
    column = _choose_column(candidates, asked, columns, "images", "image_column")
    if column is None or column not in candidates:
        raise ArgumentError(
            f"{'no column' if column is None else f'column {column!r}'} of {place} holds images, which are a Hugging "
            f"Face Image, bytes, or a struct of bytes and path; the columns are {', '.join(columns)}"
        )
    return column


class DatasetStore(RowStore):
    """The image files in a Hugging Face `Dataset`, as they are: undecoded, and without its transforms.

    Args:
        dataset: A `datasets.Dataset`; from `load_dataset`, with `split=` and without `streaming=True`.
        image_column: Default: the only column of images.
        label_column: Default: the only `ClassLabel`, or the column `label`, if there is one.
        ignore: Suffixes to leave out.

    Raises:
        TypeError: several splits, or a stream.
        ValueError: no such column, or several that may be meant; lists them.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        ignore: str | Iterable[str] = (),
    ):
        if isinstance(dataset, Mapping):
            raise WrongTypeError(f"got several splits ({', '.join(dataset)}): pass one, such as dataset['train']")
        if not hasattr(dataset, "__len__"):
            raise WrongTypeError(
                "a streaming data set has no rows by number: load it without streaming=True, or give it to torch's "
                "DataLoader, with lk.decode in its map()"
            )
        features = dataset.features
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        of_images = [name for name, kind in kinds.items() if kind == "Image"]
        of_bytes = [name for name, feature in features.items() if _holds_bytes(feature)]
        candidates = of_images + of_bytes if image_column else of_images or of_bytes
        column = _image_column(candidates, image_column, list(features), "this Dataset")
        of_labels = [name for name, kind in kinds.items() if kind == "ClassLabel"] or [n for n in kinds if n == "label"]
        self._label = _choose_column(of_labels, label_column, list(features), "labels", "label_column")
        super().__init__("the Dataset", ignore, getattr(features.get(self._label), "names", None))
        plain = dataset.with_format(None)  # else a row is what its transform makes of it
        self._label_rows = plain.select_columns([self._label]) if self._label else None
        if column in of_images:
            plain = plain.cast_column(column, type(features[column])(decode=False))
        self._rows, self._column = plain.select_columns([column]), column

    def _cell(self, row: int) -> tuple[bytes | None, str | None]:
        cell = self._rows[row][self._column]
        return (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, None)

    def _paths(self) -> list[str | None]:
        flat, name = self._rows.flatten(), f"{self._column}.path"
        return flat.select_columns([name])[:][name] if name in flat.column_names else [None] * len(flat)

    def _parts(self) -> Iterator[Any]:
        """The column of bytes, 1000 rows at a time."""
        flat = self._rows.flatten()
        [name] = [one for one in flat.column_names if one in (self._column, f"{self._column}.bytes")]
        return (part.column(name) for part in flat.select_columns([name]).with_format("arrow").iter(batch_size=1000))

    def _heads(self) -> list[bytes]:
        return [head for part in self._parts() for head in _first_bytes(part)]

    def _all_sizes(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *map(_lengths, self._parts())])

    def _labels(self) -> Sequence[Any] | None:
        return self._label_rows[:][self._label] if self._label_rows is not None else None


def _holds_bytes(feature: Any) -> bool:
    """Whether a feature of a `Dataset` is of bytes, or of a struct with them."""
    fields = feature if isinstance(feature, Mapping) else {"bytes": feature}
    return getattr(fields.get("bytes"), "dtype", None) in ("binary", "large_binary")


def _first_bytes(column: Any) -> list[bytes]:
    import pyarrow.compute

    return [head or b"" for head in pyarrow.compute.binary_slice(column, 0, 12).to_pylist()]


def _lengths(column: Any) -> np.ndarray:
    import pyarrow.compute

    return pyarrow.compute.fill_null(pyarrow.compute.binary_length(column), -1).to_numpy().astype(np.int64)


class ParquetStore(RowStore):
    """The image files in the rows of a Parquet file: a column of bytes, or of a struct of bytes and path.

    The columns of images and labels are read into memory, once for all threads and forks; a spawned worker reads the
    file again. `datasets.Dataset.from_parquet(path)` maps it into memory instead, which suits files larger than that.

    Args:
        path: The file.
        image_column: Default: the only column of images.
        label_column: Default: the column `label`, if there is one. Names of its classes are found if `datasets` wrote
            the file.
        ignore: Suffixes to leave out.

    Raises:
        FileNotFoundError: no such file.
        ImportError: pyarrow is missing.
        ValueError: it is no Parquet file; or no such column, or several that may be meant; lists them.
    """

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
        candidates = [name for name in columns if _is_of_images(schema.field(name).type)]
        column = _image_column(candidates, image_column, columns, str(self.path))
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = {name: feature["names"] for name, feature in features.items() if "names" in feature}
        of_labels = list(names) or [name for name in columns if name == "label"]
        label = _choose_column(of_labels, label_column, columns, "labels", "label_column")
        super().__init__(str(self.path), ignore, names.get(label or ""))
        self._columns = Lazy(partial(_read_columns, self.path, column, label))

    def _cell(self, row: int) -> tuple[bytes | None, str | None]:
        columns = self._columns()
        data = columns.data[row].as_py()
        return data, columns.paths[row].as_py() if data is None and columns.paths is not None else None

    def _paths(self) -> list[str | None]:
        columns = self._columns()
        return [None] * len(columns.data) if columns.paths is None else columns.paths.to_pylist()

    def _heads(self) -> list[bytes]:
        return _first_bytes(self._columns().data)

    def _all_sizes(self) -> np.ndarray:
        return _lengths(self._columns().data)

    def _labels(self) -> Sequence[Any] | None:
        labels = self._columns().labels
        return None if labels is None else labels.to_pylist()


class _Columns(NamedTuple):
    """Arrow columns of a table: the images' bytes, their paths, and their labels."""

    data: Any
    paths: Any | None
    labels: Any | None


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingLibraryError(f"{path} cannot be read without pyarrow: python -m pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ArgumentError(f"{path} is not a Parquet file, or is damaged: {error}") from error


def _read_columns(path: Path, image: str, label: str | None) -> _Columns:
    table = _open_parquet(path).read(columns=[image, *([label] if label else [])])
    labels = table.column(label) if label else None
    flat = table.select([image]).flatten()
    data = flat.column(f"{image}.bytes" if f"{image}.bytes" in flat.column_names else image)
    return _Columns(data, flat.column(f"{image}.path") if f"{image}.path" in flat.column_names else None, labels)


def _is_of_images(kind: Any) -> bool:
    """Whether an Arrow type is bytes, or a struct with bytes."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_of_images(kind.field(place).type)
    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


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

    Labels are the numbers in `.cls` members; or if there are none, the texts in `.txt`; or what `.json` members hold.
    The classes are those of the manifest, if there is one; of texts and JSON there are none.

    Args:
        root: The folder.
        ignore: Suffixes of images to leave out.

    Raises:
        FileNotFoundError: `write_shards` has not finished, a tar of its manifest is missing, or no tar holds an image.
        TarError: a tar is cut or damaged, or has changed since its members were listed.
        ValueError: a damaged manifest; images that labkit does not decode and `ignore` does not name; or, on the first
            look at `labels`, images without a label, several with one label, or a label that is no number.
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
        if self._suffix is None:
            return None
        rest = "pass labels= of your own, or classes=[] if labels are not used"
        places = list(zip(self._tar_of.tolist(), *self._labels.T.tolist(), strict=True))
        if lacking := [row for row, (_, offset, _) in enumerate(places) if offset < 0]:
            raise ArgumentError(
                f"{n_images(len(lacking))} of {len(places)} in {self.name}, such as {keys[lacking[0]]!r}, have no "
                f"{self._suffix} member: {rest}"
            )
        if len(set(places)) < len(places):
            [(place, _)] = Counter(places).most_common(1)
            several = [keys[row] for row, other in enumerate(places) if other == place]
            raise ArgumentError(
                f"{' and '.join(map(repr, several[:2]))} in {self.name} are images of one sample, with one "
                f"{self._suffix} member: leave the others out, as lk.open_store(root, ignore='.png'), or {rest}"
            )
        labels = [None] * len(places)
        for row in sorted(range(len(places)), key=places.__getitem__):  # as they lie on the disk
            labels[row] = self._label(keys[row], *places[row])
        return labels

    def _label(self, key: str, tar: int, offset: int, size: int) -> Any:
        data = self._tars[tar].read(offset, size, key)
        try:
            return _LABELS[self._suffix or ""](data)
        except ValueError:
            raise ArgumentError(
                f"{self._tars[tar].path} has {data[:20]!r} as the {self._suffix} member of {key!r}, which is no label: "
                "pass labels= of your own"
            ) from None

    def _list_keys(self) -> list[str]:
        keys, parts = [], []
        for number, tar in enumerate(self._tars):
            index = read_index(LocalBlob(tar.path))
            rows = {name: row for row, name in enumerate(index.names)}
            names = chain(rows, (f"{folder}/" for folder in index.folders))
            images = list(images_among(names, self._ignore, str(tar.path), self._folders))
            keys += images
            parted = (image.rpartition("/") for image in images)
            stems = [folder + slash + name.partition(".")[0] for folder, slash, name in parted]
            of_labels = np.array([[rows.get(stem + suffix, -1) for suffix in _LABELS] for stem in stems], np.int64)
            of_labels = of_labels.reshape(len(images), len(_LABELS))
            own = [rows[image] for image in images]
            places = np.stack([np.where(of_labels < 0, -1, index.offsets[of_labels]), index.sizes[of_labels]], axis=-1)
            parts.append((np.full(len(images), number), index.offsets[own], index.sizes[own], places))
        tar_of, offsets, sizes, labels = map(np.concatenate, zip(*parts, strict=True))
        found = [suffix for number, suffix in enumerate(_LABELS) if (labels[:, number, 0] >= 0).any()]
        self._suffix = next(iter(found), None)
        if self._suffix in (".txt", ".json") and self.classes is None:
            self.classes = []  # captions, and whatever else is no class
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
        self._labels = labels[order][:, list(_LABELS).index(self._suffix or ".cls")]
        keys = [keys[row] for row in order]
        self._images = Lazy(partial(TarIndex, PackedStrings(keys), offsets[order], sizes[order]))
        return keys


_LABELS: dict[str, Callable[[bytes], Any]] = {".cls": int, ".txt": bytes.decode, ".json": json.loads}


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
