"""Upper limits of this machine, to compare loaders with: decoding alone, copying alone, writing alone."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, cycle
from queue import SimpleQueue
from typing import Any

import numpy as np

from labkit.data.decode import decode
from labkit.data.stores import Store, read_bytes
from labkit.util.arguments import require_int
from labkit.util.machine import usable_cores

BATCH = 64
_BLOCKS_BYTES = 128 * 2**20  # all blocks of sources, and the same of targets: together several times the usual caches


def decode_limit(store: Store, *, num_threads: int | None = None) -> "Limit":
    """Decode every image of a store at full size on all cores, and do nothing else: the limit of the JPEG path.

    The files are read into memory once, when this is called. Each pass decodes them to RGB in threads and drops the
    pixels: no reading, no crop, no resize, no batch. No loader that decodes whole images on these cores can be faster.
    A loader that decodes only part of an image (at a DCT scale, or only the crop) can. The decoder, turbojpeg, gets the
    bytes without the checks of `lk.decode`; what it refuses (a PNG, a warning) goes to `lk.decode`.

    Args:
        store: Encoded images.
        num_threads: Default: the usable cores.

    Returns:
        An iterable for `compare`: each pass yields the number of images decoded, 64 at a time and then the rest.

    Raises:
        ValueError: fewer than one thread.
        DecodeError: while iterating, an image cannot be decoded; names it.
    """
    images = [(key, read_bytes(store, key)) for key in store.keys()]  # noqa: SIM118
    return Limit(len(images), _thread_count(num_threads), lambda sizes: images, _decode_unchecked, report_every=BATCH)


def _decode_unchecked(key: str, data: bytes) -> None:
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "RGB")  # releases the GIL
    except ValueError:
        decode(data, "turbojpeg", key=key)


def memcpy_limit(n_images: int, *, size: int = 224, num_threads: int | None = None) -> "Limit":
    """Copy batches of pixels from memory to memory on all cores, and do nothing else: the limit of raw pixels.

    Each thread copies whole uint8 batches (64, size, size, 3), one at a time, between blocks that are allocated and
    filled once, when this is called. The batches rotate through blocks larger than the caches, from pass to pass too,
    so this measures the bandwidth of memory. No loader that moves as many raw pixels as a batch holds can be faster,
    unless its images lie in a cache or it reads fewer pixels than it delivers. There is no crop, resize or flip.

    Args:
        n_images: Images in a pass.
        size: Side of the square images in pixels.
        num_threads: Default: the usable cores.

    Returns:
        An iterable for `compare`: each pass yields the number of images copied, 64 at a time and then the rest.

    Raises:
        ValueError: fewer than one image, pixel or thread.
    """
    return _limit_of_memory(n_images, size, num_threads, np.uint8, 2, lambda source, target: np.copyto(target, source))


def write_limit(n_images: int, *, size: int = 224, num_threads: int | None = None) -> "Limit":
    """Write batches of float32 to memory on all cores, and do nothing else: the limit of loaders that deliver floats.

    As `memcpy_limit`, but nothing is read: each thread sets whole batches (64, size, size, 3) of float32, four times
    the bytes of uint8, to a constant. Arguments, iterable and errors are the same.
    """
    return _limit_of_memory(n_images, size, num_threads, np.float32, 1, lambda target: target.fill(0))


def _limit_of_memory(
    n_images: int, size: int, num_threads: int | None, dtype: type, n_arrays: int, work: Callable[..., Any]
) -> "Limit":
    """Call `work`, which releases the GIL, with blocks (64 or fewer, size, size, 3) of each array."""
    n_images, num_threads = require_int("n_images", n_images), _thread_count(num_threads)
    shape = (BATCH, require_int("size", size), size, 3)
    # At least two for each thread, so that no two threads write one block at a time.
    n_blocks = max(2 * num_threads, math.ceil(_BLOCKS_BYTES / (math.prod(shape) * np.dtype(dtype).itemsize)))
    # Filled, because untouched memory would be mapped page by page during the work. Targets are filled last, which
    # evicts the sources from the caches.
    arrays: list[np.ndarray] = [np.full((n_blocks, *shape), value, dtype) for value in range(1, n_arrays + 1)]
    blocks = cycle(range(n_blocks))  # the next pass goes on with the next block

    def work_on_block(n_rows: int, block: int) -> None:
        work(*(array[block, :n_rows] for array in arrays))

    def items_of_pass(sizes: list[int]) -> list[tuple]:
        return list(zip(sizes, blocks, strict=False))

    return Limit(n_images, num_threads, items_of_pass, work_on_block, report_every=1)


def _thread_count(num_threads: int | None) -> int:
    return usable_cores() if num_threads is None else require_int("num_threads", num_threads)


class Limit:
    """What the limits return: work in threads, as an iterable for `compare`.

    A pass yields the sizes of its batches as soon as that many images are done.

    Args:
        n_images: Of a pass.
        num_threads: Threads that share the items of a pass.
        items_of_pass: Takes the sizes of the batches; gives the arguments of each call of `work`.
        work: What is done.
        report_every: Items in a batch.
    """

    batch_size, num_workers = BATCH, 0

    def __init__(
        self, n_images: int, num_threads: int, items_of_pass: Callable[[list[int]], list[tuple]],
        work: Callable[..., Any], report_every: int,
    ):  # fmt: skip
        self.num_threads = num_threads
        self._sizes = [min(BATCH, n_images - start) for start in range(0, n_images, BATCH)]
        self._items_of_pass, self._work, self._report_every = items_of_pass, work, report_every

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        # No executor: it would make a future for each image, and wake the caller as often.
        items = self._items_of_pass(self._sizes)
        remaining, finished, reports = iter(items), count(1), SimpleQueue[BaseException | None]()

        def run() -> None:
            try:
                for item in remaining:
                    self._work(*item)
                    number = next(finished)
                    if number % self._report_every == 0 or number == len(items):
                        reports.put(None)
            except BaseException as error:
                reports.put(error)

        threads = [threading.Thread(target=run, daemon=True) for _ in range(self.num_threads)]
        for thread in threads:
            thread.start()
        try:
            for size in self._sizes:
                if error := reports.get():
                    raise error
                yield size
        finally:
            deque(remaining, maxlen=0)  # a caller that stops early leaves no work for the threads
            for thread in threads:
                thread.join()
