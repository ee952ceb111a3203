"""Simulated disks and networks: real bytes, delivered as late as a slower storage would deliver them."""

import ctypes
import math
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from labkit.data.blobs import Extent, allow_requests
from labkit.data.remote import as_store
from labkit.data.stores import HasExtents, Store, folders_without_image, read_bytes
from labkit.util.arguments import require_a
from labkit.util.files import SharedFile, acquire_lock
from labkit.util.process import PerProcess


@dataclass(frozen=True)
class Disk:
    """How long a storage takes.

    Args:
        name: For labels; plots add *simulated*.
        seek_ms: Time to move to another place.
        bandwidth_mb_per_s: For one reader, in 1e6 bytes.
        latency_ms: Time of a network request; one is sent wherever a disk would seek.
        one_head: Requests of all processes wait for each other, as on a rotating disk.
        readahead_bytes: Gaps up to this size are read rather than skipped with a seek.
        trips_to_open: Seeks or requests that opening a file takes, before those for its bytes: 1 for an inode, or a
            look-up on a network share; 0 where one request names a file and returns it, as a GET does.
    """

    name: str
    seek_ms: float = 0.0
    bandwidth_mb_per_s: float = float("inf")
    latency_ms: float = 0.0
    one_head: bool = False
    readahead_bytes: int = 128 * 1024
    trips_to_open: int = 1


#: Milliseconds to the first byte of a small object in S3, from least to most. Both are AWS's own figures: tens of
#: milliseconds, https://docs.aws.amazon.com/whitepapers/latest/s3-optimizing-performance-best-practices/
#: timeouts-and-retries-for-latency-sensitive-applications.html, and 100 to 200 ms,
#: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html.
OBJECT_LATENCY_MS = (20.0, 200.0)
_MIDDLE_MS = round(math.prod(OBJECT_LATENCY_MS) ** 0.5)  # geometric mean

#: Places with latencies and bandwidths of their kind, by name, for `SimulatedStore`.
DISKS = {
    "hdd": Disk("hard disk", seek_ms=8.0, bandwidth_mb_per_s=180.0, one_head=True),
    "network": Disk("network storage", latency_ms=1.0, bandwidth_mb_per_s=1000.0),
    "object": Disk("object storage", latency_ms=_MIDDLE_MS, bandwidth_mb_per_s=90.0, trips_to_open=0),
}


class SimulatedStore:
    """Another store's images, delivered as late as `disk` would deliver them.

    Nothing counts as cached: each read costs as much as a first one. The store reports what a read touches (`extents`):
    a folder opens a file and reads it, an indexed tar only reads the member, and `tarfile` first visits every header. A
    store that cannot report this (HTTP, object storage) pays for one opened file per read.

    Args:
        store: Where the bytes come from: a store, or a path or URL of one.
        disk: One of `DISKS`, or a `Disk` of your own.
        wait: False adds up the time in `busy_s` without waiting, for storages that would take all day.

    >>> store = SimulatedStore(lk.FolderStore("photos"), DISKS["object"], wait=False)
    >>> data = store.read(store.keys()[0])
    >>> store.busy_s
    0.0637

    Taught in: notebooks/08_shard_formats.ipynb
    """

    def __init__(self, store: Store, disk: Disk = DISKS["hdd"], *, wait: bool = True):
        self.store = as_store(store)
        self.disk, self.wait = require_a(Disk, "disk", disk, "a Disk, such as course.DISKS['hdd']"), wait
        self._reads = PerProcess(count)  # in each process, since each opens files of its own
        self._position = SharedFile()  # empty, which reads as zeros: no file's checksum, so the first read seeks

    def __repr__(self) -> str:
        return f"SimulatedStore({self.store!r}, {self.storage})"

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def sorts_keys(self) -> bool:
        """As of the other store."""
        return getattr(self.store, "sorts_keys", False)

    @property
    def labels(self) -> Sequence[Any] | None:
        """The other store's, which are not of the images' bytes; None if it has none."""
        return getattr(self.store, "labels", None)

    @property
    def classes(self) -> list[str] | None:
        """As of the other store."""
        return getattr(self.store, "classes", None)

    def keys(self) -> Sequence[str]:
        """The other store's keys, without delay."""
        return self.store.keys()

    def folders_without_image(self) -> dict[str, Counter[str]]:
        """Those of the other store, if it can tell them."""
        return folders_without_image(self.store)

    def allow_requests(self, n_at_once: int) -> None:
        """Let the other store answer `n_at_once` requests at a time."""
        allow_requests(self.store, n_at_once)

    def read(self, key: str) -> bytes:
        """The other store's bytes, when the disk would have them."""
        data = read_bytes(self.store, key)
        extents = [Extent(key, 0, len(data), opens=True)]
        if isinstance(self.store, HasExtents):
            extents = list(self.store.extents(key, first=next(self._reads()) == 0))
        with self._locked_position() as position:
            seconds = sum(_move(position, extent, self.disk) for extent in extents)
            position.busy_s += seconds
            if self.wait and self.disk.one_head:
                time.sleep(seconds)
        if self.wait and not self.disk.one_head:
            time.sleep(seconds)
        return data

    @property
    def storage(self) -> str:
        """The disk's name in a frame: `compare(..., storage={label: store.storage})` marks its plots as simulated."""
        return f"simulated {self.disk.name}"

    @property
    def busy_s(self) -> float:
        """Seconds that the storage has been busy so far, for all processes."""
        with self._locked_position() as position:
            return position.busy_s

    @contextmanager
    def _locked_position(self) -> Iterator["_Position"]:
        with open(self._position.path, "r+b", buffering=0) as file:
            acquire_lock(file)
            position = _Position()
            file.readinto(position)
            yield position
            file.seek(0)
            file.write(position)


class _Position(ctypes.Structure):
    """Where the last read ended (file: checksum of its name), and how long the disk was busy.

    One for all processes and threads, in a small locked file.
    """

    _fields_ = (("file", ctypes.c_int64), ("offset", ctypes.c_int64), ("busy_s", ctypes.c_double))


def _move(position: _Position, extent: Extent, disk: Disk) -> float:
    """Seconds to read `extent`, after which `position` is at its end."""
    file = zlib.crc32(extent.file.encode("utf-8", "surrogateescape"))
    gap = extent.offset - position.offset
    is_near = file == position.file and 0 <= gap <= disk.readahead_bytes
    position.file, position.offset = file, extent.offset + extent.size
    n_seeks = extent.opens * disk.trips_to_open + (not is_near)
    n_bytes = extent.size + (gap if is_near else 0)
    return n_seeks * (disk.seek_ms + disk.latency_ms) / 1e3 + n_bytes / (disk.bandwidth_mb_per_s * 1e6)
