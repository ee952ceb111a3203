"""Remote shards one after the other, by many requests at a time: those of the next begin before one has ended."""

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Condition
from typing import Any, NamedTuple

from labkit.data.blobs import Blob, HttpBlob, HttpClient, allow_requests, is_http_url, is_url, open_blob
from labkit.data.shards.gopen import CHUNK_BYTES, open_url


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
