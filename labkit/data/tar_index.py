"""Where each member of a tar lies: built by one pass over the headers, kept beside the tar, looked up in memory.

`tarfile` reads the same headers, but keeps an object for each and then searches them one after the other.
"""

import io
import json
import posixpath
import tarfile
import warnings
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.data.blobs import Blob, LocalBlob, buffered
from labkit.data.packed import PackedStrings
from labkit.measure.env import home
from labkit.measure.files import write_whole

SUFFIX = ".labkit-index.npz"
_VERSION = 1
_BLOCK = tarfile.BLOCKSIZE
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class TarError(OSError):
    """A file that is no whole, uncompressed tar; names the file and the remedy."""


class TarWarning(UserWarning):
    """A tar that can be read, but may not be whole."""


class Member(NamedTuple):
    """One member with data: its name without a leading `./`; where its data begin; their size in bytes.

    `link` is set where the data are another member's: "hard" or "sym", with the target's name. `sparse` lists the
    (offset, size) of the pieces that are stored, where the rest is zeros.
    """

    name: str
    offset: int
    size: int
    link: str = ""
    target: str = ""
    sparse: tuple[tuple[int, int], ...] = ()


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
        encoded = name.encode("utf-8", "surrogateescape")
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
    stamp = blob.stamp()
    for path in _places(blob):
        index = _load(path, stamp)
        if index is not None:
            return index
    index = build_index(blob)
    if blob.stamp() != stamp:
        raise TarError(f"{blob.name} changed while it was read: wait until it is written")
    for path in _places(blob):
        try:
            write_whole(path, _dump(index, stamp))
            break
        except OSError:  # a folder that cannot be written to; the cache folder is next
            continue
    return index


def build_index(blob: Blob) -> TarIndex:
    """One pass over the headers."""
    members: dict[str, Member] = {}
    links = False
    earlier: list[Member] = []
    for member in scan(blob):
        links = links or bool(member.link)
        earlier.append(member)
        members[member.name] = member
    if links:
        members = _with_links_resolved(earlier)
    names = sorted(members)
    return TarIndex(
        PackedStrings(names),
        np.fromiter((members[name].offset for name in names), np.int64, len(names)),
        np.fromiter((members[name].size for name in names), np.int64, len(names)),
        {
            row: [list(piece) for piece in members[name].sparse]
            for row, name in enumerate(names)
            if members[name].sparse
        },
    )


