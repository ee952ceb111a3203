"""Images in a tar, read without unpacking it: by an index, or by `tarfile`.

The index holds the names, offsets and sizes of a tar's members. It is built by one pass over the headers and stored
beside the tar. `tarfile` reads the same headers, but keeps an object for each and then searches them one by one.
"""

import io
import json
import os
import posixpath
import re
import shlex
import tarfile
import threading
import warnings
import weakref
import zipfile
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from labkit.data.blobs import (
    Blob,
    Extent,
    LocalBlob,
    allow_requests,
    evict,
    is_url,
    open_blob,
    open_buffered,
    refuse_storage_options,
)
from labkit.data.tar_members import (
    BoundedInfo,
    TarWarning,
    check_end,
    damage_error,
    find_compression,
    impossible_size,
    open_tar,
    plain_name,
    read_header,
    reading,
)
from labkit.errors import ArgumentError, MissingFileError, MissingKeyError, StorageError, TarError
from labkit.util.arguments import MAX_FILE_VARIABLE, max_file_bytes, require_choice
from labkit.util.files import checked_suffixes, images_among, is_image, write_atomic
from labkit.util.machine import labkit_home
from labkit.util.process import Lazy, PerProcess
from labkit.util.strings import PackedStrings

MODES = ("index", "tarfile", "reopen")
SUFFIX = ".labkit-index.npz"
_VERSION = 2
_BLOCK = tarfile.BLOCKSIZE


