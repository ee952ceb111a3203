"""The kernel's page cache: drop files from it, and ask which of their pages it holds.

A second epoch over a folder reads memory, not the disk. A benchmark of the disk has to evict the files first, and then
check that they are gone: the kernel may ignore the request.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable

import numpy as np


def evict(paths: Iterable[os.PathLike]) -> int:
    """Ask the kernel to drop these files from the page cache.

    Dirty pages are written first, since only clean ones can be dropped.

    Returns:
        Total size of the files in bytes: what a cold reader has to fetch from the disk.

    Raises:
        OSError: this system cannot evict single files (macOS, Windows).

    Source: posix_fadvise(2), POSIX_FADV_DONTNEED. Taught in: notebooks/00_measure.ipynb
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system has no posix_fadvise: cold reads cannot be measured here")
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return total


def resident_fraction(paths: Iterable[os.PathLike]) -> float:
    """Share of the files' pages that are in the page cache, 0.0 to 1.0, by mincore(2)."""
    resident = pages = 0
    for path in paths:
        flags = _read_page_flags(path)
        pages += len(flags)
        resident += sum(flag & 1 for flag in flags)
    return resident / pages if pages else 0.0


def _read_page_flags(path: os.PathLike) -> bytes:
    size = os.path.getsize(path)
    if size == 0:
        return b""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view:
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        # NumPy gives the address of a read-only mapping; ctypes' from_buffer needs a writable one.
        address = np.frombuffer(view, np.uint8).ctypes.data
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), os.fspath(path))
    return bytes(flags)
