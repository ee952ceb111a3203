"""Images in a tar, read without unpacking it, by an index of its members.

The index holds the names, offsets and sizes of a tar's members. It is built by one pass over the headers and stored
next to the tar. `tarfile` reads the same headers, but keeps an object for each and then searches them one by one.
"""

import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
import warnings
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from labkit.data.blobs import (
    Blob,
    BlobFile,
    LocalBlob,
    allow_requests,
    is_url,
    open_blob,
    refuse_storage_options,
)
from labkit.data.stores import ListedStore, images_among
from labkit.data.tar_stream import (
    TAR_SUFFIXES,
    TarWarning,
    check_end,
    damage_error,
    find_compression,
    open_tar,
    plain_name,
    read_header,
    reading,
    unpacking_command,
)
from labkit.errors import ArgumentError, MissingKeyError, TarError
from labkit.util.arguments import require_choice, require_path
from labkit.util.files import n_images, write_atomic
from labkit.util.machine import labkit_home
from labkit.util.process import Lazy
from labkit.util.strings import PackedStrings

SUFFIX = ".labkit-index.npz"
_VERSION = 4
_BLOCK = tarfile.BLOCKSIZE
_DANGLING, _SPARSE = -1, -2  # in place of an offset
_MAX_LINKS = 40  # that lead to each other; Linux follows as many


class TarStore(ListedStore):
    """Image files in an uncompressed tar.

    Args:
        path: A path, or a URL (`http://`, `s3://`, anything that fsspec opens).
        mode: `"index"`: each member's offset and size are kept in a file next to the tar, or in labkit's cache. It is
            built by one pass over the headers; then a member is read by one `pread`, or one request.
        ignore: Suffixes of members to leave out of `keys()`, as for `FolderStore`.
        **storage_options: Passed to fsspec, for object storage.

    Raises:
        FileNotFoundError: no such tar, or it holds no image (on the first call of `keys()`).
        TarError: the tar is compressed, cut or damaged, goes on after its end mark, or is not a tar; names the remedy.
            Raised on first use. Also by `read` for a member that is stored as a sparse file.
        ValueError: another mode; or the tar holds images that labkit does not decode and `ignore` does not name (on the
            first call of `keys()`); or, on the first look at `labels`, these are texts, images lack one, several share
            one, or one is no number.
        TypeError: options for a place that takes none.

    Warns, on first use:
        TarWarning: members may be missing: there is no end mark, or it is followed by more zeros than fill a record.

    Labels, as WebDataset has them, are the numbers in the `.cls` members beside the images; or if there are none, those
    in `.json`. Texts in `.txt` members are what `lk.read_shards` gives. Without such members, classes are the folders.

    Keys have no leading `./`; `read` takes them with or without. A link gives its target's bytes. The index is built
    again when the tar's size or modification time has changed; it may be deleted at any time.

    >>> lk.TarStore("photos.tar").keys()[0]
    'photos/astronaut/000000.jpg'

    Taught in: notebooks/09_marigold_storage.ipynb
    """

    def __init__(
        self,
        path: str | os.PathLike,
        mode: str = "index",
        *,
        ignore: str | Iterable[str] = (),
        **storage_options: Any,
    ):
        self.mode = require_choice("mode", mode, ["index"])
        path = require_path("path", path, what="the path or URL of a tar")
        refuse_storage_options(path, storage_options)
        self._blob = open_blob(path, **storage_options)
        super().__init__(self._blob.name, ignore)
        if isinstance(self._blob, LocalBlob):
            self._blob.fingerprint()  # raise for a missing file here, not in a worker
        self._index = Lazy(partial(read_index, self._blob))

    def __repr__(self) -> str:
        return f"TarStore({os.path.basename(self.name)!r}, {len(self)} images)"

    def names(self) -> Sequence[str]:
        """Names of all members with data, images or not, sorted."""
        return self._index().names

    def read(self, key: str) -> bytes:
        """A member's bytes. Raises KeyError for an unknown one, TarError if the tar was cut meanwhile."""
        index = self._index()
        try:
            row = index.row(plain_name(key))
        except KeyError:
            raise MissingKeyError(f"{key!r} is not a file in {self.name}") from None
        offset, size = index.offsets[row].item(), index.sizes[row].item()
        if offset == _DANGLING:
            raise MissingKeyError(f"{key!r} is a link to a file that is not in {self.name}")
        if offset == _SPARSE:
            raise TarError(f"{self.name}: {key!r} is stored as a sparse file: unpack the tar by `tar -xf`")
        return self._read_at(key, offset, size)

    def _read_at(self, key: str, offset: int, size: int) -> bytes:
        with reading(self.name):
            data = self._blob.read_at(offset, size)
        if len(data) != size:
            raise TarError(f"{self.name} was cut after its headers were read: {key!r} lacks its end")
        return data

    @cached_property
    def labels(self) -> Sequence[Any] | None:
        """The label of each image, in the order of `keys()`; None if the tar holds none."""
        keys, index = self.keys(), self._index()
        places = label_places(index, keys)
        suffix = label_suffix(places)
        of_suffix = list(map(tuple, places[:, LABEL_SUFFIXES.index(suffix or ".cls")].tolist()))
        n_at_once = 1 if isinstance(self._blob, LocalBlob) else _LABELS_AT_ONCE
        self.allow_requests(n_at_once)
        return read_labels(
            self.name, keys, suffix, of_suffix, lambda key, place: self._read_at(key, *place), n_at_once=n_at_once
        )

    def allow_requests(self, n_at_once: int) -> None:
        """Let a server be asked for `n_at_once` members at a time. Call it before the first read."""
        allow_requests(self._blob, n_at_once)

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        index = self._index()
        return index.sizes[[index.row(key) for key in self.keys()]]

    def _why_empty(self) -> str:
        tars = [name for name in self.names() if name.lower().endswith(TAR_SUFFIXES)]
        if not tars:
            return super()._why_empty()
        return (
            f"holds {len(tars)} tar{'s' * (len(tars) > 1)}, such as {tars[0]!r}, and no image: unpack it by `tar -xf`, "
            "and then the tars, each into a folder of its own: python data_scripts/extract_tars.py FOLDER TAR..."
        )

    def _list_keys(self) -> Iterator[str]:
        index = self._index()
        names = chain(index.names, (f"{folder}/" for folder in index.folders))
        return images_among(names, self._ignore, self.name, self._folders)