class TarStore:
    """Image files in an uncompressed tar.

    Args:
        path: A path, or a URL (`http://`, `s3://`, anything that fsspec opens) in mode `"index"`.
        mode: `"index"` keeps each member's offset and size in a file beside the tar, built by one pass over the
            headers, and reads by one `pread`. `"tarfile"` opens the tar once per process and asks `tarfile` for each
            member, as Marigold does: the first look-up reads every header, and every look-up searches all names.
            `"reopen"` opens the tar again for each image, and so reads all headers each time.
        ignore: Suffixes of members to leave out of `keys()`, as for `FolderStore`.
        **storage_options: Passed to fsspec, for object storage.

    Raises:
        FileNotFoundError: no such tar, or it holds no image (on the first call of `keys()`).
        TarError: the tar is compressed, cut or damaged, goes on after its end mark, or is not a tar; names the remedy.
            Raised on first use. Also for a sparse member of more than 1024 MB (`LABKIT_MAX_FILE_MB`), and for headers
            of more than a MiB.
        ValueError: unknown mode; or the tar holds images that labkit does not decode and `ignore` does not name (on the
            first call of `keys()`).
        TypeError: options for a place that takes none.

    Warns, on first use:
        TarWarning: members may be missing: there is no end mark, or it is followed by more zeros than fill a record.

    Keys have no leading `./`; `read` takes them with or without. A link gives its target's bytes. The index is built
    again when the tar's size or modification time has changed; it may be deleted at any time.

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
        require_choice("mode", mode, MODES)
        if is_url(path) and mode != "index":
            raise ArgumentError(f"mode={mode!r} needs a local file: mode='index' reads URLs")
        refuse_storage_options(path, storage_options)
        self.mode, self._ignore = mode, checked_suffixes(ignore)
        self._blob = open_blob(path, **storage_options)
        if isinstance(self._blob, LocalBlob):
            self._blob.fingerprint()  # raise for a missing file here, not in a worker
        self._index = Lazy(partial(read_index, self._blob))
        open_tarfile = partial(_ScannedTar, self._blob.name)
        self._tarfile: Callable[[], _ScannedTar] = PerProcess(open_tarfile) if mode == "tarfile" else open_tarfile
        self._keys: PackedStrings | None = None

    def __repr__(self) -> str:
        return f"TarStore({self.name!r}, mode={self.mode!r}, {len(self.keys())} images)"

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return os.path.basename(self._blob.name)

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> PackedStrings:
        """Names of all JPEG, PNG and WebP members, sorted; hidden ones are left out."""
        if self._keys is None:
            names = self.names()
            are_keys = not self._ignore and all(map(is_image, names))  # then the index and the keys share their memory
            keys = PackedStrings(names if are_keys else images_among(names, self._ignore, self._blob.name))
            if not len(keys):
                raise MissingFileError(f"{self._blob.name} holds no image")
            self._keys = keys
        return self._keys

    def names(self) -> Sequence[str]:
        """Names of all members with data, images or not, sorted."""
        return self._index().names

    def read(self, key: str) -> bytes:
        """A member's bytes. Raises KeyError for an unknown one, TarError if the tar was cut meanwhile."""
        place, name, index = self._blob.name, plain_name(key), self._index()
        try:
            row = index.row(name)
        except KeyError:
            raise MissingKeyError(f"{key!r} is not a file in {place}") from None
        offset, size = index.offsets[row].item(), index.sizes[row].item()
        if offset < 0:
            raise MissingKeyError(f"{key!r} is a link to a file that is not in {place}")
        # A few bytes in a tar may state that a file has many zeros, which would take as much memory.
        if row in index.sparse and size > max_file_bytes():
            raise TarError(
                f"{place}: {key!r} has {size} bytes with its holes; the limit is {max_file_bytes()} "
                f"({MAX_FILE_VARIABLE}): unpack it by `tar -xf`"
            )

        def cut(_: Exception | None = None) -> TarError:
            return TarError(f"{place} was cut after its headers were read: {key!r} lacks its end")

        with reading(place, cut):
            if self.mode != "index":
                return self._tarfile().read(name)
            if row not in index.sparse:
                data = self._blob.read_at(offset, size)
                n_missing = size - len(data)
            else:
                holed, n_missing = bytearray(size), 0
                for start, length in index.sparse[row]:
                    piece = self._blob.read_at(offset, length)
                    holed[start : start + len(piece)] = piece
                    offset, n_missing = offset + length, n_missing + length - len(piece)
                data = bytes(holed)
        if n_missing:
            raise cut()
        return data

    def allow_requests(self, n_at_once: int) -> None:
        """Let a server be asked for so many members at a time. Call it before the first read."""
        allow_requests(self._blob, n_at_once)

    def evict(self) -> int:
        """Drop the tar from the page cache; returns its bytes. Raises OSError if that is impossible."""
        if not isinstance(self._blob, LocalBlob):
            raise StorageError(f"{self._blob.name} is not a local file: this machine's page cache does not hold it")
        return evict([Path(self._blob.name)])

    def sizes(self) -> np.ndarray:
        """Bytes of each image, int64, in the order of `keys()`."""
        return self._index().sizes[self._rows()]

    def offsets(self) -> np.ndarray:
        """Where the data of each image begin, int64, in the order of `keys()`; sort by them to read sequentially."""
        return self._index().offsets[self._rows()]

    def extents(self, key: str, first: bool) -> Iterator[Extent]:
        """What a disk has to touch for `read(key)`, for `SimulatedStore`. `first`: whether it is the process' first."""
        index = self._index()
        row, opens = index.row(plain_name(key)), first or self.mode == "reopen"
        places = [(index.offsets[row], index.sizes[row])]
        if opens and self.mode != "index":
            headers = np.unique(index.offsets[index.offsets >= 0]) - _BLOCK  # -1: a link that leads nowhere
            places = [*((offset, _BLOCK) for offset in headers), *places]
        for number, (offset, size) in enumerate(places):
            yield Extent(self._blob.name, int(offset), int(size), opens and number == 0)

    def _rows(self) -> np.ndarray:
        index = self._index()
        return np.fromiter((index.row(key) for key in self.keys()), np.int64, len(self))


class _ScannedTar:
    """A `tarfile.TarFile` that has read all headers; closed when nothing refers to it any more."""

    def __init__(self, path: str):
        with reading(path, partial(damage_error, path)):
            self._tar, self._lock = tarfile.TarFile(path, tarinfo=BoundedInfo, encoding="utf-8"), threading.Lock()
            weakref.finalize(self, self._tar.close)
            prefixes = {info.name.removesuffix(plain_name(info.name)) for info in self._tar if not info.isdir()}
        self._prefix = prefixes.pop() if len(prefixes) == 1 else None

    def read(self, name: str) -> bytes:
        """One search by name, as in Marigold; by plain names if the tar spells them in more than one way."""
        if self._prefix is not None and not name.endswith("/"):  # `getmember` ignores a final slash
            info = self._tar.getmember(self._prefix + name)
        else:
            info = next(info for info in reversed(self._tar.getmembers()) if plain_name(info.name) == name)
        file: Any = self._tar.extractfile(info)  # of a file or a link it is not None
        with self._lock:  # two threads would move each other's file position
            return file.read()


# The index.


