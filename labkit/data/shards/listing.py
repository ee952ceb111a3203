"""List the shards of a set, and read one shard's members, checked against its manifest."""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from webdataset.tariterators import group_by_keys

from labkit.core import require_int, strip_credentials
from labkit.data.blobs import is_url
from labkit.data.shards.ahead import ShardsAhead
from labkit.data.shards.cache import CachedShards, ShardCache
from labkit.data.shards.gopen import open_url
from labkit.data.shards.layout import read_members, sample_files
from labkit.data.shards.write import MANIFEST, UNFINISHED, read_manifest
from labkit.data.tar import TAR_SUFFIXES, TarStream


@dataclass(frozen=True)
class ShardList:
    """Shards in order.

    Args:
        urls: Paths or URLs.
        classes: From the manifest, or None.
        sha256: URL -> checksum, compared at the shard's end.
        n_samples: URL -> number of samples, as the manifest says; empty without one.
        storage_options: Passed to fsspec.
        reads_in_flight: Requests at a time. None: one chunk of the shard that is read.
        cache: Where shards are kept, or None.
    """

    urls: list[str] = field(repr=False)  # may hold credentials
    classes: list[str] | None = None
    sha256: dict[str, str] = field(default_factory=dict, repr=False)
    n_samples: dict[str, int] = field(default_factory=dict, repr=False)
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    reads_in_flight: int | None = None
    cache: ShardCache | None = None

    def __post_init__(self) -> None:
        if self.reads_in_flight is not None:
            require_int("reads_in_flight", self.reads_in_flight)

    @classmethod
    def find(cls, places: Any, *, verify: bool, storage_options: dict[str, Any]) -> "ShardList":
        """The shards that `places` names, as `read_shards` takes them."""
        _refuse_commands([places] if isinstance(places, str) else [])
        if isinstance(places, str | os.PathLike) and not _is_shard(places):
            return _from_manifest(os.fspath(places), verify, storage_options)
        if verify:
            raise ValueError("verify=True needs the checksums of a manifest: name the folder, not its shards")
        urls = _expand(places)
        _refuse_commands(urls)
        if not urls:
            raise ValueError("the list of shards is empty: there is no shard to read")
        if missing := [url for url in urls if not is_url(url) and not os.path.isfile(url)]:
            raise FileNotFoundError(f"{missing[0]} does not exist, nor do {len(missing) - 1} other shards")
        return cls(urls, storage_options=storage_options)

    def open_in_turn(self, urls: Iterable[str]) -> Iterator[tuple[str, io.BufferedReader]]:
        """Each URL and its file, to be closed before the next is asked for. Some URLs are drawn before their turn."""
        if self.cache:
            return iter(CachedShards(urls, self.cache, self.reads_in_flight or 1, self.storage_options))
        if self.reads_in_flight:
            return iter(ShardsAhead(urls, self.reads_in_flight, self.storage_options))
        return ((url, open_url(url, **self.storage_options)) for url in urls)


def read_samples(shards: ShardList, url: str, file: io.BufferedReader) -> Iterator[dict[str, Any]]:
    """The samples of one shard, whose `file` stays open: `__key__`, `__url__`, and each member's bytes by its suffix.

    Raises:
        ValueError: names that make no sample, or a checksum that is not the manifest's; names the shard.
    """
    return _group(_read_files(shards, url, file), url)


def count_samples(shards: ShardList) -> dict[str, int]:
    """URL -> number of samples: the manifest's, or counted. Only headers are read of local tars, all of others."""
    return {url: shards.n_samples.get(url) or _count(shards, url) for url in shards.urls}


def _count(shards: ShardList, url: str) -> int:
    return sum(1 for _ in _group(_list_files(shards, url), url))


def _group(files: Iterator[dict[str, Any]], url: str) -> Iterator[dict[str, Any]]:
    return group_by_keys(files, handler=partial(_raise_group_error, url))


def _raise_group_error(url: str, error: Exception) -> None:
    raise ValueError(f"{name_of(url)}: {error.args[0]}") from error


def _list_files(shards: ShardList, url: str) -> Iterator[dict[str, Any]]:
    """As `_read_files`, without the data."""
    name = name_of(url)
    with ExitStack() as stack:
        # A path can be sought in: that skips the data.
        source = stack.enter_context(open_url(url, **shards.storage_options)) if is_url(url) else url
        for info in sample_files(stack.enter_context(TarStream(source, name, needs_end_mark=True))):
            yield {"fname": info.name, "data": b"", "__url__": name}
    yield {}


def _read_files(shards: ShardList, url: str, file: io.BufferedReader) -> Iterator[dict[str, Any]]:
    """One shard's files as WebDataset's dictionaries, and an empty one at the end."""
    name, expected_sha256 = name_of(url), shards.sha256.get(url)
    hashing = _HashingReader(file)
    for member, data in read_members(io.BufferedReader(hashing) if expected_sha256 else file, name):
        yield {"fname": member, "data": data, "__url__": name}
    if expected_sha256 and hashing.finish() != expected_sha256:
        raise ValueError(f"{name} does not have the SHA-256 of its manifest: copy it again, or write it again")
    yield {}


def name_of(place: str) -> str:
    """A path or URL as messages show it, without credentials."""
    return strip_credentials(place) if is_url(place) else place


class _HashingReader(io.RawIOBase):
    """A stream that computes its SHA-256 while it is read."""

    def __init__(self, file: io.BufferedReader):
        self._file, self._hash = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n_bytes = self._file.readinto(buffer)
        self._hash.update(buffer[:n_bytes])
        return n_bytes

    def finish(self) -> str:
        """Read to the end; returns the SHA-256 of the whole stream."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()


def _is_shard(place: str | os.PathLike) -> bool:
    path = urlsplit(os.fspath(place)).path if is_url(place) else os.fspath(place)
    return path.endswith(TAR_SUFFIXES)


def _refuse_commands(places: list[str]) -> None:
    """WebDataset's own `gopen` runs what follows `pipe:` in a shell; here no list of shards runs anything."""
    if any(place.startswith("pipe:") for place in places):
        raise ValueError("`pipe:` in a list of shards is a command, which labkit does not run: name paths or URLs")


def _expand(places: Any) -> list[str]:
    from braceexpand import braceexpand  # as WebDataset does

    if isinstance(places, str) and not os.path.isfile(places):  # else the braces are part of the name
        return list(braceexpand(places))
    return [os.fspath(place) for place in ([places] if isinstance(places, str | os.PathLike) else places)]


def _from_manifest(folder: str, verify: bool, storage_options: dict[str, Any]) -> ShardList:
    folder = folder.rstrip("/")
    name = f"{name_of(folder)}/{MANIFEST}"
    try:
        with open_url(f"{folder}/{MANIFEST}", **storage_options) as file:
            content = read_manifest(file.read(), name)
    except FileNotFoundError as error:
        is_unfinished = os.path.isdir(os.path.join(folder, UNFINISHED))
        remedy = "run write_shards to its end" if is_unfinished else "name a folder that it filled, or .tar files"
        raise FileNotFoundError(f"{name} does not exist: {remedy}") from error
    rows = {f"{folder}/{row['name']}": row for row in content["shards"]}
    sha256 = {url: row["sha256"] for url, row in rows.items()} if verify else {}
    n_samples = {url: row["n_samples"] for url, row in rows.items()}
    return ShardList(list(rows), content["classes"], sha256, n_samples, storage_options)