# Labels, which lie beside their images: WebDataset's members with the name of the image up to its first dot.

_LABELS_AT_ONCE = 32  # of a distant tar, where each takes a request
LABEL_SUFFIXES = [".cls", ".txt", ".json"]  # the first of these that there is, as for `read_shards`


def label_places(index: "TarIndex", images: Sequence[str]) -> np.ndarray:
    """Offset and size of the members beside each image, one of each suffix: int64 (images, suffixes, 2), or -1."""
    rows = {}
    for row, name in enumerate(index.names):
        stem, dot, suffix = name.rpartition(".")
        if dot + suffix.lower() in LABEL_SUFFIXES:  # as for WebDataset, whatever their case
            rows[stem + dot + suffix.lower()] = row
    parted = (image.rpartition("/") for image in images)
    stems = (folder + slash + name.partition(".")[0] for folder, slash, name in parted)
    found = [[rows.get(stem + suffix, -1) for suffix in LABEL_SUFFIXES] for stem in stems]
    chosen = np.array(found, np.int64).reshape(len(images), len(LABEL_SUFFIXES))
    places = np.stack([index.offsets[chosen], index.sizes[chosen]], axis=-1)
    return np.where(chosen[..., None] < 0, -1, places)


def label_suffix(places: np.ndarray) -> str | None:
    """The suffix of the members that are labels, of those that `label_places` found."""
    return next((suffix for n, suffix in enumerate(LABEL_SUFFIXES) if (places[:, n, 0] >= 0).any()), None)


def read_labels(
    name: str,
    keys: Sequence[str],
    suffix: str | None,
    places: Sequence[tuple[int, ...]],
    read: Callable[[str, tuple[int, ...]], bytes],
    *,
    n_at_once: int = 1,
) -> list[Any] | None:
    """The labels in the members of one suffix, a number or what JSON holds for each image; None without a suffix.

    Args:
        name: Of the tar or the folder of tars, for messages.
        places: Of each image's member: perhaps a number of a tar, then its offset, which is -1 without one, and size.
        read: Gives a member's bytes.
        n_at_once: How many to read at a time.
    """
    rest = (
        "pass labels= of your own, such as labels=lambda key: key.partition('/')[0] for the folders, or classes=[] if "
        "labels are not used"
    )
    if suffix is None:
        return None
    if suffix == ".txt":
        raise ArgumentError(f"the labels in {name} are texts, in .txt members, which lk.read_shards gives: {rest}")
    if lacking := [row for row, (*_, offset, _) in enumerate(places) if offset < 0]:
        raise ArgumentError(
            f"{n_images(len(lacking))} of {len(places)} in {name}, such as {keys[lacking[0]]!r}, have no {suffix} "
            f"member: {rest}"
        )
    if len(set(places)) < len(places):
        [(place, _)] = Counter(places).most_common(1)
        several = [keys[row] for row, other in enumerate(places) if other == place]
        raise ArgumentError(
            f"{' and '.join(map(repr, several[:2]))} in {name} are images of one sample, with one {suffix} member: "
            f"leave the others out, as lk.open_store(root, ignore='.png'), or {rest}"
        )
    labels: list[Any] = [None] * len(places)
    order = sorted(range(len(places)), key=places.__getitem__)  # as they lie on the disk
    with ThreadPoolExecutor(n_at_once, "labkit-labels") as pool:
        reads = (pool.map if n_at_once > 1 else map)(lambda row: read(keys[row], places[row]), order)
        for row, data in zip(order, reads, strict=True):
            try:
                labels[row] = label = int(data) if suffix == ".cls" else json.loads(data)
            except (ValueError, RecursionError):  # the latter of JSON that is nested too deeply
                raise ArgumentError(
                    f"{name} has {data[:20]!r} as the {suffix} member of {keys[row]!r}, which is no label: {rest}"
                ) from None
            if isinstance(label, str | dict) or label is None:
                raise ArgumentError(
                    f"the labels in {name}, in .json members, are no numbers, such as {label!r:.50} of {keys[row]!r}: "
                    f"lk.read_shards gives them; here, {rest}"
                )
    return labels


