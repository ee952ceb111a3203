"""Shards on their way: listed, fetched ahead, and given sample by sample.

WebDataset opens URLs by its own `gopen`, whose table has no entry for `s3://`: `register` adds one, which
`labkit.read_shards` calls. Spawned workers do not inherit the table; in WebDataset's own pipelines, use
`DataLoader(..., worker_init_fn=register)`. Those pipelines also run what follows `pipe:` in a list of shards, and
unpickle members with such suffixes, unless the variable `WDS_SECURE` is 1. `labkit.read_shards` never does either.
"""

import hashlib
import io
import os
import tarfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from labkit.data.blobs import Blob, HttpBlob, HttpClient, allow_requests, is_http_url, is_url, open_blob
from labkit.data.shards_write import MANIFEST, UNFINISHED, read_manifest
from labkit.data.tar_stream import TAR_SUFFIXES, TarStream
from labkit.errors import ArgumentError, MissingFileError, StorageError, TarError
from labkit.util.arguments import MAX_FILE_VARIABLE, max_file_bytes, require_path
from labkit.util.redact import strip_credentials

CHUNK_BYTES = 4 << 20  # of a request: about forty photos, and decoding them takes longer than fetching the next chunk

_BUFFER_BYTES = 1 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


class BlockStream(io.RawIOBase):
    """The blocks of bytes that a generator gives, as a file; closing it closes the generator."""

    def __init__(self, blocks: Generator[bytes]):
        self._blocks, self._block = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        n_bytes = min(len(buffer), len(self._block))
        buffer[:n_bytes] = self._block[:n_bytes]
        self._block = self._block[n_bytes:]
        return n_bytes

    def close(self) -> None:
        self._blocks.close()
        super().close()


@dataclass(eq=False)
class _Source:
    """Where a shard is fetched from, or the error of looking for it."""

    blob: Any = None
    size: int = 0
    error: Exception | None = None


