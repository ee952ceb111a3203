"""Shards on their way: listed, opened, read ahead, kept in a local folder, and given sample by sample.

WebDataset opens URLs by its own `gopen`, whose table has no entry for `s3://`: `register` adds one, which
`labkit.read_shards` calls. Spawned workers do not inherit the table; in WebDataset's own pipelines, use
`DataLoader(..., worker_init_fn=register)`. Those pipelines also run what follows `pipe:` in a list of shards, and
unpickle members with such suffixes, unless the variable `WDS_SECURE` is 1. `labkit.read_shards` never does either.
"""

import hashlib
import io
import os
import re
import tarfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from labkit.data.blobs import Blob, HttpBlob, HttpClient, allow_requests, is_http_url, is_url, open_blob
from labkit.data.shards_write import MANIFEST, UNFINISHED, read_manifest
from labkit.data.tar_stream import TAR_SUFFIXES, TarStream
from labkit.errors import ArgumentError, MissingFileError, StorageError, TarError
from labkit.util.arguments import MAX_FILE_VARIABLE, MAX_PATH_BYTES, max_file_bytes, require_int
from labkit.util.files import atomic_path, file_lock, is_image, remove_leftovers
from labkit.util.redact import strip_credentials

CHUNK_BYTES = 4 << 20  # of a request: about forty photos, and decoding them takes longer than fetching the next chunk

_LOCAL_BUFFER_BYTES = 1 << 20
_N_CACHED_AHEAD = 2  # shards that are fetched into a cache while one is read
_SUFFIX = ".shard"  # of a file in a cache
_SAMPLE_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # WebDataset's: all before the first dot is the key


class NoRoomError(Exception):
    """A shard does not fit beside what other processes are writing."""


@dataclass(frozen=True)
class ShardCache:
    """A local folder for remote shards.

    All processes of a machine may use it at a time. The next two shards are fetched while one is read; who wants a
    shard that another process fetches waits for it. A shard is found by its URL (without credentials), size and
    version, for which its server is asked in every epoch: one small request. It is written under a temporary name, and
    renamed when it is whole, so that a kill leaves none broken. Its size is checked each time, its bytes only by
    `read_shards(..., verify=True)`.

    Shards used longest ago make room. A process that has one open still reads its bytes, and the disk holds them
    until then, beyond the limit: at most four shards per process (POSIX; the folder must be on a local disk). What
    has no room, or no version (ETag or date), is streamed::

        lk.read_shards("s3://bucket/shards", cache=lk.ShardCache("/scratch/shards", max_bytes=200_000_000_000))

    Args:
        folder: Made if missing. Nothing else should be in it.
        max_bytes: Limit of the files in it, also of those being written; the same in all processes.

    Raises:
        ValueError: `max_bytes` is not an integer >= 1.

    Taught in: notebooks/08_shard_formats.ipynb
    """

    folder: str | os.PathLike
    max_bytes: int

    def __post_init__(self) -> None:
        require_int("max_bytes", self.max_bytes)
        object.__setattr__(self, "folder", Path(self.folder).absolute())

    def open(self, blob: Blob, threads: ThreadPoolExecutor) -> io.BufferedReader:
        """A shard's file; `threads` fetch it, chunk by chunk, if it is not there.

        Raises:
            NoRoomError: it is larger than the limit less what is being written, or has no version by which a change
                would be seen.
            OSError: as `blob` raises, or the disk is full.
        """
        size, version = blob.fingerprint()
        if not version or not 0 < size <= self.max_bytes:
            raise NoRoomError
        digest = hashlib.sha256(f"{blob.name}\0{size}\0{version}".encode(errors="surrogateescape")).hexdigest()
        path = Path(self.folder) / f"{digest[:32]}{_SUFFIX}"
        if file := _open_whole(path, size):
            return file
        with file_lock(path.with_suffix(".lock")):
            if file := _open_whole(path, size):  # another process was faster
                return file
            with atomic_path(path) as partial:
                self._reserve(partial, size)
                _copy(blob, size, partial, threads)
                return _open_local(partial)  # before it can be removed again

    def _reserve(self, partial: Path, size: int) -> None:
        """Give the file its size, for which the shards used longest ago make room."""
        with file_lock(partial.with_name("room.lock")):
            remove_leftovers(partial.parent)
            found = []
            with os.scandir(partial.parent) as entries:
                for entry in entries:
                    if entry.name.endswith((_SUFFIX, ".partial")):
                        with suppress(FileNotFoundError):
                            found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            excess = sum(n_bytes for _, n_bytes, _ in found) + size - self.max_bytes
            for _, n_bytes, path in sorted(found):
                if excess > 0 and path.endswith(_SUFFIX):
                    with suppress(FileNotFoundError):
                        os.unlink(path)
                    excess -= n_bytes
            if excess > 0:
                raise NoRoomError
            os.truncate(partial, size)


