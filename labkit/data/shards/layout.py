"""One shard: a tar in WebDataset's layout, whose bytes depend on its contents alone, and which is read to its end."""

import hashlib
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from webdataset.tariterators import base_plus_ext

from labkit.core import MAX_FILE_VARIABLE, MAX_PATH_BYTES, is_image, max_file_bytes
from labkit.data.stores import Store
from labkit.data.tar import TarError, TarStream

_MAX_PLAIN_NAME = 100  # longer names, and those that are not ASCII, take a pax record of their own


class Sample(NamedTuple):
    """One image of a store on its way into a shard: its key there, its name here, its size and its label."""

    store_key: str
    member: str
    n_bytes: int
    label: int

    @property
    def label_file(self) -> tuple[str, bytes]:
        """Name and data of the member beside the image."""
        return self.member.rpartition(".")[0] + ".cls", str(self.label).encode()


def member_names(keys: Iterable[str]) -> list[str]:
    """Names of images in a shard, one for each key of a store; `store_key` gives the key back.

    WebDataset takes everything before the first dot of a file's name as the sample's key. So `dog/a.jpg` keeps its
    name. If the name has another dot or an upper-case suffix, or another file differs in the suffix alone, all dots of
    the name become `%2E`, and a suffix follows.
    """
    keys = list(keys)
    stems = [key.rpartition(".")[0] for key in keys]
    counts = Counter(stems)
    return [_member_name(key, counts[stem] > 1) for key, stem in zip(keys, stems, strict=True)]


def store_key(member: str) -> str:
    """The key, in its store, of an image in a shard."""
    stem = member.rpartition(".")[0]
    return unquote(stem if "%2E" in stem.rpartition("/")[2] else member, errors="surrogateescape")


def _member_name(key: str, is_stem_repeated: bool) -> str:
    folder, slash, name = _escape(key).rpartition("/")
    stem, _, suffix = name.rpartition(".")
    if is_stem_repeated or not stem or "." in stem or suffix != suffix.lower():
        name = f"{name.replace('.', '%2E')}.{suffix.lower()}"
    return folder + slash + name


def _escape(key: str) -> str:
    escaped = re.sub(r"[%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", key)
    # Whatever a store's keys are, no member leads out of the folder that a shard is extracted to.
    escaped = re.sub(r"^/|(?<![^/])\.\.(?![^/])", lambda found: {"/": "%2F"}.get(found[0], "%2E%2E"), escaped)
    return "%5F" + escaped[1:] if re.match(r"__[^/]*__/", escaped) else escaped  # else WebDataset skips it as metadata


def sample_bytes(sample: Sample) -> int:
    """Bytes that a sample takes in a tar: image and label, each with its header and padding."""
    label_name, label = sample.label_file
    members = ((label_name, len(label)), (sample.member, sample.n_bytes))
    return sum(_header_bytes(name, size) + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for name, size in members)


def _header_bytes(name: str, size: int) -> int:
    if len(name) <= _MAX_PLAIN_NAME and name.isascii() and size < 8**11:
        return tarfile.BLOCKSIZE
    return len(_header(name, size).tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def _header(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)  # owner 0, time 0, mode 644: the same in every run
    info.size = size
    return info


def write_tar(path: Path, samples: Iterable[Sample], store: Store) -> None:
    """Write images and labels of `samples`, in their order, and flush them to the disk.

    Raises:
        ValueError: an image has another size than planned.
    """
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for sample in samples:
                data = store.read(sample.store_key)
                if len(data) != sample.n_bytes:
                    raise ValueError(
                        f"{sample.store_key} has {len(data)} bytes where {sample.n_bytes} were counted: something "
                        "writes to the store; wait for it, then run again"
                    )
                for name, content in (sample.label_file, (sample.member, data)):
                    tar.addfile(_header(name, len(content)), io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_members(stream: io.BufferedReader, name: str) -> Iterator[tuple[str, bytes]]:
    """(name, data) of every file of a sample (`sample_files`) in a tar, in one pass without seeking.

    Args:
        stream: The tar from its first byte on, plain or compressed. Unpacked in bounded memory.
        name: What messages call the tar.

    Raises:
        TarError: the tar is cut or damaged, between two members, too; names it and its last whole member. Or a member
            is larger than `labkit.core.limits.max_file_bytes()`; its data are not read. Or as `sample_files` raises.
        ValueError: as `sample_files` raises.
    """
    limit = max_file_bytes()
    with TarStream(stream, name, needs_end_mark=True) as tar:
        for info in sample_files(tar):
            if info.size > limit:
                about = f"{info.size} bytes, over the limit of {limit} ({MAX_FILE_VARIABLE})"
                raise TarError(f"{name}: {info.name!r} has {about}")
            yield info.name, b"".join(tar.blocks(info))


def sample_files(tar: TarStream) -> Iterator[tarfile.TarInfo]:
    """The files that make up samples, by WebDataset's rule: what is left of the first dot in a name is the key.

    Folders, hidden files (`._a.jpg`) and names without a dot (`README`) belong to no sample, and are left out.

    Raises:
        TarError: a member that belongs to a sample is a link, a device or of an unknown type, so that the sample would
            lack it.
        ValueError: a member's name is one that WebDataset skips in silence.
    """
    for info in tar:
        if not info.isdir() and _belongs_to_sample(info.name, tar.name):
            if not info.isreg():
                raise TarError(
                    f"{tar.name}: {info.name!r} is {_describe(info)}, not a file, and its sample would lack it: write "
                    "the shard again with files alone (GNU tar: --dereference --hard-dereference)"
                )
            yield info


def _belongs_to_sample(member: str, name: str) -> bool:
    if len(member) > MAX_PATH_BYTES:
        about = f"{len(member)} characters, where a file's path has at most {MAX_PATH_BYTES} bytes"
        raise ValueError(f"{name}: {member[:200] + '...'!r} has {about}")
    if member.rpartition("/")[2].startswith("."):  # to WebDataset, `d/._a.jpg` is a sample named `d/`
        return False
    key, suffix = base_plus_ext(member)
    if key is not None and suffix.startswith("__"):
        raise ValueError(f"{name}: {member!r} has a suffix that WebDataset reserves: write it under another")
    if key is None and is_image(member):
        raise ValueError(f"{name}: {member!r} names no sample to WebDataset: write it without the line break")
    return key is not None


def _describe(info: tarfile.TarInfo) -> str:
    if info.islnk() or info.issym():
        return f"a {'hard' if info.islnk() else 'symbolic'} link to {info.linkname!r}"
    return "a device or a pipe" if info.isdev() else f"of unknown type {info.type!r}"
