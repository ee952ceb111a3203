"""Have the kernel read the images of a pixel file before they are touched, while they come from a disk."""

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

if sys.platform != "win32":
    import resource

_WILL_NEED: int = getattr(mmap, "MADV_WILLNEED", -1)
CAN_ADVISE = _WILL_NEED >= 0  # not on Windows
_LOOK_EVERY = 64  # images
_QUIET_LOOKS = 2  # without a read, before the file counts as cached: two threads may look at once


class DiskReads:
    """Whether this process reads from disks, by the kernel's counters.

    A hint for an image that is in memory would cost as much as a twentieth of the work on it. The counters are looked
    at once in 64 images, and hints count as reads where they bring pages in.
    """

    def __init__(self) -> None:
        self._images_left, self._seen = 0, -1
        self._quiet_looks = 0 if CAN_ADVISE else _QUIET_LOOKS

    def go_on(self, n_images: int) -> bool:
        """Whether there were reads lately. `n_images`: how many images will be used."""
        if self._images_left <= 0 and CAN_ADVISE:
            self._images_left = _LOOK_EVERY
            seen = _count_reads()
            self._quiet_looks = self._quiet_looks + 1 if seen == self._seen else 0
            self._seen = seen
        self._images_left -= n_images
        return self._quiet_looks < _QUIET_LOOKS


def _count_reads() -> int:
    """Blocks that this process had read from disks, and its page faults that waited for one."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_majflt


def will_need(view: mmap.mmap, start: int, size: int) -> None:
    """Begin to read a range of a mapped file, without waiting for it.

    Source: madvise(2), MADV_WILLNEED.
    """
    before = start % mmap.PAGESIZE  # a range begins with a page
    with suppress(OSError):  # only a hint: what the kernel refuses is read when it is touched
        advise(view, start - before, before + size)


def advise(view: mmap.mmap, start: int, size: int) -> None:
    """The system call; `start` is a multiple of the page size."""
    view.madvise(_WILL_NEED, start, size)


def are_consecutive(indices: Sequence[int]) -> bool:
    """Whether the kernel sees that images are read in their order, and reads ahead by itself. One image shows none."""
    first, count = indices[0], len(indices)
    return count > 1 and indices[-1] - first == count - 1 and list(indices) == list(range(first, first + count))