def _open_local(path: str | os.PathLike) -> io.BufferedReader:
    return io.BufferedReader(io.FileIO(path), _LOCAL_BUFFER_BYTES)


def _open_whole(path: Path, size: int) -> io.BufferedReader | None:
    """The file, which counts as used now; None if it is not there, or not whole."""
    with suppress(FileNotFoundError):
        file = _open_local(path)
        if os.fstat(file.fileno()).st_size == size:
            with suppress(OSError):  # removed meanwhile, or another user's
                os.utime(path)
            return file
        file.close()
    return None


def _copy(blob: Blob, size: int, path: Path, threads: ThreadPoolExecutor) -> None:
    """Fetch a blob into a file, as many chunks at a time as there are threads. A thread holds one chunk in memory."""

    def fetch(offset: int) -> None:
        data = blob.read_at(offset, min(CHUNK_BYTES, size - offset))
        # Opened for each chunk: after an error, the other threads may still be about to write.
        with open(path, "r+b") as file:
            n_written = os.pwrite(file.fileno(), data, offset)
        if n_written != min(CHUNK_BYTES, size - offset):
            raise StorageError(f"{blob.name} could not be copied to {path.parent}: {n_written} bytes at {offset}")

    for _ in threads.map(fetch, range(0, size, CHUNK_BYTES)):
        pass
    with open(path, "rb") as file:
        os.fsync(file.fileno())


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
class _ComingShard:
    """A shard that is read or comes next. It has a file in the cache, or a blob of `size` bytes that is streamed."""

    url: str
    opened: Future[None] | None = None  # None: a local shard, which is opened when it is read
    file: io.BufferedReader | None = None
    blob: Blob | None = None
    size: int = 0
    chunks: deque[Future[bytes]] = field(default_factory=deque)  # asked for and not read yet
    next_offset: int = 0  # of the first chunk that was not asked for

    def close_file(self, _: Future) -> None:
        if self.file:
            self.file.close()