@dataclass(frozen=True)
class TarIndex:
    """Sorted names with the offsets and sizes of their data.

    Args:
        names: One for each member with data; of several with one name the last counts, as in `tarfile`.
        offsets: int64; -1 for a link that leads nowhere.
        sizes: int64 bytes, holes included.
        sparse: Row -> (offset, size) of each stored piece; the rest is zeros.
        doubt: Why members may be missing at the end of the tar; "" if nothing says so.
    """

    names: PackedStrings
    offsets: np.ndarray
    sizes: np.ndarray
    sparse: dict[int, Sequence[Sequence[int]]]
    doubt: str = ""

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
    index = _find_index(blob)
    if index.doubt:
        warnings.warn(TarWarning(index.doubt), stacklevel=2)
    return index


def _find_index(blob: Blob) -> TarIndex:
    stamp = blob.fingerprint()
    places = _index_paths(blob) if stamp[1] else []  # without a version, a server's file may be another one next time
    for path in places:
        if (index := _load(path, stamp)) is not None:
            return index
    index = build_index(blob)
    if blob.fingerprint() != stamp:
        raise TarError(f"{blob.name} changed while it was read: wait until it is written")
    for path in places:
        try:
            write_atomic(path, _dump(index, stamp))
            break
        except OSError:  # the folder is read-only: try the next one
            continue
    return index