def open_shards(
    urls: Sequence[str], reads_in_flight: int, storage_options: dict[str, Any]
) -> Iterator[io.BufferedReader]:
    """The file of each path or URL, while chunks of what follows are fetched, over the ends of shards.

    Each is closed when the next is asked for. At most `reads_in_flight` chunks are on their way or wait to be read;
    with the one being read, they take `(reads_in_flight + 1) * CHUNK_BYTES` of memory.

    Args:
        urls: Paths, `http(s)://`, `s3://`, or any other scheme that fsspec reads.
        reads_in_flight: Requests at a time.
        storage_options: Passed to fsspec.

    Raises, when it is a shard's turn:
        FileNotFoundError: no such file.
        OSError: no whole answer after all tries; names the URL without credentials.
        ImportError: the scheme's package is missing; names it.
    """
    file: io.BufferedReader
    if not any(map(is_url, urls)):
        for path in urls:
            file = io.BufferedReader(io.FileIO(path), _BUFFER_BYTES)
            with file:
                yield file
        return

    client = HttpClient(reads_in_flight)  # all shards share its connections

    def find(url: str) -> _Source:
        try:
            blob: Blob = HttpBlob(url, client) if is_http_url(url) else open_blob(url, **storage_options)
            allow_requests(blob, reads_in_flight)
            return _Source(blob, blob.fingerprint()[0])
        except Exception as error:
            return _Source(error=error)

    def requests() -> Iterator[tuple[_Source, int]]:
        for source in _ahead(threads, find, urls, reads_in_flight):
            yield from ((source, offset) for offset in range(0, max(source.size, 1), CHUNK_BYTES))
            if source.error:  # nothing is fetched behind it
                return

    def fetch(request: tuple[_Source, int]) -> tuple[_Source, int, bytes]:
        source, offset = request
        if source.error:
            raise source.error
        n_bytes = min(CHUNK_BYTES, source.size - offset)
        data = source.blob.read_at(offset, n_bytes)
        if len(data) != n_bytes:
            raise StorageError(f"{source.blob.name} became shorter while it was read: run again")
        return source, offset, data

    def blocks(source: _Source, first: bytes) -> Generator[bytes]:
        yield first
        for _ in range(CHUNK_BYTES, source.size, CHUNK_BYTES):
            yield next(chunks)[2]

    threads = ThreadPoolExecutor(reads_in_flight, "labkit-shards")
    try:
        chunks = _ahead(threads, fetch, requests(), reads_in_flight)
        for source, offset, data in chunks:
            if not offset:  # else it was not read to its end
                file = io.BufferedReader(BlockStream(blocks(source, data)))
                with file:
                    yield file
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _ahead(
    threads: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[Result]:
    """The results of a function, in order, while `count` of those that follow are computed."""
    coming: deque[Future[Result]] = deque()
    for item in items:
        coming.append(threads.submit(function, item))
        if len(coming) > count:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def register(*_: Any) -> None:
    """Let WebDataset's `gopen` open `s3://`, through fsspec, unless it does already. Arguments are ignored.

    Endpoint and credentials come from fsspec's configuration or the environment (`AWS_ENDPOINT_URL`, `AWS_PROFILE`).
    """
    from webdataset.gopen import gopen_schemes  # here: its import takes a while

    gopen_schemes.setdefault("s3", _gopen_s3)


def _gopen_s3(url: str, mode: str = "rb", bufsize: int = -1, **storage_options: Any) -> Any:
    import fsspec

    return fsspec.open(url, mode, **storage_options).open()


@dataclass(frozen=True)
class ShardList:
    """Shards in order.

    Args:
        urls: Paths or URLs.
        classes: From the manifest, or None.
        labels: What labels are, as the manifest says: one of `LABEL_SUFFIXES`; or None.
        sha256: URL -> checksum, compared at the shard's end.
        n_samples: URL -> number of samples, as the manifest says; empty without one.
        storage_options: Passed to fsspec.
        reads_in_flight: Requests at a time.
    """

    urls: list[str] = field(repr=False)  # may hold credentials
    classes: list[str] | None = None
    sha256: dict[str, str] = field(default_factory=dict, repr=False)
    n_samples: dict[str, int] = field(default_factory=dict, repr=False)
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    reads_in_flight: int = 1
    labels: str | None = None

    def open(self, urls: Sequence[str]) -> Iterator[io.BufferedReader]:
        """The files of some shards, one after another."""
        return open_shards(urls, self.reads_in_flight, self.storage_options)


_PLACES = "a path or URL of a folder of shards, of a .tar, or of several"


def find_shards(places: Any, *, verify: bool, storage_options: dict[str, Any]) -> ShardList:
    """The shards that `places` names, as `read_shards` takes them."""
    is_one = isinstance(places, str | os.PathLike) or not isinstance(places, Iterable)
    urls = [require_path("a shard", place, what=_PLACES) for place in ([places] if is_one else places)]
    if is_one and not urls[0].startswith("pipe:"):
        path = urlsplit(urls[0]).path if is_url(urls[0]) else urls[0]
        if not path.lower().endswith(TAR_SUFFIXES):
            return _from_manifest(urls[0].rstrip("/"), verify, storage_options)
    if verify:
        raise ArgumentError("verify=True needs the checksums of a manifest: name the folder, not its shards")
    if isinstance(places, str) and not os.path.isfile(places):  # else the braces are part of the name
        from braceexpand import braceexpand  # as WebDataset does

        urls = list(braceexpand(places))
    if any(url.startswith("pipe:") for url in urls):  # WebDataset's own `gopen` runs what follows in a shell
        raise ArgumentError("`pipe:` in a list of shards is a command, which labkit does not run: name paths or URLs")
    if not urls:
        raise ArgumentError("the list of shards is empty: there is no shard to read")
    if missing := [url for url in urls if not is_url(url) and not os.path.isfile(url)]:
        others = f", nor do {len(missing) - 1} others of {len(urls)}" if len(missing) > 1 else ""
        hint = (
            "; wildcards are not expanded: name the folder, or pass sorted(glob.glob(...))" if "*" in missing[0] else ""
        )
        raise MissingFileError(f"the shard {missing[0]} does not exist{others}{hint}")
    return ShardList(urls, storage_options=storage_options)


def _from_manifest(folder: str, verify: bool, storage_options: dict[str, Any]) -> ShardList:
    name = f"{name_of(folder)}/{MANIFEST}"
    try:
        text = b"".join(file.read() for file in open_shards([f"{folder}/{MANIFEST}"], 1, storage_options))
    except (FileNotFoundError, NotADirectoryError) as error:
        is_unfinished = os.path.isdir(os.path.join(folder, UNFINISHED))
        remedy = (
            "run write_shards to its end" if is_unfinished else "name a folder that write_shards filled, or .tar files"
        )
        raise MissingFileError(f"{name} does not exist: {remedy}") from error
    content = read_manifest(text, name)
    rows = {f"{folder}/{row['name']}": row for row in content["shards"]}
    sha256 = {url: row["sha256"] for url, row in rows.items()} if verify else {}
    n_samples = {url: row["n_samples"] for url, row in rows.items()}
    return ShardList(list(rows), content["classes"], sha256, n_samples, storage_options, labels=content["labels"])


def name_of(place: str) -> str:
    """A path or URL as messages show it, without credentials."""
    return strip_credentials(place) if is_url(place) else place


def read_samples(shards: ShardList, url: str, file: io.BufferedReader) -> Iterator[dict[str, Any]]:
    """The samples of one shard, whose `file` stays open: `__key__`, `__url__`, and each member's bytes by its suffix.

    The tar, plain or compressed, is read in one pass without seeking, in bounded memory.

    Raises:
        TarError: the tar is cut or damaged, between two members, too; names it and its last whole member. Or a member
            is larger than `labkit.util.arguments.max_file_bytes()`; its data are not read. Or as `_group` raises.
        ValueError: names that make no sample, or a checksum that is not the manifest's; names the shard.
    """
    name, sha256, digest = name_of(url), shards.sha256.get(url), hashlib.sha256()

    def hashed_blocks() -> Generator[bytes]:
        while data := file.read(_BUFFER_BYTES):
            digest.update(data)
            yield data

    def read(tar: TarStream, info: tarfile.TarInfo) -> bytes:
        if info.size > (limit := max_file_bytes()):
            about = f"{info.size} bytes, over the limit of {limit} ({MAX_FILE_VARIABLE})"
            raise TarError(f"{name}: {info.name!r} has {about}")
        return b"".join(tar.blocks(info))

    stream: io.BufferedReader = io.BufferedReader(BlockStream(hashed_blocks())) if sha256 else file
    with TarStream(stream, name, needs_end_mark=True) as tar:
        yield from _group(tar, read)
    if sha256:
        while stream.read(_BUFFER_BYTES):  # what follows the tar's end mark
            pass
        if digest.hexdigest() != sha256:
            raise ArgumentError(f"{name} does not have the SHA-256 of its manifest: copy it again, or write it again")


def count_samples(shards: ShardList, url: str) -> int:
    """Samples of one shard: the manifest's number, or counted. Only headers are read of a local tar, all of others."""
    if n_samples := shards.n_samples.get(url):
        return n_samples
    for source in shards.open([url]) if is_url(url) else [url]:  # a path can be sought in: that skips the data
        with TarStream(source, name_of(url), needs_end_mark=True) as tar:
            n_samples = sum(1 for _ in _group(tar, lambda tar, info: b""))
    return n_samples or 0


def _group(tar: TarStream, read: Callable[[TarStream, tarfile.TarInfo], bytes]) -> Iterator[dict[str, Any]]:
    """Samples of consecutive members with one key, by WebDataset's rule: it is what is left of a name's first dot.

    Folders, hidden files (`._a.jpg`) and names without a dot (`README`) belong to no sample, and are left out.

    Raises:
        TarError: a member that belongs to a sample is a link, a device or of an unknown type, so that the sample would
            lack it.
        ValueError: a suffix that comes twice in a sample, or that WebDataset reserves.
    """
    sample: dict[str, Any] = {}
    for info in tar:
        folder, slash, base = info.name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if info.isdir() or not stem or not dot:
            continue
        name, key, suffix = f"{tar.name}: {info.name!r}", folder + slash + stem, suffix.lower()
        if suffix.startswith("__"):
            raise ArgumentError(f"{name} has a suffix that WebDataset reserves: write it under another")
        if not info.isreg():
            raise TarError(
                f"{name} is a link, a device or of unknown type, and its sample would lack it: write the shard again "
                "with files alone (GNU tar: --dereference --hard-dereference)"
            )
        if sample and key != sample["__key__"]:
            yield sample
            sample = {}
        if suffix in sample:
            raise ArgumentError(f"{name}: duplicate file name in tar file: its sample has one of suffix {suffix}")
        sample = sample or {"__key__": key, "__url__": tar.name}
        sample[suffix] = read(tar, info)
    if sample:
        yield sample
