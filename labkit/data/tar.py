"""Tar files as stores, with an index.

An index of a tar's members: built by one pass over the headers, stored beside the tar, looked up in memory.

`tarfile` reads the same headers, but keeps an object for each and then searches them one by one.

Images in a tar, read without unpacking it: by an index, or by `tarfile`.
"""

import io
import json
import os
import posixpath
import tarfile
import threading
import warnings
import weakref
import zipfile
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from labkit.data.blobs import Blob, Extent, LocalBlob, allow_requests, evict, is_url, open_blob, refuse_storage_options
from labkit.data.tar_members import (
    UNREADABLE,
    BoundedInfo,
    Member,
    TarError,
    TarWarning,
    check_end,
    pieces_of,
    plain_name,
    scan,
    size_fault,
)
from labkit.util.arguments import MAX_FILE_VARIABLE, max_file_bytes, require_choice
from labkit.util.files import checked_suffixes, images_among, is_image, write_atomic
from labkit.util.machine import labkit_home
from labkit.util.process import Lazy, PerProcess
from labkit.util.strings import PackedStrings

SUFFIX = ".labkit-index.npz"
_VERSION = 2
_NOWHERE = Member("", -1, 0)


@dataclass(frozen=True)
class TarIndex:
    """Sorted names with the offsets and sizes of their data.

    Args:
        names: One for each member with data; of several with one name the last counts, as in `tarfile`.
        offsets: int64; -1 for a link that leads nowhere.
        sizes: int64 bytes, holes included.
        sparse: Row -> (offset, size) of each stored piece.
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
        try:
            encoded = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half a surrogate pair: no file has such a name
            raise KeyError(name) from None
        hashes, rows, block, ends = self._hash_table
        crc = zlib.crc32(encoded)
        position = bisect_left(hashes, crc)
        while position < len(hashes) and hashes[position] == crc:
            row = rows[position]
            if block[ends[row] : ends[row + 1]] == encoded:
                return row
            position += 1
        raise KeyError(name)

    @cached_property
    def _hash_table(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        """Sorted CRC-32 of the names, their rows, and the names: 8 bytes per name, where a dict takes a hundred.

        Memory views, because getting an item of an array takes three times as long.
        """
        crcs = np.fromiter((zlib.crc32(name) for name in self.names.encoded()), np.uint32, len(self))
        order = np.argsort(crcs, kind="stable").astype(np.uint32)
        block, ends = self.names.arrays()
        return crcs[order].data, order.data, block.data, ends.data


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
    """One pass over the headers."""
    doubts: list[str] = []
    scanned = _Columns(_scan(blob, doubts))
    if any(member.kind in ("hard", "sym") for member in scanned.odd.values()):
        scanned = _Columns(_with_links_resolved(scanned.members()))
    last = {name: row for row, name in enumerate(scanned.names)}  # of several with one name the last counts
    others = {row for row, member in scanned.odd.items() if member.kind == "other"}
    rows = [last[name] for name in sorted(last) if last[name] not in others]
    return TarIndex(
        PackedStrings(map(scanned.names.__getitem__, rows)),
        np.frombuffer(scanned.offsets, np.int64)[rows],
        np.frombuffer(scanned.sizes, np.int64)[rows],
        {place: scanned.odd[row].sparse for place, row in enumerate(rows) if row in scanned.odd},
        "".join(doubts),
    )


def _scan(blob: Blob, doubts: list[str]) -> Iterator[Member]:
    doubts.append((yield from scan(blob)))


class _Columns:
    """Members by column: of a million members, an object each would take more memory than all the rest.

    odd: Row -> member, for those that are more than a file with its bytes in one place.
    """

    def __init__(self, members: Iterable[Member]):
        self.names: list[str] = []
        self.offsets, self.sizes, self.odd = array("q"), array("q"), {}
        for row, member in enumerate(members):
            if member.kind != "file" or member.sparse:
                self.odd[row] = member
            self.names.append(member.name)
            self.offsets.append(member.offset)
            self.sizes.append(member.size)

    def members(self) -> list[Member]:
        files = map(Member, self.names, self.offsets, self.sizes)
        return [self.odd.get(row, member) for row, member in enumerate(files)]


def _with_links_resolved(scanned: list[Member]) -> Iterator[Member]:
    """One member of each name, links with their targets' data.

    A hard link's target precedes it; a symbolic one's need not.
    """
    final = {posixpath.normpath(member.name): member for member in scanned}
    so_far: dict[str, Member] = {}
    members: dict[str, Member] = {}
    for member in scanned:
        resolved = so_far.get(member.target, _NOWHERE) if member.kind == "hard" else member
        members[member.name] = resolved
        so_far[posixpath.normpath(member.name)] = _NOWHERE if member.kind == "other" else resolved
    return (_follow_links(member, final, members)._replace(name=name) for name, member in members.items())


def _follow_links(member: Member, final: dict[str, Member], members: dict[str, Member]) -> Member:
    for _ in range(41):  # Linux follows 40 links
        if member.kind != "sym":
            return member
        target = final.get(member.target, _NOWHERE)
        if target is _NOWHERE or target.kind == "other":
            break
        member = members[target.name]
    return _NOWHERE


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
    buffer = io.BytesIO()
    np.savez(
        buffer, about=np.frombuffer(about.encode(), np.uint8), block=block, ends=ends, offsets=index.offsets,
        sizes=index.sizes,
    )  # fmt: skip
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
        if not 0 <= row < len(index) or size_fault(sizes[row].item(), pieces):
            return False
        stored[row] = sum(length for _, length in pieces)
    is_inside = (sizes >= 0) & (offsets <= n_bytes) & (stored <= n_bytes - offsets)
    return bool(np.where(offsets >= 0, is_inside, (offsets == -1) & (sizes == 0)).all())


_HEADER_BYTES = tarfile.BLOCKSIZE


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
            raise ValueError(f"mode={mode!r} needs a local file: mode='index' reads URLs")
        refuse_storage_options(path, storage_options)
        self.mode, self._ignore = mode, checked_suffixes(ignore)
        self._blob = open_blob(path, **storage_options)
        if isinstance(self._blob, LocalBlob):
            self._blob.fingerprint()  # raise for a missing file here, not in a worker
        self._index = Lazy(partial(read_index, self._blob))
        self._reader = MODES[mode](self._blob, self._index)
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
                raise FileNotFoundError(f"{self._blob.name} holds no image")
            self._keys = keys
        return self._keys

    def names(self) -> Sequence[str]:
        """Names of all members with data, images or not, sorted."""
        return self._reader().names()

    def read(self, key: str) -> bytes:
        """A member's bytes. Raises KeyError for an unknown one, TarError if the tar was cut meanwhile."""
        return self._reader().read(key)

    def allow_requests(self, n_at_once: int) -> None:
        """Let a server be asked for so many members at a time. Call it before the first read."""
        allow_requests(self._blob, n_at_once)

    def evict(self) -> int:
        """Drop the tar from the page cache; returns its bytes. Raises OSError if that is impossible."""
        if not isinstance(self._blob, LocalBlob):
            raise OSError(f"{self._blob.name} is not a local file: this machine's page cache does not hold it")
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
            headers = np.unique(index.offsets[index.offsets >= 0]) - _HEADER_BYTES  # -1: a link that leads nowhere
            places = [*((offset, _HEADER_BYTES) for offset in headers), *places]
        for number, (offset, size) in enumerate(places):
            yield Extent(self._blob.name, int(offset), int(size), opens and number == 0)

    def _rows(self) -> np.ndarray:
        index = self._index()
        return np.fromiter((index.row(key) for key in self.keys()), np.int64, len(self))


