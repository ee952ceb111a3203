"""One shard: a tar in WebDataset's layout, written the same byte for byte, and read from a stream to its very end."""

import gzip
import hashlib
import io
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote

from labkit.core import MAX_FILE_VARIABLE, max_file_bytes
from labkit.data.tar import BoundedInfo, Source, TarError, unpacked

_READABLE_NAME = 100  # longer names, and those that are not ASCII, take a pax record of their own


class Sample(NamedTuple):
    """One image of a store on its way into a shard: its key there, its name here, its bytes and its label."""

    store_key: str
    member: str
    n_bytes: int
    label: int

    @property
    def label_member(self) -> str:
        return self.member.rpartition(".")[0] + ".cls"

    @property
    def label_data(self) -> bytes:
        return str(self.label).encode()


def member_names(keys: Iterable[str]) -> list[str]:
    """Names of images in a shard, one for each key of a store; `store_key` gives the key back.

    WebDataset takes everything before the first dot of a file's name for the sample's key. So `dog/a.jpg` keeps its
    name, while a dot in the name, an upper-case suffix, or two files that differ in nothing but the suffix lead to
    the whole name with `%2E` for its dots, and a suffix after it.
    """
    keys = list(keys)
    stems = [key.rpartition(".")[0] for key in keys]
    seen, repeated = set(), set()
    for stem in stems:
        (repeated if stem in seen else seen).add(stem)
    return [_member_name(key, stem in repeated) for key, stem in zip(keys, stems, strict=True)]


def store_key(member: str) -> str:
    """The key of the store that an image in a shard was made of."""
    stem, _, suffix = member.rpartition(".")
    whole = "%2E" in stem.rpartition("/")[2]
    return unquote(stem if whole else f"{stem}.{suffix}", errors="surrogateescape")


def _member_name(key: str, stem_is_taken: bool) -> str:
    folder, slash, name = _escaped(key).rpartition("/")
    stem, _, suffix = name.rpartition(".")
    if stem_is_taken or not stem or "." in stem or suffix != suffix.lower():
        name = f"{name.replace('.', '%2E')}.{suffix.lower()}"
    return folder + slash + name


def _escaped(key: str) -> str:
    escaped = re.sub(r"[%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", key)
    # No tar of ours leads out of the folder that it is extracted to, whatever a store's keys are.
    escaped = re.sub(r"^/|(?<![^/])\.\.(?![^/])", lambda found: {"/": "%2F"}.get(found[0], "%2E%2E"), escaped)
    return "%5F" + escaped[1:] if re.match(r"__[^/]*__/", escaped) else escaped  # WebDataset skips it as metadata


def sample_bytes(sample: Sample) -> int:
    """Bytes that a sample takes in a tar: image and label, each with its header and padding."""
    members = ((sample.label_member, len(sample.label_data)), (sample.member, sample.n_bytes))
    return sum(_header_bytes(name, size) + _up_to_multiple(size, tarfile.BLOCKSIZE) for name, size in members)


def _header_bytes(name: str, size: int) -> int:
    if len(name) <= _READABLE_NAME and name.isascii() and size < 8**11:
        return tarfile.BLOCKSIZE
    return len(_header(name, size).tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def _up_to_multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _header(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)  # owner 0, time 0, mode 644: nothing that another run would write otherwise
    info.size = size
    return info


def write_tar(path: Path, samples: Iterable[Sample], store) -> None:
    """Write images and labels of `samples`, in their order, and flush them to the disk.

    Raises:
        ValueError: an image is not as large as planned.
    """
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for sample in samples:
                data = store.read(sample.store_key)
                if len(data) != sample.n_bytes:
                    raise ValueError(
                        f"{sample.store_key} has {len(data)} bytes where {sample.n_bytes} were counted: "
                        "something writes to the store"
                    )
                tar.addfile(_header(sample.label_member, len(sample.label_data)), io.BytesIO(sample.label_data))
                tar.addfile(_header(sample.member, len(data)), io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_members(stream: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """(name, data) of every file in a tar, in one pass without seeking.

    Args:
        stream: From the tar's first byte on; compressed tars are recognised. Unpacked in bounded memory.
        name: What the tar is called in messages.

    Raises:
        TarError: the tar is cut or damaged; names it and its last whole member. `tarfile` alone takes a cut between
            two members, and a damaged header, for the end. Or a member is larger than
            `labkit.core.limits.max_file_bytes()`; its data are not read.
    """
    last, most = "", max_file_bytes()
    file = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)
    unpacking = unpacked(file, name)
    try:
        # read1: what was unpacked before a fault is not lost with it.
        source = Source(file.read if unpacking is None else partial(_read, unpacking))
        with tarfile.open(fileobj=source, mode="r|", tarinfo=_StrictTarInfo, encoding="utf-8") as tar:
            for info in tar:
                if info.isreg():
                    if not 0 <= info.size <= most:
                        raise TarError(
                            f"{name}: {info.name!r}: {info.size} bytes, over the limit of {most} ({MAX_FILE_VARIABLE})"
                        )
                    yield info.name, tar.extractfile(info).read()
                    last = info.name
                tar.members = []  # else it keeps all of them
    except OSError as error:  # of the disk or the network, not of the tar
        error.add_note(f"while reading {name}, after {last!r}")
        raise
    except MemoryError:
        raise
    except Exception as error:  # tarfile and each compression have their own classes of error
        whole = f"the last whole member is {last!r}" if last else "no member is whole"
        raise TarError(f"{name} is cut or damaged ({error}): {whole}. Copy or download it again") from error


def _read(unpacking: BinaryIO, size: int) -> bytes:
    try:
        return unpacking.read1(size)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise tarfile.ReadError(str(error)) from error
    except OSError as error:
        if str(error) == "Invalid data stream":  # bz2's word; all others are of the disk or the network
            raise tarfile.ReadError(str(error)) from error
        raise


class _StrictTarInfo(BoundedInfo):
    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # a block of zeros: the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tar.offset}") from error