class ReadAhead:
    """Shards that are read one after another, while chunks of what follows are fetched, over the ends of shards.

    At most `reads_in_flight` chunks are on their way or wait to be read; with the one being read, they take
    `(reads_in_flight + 1) * CHUNK_BYTES` of memory. Only who reads asks for chunks, so nothing needs a lock.

    Args:
        reads_in_flight: Requests at a time.
        storage_options: Passed to fsspec.
        cache: Where shards are kept: the next ones are then fetched whole. What it has no room for is streamed.
    """

    def __init__(self, reads_in_flight: int, storage_options: dict[str, Any], cache: ShardCache | None = None):
        self._reads_in_flight, self._storage_options, self._cache = reads_in_flight, storage_options, cache
        self._n_ahead = _N_CACHED_AHEAD if cache else reads_in_flight
        self._threads = self._opening = ThreadPoolExecutor(reads_in_flight, "labkit-shards")
        self._n_connections = reads_in_flight
        if cache:  # a shard's thread may wait for another process, and no chunk may wait behind it
            self._opening = ThreadPoolExecutor(_N_CACHED_AHEAD + 1, "labkit-cache")
            self._n_connections += _N_CACHED_AHEAD
        self._client = HttpClient(self._n_connections)
        self._shards: deque[_ComingShard] = deque()  # the one that is read comes first

    def files(self, urls: Iterable[str]) -> Iterator[io.BufferedReader]:
        """The file of each path or URL. It is closed when the next is asked for. URLs are drawn before their turn."""
        coming = iter(urls)
        try:
            while True:
                while len(self._shards) <= self._n_ahead and (url := next(coming, None)) is not None:
                    self._begin(url)
                if not self._shards:
                    return
                with self._open(self._shards[0]) as file:
                    yield file
                for chunk in self._shards.popleft().chunks:
                    chunk.cancel()
        finally:
            for pool in (self._opening, self._threads):
                pool.shutdown(wait=False, cancel_futures=True)
            for shard in self._shards:
                if shard.opened:
                    shard.opened.add_done_callback(shard.close_file)

    def file(self, url: str) -> io.BufferedReader:
        """One file, to be closed by the caller."""
        self._begin(url)
        return self._open(self._shards[0])

    def _begin(self, url: str) -> None:
        shard = _ComingShard(url)
        self._shards.append(shard)
        if is_url(url):
            shard.opened = self._opening.submit(self._find, shard)

    def _find(self, shard: _ComingShard) -> None:
        """Find the shard in the cache, where it is put if need be; else learn its size."""
        if is_http_url(shard.url):
            blob: Blob = HttpBlob(shard.url, self._client)  # all share their connections
        else:
            blob = open_blob(shard.url, **self._storage_options)
            allow_requests(blob, self._n_connections)
        if self._cache:
            with suppress(NoRoomError):
                shard.file = self._cache.open(blob, self._threads)
                return
        shard.size = blob.fingerprint()[0]
        shard.blob = blob

    def _open(self, shard: _ComingShard) -> io.BufferedReader:
        if not shard.opened:
            return _open_local(shard.url)
        shard.opened.result()
        return shard.file or io.BufferedReader(BlockStream(self._read_chunks(shard)))

    def _read_chunks(self, shard: _ComingShard) -> Generator[bytes]:
        while True:
            self._ask_for_chunks()
            if not shard.chunks:
                return
            if shard.chunks[0].done():
                chunk = shard.chunks.popleft()
                self._ask_for_chunks()
                yield chunk.result()
            else:  # when the size of another shard becomes known, more can be asked for
                awaited: list[Future[Any]] = [shard.chunks[0]]
                awaited += [other.opened for other in self._shards if other.opened and not other.opened.done()]
                wait(awaited, return_when=FIRST_COMPLETED)

    def _ask_for_chunks(self) -> None:
        """Ask for chunks in their order, as far as sizes are known, and none behind a shard that failed."""
        n_free = self._reads_in_flight - sum(len(shard.chunks) for shard in self._shards)
        for shard in self._shards:
            if shard.opened and (not shard.opened.done() or shard.opened.exception()):
                return
            while n_free and shard.blob and shard.next_offset < shard.size:
                n_bytes = min(CHUNK_BYTES, shard.size - shard.next_offset)
                shard.chunks.append(self._threads.submit(shard.blob.read_at, shard.next_offset, n_bytes))
                shard.next_offset += n_bytes
                n_free -= 1


def open_url(place: str | os.PathLike, **storage_options: Any) -> io.BufferedReader:
    """A file, from its first byte on. Remote ones are fetched one chunk ahead, with retries.

    Args:
        place: A path, `http(s)://`, `s3://`, or any other scheme that fsspec reads.
        **storage_options: Passed to fsspec.

    Raises:
        FileNotFoundError: no such file.
        OSError: no whole answer after all tries; names the URL without credentials.
        ImportError: the scheme's package is missing; names it.
    """
    return ReadAhead(1, storage_options).file(os.fspath(place))