class _IndexReader:
    """Look up, then one `pread` (or one range request)."""

    def __init__(self, blob: Blob, index: Lazy):
        self._blob, self._index = blob, index

    def names(self) -> PackedStrings:
        return self._index().names

    def read(self, key: str) -> bytes:
        index = self._index()
        try:
            row = index.row(plain_name(key))
        except KeyError:
            raise _not_found(key, self._blob) from None
        offset, size = index.offsets[row].item(), index.sizes[row].item()
        if offset < 0:
            raise _not_found(key, self._blob, is_link=True)
        if row not in index.sparse:
            return self._read_at(key, offset, size)
        _check_sparse_size(key, size, self._blob)
        data = bytearray(size)
        for start, length in index.sparse[row]:
            data[start : start + length] = self._read_at(key, offset, length)
            offset += length
        return bytes(data)

    def _read_at(self, key: str, offset: int, size: int) -> bytes:
        data = self._blob.read_at(offset, size)
        if len(data) != size:
            raise _truncated_error(key, self._blob)
        return data


class _PlainNameTar:
    """A `tarfile.TarFile` whose members are found by their plain names; closed when nothing refers to it any more."""

    def __init__(self, tar: tarfile.TarFile, blob: Blob):
        self._tar, self._blob, self._lock = tar, blob, threading.Lock()
        spellings = {member.name.removesuffix(plain_name(member.name)) for member in tar if not member.isdir()}
        self._prefix = spellings.pop() if len(spellings) == 1 else None
        weakref.finalize(self, tar.close)

    def names(self) -> list[str]:
        members = {plain_name(member.name): member for member in self._tar.getmembers()}
        return sorted(name for name, member in members.items() if not (member.isdir() or member.isdev()))

    def read(self, key: str) -> bytes:
        member = self._find(key)
        # Two threads would move each other's file position.
        with self._lock, suppress(KeyError, RecursionError):
            if file := self._tar.extractfile(member):
                size = file.seek(0, os.SEEK_END)
                if member.issparse() or size > self._blob.fingerprint()[0]:
                    _check_sparse_size(key, size, self._blob)
                file.seek(0)
                try:
                    return file.read()
                except tarfile.TarError as error:
                    raise _truncated_error(key, self._blob) from error
        raise _not_found(key, self._blob, is_link=member.islnk() or member.issym())

    def _find(self, key: str) -> tarfile.TarInfo:
        """One search by name, as in Marigold; by plain names if the tar spells them in more than one way."""
        name = plain_name(key)
        try:
            if self._prefix is not None and not name.endswith("/"):  # `getmember` ignores a final slash
                return self._tar.getmember(self._prefix + name)
            return next(info for info in reversed(self._tar.getmembers()) if plain_name(info.name) == name)
        except (KeyError, StopIteration):
            raise _not_found(key, self._blob) from None


