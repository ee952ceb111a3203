"""Shards on their way: opened, listed, read ahead, cached.

Open a path or URL for one pass from beginning to end; importing this teaches WebDataset the scheme `s3://`.

WebDataset opens URLs by `gopen`, whose table has no entry for `s3`. The one added here reads through fsspec: endpoint
and credentials come from fsspec's configuration or the environment (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, ...). Spawned
workers do not inherit the table: in WebDataset's own pipelines, use `DataLoader(..., worker_init_fn=gopen.register)`.
`labkit.read_shards` does not need that.

Those pipelines also run what follows `pipe:` in a list of shards, and unpickle members with such suffixes, unless the
variable `WDS_SECURE` is 1. `labkit.read_shards` never does either.

Remote shards one after the other, by many requests at a time: those of the next begin before one has ended.

Whole shards kept in a local folder, up to a size, for all processes of a machine.

List the shards of a set, and read one shard's members, checked against its manifest.
"""

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from webdataset.gopen import gopen_schemes
from webdataset.tariterators import group_by_keys

from labkit.data.blobs import Blob, HttpBlob, HttpClient, LocalBlob, allow_requests, is_http_url, is_url, open_blob
from labkit.data.shards_write import MANIFEST, UNFINISHED, read_manifest, read_members, sample_files
from labkit.data.tar_members import TAR_SUFFIXES
from labkit.data.tar_stream import TarStream
from labkit.util.arguments import require_int
from labkit.util.files import atomic_path, file_lock, remove_leftovers
from labkit.util.redact import strip_credentials

CHUNK_BYTES = 4 << 20  # about forty photos: decoding them takes longer than fetching the next chunk
_LOCAL_BUFFER_BYTES = 1 << 20


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
    blob = open_blob(place, **storage_options)
    if isinstance(blob, LocalBlob):
        return io.BufferedReader(io.FileIO(blob.name), _LOCAL_BUFFER_BYTES)
    return io.BufferedReader(ReadAhead(blob))


def register(*_: Any) -> None:
    """Let WebDataset's `gopen` open `s3://`, unless it does already. Arguments are ignored."""
    gopen_schemes.setdefault("s3", _gopen_s3)


def _gopen_s3(url: str, mode: str = "rb", bufsize: int = -1, **storage_options: Any) -> BinaryIO:
    if mode == "rb":
        return open_url(url, **storage_options)
    import fsspec

    return fsspec.open(url, mode, **storage_options).open()