def register(*_: Any) -> None:
    """Let WebDataset's `gopen` open `s3://`, through fsspec, unless it does already. Arguments are ignored.

    Endpoint and credentials come from fsspec's configuration or the environment (`AWS_ENDPOINT_URL`, `AWS_PROFILE`).
    """
    from webdataset.gopen import gopen_schemes  # here: its import takes a while

    gopen_schemes.setdefault("s3", _gopen_s3)


def _gopen_s3(url: str, mode: str = "rb", bufsize: int = -1, **storage_options: Any) -> BinaryIO:
    if mode == "rb":
        return open_url(url, **storage_options)
    import fsspec

    return fsspec.open(url, mode, **storage_options).open()


@dataclass(frozen=True)
class ShardList:
    """Shards in order.

    Args:
        urls: Paths or URLs.
        classes: From the manifest, or None.
        sha256: URL -> checksum, compared at the shard's end.
        n_samples: URL -> number of samples, as the manifest says; empty without one.
        storage_options: Passed to fsspec.
        reads_in_flight: Requests at a time.
        cache: Where shards are kept, or None.
    """

    urls: list[str] = field(repr=False)  # may hold credentials
    classes: list[str] | None = None
    sha256: dict[str, str] = field(default_factory=dict, repr=False)
    n_samples: dict[str, int] = field(default_factory=dict, repr=False)
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    reads_in_flight: int = 1
    cache: ShardCache | None = None


def find_shards(places: Any, *, verify: bool, storage_options: dict[str, Any]) -> ShardList:
    """The shards that `places` names, as `read_shards` takes them."""
    is_one = isinstance(places, str | os.PathLike)
    urls = [os.fspath(place) for place in ([places] if is_one else places)]
    if is_one and not urls[0].startswith("pipe:"):
        path = urlsplit(urls[0]).path if is_url(urls[0]) else urls[0]
        if not path.endswith(TAR_SUFFIXES):
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
        raise MissingFileError(f"{missing[0]} does not exist, nor do {len(missing) - 1} other shards")
    return ShardList(urls, storage_options=storage_options)


def _from_manifest(folder: str, verify: bool, storage_options: dict[str, Any]) -> ShardList:
    name = f"{name_of(folder)}/{MANIFEST}"
    try:
        with open_url(f"{folder}/{MANIFEST}", **storage_options) as file:
            content = read_manifest(file.read(), name)
    except FileNotFoundError as error:
        is_unfinished = os.path.isdir(os.path.join(folder, UNFINISHED))
        remedy = "run write_shards to its end" if is_unfinished else "name a folder that it filled, or .tar files"
        raise MissingFileError(f"{name} does not exist: {remedy}") from error
    rows = {f"{folder}/{row['name']}": row for row in content["shards"]}
    sha256 = {url: row["sha256"] for url, row in rows.items()} if verify else {}
    n_samples = {url: row["n_samples"] for url, row in rows.items()}
    return ShardList(list(rows), content["classes"], sha256, n_samples, storage_options)


def name_of(place: str) -> str:
    """A path or URL as messages show it, without credentials."""
    return strip_credentials(place) if is_url(place) else place


def read_samples(shards: ShardList, url: str, file: io.BufferedReader) -> Iterator[dict[str, Any]]:
    """The samples of one shard, whose `file` stays open: `__key__`, `__url__`, and each member's bytes by its suffix.

    The tar, plain or compressed, is read in one pass without seeking, in bounded memory.

    Raises:
        TarError: the tar is cut or damaged, between two members, too; names it and its last whole member. Or a member
            is larger than `labkit.util.arguments.max_file_bytes()`; its data are not read. Or as `sample_files` raises.
        ValueError: names that make no sample, or a checksum that is not the manifest's; names the shard.
    """
    name, sha256, digest = name_of(url), shards.sha256.get(url), hashlib.sha256()

    def hashed_blocks() -> Generator[bytes]:
        while data := file.read(_LOCAL_BUFFER_BYTES):
            digest.update(data)
            yield data

    def members() -> Iterator[tuple[str, bytes]]:
        limit = max_file_bytes()
        stream: io.BufferedReader = io.BufferedReader(BlockStream(hashed_blocks())) if sha256 else file
        with TarStream(stream, name, needs_end_mark=True) as tar:
            for info in sample_files(tar):
                if info.size > limit:
                    about = f"{info.size} bytes, over the limit of {limit} ({MAX_FILE_VARIABLE})"
                    raise TarError(f"{name}: {info.name!r} has {about}")
                yield info.name, b"".join(tar.blocks(info))
        if sha256:
            while stream.read(_LOCAL_BUFFER_BYTES):  # what follows the tar's end mark
                pass
            if digest.hexdigest() != sha256:
                raise ArgumentError(
                    f"{name} does not have the SHA-256 of its manifest: copy it again, or write it again"
                )

    return _group(members(), name)


