"""Whole shards kept in a local folder, up to a size, for all processes of a machine."""

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.core import atomic_path, file_lock, remove_leftovers, require_int
from labkit.data.blobs import Blob, is_url
from labkit.data.shards.ahead import Opener, ShardsAhead
from labkit.data.shards.gopen import CHUNK_BYTES, open_url

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