def scan(blob: Blob) -> Iterator[Member]:
    """Members with data (files and links), in the order of the tar.

    Headers of ordinary files are read here; all others by `tarfile`, so that GNU long names, pax records, sparse
    files and the rest mean what they mean there.
    """
    size, last = blob.stamp()[0], ""
    with blob.open() if isinstance(blob, LocalBlob) else buffered(blob) as file:
        tar = _open_tar(file, blob.name)
        offset = 0
        while True:
            file.seek(offset)
            header = file.read(_BLOCK)
            if len(header) < _BLOCK or not (header[0] or header.strip(b"\0")):
                _check_end(blob.name, header, last)
                return
            member = None if tar.pax_headers else _plain_member(header, offset)
            if member is not None:
                offset = member.offset + -(-member.size // _BLOCK) * _BLOCK
            else:
                member, offset = _other_member(file, tar, offset, blob.name, last)
            if member is None:  # a folder, a device: nothing to read
                continue
            if member.offset + _stored(member) > size:
                raise _cut(blob.name, f"{member.name!r} lacks its end", last)
            last = member.name
            yield member


def _plain_member(header: bytes, offset: int) -> Member | None:
    """The member of an ordinary file's header, or None where `tarfile` has to look at it."""
    try:
        size, checksum = int(header[124:136].rstrip(b"\0 ") or b"0", 8), int(header[148:156].rstrip(b"\0 "), 8)
    except ValueError:
        return None
    # The checksum is the sum of all bytes, its own field taken as spaces. Adler-32's lower half is such a sum, in C.
    total = checksum - 256 + sum(header[148:156])
    whole = zlib.adler32(header) & 0xFFFF == (1 + total) % 65521
    if not whole or size < 0 or header[156] not in b"0\0" or header[124] & 0x80:
        return None
    name = header[:100].split(b"\0", 1)[0]
    if header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    if name.endswith(b"/"):  # a folder, in the oldest format
        return None
    return Member(plain_name(name.decode("utf-8", "surrogateescape")), offset + _BLOCK, size)


def _other_member(file, tar: tarfile.TarFile, offset: int, name: str, last: str) -> tuple[Member | None, int]:
    file.seek(offset)
    tar.offset = offset
    try:
        info = tarfile.TarInfo.fromtarfile(tar)
    except (tarfile.HeaderError, ValueError, IndexError, OverflowError) as error:
        raise _cut(name, f"the header at byte {offset} cannot be read ({error})", last) from error
    if tar.offset <= offset:
        raise _cut(name, f"the header at byte {offset} leads back", last)
    if info.islnk() or info.issym():
        kind = "hard" if info.islnk() else "sym"
        target = info.linkname if info.islnk() else posixpath.join(posixpath.dirname(info.name), info.linkname)
        return Member(plain_name(info.name), info.offset_data, 0, kind, posixpath.normpath(target)), tar.offset
    if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:  # tarfile, too, reads unknown types as files
        sparse = tuple(info.sparse or ()) if info.issparse() else ()
        return Member(plain_name(info.name), info.offset_data, info.size, sparse=sparse), tar.offset
    return None, tar.offset


def _with_links_resolved(scanned: list[Member]) -> dict[str, Member]:
    """Links with their targets' data: a hard link's target comes before it, a symbolic one's may be anywhere."""
    final = {posixpath.normpath(member.name): member for member in scanned}
    so_far: dict[str, Member] = {}
    members: dict[str, Member] = {}
    for member in scanned:
        resolved = so_far.get(member.target) if member.link == "hard" else member
        if resolved is None:
            resolved = member._replace(offset=-1)
        members[member.name] = so_far[posixpath.normpath(member.name)] = resolved._replace(name=member.name)
    return {name: _followed(member, final, members)._replace(name=name) for name, member in members.items()}


def _followed(member: Member, final: dict[str, Member], members: dict[str, Member]) -> Member:
    for _ in range(40):  # as many links as Linux follows
        if member.link != "sym":
            return member
        target = final.get(member.target)
        if target is None:
            break
        member = members[target.name]
    return member._replace(offset=-1, size=0, link="", sparse=())


def plain_name(name: str) -> str:
    """A member's name as a key: without the `./` that `tar -cf x.tar .` puts before it."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return name


def _stored(member: Member) -> int:
    return sum(size for _, size in member.sparse) if member.sparse else member.size


def _open_tar(file, name: str) -> tarfile.TarFile:
    head = file.read(_BLOCK)
    for magic, method in _COMPRESSED.items():
        if head.startswith(magic):
            raise TarError(
                f"{name} is compressed ({method}): no member can be read without unpacking all before it. "
                f"Convert it: python -m labkit convert {name} {name}.tar"
            )
    if not head:
        raise TarError(f"{name} is empty: copy or download it again")
    file.seek(0)
    try:
        return tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        raise TarError(f"{name} is not a tar ({error})") from error


def _check_end(name: str, header: bytes, last: str) -> None:
    if not header:
        warnings.warn(f"{name} has no end mark: it may be cut after {last!r}", TarWarning, stacklevel=2)
    elif len(header) < _BLOCK:
        raise _cut(name, "it ends within a header", last)


def _cut(name: str, what: str, last: str) -> TarError:
    whole = f"the last whole member is {last!r}" if last else "no member is whole"
    return TarError(f"{name} is cut or damaged: {what}; {whole}. Copy or download it again")


def _places(blob: Blob) -> list[Path]:
    """Where an index may lie: beside a local tar; else, or where that folder is read-only, in labkit's own."""
    own = home() / "tar_index" / f"{zlib.crc32(blob.name.encode()):08x}-{posixpath.basename(blob.name)[:80]}{SUFFIX}"
    return [Path(blob.name + SUFFIX), own] if isinstance(blob, LocalBlob) else [own]


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
        with np.load(path, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
            if about["version"] != _VERSION or tuple(about["stamp"]) != stamp:
                return None
            names = PackedStrings.from_arrays(stored["block"], stored["ends"])
            index = TarIndex(
                names, stored["offsets"], stored["sizes"], {int(row): pieces for row, pieces in about["sparse"]}
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return index if len(names) == len(index.offsets) == len(index.sizes) else None
