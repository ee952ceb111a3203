"""Where each member of a tar lies: built by one pass over the headers, kept beside the tar, looked up in memory.

`tarfile` reads the same headers, but keeps an object for each and then searches them one after the other.
"""

import io
import json
import os
import posixpath
import zipfile
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from labkit.core import PackedStrings, labkit_home, write_atomic
from labkit.data.blobs import Blob, LocalBlob
from labkit.data.tar.members import Member, TarError, TarWarning, plain_name, scan, size_fault

__all__ = ["SUFFIX", "TarError", "TarIndex", "TarWarning", "build_index", "plain_name", "read_index"]

SUFFIX = ".labkit-index.npz"
_VERSION = 1
_NOWHERE = Member("", -1, 0)


@dataclass(frozen=True)
class TarIndex:
    """Names, sorted, with offset and size of their data.

    Args:
        names: One for each member with data; of several with one name the last counts, as in `tarfile`.
        offsets: int64, -1 where a link leads to nothing.
        sizes: int64 bytes, holes included.
        sparse: Row -> (offset, size) of the stored pieces.
    """

    names: PackedStrings
    offsets: np.ndarray
    sizes: np.ndarray
    sparse: dict[int, list[list[int]]]

    def __len__(self) -> int:
        return len(self.names)

    def row(self, name: str) -> int:
        """Row of a name. Raises KeyError."""
        try:
            encoded = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half a surrogate pair: no file has such a name
            raise KeyError(name) from None
        hashes, rows, block, ends = self._table
        crc = zlib.crc32(encoded)
        position = bisect_left(hashes, crc)
        while position < len(hashes) and hashes[position] == crc:
            row = rows[position]
            if block[ends[row] : ends[row + 1]] == encoded:
                return row
            position += 1
        raise KeyError(name)

    @cached_property
    def _table(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        """Sorted CRC-32 of the names, their rows (8 bytes a name, where a dict takes a hundred), and the names.

        Memory views, because an item of an array takes three times as long as one of theirs.
        """
        crcs = np.fromiter((zlib.crc32(name) for name in self.names.encoded()), np.uint32, len(self))
        order = np.argsort(crcs, kind="stable").astype(np.uint32)
        return memoryview(crcs[order]), memoryview(order), *map(memoryview, self.names.arrays())


def read_index(blob: Blob) -> TarIndex:
    """The index of a tar: from its file where that fits, else built and stored.

    Raises:
        FileNotFoundError: no such tar.
        TarError: compressed, cut, damaged, or no tar.
    """
    stamp = blob.fingerprint()
    places = _places(blob) if stamp[1] else []  # without a version, a server's file may be another one next time
    for path in places:
        index = _load(path, stamp)
        if index is not None:
            return index
    index = build_index(blob)
    if blob.fingerprint() != stamp:
        raise TarError(f"{blob.name} changed while it was read: wait until it is written")
    for path in places:
        try:
            write_atomic(path, _dump(index, stamp))
            break
        except OSError:  # a folder that cannot be written to; the cache folder is next
            continue
    return index


def build_index(blob: Blob) -> TarIndex:
    """One pass over the headers."""
    scanned = _Columns((member.name, member) for member in scan(blob))
    if any(member.kind in ("hard", "sym") for member in scanned.odd.values()):
        scanned = _Columns(_with_links_resolved(scanned.members()).items())
    rows = scanned.last_by_name()
    return TarIndex(
        PackedStrings(map(scanned.names.__getitem__, rows)),
        np.frombuffer(scanned.offsets, np.int64)[rows],
        np.frombuffer(scanned.sizes, np.int64)[rows],
        {
            place: [list(piece) for piece in scanned.odd[row].sparse]
            for place, row in enumerate(rows)
            if row in scanned.odd and scanned.odd[row].sparse
        },
    )


class _Columns:
    """Members by column, since of a million an object each would take more than all the rest.

    odd: Row -> member, of those that are more than a file with its bytes in one place.
    """

    def __init__(self, members: Iterable[tuple[str, Member]]):
        self.names: list[str] = []
        self.offsets, self.sizes, self.odd = array("q"), array("q"), {}
        for name, member in members:
            if member.kind != "file" or member.sparse:
                self.odd[len(self.names)] = member
            self.names.append(name)
            self.offsets.append(member.offset)
            self.sizes.append(member.size)

    def members(self) -> list[Member]:
        files = map(Member, self.names, self.offsets, self.sizes)
        return [self.odd.get(row, member) for row, member in enumerate(files)]

    def last_by_name(self) -> list[int]:
        """Rows in the order of their names, of several with one name the last; without what has no data."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)  # rows of one name stay in their order
        following = (self.names[row] for row in islice(order, 1, None))
        last = [row for row, name in zip_longest(order, following) if self.names[row] != name]
        return [row for row in last if row not in self.odd or self.odd[row].kind != "other"]


def _with_links_resolved(scanned: list[Member]) -> dict[str, Member]:
    """Links with their targets' data: a hard link's target comes before it, a symbolic one's may be anywhere."""
    final = {posixpath.normpath(member.name): member for member in scanned}
    so_far: dict[str, Member] = {}
    members: dict[str, Member] = {}
    for member in scanned:
        resolved = so_far.get(member.target, _NOWHERE) if member.kind == "hard" else member
        members[member.name] = resolved
        so_far[posixpath.normpath(member.name)] = _NOWHERE if member.kind == "other" else resolved
    return {name: _followed(member, final, members) for name, member in members.items()}


def _followed(member: Member, final: dict[str, Member], members: dict[str, Member]) -> Member:
    for _ in range(41):  # a file behind 40 links, as many as Linux follows
        if member.kind != "sym":
            return member
        target = final.get(member.target, _NOWHERE)
        if target is _NOWHERE or target.kind == "other":
            break
        member = members[target.name]
    return _NOWHERE


def _places(blob: Blob) -> list[Path]:
    """Where an index may lie: beside a local tar; else, or where that folder is read-only, in labkit's own."""
    place = os.path.abspath(blob.name) if isinstance(blob, LocalBlob) else blob.name
    own = (
        labkit_home() / "tar_index" / f"{zlib.crc32(os.fsencode(place)):08x}-{_cut(posixpath.basename(place))}{SUFFIX}"
    )
    return [Path(place + SUFFIX), own] if isinstance(blob, LocalBlob) else [own]


def _cut(name: str) -> str:
    """As much of a name as leaves room for more."""
    return os.fsdecode(os.fsencode(name)[:80])


def _dump(index: TarIndex, stamp: tuple[int, str]) -> bytes:
    block, ends = index.names.arrays()
    about = json.dumps({"version": _VERSION, "stamp": stamp, "sparse": list(index.sparse.items())})
    buffer = io.BytesIO()
    np.savez(
        buffer, about=np.frombuffer(about.encode(), np.uint8), block=block, ends=ends, offsets=index.offsets,
        sizes=index.sizes,
    )  # fmt: skip
    return buffer.getvalue()


def _load(path: Path, stamp: tuple[int, str]) -> TarIndex | None:
    """The stored index, or None where there is none, or it is of another tar, another version, or damaged."""
    try:
        _check_stored(path)
        with np.load(path, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
            if about["version"] != _VERSION or tuple(about["stamp"]) != stamp:
                return None
            names = PackedStrings.from_arrays(stored["block"], stored["ends"])
            sparse = {int(row): pieces for row, pieces in about["sparse"]}
            index = TarIndex(names, stored["offsets"], stored["sizes"], sparse)
        return index if _fits(index, stamp[0]) else None
    except Exception:  # damaged files make zipfile, NumPy and json raise almost anything
        return None


def _check_stored(path: Path) -> None:
    """NumPy would unpack what is compressed, and little of it may be very much; `_dump` compresses nothing."""
    with zipfile.ZipFile(path) as file:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
            raise ValueError("compressed")


def _fits(index: TarIndex, n_bytes: int) -> bool:
    """Whether all that is stored lies inside a tar of so many bytes: a read asks for no more than there is."""
    offsets, sizes = index.offsets, index.sizes
    if not offsets.shape == sizes.shape == (len(index),) or not offsets.dtype == sizes.dtype == np.int64:
        return False
    stored = sizes.copy()
    for row, pieces in index.sparse.items():
        if not 0 <= row < len(index) or size_fault(sizes[row].item(), pieces):
            return False
        stored[row] = sum(length for _, length in pieces)
    somewhere = offsets >= 0
    inside = (sizes >= 0) & (offsets <= n_bytes) & (stored <= n_bytes - offsets)
    return bool(np.where(somewhere, inside, (offsets == -1) & (sizes == 0)).all())