def count_samples(shards: ShardList) -> dict[str, int]:
    """URL -> number of samples: the manifest's, or counted. Only headers are read of local tars, all of others."""
    counts = {}
    for url in shards.urls:
        counts[url] = shards.n_samples.get(url, 0)
        if not counts[url]:
            with ExitStack() as stack:  # a path can be sought in: that skips the data
                source = stack.enter_context(open_url(url, **shards.storage_options)) if is_url(url) else url
                tar = stack.enter_context(TarStream(source, name_of(url), needs_end_mark=True))
                members = ((info.name, b"") for info in sample_files(tar))
                counts[url] = sum(1 for _ in _group(members, name_of(url)))
    return counts


def _group(members: Iterable[tuple[str, bytes]], shard: str) -> Iterator[dict[str, Any]]:
    """Samples of consecutive members with the same key, as WebDataset groups them."""
    sample: dict[str, Any] = {}
    for name, data in members:
        suffix = name.rpartition("/")[2].partition(".")[2]
        key, suffix = name.removesuffix(f".{suffix}"), suffix.lower()
        if sample and key != sample["__key__"]:
            yield sample
            sample = {}
        if suffix in sample:
            raise ArgumentError(
                f"{shard}: {name}: duplicate file name in tar file: its sample has one of suffix {suffix}"
            )
        sample = sample or {"__key__": key, "__url__": shard}
        sample[suffix] = data
    if sample:
        yield sample


def sample_files(tar: TarStream) -> Iterator[tarfile.TarInfo]:
    """The files that make up samples, by WebDataset's rule: what is left of the first dot in a name is the key.

    Folders, hidden files (`._a.jpg`) and names without a dot (`README`) belong to no sample, and are left out.

    Raises:
        TarError: a member that belongs to a sample is a link, a device or of an unknown type, so that the sample would
            lack it.
        ValueError: a member's name is one that WebDataset skips in silence.
    """
    for info in tar:
        if info.isdir():
            continue
        name = f"{tar.name}: {info.name!r}"
        if len(info.name) > MAX_PATH_BYTES:
            about = f"{len(info.name)} characters, where a file's path has at most {MAX_PATH_BYTES} bytes"
            raise ArgumentError(f"{tar.name}: {info.name[:200] + '...'!r} has {about}")
        if info.name.rpartition("/")[2].startswith("."):  # to WebDataset, `d/._a.jpg` is a sample named `d/`
            continue
        found = _SAMPLE_NAME.match(info.name)
        if found is None and is_image(info.name):
            raise ArgumentError(f"{name} names no sample to WebDataset: write it without the line break")
        if found is None:
            continue
        if found[2].startswith("__"):
            raise ArgumentError(f"{name} has a suffix that WebDataset reserves: write it under another")
        if not info.isreg():
            kind = "a device or a pipe" if info.isdev() else f"of unknown type {info.type!r}"
            if info.islnk() or info.issym():
                kind = f"a {'hard' if info.islnk() else 'symbolic'} link to {info.linkname!r}"
            raise TarError(
                f"{name} is {kind}, not a file, and its sample would lack it: write the shard again with files alone "
                "(GNU tar: --dereference --hard-dereference)"
            )
        yield info