# The index.


@dataclass(frozen=True)
class TarIndex:
    """Sorted names with the offsets and sizes of their data.

    Args:
        names: One for each member with data; of several with one name the last counts, as in `tarfile`.
        offsets: int64; -1 for a link that leads nowhere, -2 for a sparse file.
        sizes: int64 bytes.
        doubt: Why members may be missing at the end of the tar; "" if nothing says so.
        folders: First folders of the tar in which no member with data is.
    """

    names: PackedStrings
    offsets: np.ndarray
    sizes: np.ndarray
    doubt: str = ""
    folders: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.names)

    def row(self, name: str) -> int:
        """Row of a name. Raises KeyError."""
        block, ends = self._name_views

        def name_at(row: int) -> str:
            return str(block[ends[row] : ends[row + 1]], "utf-8", "surrogateescape")

        row = bisect_left(range(len(self)), name, key=name_at)
        if row == len(self) or name_at(row) != name:
            raise MissingKeyError(name)
        return row

    @cached_property
    def _name_views(self) -> tuple[memoryview, memoryview]:
        """The names' arrays as memory views, from which an item comes in a third of the time."""
        block, ends = self.names.arrays()
        return block.data, ends.data


def read_index(blob: Blob) -> TarIndex:
    """The index of a tar: the stored one if it is up to date, else a new one, which is stored.

    Raises:
        FileNotFoundError: no such tar.
        TarError: the tar is compressed, cut or damaged, or not a tar.

    Warns:
        TarWarning: members may be missing at its end; each time, also if the index was stored.
    """
    stamp = blob.fingerprint()
    paths = _index_paths(blob) if stamp[1] else []  # without a version, a server's file may be another one next time
    stored = (_load(path, stamp) for path in paths)
    index = next((index for index in stored if index is not None), None)
    if index is None:
        index = build_index(blob)
        if blob.fingerprint() != stamp:
            raise TarError(f"{blob.name} changed while it was read: wait until it is written")
        for path in paths:
            with suppress(OSError):  # the folder is read-only: try the next one
                write_atomic(path, _dump(index, stamp))
                break
    if index.doubt:
        warnings.warn(TarWarning(index.doubt), stacklevel=2)
    return index