def _open_tar(blob: Blob) -> _PlainNameTar:
    """A tar whose headers are all read. A damaged one, where `tarfile` ends silently, is an error here."""
    with suppress(*UNREADABLE, OSError):  # OSError: a seek beyond what files can hold
        tar = tarfile.TarFile(blob.name, tarinfo=BoundedInfo, encoding="utf-8")
        with suppress(*UNREADABLE, OSError):
            tar.getmembers()
            tar.fileobj.seek(tar.offset)
            sparse = (member for member in tar.getmembers() if member.issparse())
            is_sound = not any(size_fault(member.size, pieces_of(member)) for member in sparse)
            if is_sound and not tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
                _check_end(tar, blob)
                return _PlainNameTar(tar, blob)
        tar.close()
    deque(scan(blob), maxlen=0)  # raises an error that names the last whole member
    raise TarError(f"{blob.name} is cut within the padding of its last member: copy or download it again")


def _check_end(tar: tarfile.TarFile, blob: Blob) -> None:
    names = tar.getnames()
    tar.fileobj.seek(tar.offset)
    if doubt := check_end(tar.fileobj.read, blob.name, plain_name(names[-1]) if names else "", tar.offset, tar.offset):
        warnings.warn(TarWarning(doubt), stacklevel=2)


def _check_sparse_size(key: str, size: int, blob: Blob) -> None:
    """A few bytes in a tar may state that a file has many zeros, which would take as much memory."""
    if size > max_file_bytes():
        raise TarError(
            f"{blob.name}: {key!r} has {size} bytes with its holes; the limit is {max_file_bytes()} "
            f"({MAX_FILE_VARIABLE}): unpack it by `tar -xf`"
        )


def _not_found(key: str, blob: Blob, *, is_link: bool = False) -> KeyError:
    return KeyError(f"{key!r} is {'a link to a file that is not' if is_link else 'not a file'} in {blob.name}")


def _truncated_error(key: str, blob: Blob) -> TarError:
    return TarError(f"{blob.name} was cut after its headers were read: {key!r} lacks its end")


# Mode -> a function that makes a reader: once for all, once in each process as Marigold does, or anew for each read.
MODES: dict[str, Callable[[Blob, Lazy[TarIndex]], Callable[[], Any]]] = {
    "index": lambda blob, index: Lazy(partial(_IndexReader, blob, index)),
    "tarfile": lambda blob, index: PerProcess(partial(_open_tar, blob)),
    "reopen": lambda blob, index: partial(_open_tar, blob),
}
