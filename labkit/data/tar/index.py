"""An index of a tar's members: built by one pass over the headers, stored beside the tar, looked up in memory.

`tarfile` reads the same headers, but keeps an object for each and then searches them one by one.
"""

import io
import json
import os
import posixpath
import warnings
import zipfile
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from labkit.core import PackedStrings, labkit_home, write_atomic
from labkit.data.blobs import Blob, LocalBlob
from labkit.data.tar.errors import TarError, TarWarning
from labkit.data.tar.members import Member, scan, size_fault

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