def build_index(blob: Blob) -> TarIndex:
    """One pass over the headers: those of ordinary files are read here, all others by `tarfile`. Raises TarError."""
    n_bytes = blob.fingerprint()[0]
    found: dict[str, tuple[int, int]] = {}  # name -> offset and size; of several with one name the last counts
    links: dict[str, str] = {}  # symbolic link -> the name that it leads to
    folders: set[str] = set()
    offset, last = 0, ""  # of the next header; the member before it
    with (
        # One request fetches the headers of many small members.
        open(blob.name, "rb", 0) if isinstance(blob, LocalBlob) else io.BufferedReader(BlobFile(blob), 1 << 20) as file,
        reading(blob.name, lambda: last),
    ):
        if program := find_compression(file.read(_BLOCK)):
            place = posixpath.basename(blob.name) if is_url(blob.name) else blob.name
            raise TarError(
                f"{blob.name} is compressed ({program}): no member can be read without unpacking all before it. "
                f"{'Download and convert' if is_url(blob.name) else 'Convert'} it: "
                f"{unpacking_command(program, blob.name, place)}"
            )
        file.seek(0)
        tar = open_tar(file, blob.name)
        while True:
            file.seek(offset)
            header = file.read(_BLOCK)
            plain = None if tar.pax_headers else _parse_plain_header(header)
            entry: tuple[int, int] | None
            target = None
            if plain is not None:
                (name, size), start = plain, offset + _BLOCK
                entry, end = (start, size), start + -(-size // _BLOCK) * _BLOCK
            else:
                file.seek(offset)
                info = read_header(tar, blob.name, last) if header.strip(b"\0") else None
                if info is None:
                    break
                name, start, end, size = plain_name(info.name), info.offset_data, tar.offset, 0
                if info.isdir() or info.isdev():
                    entry = None
                    folders |= {name.partition("/")[0]} if info.isdir() else set()
                elif info.islnk():  # its target precedes it
                    earlier = plain_name(info.linkname)
                    entry, target = found.get(earlier, (_DANGLING, 0)), links.get(earlier)
                elif info.issym():
                    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))
                    entry = _DANGLING, 0
                elif info.issparse():
                    entry, size = (_SPARSE, 0), end - start
                else:  # like `tarfile`: what is of unknown type is a file
                    entry, size = (start, info.size), info.size
            if start + size > n_bytes:
                raise damage_error(blob.name, f"{name!r} lacks its end", last)
            if entry is None:
                found.pop(name, None)
            else:
                found[name] = entry
            if target is not None:
                links[name] = target
            elif links:
                links.pop(name, None)
            offset, last = end, name
        doubt = check_end(file, blob.name, last, offset)

    for name, target in links.items():
        for _ in range(_MAX_LINKS):
            target = links.get(target, target)
        found[name] = found.get(target, (_DANGLING, 0)) if target not in links else (_DANGLING, 0)
    names = sorted(found)
    places = np.fromiter(chain.from_iterable(map(found.__getitem__, names)), np.int64).reshape(-1, 2)
    folders -= {name.partition("/")[0] for name in names if "/" in name} | {"", "."}
    return TarIndex(PackedStrings(names), places[:, 0].copy(), places[:, 1].copy(), doubt, sorted(folders))


# Mode, owner, group, time and device as common writers write them; anything else is left to `tarfile`.
_PLAIN_NUMBER = rb"(?:[0-7]{7}[ \0]|[0-7]{6}[ \0]{2}|\0{8})"
_PLAIN_TIME = rb"(?:[0-7]{11}[ \0]|[0-7]{10}[ \0]{2}|\0{12})"
_PLAIN_NUMBERS = re.compile(rb"%b{3}.{12}%b.{181}%b{2}" % (_PLAIN_NUMBER, _PLAIN_TIME, _PLAIN_NUMBER), re.DOTALL)


def _parse_plain_header(header: bytes) -> tuple[str, int] | None:
    """Name and size of an ordinary file; None if `tarfile` has to read the header."""
    if len(header) < _BLOCK or not header[0]:
        return None
    try:
        size, checksum = int(header[124:136].rstrip(b"\0 ") or b"0", 8), int(header[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    # The checksum is the sum of all bytes, its own field taken as spaces. Adler-32's lower half is such a sum, in C.
    total = checksum - 256 + sum(header[148:156])
    is_intact = zlib.adler32(header) & 0xFFFF == (1 + total) % 65521
    if not is_intact or size < 0 or header[156] not in b"0\0" or not _PLAIN_NUMBERS.match(header, 100):
        return None
    name = header[:100].split(b"\0", 1)[0]
    if header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    if name.endswith(b"/"):  # a folder, in the oldest format
        return None
    return plain_name(name.decode("utf-8", "surrogateescape")), size


# The index's file.


def _index_paths(blob: Blob) -> list[Path]:
    """Where an index may be stored: next to a local tar; else, or if that folder is read-only, in labkit's own."""
    place = os.path.abspath(blob.name) if isinstance(blob, LocalBlob) else blob.name
    paths = [Path(place + SUFFIX)] if isinstance(blob, LocalBlob) else []
    with suppress(OSError):  # a user without a home folder
        paths.append(labkit_home() / "tar_index" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}{SUFFIX}")
    return paths


def _dump(index: TarIndex, stamp: tuple[int, str]) -> bytes:
    block, ends = index.names.arrays()
    about, buffer = json.dumps([_VERSION, *stamp, index.doubt, index.folders]).encode(), io.BytesIO()
    np.savez(
        buffer,
        about=np.frombuffer(about, np.uint8),
        block=block,
        ends=ends,
        offsets=index.offsets,
        sizes=index.sizes,
    )
    return buffer.getvalue()


def _load(path: Path, stamp: tuple[int, str]) -> TarIndex | None:
    """The stored index; None if there is none, or it is of another tar or version, or damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            *found, doubt, folders = json.loads(stored["about"].tobytes())
            names = PackedStrings.from_arrays(stored["block"], stored["ends"])
            index = TarIndex(names, stored["offsets"], stored["sizes"], doubt, folders)
    except Exception:  # damaged files make zipfile, NumPy and json raise almost anything
        return None
    is_whole = index.offsets.shape == index.sizes.shape == (len(names),)
    return index if is_whole and found == [_VERSION, *stamp] else None
