"""Which shards there are, and what is known of them; and one shard's members, checked against that."""

import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from webdataset.tariterators import base_plus_ext

from labkit.core import is_image, strip_credentials
from labkit.data.blobs import is_url
from labkit.data.shards.gopen import open_url
from labkit.data.shards.layout import read_members
from labkit.data.shards.write import MANIFEST, UNFINISHED, read_manifest

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


@dataclass(frozen=True)
class ShardList:
    """Shards in order.

    Args:
        urls: Paths or URLs.
        classes: From the manifest, or None.
        sha256: URL -> checksum that is verified at the shard's end.
        storage_options: To fsspec.
    """

    urls: list[str] = field(repr=False)  # these, too, may hold credentials
    classes: list[str] | None = None
    sha256: dict[str, str] = field(default_factory=dict, repr=False)
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def find(cls, places: Any, *, verify: bool, storage_options: dict[str, Any]) -> "ShardList":
        """The shards that `places` means, as `read_shards` states it."""
        _refuse_commands([places] if isinstance(places, str) else [])
        if isinstance(places, str | os.PathLike) and not _is_shard(places):
            return _from_manifest(os.fspath(places), verify, storage_options)
        if verify:
            raise ValueError("verify=True needs the checksums of a manifest: name the folder, not its shards")
        urls = _expanded(places)
        _refuse_commands(urls)
        if not urls:
            raise ValueError("there is no shard to read")
        missing = [url for url in urls if not is_url(url) and not os.path.isfile(url)]
        if missing:
            raise FileNotFoundError(f"{missing[0]} does not exist, and {len(missing) - 1} other shards neither")
        return cls(urls, storage_options=storage_options)


def read_shard(shards: ShardList, url: str) -> Iterator[dict[str, Any]]:
    """One shard's files as WebDataset's dictionaries, and an empty one at the end."""
    name = name_of(url)
    with open_url(url, **shards.storage_options) as file:
        hashed = _Hashed(file)
        stream = io.BufferedReader(hashed) if url in shards.sha256 else file
        for member, data in read_members(stream, name):
            _check_member(member, name)
            yield {"fname": member, "data": data, "__url__": name}
        if url in shards.sha256 and hashed.sha256() != shards.sha256[url]:
            raise ValueError(f"{name} has not the SHA-256 of its manifest: copy it again, or write the shards again")
    yield {}


def _check_member(member: str, name: str) -> None:
    """WebDataset would pass over these in silence, and over the whole sample of the first kind."""
    key, suffix = base_plus_ext(member)
    if key is not None and suffix.startswith("__"):
        raise ValueError(f"{name}: {member!r} has a suffix that WebDataset keeps for itself: write it under another")
    if key is None and is_image(member):
        raise ValueError(f"{name}: {member!r} names no sample to WebDataset: write it without the line break")


def name_of(place: str) -> str:
    """A path or URL, fit for messages: without credentials."""
    return strip_credentials(place) if is_url(place) else place


class _Hashed(io.RawIOBase):
    """A stream whose SHA-256 is taken on the way."""

    def __init__(self, file: BinaryIO):
        self._file, self._hash = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        n_bytes = self._file.readinto(buffer)
        self._hash.update(buffer[:n_bytes])
        return n_bytes

    def sha256(self) -> str:
        """Of the whole stream, its unread rest included."""
        while self.read(1 << 20):  # what a reader around this one has buffered, it had read
            pass
        return self._hash.hexdigest()


def _is_shard(place: str | os.PathLike) -> bool:
    path = urlsplit(os.fspath(place)).path if is_url(place) else os.fspath(place)
    return path.endswith(_SUFFIXES)


def _refuse_commands(places: list[str]) -> None:
    """WebDataset's own `gopen` gives what follows `pipe:` to a shell; here no list of shards runs anything."""
    if any(place.startswith("pipe:") for place in places):
        raise ValueError(
            "`pipe:` in a list of shards is a command, which labkit does not run: name paths or addresses "
            "(http(s)://, s3://, whatever fsspec reads)"
        )


def _expanded(places: Any) -> list[str]:
    from braceexpand import braceexpand  # WebDataset's own

    if isinstance(places, str):
        return [places] if os.path.isfile(places) else list(braceexpand(places))  # braces may be part of a name
    return [os.fspath(places)] if isinstance(places, os.PathLike) else [os.fspath(place) for place in places]


def _from_manifest(folder: str, verify: bool, storage_options: dict[str, Any]) -> ShardList:
    folder = folder.rstrip("/")
    name = f"{name_of(folder)}/{MANIFEST}"
    try:
        with open_url(f"{folder}/{MANIFEST}", **storage_options) as file:
            content = read_manifest(file.read(), name)
    except FileNotFoundError as error:
        unfinished = os.path.isdir(os.path.join(folder, UNFINISHED))
        remedy = "run write_shards to its end" if unfinished else "name a folder that it filled, or .tar files"
        raise FileNotFoundError(f"{name} does not exist: {remedy}") from error
    rows = content["shards"]
    sha256 = {f"{folder}/{row['name']}": row["sha256"] for row in rows} if verify else {}
    return ShardList([f"{folder}/{row['name']}" for row in rows], content["classes"], sha256, storage_options)