class ReadAhead(io.RawIOBase):
    """A blob read in order: a thread fetches the next chunk while one is used."""

    def __init__(self, blob: Blob, chunk_bytes: int = CHUNK_BYTES):
        self._thread = ThreadPoolExecutor(1)
        size = blob.fingerprint()[0]
        self._requests = (
            self._thread.submit(blob.read_at, offset, min(chunk_bytes, size - offset))
            for offset in range(0, size, chunk_bytes)
        )
        self._chunk, self._next = memoryview(b""), next(self._requests, None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._chunk and self._next is not None:
            self._chunk = memoryview(self._next.result())
            self._next = next(self._requests, None)
        n_bytes = min(len(buffer), len(self._chunk))
        buffer[:n_bytes] = self._chunk[:n_bytes]
        self._chunk = self._chunk[n_bytes:]
        return n_bytes

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()


register()


class Remote(NamedTuple):
    """An opened blob, and its size in bytes."""

    blob: Blob
    size: int


class Opener:
    """Opens the blobs of one set of shards: over HTTP all share their connections.

    Args:
        reads_in_flight: Connections.
        storage_options: Passed to fsspec.
    """

    def __init__(self, reads_in_flight: int, storage_options: dict[str, Any]):
        self._client = HttpClient(num_connections=reads_in_flight)
        self._reads_in_flight, self._storage_options = reads_in_flight, storage_options

    def blob(self, url: str) -> Blob:
        """The blob of a URL, before its first request."""
        if is_http_url(url):
            return HttpBlob(url, self._client)
        blob = open_blob(url, **self._storage_options)
        allow_requests(blob, self._reads_in_flight)
        return blob

    def open(self, url: str) -> Remote:
        """Ask for its size."""
        blob = self.blob(url)
        return Remote(blob, blob.fingerprint()[0])


class _Pending:
    """A shard on its way: what is known of it, the chunks asked for, and where the next one begins."""

    def __init__(self, url: str):
        self.url = url
        self.remote: Future[Remote] = Future()
        self.chunks: deque[Future[bytes]] = deque()
        self.next_offset = 0

    def is_sound(self) -> bool:
        """Whether it was opened and holds something. An error is left to whoever reads it."""
        is_opened = self.remote.done() and not self.remote.cancelled() and self.remote.exception() is None
        return is_opened and self.remote.result().size > 0

    def has_more(self) -> bool:
        """Whether a chunk can be asked for."""
        return self.is_sound() and self.next_offset < self.remote.result().size


class ShardsAhead:
    """Files of shards in order, whose chunks are fetched in order by threads, over the ends of shards.

    At most `reads_in_flight` chunks are asked for, or wait to be read, at a time; with the one being read, they take
    `(reads_in_flight + 1) * chunk_bytes` of memory. A local shard is opened when its turn comes.

    Args:
        urls: Paths or URLs. Drawn as they are asked for, some before their turn, from any thread but one at a time.
        reads_in_flight: Threads, each with one request at a time.
        storage_options: Passed to fsspec.
        chunk_bytes: Size of a request.
    """

    def __init__(
        self,
        urls: Iterable[str],
        reads_in_flight: int,
        storage_options: dict[str, Any],
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self._urls, self._limit, self._chunk_bytes = iter(urls), reads_in_flight, chunk_bytes
        self._opener = Opener(reads_in_flight, storage_options)
        self._threads = ThreadPoolExecutor(reads_in_flight, "labkit-shards")
        self._changed = Condition()  # its lock can be taken again by the thread that holds it
        self._n_held = 0  # chunks asked for and not read yet, and shards of unknown size
        self._in_turn: deque[_Pending] = deque()  # shards that nobody reads yet
        self._asking: deque[_Pending] = deque()  # shards not all of whose chunks were asked for
        self._is_closed = False

    def __iter__(self) -> Iterator[tuple[str, io.BufferedReader]]:
        """Each shard's URL, and its file, to be closed before the next is asked for."""
        try:
            while (shard := self._next()) is not None:
                yield shard.url, self._open(shard)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> _Pending | None:
        with self._changed:
            self._ask()
            if not self._in_turn:  # this is the end, or all places are held
                self._draw()
            return self._in_turn.popleft() if self._in_turn else None

    def _open(self, shard: _Pending) -> io.BufferedReader:
        return io.BufferedReader(_ShardFile(self, shard)) if is_url(shard.url) else open_url(shard.url)

    def _ask(self) -> None:
        """Send requests while there are places: chunks in their order first, then sizes of later shards."""
        while self._n_held < self._limit and not self._is_closed:
            while self._asking and self._asking[0].is_sound() and not self._asking[0].has_more():
                self._asking.popleft()
            if not (self._ask_chunk() or self._draw()):
                return

    def _ask_chunk(self) -> bool:
        """Ask for the next chunk of the first shard that lacks some; False if its size is not known yet."""
        if not self._asking or not self._asking[0].has_more():
            return False
        shard = self._asking[0]
        remote, offset = shard.remote.result(), shard.next_offset
        size = min(self._chunk_bytes, remote.size - offset)
        shard.chunks.append(self._threads.submit(remote.blob.read_at, offset, size))
        shard.next_offset += size
        self._n_held += 1
        return True

    def _draw(self) -> bool:
        """Ask for the size of one more shard; False if there is none, or one before it is broken."""
        is_broken = bool(self._asking) and self._asking[0].remote.done() and not self._asking[0].is_sound()
        url = None if is_broken else next(self._urls, None)
        if url is None:
            return False
        shard = _Pending(os.fspath(url))
        self._in_turn.append(shard)
        if is_url(shard.url):
            self._asking.append(shard)
            self._n_held += 1
            shard.remote = self._threads.submit(self._opener.open, shard.url)
            shard.remote.add_done_callback(self._note_size)
        return True

    def _note_size(self, _: Future) -> None:
        with suppress(RuntimeError):  # the interpreter ends
            self._free(1)

    def _free(self, n_places: int) -> None:
        with self._changed:
            self._n_held -= n_places
            self._ask()
            self._changed.notify_all()

    def read_chunk(self, shard: _Pending) -> bytes:
        """The next chunk of a shard; b"" at its end. Raises what its request raised."""
        shard.remote.result()
        with self._changed:
            self._changed.wait_for(lambda: shard.chunks or self._is_closed or not shard.has_more())
            if not shard.chunks and not shard.has_more():
                return b""
            if self._is_closed:
                raise ValueError(f"{shard.remote.result().blob.name} is read after the loop over its shards was left")
            chunk = shard.chunks.popleft()
        try:
            return chunk.result()
        finally:
            self._free(1)

    def give_up(self, shard: _Pending) -> None:
        """Free the places of what is left of a shard."""
        with self._changed:
            with suppress(ValueError):
                self._asking.remove(shard)
            n_left = len(shard.chunks)
            while shard.chunks:
                shard.chunks.popleft().cancel()
            self._free(n_left)


class _ShardFile(io.RawIOBase):
    """One shard of several, read in order."""

    def __init__(self, shards: ShardsAhead, shard: _Pending):
        self._shards, self._shard = shards, shard
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._chunk:
            self._chunk = memoryview(self._shards.read_chunk(self._shard))
        n_bytes = min(len(buffer), len(self._chunk))
        buffer[:n_bytes] = self._chunk[:n_bytes]
        self._chunk = self._chunk[n_bytes:]
        return n_bytes

    def close(self) -> None:
        if not self.closed:
            self._shards.give_up(self._shard)
        super().close()


_SUFFIX = ".shard"
_BUFFER_BYTES = 1 << 20
_N_AHEAD = 2  # shards that are opened, and if need be fetched, while one is read


class NoRoomError(Exception):
    """A shard does not fit beside what other processes are writing."""


@dataclass(frozen=True)
class ShardCache:
    """A local folder for remote shards: `read_shards(..., cache=ShardCache(folder, max_bytes))`.

    All processes of a machine may use it at a time. The next two shards are fetched while one is read; who wants a
    shard that another process fetches waits for it. A shard is found by its URL (without credentials), size and
    version, for which its server is asked in every epoch: one small request. It is written under a temporary name, and
    renamed when it is whole, so that a kill leaves none broken. Its size is checked each time, its bytes only by
    `read_shards(..., verify=True)`.

    Shards used longest ago make room. A process that has one open still reads its bytes, and the disk holds them
    until then, beyond the limit: at most four shards per process (POSIX; the folder must be on a local disk). What
    has no room, or no version (ETag or date), is streamed.

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
        return _open_whole(path, size) or self._fetch(blob, size, path, threads)

    def _fetch(self, blob: Blob, size: int, path: Path, threads: ThreadPoolExecutor) -> io.BufferedReader:
        with file_lock(path.with_suffix(".lock")):
            if file := _open_whole(path, size):  # another process was faster
                return file
            with atomic_path(path) as partial:
                self._reserve(partial, size)
                _write(blob, size, partial, threads)
                return _open(partial)  # before it can be removed again

    def _reserve(self, partial: Path, size: int) -> None:
        """Give the file its size, for which the oldest shards make room."""
        with file_lock(partial.with_name("room.lock")):
            remove_leftovers(partial.parent)
            found = sorted(_list_cached(partial.parent), key=lambda file: file[1].st_mtime_ns)
            excess = sum(status.st_size for _, status in found) + size - self.max_bytes
            for path, status in found:
                if excess > 0 and path.endswith(_SUFFIX):
                    with suppress(FileNotFoundError):
                        os.unlink(path)
                    excess -= status.st_size
            if excess > 0:
                raise NoRoomError
            os.truncate(partial, size)


def _list_cached(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.name.endswith((_SUFFIX, ".partial")):
                    yield entry.path, entry.stat()


def _open(path: Path) -> io.BufferedReader:
    return io.BufferedReader(io.FileIO(path), _BUFFER_BYTES)


def _open_whole(path: Path, size: int) -> io.BufferedReader | None:
    """The file, which counts as used now; None if it is not there, or not whole."""
    with suppress(FileNotFoundError):
        file = _open(path)
        if os.fstat(file.fileno()).st_size == size:
            with suppress(OSError):  # removed meanwhile, or another user's
                os.utime(path)
            return file
        file.close()
    return None


def _write(blob: Blob, size: int, path: Path, threads: ThreadPoolExecutor) -> None:
    """Fetch a blob into a file, as many chunks at a time as there are threads. A thread holds one chunk in memory."""

    def fetch(offset: int) -> None:
        data = blob.read_at(offset, min(CHUNK_BYTES, size - offset))
        if len(data) != min(CHUNK_BYTES, size - offset) or os.pwrite(descriptor, data, offset) != len(data):
            raise OSError(f"{blob.name} could not be copied to {path.parent}: {len(data)} bytes at {offset}")

    descriptor = os.open(path, os.O_WRONLY)
    try:
        tasks = [threads.submit(fetch, offset) for offset in range(0, size, CHUNK_BYTES)]
        try:
            for task in tasks:  # not `wait`, which is not told when the loop is left and its executor cancels them
                task.result()
        finally:
            wait([task for task in tasks if not task.cancel()])  # none may write once the file is closed
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CachedShards:
    """Files of shards in order, out of a cache: the next two are opened, and if need be fetched, while one is read.

    What the cache has no room for, or what has no version, is streamed, as `ShardsAhead` does. A local shard is opened
    where it is.

    Args:
        urls: Paths or URLs.
        cache: Where shards are kept.
        reads_in_flight: Requests at a time, each for 4 MiB, which are written to the disk as they come.
        storage_options: Passed to fsspec.
    """

    def __init__(self, urls: Iterable[str], cache: ShardCache, reads_in_flight: int, storage_options: dict[str, Any]):
        self._urls, self._cache = iter(urls), cache
        self._reads_in_flight, self._storage_options = reads_in_flight, storage_options
        self._opener = Opener(reads_in_flight + _N_AHEAD, storage_options)
        # Apart from each other: a shard's thread may wait for another process, and no chunk may wait behind it.
        self._fetching = ThreadPoolExecutor(reads_in_flight, "labkit-shards")
        self._opening = ThreadPoolExecutor(_N_AHEAD + 1, "labkit-cache")

    def __iter__(self) -> Iterator[tuple[str, io.BufferedReader]]:
        """Each shard's URL, and its file, to be closed before the next is asked for."""
        coming: deque[tuple[str, Future[io.BufferedReader]]] = deque()
        try:
            while True:
                while len(coming) <= _N_AHEAD and (url := next(self._urls, None)) is not None:
                    coming.append((url, self._opening.submit(self._open, url)))
                if not coming:
                    return
                url, opened = coming.popleft()
                if isinstance(opened.exception(), NoRoomError):
                    yield from ShardsAhead([url], self._reads_in_flight, self._storage_options)
                else:
                    yield url, opened.result()
        finally:
            self._opening.shutdown(wait=False, cancel_futures=True)
            self._fetching.shutdown(wait=False, cancel_futures=True)
            for _, opened in coming:
                opened.add_done_callback(_close_unread)

    def _open(self, url: str) -> io.BufferedReader:
        return self._cache.open(self._opener.blob(url), self._fetching) if is_url(url) else open_url(url)


def _close_unread(opened: Future[io.BufferedReader]) -> None:
    if not opened.cancelled() and not opened.exception():
        opened.result().close()


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
