"""The kernel's page cache: put files out of it, and ask the kernel whether they are out.

A second epoch over a folder reads memory, not the disk. A benchmark that means the disk has to evict first, and has
to check: eviction is a request that the kernel may refuse.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def evict(paths: Iterable[os.PathLike]) -> int:
    """Ask the kernel to drop these files from the page cache.

    Dirty pages are written first, since only clean ones can be dropped.

    Returns:
        Bytes that the files hold: what a cold reader has to fetch from the disk.

    Raises:
        OSError: this system cannot evict single files (macOS, Windows).

    Source: posix_fadvise(2), POSIX_FADV_DONTNEED. Taught in: notebooks/00_measure.ipynb
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system has no posix_fadvise: cold reads cannot be arranged here")
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
    """Share of the files' pages that lie in the page cache, 0.0 to 1.0, by mincore(2)."""
    resident = pages = 0
    for path in paths:
        flags = _page_flags(Path(path))
        pages += len(flags)
        resident += sum(flag & 1 for flag in flags)
    return resident / pages if pages else 0.0


def _page_flags(path: Path) -> bytes:
    size = path.stat().st_size
    if size == 0:
        return b""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view:
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        # NumPy gives the address of a read-only mapping; ctypes' from_buffer wants a writable one.
        address = _address(view)
        if _libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
    return bytes(flags)


def _address(view: mmap.mmap) -> int:
    import numpy as np

    return np.frombuffer(view, np.uint8).ctypes.data


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
