"""The page cache: what is in it, and files that it drops."""

import ctypes
import mmap
import os
from collections.abc import Iterable

import numpy as np


def evict(paths: Iterable[os.PathLike]) -> None:
    """Ask the kernel to drop these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident_fraction(paths: Iterable[os.PathLike]) -> float:
    """Share of the files' pages that are in the page cache, 0.0 to 1.0, by mincore(2)."""
    resident = pages = 0
    for path in paths:
        if not (size := os.path.getsize(path)):
            continue
        flags = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
            # NumPy gives the address of a read-only mapping; ctypes' from_buffer needs a writable one.
            address = ctypes.c_void_p(np.frombuffer(view, np.uint8).ctypes.data)
            if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), flags.ctypes):
                raise OSError(ctypes.get_errno(), "mincore failed", os.fspath(path))
        resident, pages = resident + int((flags & 1).sum()), pages + len(flags)
    return resident / pages if pages else 0.0
