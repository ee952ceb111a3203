"""Disks and networks that are not there: real bytes, delivered as late as a slower storage would."""

import os
import struct
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from labkit.core import PerProcess, acquire_lock, has_file_locks
from labkit.data.blobs import Extent

_STATE = struct.Struct("=qqd")  # a `_Position`


@dataclass(frozen=True)
class Disk:
    """How long a storage takes.

    Args:
        name: For labels; plots say *simulated*.
        seek_ms: To move to another place; an opened file costs one more, for its inode.
        bandwidth_mb_per_s: Of one reader, in 1e6 bytes.
        latency_ms: Of a request over a network; it is asked where a disk would seek.
        one_head: Requests of all processes wait for each other, as on a rotating disk.
        readahead_bytes: Gaps up to this are read over rather than sought over.

    Raises:
        ValueError: a time below zero, or no bandwidth.
    """

    name: str
    seek_ms: float = 0.0
    bandwidth_mb_per_s: float = float("inf")
    latency_ms: float = 0.0
    one_head: bool = False
    readahead_bytes: int = 128 * 1024

    def __post_init__(self):
        if min(self.seek_ms, self.latency_ms, self.readahead_bytes) < 0 or self.bandwidth_mb_per_s <= 0:
            raise ValueError(f"{self}: times are 0 or more, the bandwidth is above 0")


DISKS = {
    "hdd": Disk("hard disk", seek_ms=8.0, bandwidth_mb_per_s=180.0, one_head=True),
    "network": Disk("network storage", latency_ms=1.0, bandwidth_mb_per_s=1000.0),
    "object": Disk("object storage", latency_ms=30.0, bandwidth_mb_per_s=90.0),
}


class SimulatedStore:
    """Another store's images, delivered as late as `disk` would.

    Nothing counts as cached: each read pays as a first one does. What a read touches is asked from the store
    (`extents`): a folder's file is opened and read, an indexed tar's member only read, and `tarfile` first visits
    every header. A store that cannot say (HTTP, object storage) pays as for one opened file a read.

    Args:
        store: Where the bytes come from.
        disk: One of `DISKS`, or a `Disk` of your own.
        wait: False adds up the time in `busy_s` without waiting, for storages that would take all day.

    Raises:
        OSError: the system has no file locks (Windows).

    Taught in: notebooks/09_marigold_storage.ipynb
    """

    def __init__(self, store: Any, disk: Disk = DISKS["hdd"], *, wait: bool = True):
        self.store, self.disk, self.wait = store, disk, wait
        self._head = _Head()
        self._reads = PerProcess(count)

    def __repr__(self) -> str:
        return f"SimulatedStore({self.store!r}, simulated {self.disk.name})"

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Sequence[str]:
        """The other store's keys, without delay."""
        return self.store.keys()

    def read(self, key: str) -> bytes:
        """The other store's bytes, when the disk would have them."""
        data = self.store.read(key)
        extents = self._extents(key, len(data))
        with self._head.locked() as position:
            seconds = sum(self._seconds(position, extent) for extent in extents)
            position.busy_s += seconds
            if self.disk.one_head:
                self._sleep(seconds)
        if not self.disk.one_head:
            self._sleep(seconds)
        return data

    @property
    def storage(self) -> str:
        """What to name it in a frame: `compare(..., storage={label: store.storage})` marks its plots as simulated."""
        return f"simulated {self.disk.name}"

    @property
    def busy_s(self) -> float:
        """Seconds of work that were asked of the storage so far, by all processes."""
        with self._head.locked() as position:
            return position.busy_s

    def _sleep(self, seconds: float) -> None:
        if self.wait:
            time.sleep(seconds)

    def _extents(self, key: str, size: int) -> list[Extent]:
        if not hasattr(self.store, "extents"):
            return [Extent(key, 0, size, opens=True)]
        number = next(self._reads())  # of this process: each worker opens its own files
        return list(self.store.extents(key, first=number == 0))

    def _seconds(self, position: "_Position", extent: Extent) -> float:
        gap = position.gap_to(extent)
        near = 0 <= gap <= self.disk.readahead_bytes
        position.move(extent)
        trips = extent.opens + (not near)
        transferred_bytes = extent.size + (gap if near else 0)
        moving_s = transferred_bytes / (self.disk.bandwidth_mb_per_s * 1e6)
        return trips * (self.disk.seek_ms + self.disk.latency_ms) / 1e3 + moving_s


@dataclass
class _Position:
    """Where the last read ended, and the seconds of work so far."""

    file: int = -1
    offset: int = 0
    busy_s: float = 0.0

    def gap_to(self, extent: Extent) -> int:
        """Bytes from here to `extent`; -1 in another file."""
        return extent.offset - self.offset if _number(extent.file) == self.file else -1

    def move(self, extent: Extent) -> None:
        self.file, self.offset = _number(extent.file), extent.offset + extent.size


class _Head:
    """One position for all processes and threads, in a small locked file."""

    def __init__(self):
        if not has_file_locks():
            raise OSError("SimulatedStore needs file locks, which this system lacks: use Linux, macOS or WSL")
        descriptor, self._path = tempfile.mkstemp(prefix="labkit-disk-")
        os.write(descriptor, _STATE.pack(-1, 0, 0.0))
        os.close(descriptor)
        weakref.finalize(self, _remove, self._path, os.getpid())

    @contextmanager
    def locked(self) -> Iterator[_Position]:
        with open(self._path, "r+b", buffering=0) as file:
            acquire_lock(file)
            position = _Position(*_STATE.unpack(file.read(_STATE.size)))
            yield position
            file.seek(0)
            file.write(_STATE.pack(position.file, position.offset, position.busy_s))


def _number(file: str) -> int:
    return zlib.crc32(file.encode("utf-8", "surrogateescape"))


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker ends too, and must not remove it
        os.unlink(path)