def build_index(blob: Blob) -> TarIndex:
    """One pass over the headers: those of ordinary files are read here, all others by `tarfile`. Raises TarError."""
    n_bytes = blob.fingerprint()[0]
    # By column: of a million members, an object each would take more memory than all the rest.
    names: list[str] = []
    offsets, sizes = array("q"), array("q")
    # By row, for those that are more than a file with its bytes in one place.
    sparse: dict[int, Sequence[Sequence[int]]] = {}
    links: dict[int, tarfile.TarInfo] = {}
    others: set[int] = set()  # folders and devices

    with open(blob.name, "rb", 0) if isinstance(blob, LocalBlob) else open_buffered(blob) as file:
        tar = _open_uncompressed(file, blob.name)
        with reading(blob.name, lambda error: damage_error(blob.name, error, names[-1] if names else "")):
            offset = 0  # of the next header
            while True:
                file.seek(offset)
                header = file.read(_BLOCK)
                plain = None if tar.pax_headers else _parse_plain_header(header)
                row, last, fault = len(names), names[-1] if names else "", ""
                if plain is not None:
                    name, size = plain
                    start, stored = offset + _BLOCK, size
                    offset = start + -(-size // _BLOCK) * _BLOCK
                else:
                    file.seek(offset)
                    info = read_header(tar, blob.name, last) if header.strip(b"\0") else None
                    if info is None:
                        break
                    name, start, size, offset = plain_name(info.name), info.offset_data, 0, tar.offset
                    if info.islnk() or info.issym():
                        links[row] = info
                    elif info.issparse():
                        pieces: Any = info.sparse  # typeshed takes the pairs for bytes
                        size, sparse[row] = info.size, pieces or ((0, 0),)
                    elif info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:  # like `tarfile`: unknown is a file
                        size = info.size
                    else:
                        others.add(row)
                    stored = sum(length for _, length in sparse[row]) if row in sparse else size
                    fault = impossible_size(size, sparse.get(row, ()))
                if fault or start + stored > n_bytes:
                    raise damage_error(blob.name, f"{name!r} {fault or 'lacks its end'}", last)
                names.append(name)
                offsets.append(start)
                sizes.append(size)
            doubt = check_end(file, blob.name, last, offset)

    for row, end in _follow_links(names, links, others).items() if links else ():
        offsets[row], sizes[row] = (offsets[end], sizes[end]) if end >= 0 else (-1, 0)
        if end in sparse:
            sparse[row] = sparse[end]
    row_of = {name: row for row, name in enumerate(names)}  # of several with one name the last counts
    rows = [row_of[name] for name in sorted(row_of) if row_of[name] not in others]
    return TarIndex(
        PackedStrings(map(names.__getitem__, rows)),
        np.frombuffer(offsets, np.int64)[rows],
        np.frombuffer(sizes, np.int64)[rows],
        {place: sparse[row] for place, row in enumerate(rows) if row in sparse},
        doubt,
    )


def _open_uncompressed(file: BinaryIO, name: str) -> tarfile.TarFile:
    with reading(name, partial(damage_error, name)):
        head = file.read(_BLOCK)
        file.seek(0)
    if not head:
        raise TarError(f"{name} is empty: copy or download it again")
    if compression := find_compression(head):
        local_name = posixpath.basename(name) if is_url(name) else name
        raise TarError(
            f"{name} is compressed ({compression.command}): no member can be read without unpacking all before it. "
            f"{'Download and convert' if is_url(name) else 'Convert'} it: "
            f"python -m labkit convert {shlex.quote(local_name)} {shlex.quote(local_name + '.tar')}"
        )
    return open_tar(file, name)


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


def _follow_links(names: list[str], links: dict[int, tarfile.TarInfo], others: set[int]) -> dict[int, int]:
    """Row of each link -> row of the file whose data it has; -1 if it leads nowhere.

    A hard link's target precedes it; a symbolic one's need not.
    """
    final = {posixpath.normpath(name): row for row, name in enumerate(names)}
    so_far: dict[str, int] = {}
    hard: dict[int, int] = {}
    for row, name in enumerate(names):
        if row in links and links[row].islnk():
            hard[row] = so_far.get(posixpath.normpath(links[row].linkname), -1)
        so_far[posixpath.normpath(name)] = -1 if row in others else hard.get(row, row)

    ends = {}
    for row in links:
        end = hard.get(row, row)
        for _ in range(41):  # Linux follows 40 symbolic links
            if end not in links:
                break
            # Like `tarfile`, look for an absolute target, too, below the link's folder.
            target = "/".join(filter(None, (posixpath.dirname(links[end].name), links[end].linkname)))
            end = final.get(posixpath.normpath(target), -1)
            end = -1 if end in others else hard.get(end, end)
        else:
            end = -1
        ends[row] = end
    return ends


def _index_paths(blob: Blob) -> list[Path]:
    """Where an index may be stored: beside a local tar; for others, or if that folder is read-only, in labkit's own."""
    place = os.path.abspath(blob.name) if isinstance(blob, LocalBlob) else blob.name
    encoded = os.fsencode(place)
    short_name = os.fsdecode(posixpath.basename(encoded)[:80])
    own = labkit_home() / "tar_index" / f"{zlib.crc32(encoded):08x}-{short_name}{SUFFIX}"
    return [Path(place + SUFFIX), own] if isinstance(blob, LocalBlob) else [own]


def _dump(index: TarIndex, stamp: tuple[int, str]) -> bytes:
    block, ends = index.names.arrays()
    sparse = list(index.sparse.items())
    about = json.dumps({"version": _VERSION, "stamp": stamp, "sparse": sparse, "doubt": index.doubt})
    header, buffer = np.frombuffer(about.encode(), np.uint8), io.BytesIO()
    np.savez(buffer, about=header, block=block, ends=ends, offsets=index.offsets, sizes=index.sizes)
    return buffer.getvalue()


def _load(path: Path, stamp: tuple[int, str]) -> TarIndex | None:
    """The stored index; None if there is none, or it is of another tar or version, or damaged."""
    try:
        with zipfile.ZipFile(path) as file:  # NumPy would unpack what is compressed: little of it may be very much
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                return None
        with np.load(path, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
            if about["version"] != _VERSION or tuple(about["stamp"]) != stamp:
                return None
            names = PackedStrings.from_arrays(stored["block"], stored["ends"])
            sparse = {int(row): pieces for row, pieces in about["sparse"]}
            index = TarIndex(names, stored["offsets"], stored["sizes"], sparse, str(about["doubt"]))
        return index if _lies_within(index, stamp[0]) else None
    except Exception:  # damaged files make zipfile, NumPy and json raise almost anything
        return None


def _lies_within(index: TarIndex, n_bytes: int) -> bool:
    """Whether all data lie inside a tar of `n_bytes`, so that no read asks for more than there is."""
    offsets, sizes = index.offsets, index.sizes
    if not offsets.shape == sizes.shape == (len(index),) or not offsets.dtype == sizes.dtype == np.int64:
        return False
    stored = sizes.copy()
    for row, pieces in index.sparse.items():
        if not 0 <= row < len(index) or impossible_size(sizes[row].item(), pieces):
            return False
        stored[row] = sum(length for _, length in pieces)
    is_inside = (sizes >= 0) & (offsets <= n_bytes) & (stored <= n_bytes - offsets)
    return bool(np.where(offsets >= 0, is_inside, (offsets == -1) & (sizes == 0)).all())
