"""What the machine allows: the rates that no loader on these cores can exceed, measured beside the loaders."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np

from labkit.core import usable_cores
from labkit.data import DECODERS, decode
from labkit.data.stores import Store

BATCH = 64
_BLOCK_BYTES = 128 * 2**20  # of sources, and again of targets: together several times the usual caches


def decode_limit(store: Store, *, num_threads: int | None = None, decoder: str = "turbojpeg") -> "DecodeLimit":
    """Decode every image of a store at full size, and nothing else, on all cores: the limit of the JPEG path.

    The files are read into memory here, once. Each pass decodes them to RGB in threads and drops the pixels: no
    reading, no crop, no resize, no batch. So it bounds every loader that decodes whole images by that decoder on these
    cores. A loader that decodes less of an image than all (at a DCT scale, or only the crop) may go beyond it.

    Args:
        store: Encoded images.
        num_threads: Default: the usable cores.
        decoder: One of `DECODERS`. `"turbojpeg"`, the fastest, is handed the bytes without the checks of `lk.decode`;
            what it refuses (PNG, a warning) goes to `lk.decode`, as does every image with another decoder.

    Returns:
        An iterable for `compare`: every pass yields counts of decoded images, 64 at a time, the last one smaller.

    Raises:
        ValueError: unknown decoder, or fewer than one thread.
        DecodeError: while iterating, an image cannot be decoded; names it.

    Taught in: notebooks/11_resize_once.ipynb
    """
    if decoder not in DECODERS:
        raise ValueError(f"unknown decoder {decoder!r}: choose one of {', '.join(DECODERS)}")
    return DecodeLimit(store, _threads(num_threads), decoder)


def memcpy_limit(n_images: int, *, size: int = 224, num_threads: int | None = None) -> "MemcpyLimit":
    """Copy batches of pixels from memory to memory on all cores, and nothing else: the limit of raw pixels.

    Every thread copies whole uint8 batches (64, size, size, 3), one at a time, between blocks that are allocated and
    filled here, once. The batches take turns in blocks larger than the caches, from pass to pass too, so that this is
    the bandwidth of memory. It bounds every loader that brings as many raw pixels as a batch holds from one place in
    memory to another: no choice of a crop, no resize, no flip. Only a loader whose images lie in a cache, or that reads
    fewer pixels than it delivers, may go beyond it.

    Args:
        n_images: Images in a pass.
        size: Side of the square images in pixels.
        num_threads: Default: the usable cores.

    Returns:
        An iterable for `compare`: every pass yields counts of copied images, 64 at a time, the last one smaller.

    Raises:
        ValueError: fewer than one image, pixel or thread.

    Taught in: notebooks/11_resize_once.ipynb
    """
    if n_images < 1 or size < 1:
        raise ValueError(f"n_images={n_images}, size={size}: at least 1 is wanted")
    return MemcpyLimit(n_images, size, _threads(num_threads))


class DecodeLimit:
    """What `decode_limit` returns."""

    batch_size, num_workers = BATCH, 0

    def __init__(self, store: Store, num_threads: int, decoder: str):
        self.num_threads = num_threads
        self._decode = _bare_turbojpeg if decoder == "turbojpeg" else partial(_checked, decoder=decoder)
        self._images = [(key, store.read(key)) for key in store.keys()]  # noqa: SIM118

    def __len__(self) -> int:
        return len(_lengths(len(self._images)))

    def __iter__(self) -> Iterator[int]:
        return _counts(len(self._images), _shared_out(self._images, self._decode, self.num_threads, every=BATCH))


class MemcpyLimit:
    """What `memcpy_limit` returns."""

    batch_size, num_workers = BATCH, 0

    def __init__(self, n_images: int, size: int, num_threads: int):
        self.num_threads, self._n_images = num_threads, n_images
        shape = (BATCH, size, size, 3)
        # At least two for each thread, so that no two threads write one target at a time.
        n_blocks = max(2 * num_threads, math.ceil(_BLOCK_BYTES / math.prod(shape)))
        # Filled: untouched memory would be mapped page by page while it is copied. Targets last, which takes the
        # sources out of the caches.
        self._sources, self._targets = (np.full((n_blocks, *shape), value, np.uint8) for value in (1, 2))
        self._turns = count()

    def __len__(self) -> int:
        return len(_lengths(self._n_images))

    def __iter__(self) -> Iterator[int]:
        copies = [(next(self._turns) % len(self._sources), length) for length in _lengths(self._n_images)]
        return _counts(self._n_images, _shared_out(copies, self._copy, self.num_threads, every=1))

    def _copy(self, block: int, length: int) -> None:
        np.copyto(self._targets[block, :length], self._sources[block, :length])  # releases the GIL


def _bare_turbojpeg(key: str, data: bytes) -> None:
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "RGB")  # releases the GIL
    except ValueError:
        _checked(key, data, "turbojpeg")


def _checked(key: str, data: bytes, decoder: str) -> None:
    decode(data, decoder, key=key)


def _threads(num_threads: int | None) -> int:
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: at least 1 is wanted")
    return num_threads or usable_cores()


def _lengths(n_images: int) -> list[int]:
    """Images in each batch."""
    return [min(BATCH, n_images - start) for start in range(0, n_images, BATCH)]


def _counts(n_images: int, finished: Iterator[None]) -> Iterator[int]:
    for length, _ in zip(_lengths(n_images), finished, strict=True):
        yield length


def _shared_out(items: Iterable[tuple], work: Callable[..., Any], num_threads: int, every: int) -> Iterator[None]:
    """Call `work(*item)` in threads; yield whenever `every` items are done, and at the end for those that remain.

    The threads take item after item from one iterator: a pool would cost a future an image, and chunks of images would
    leave cores idle behind the last one. The one who waits is woken only once in `every` items.
    """
    items = list(items)
    queue, done, news = iter(items), count(1), SimpleQueue()  # `next` of each is atomic

    def run() -> None:
        try:
            for item in queue:
                work(*item)
                number = next(done)
                if number % every == 0 or number == len(items):
                    news.put(None)
        except BaseException as error:
            news.put(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(math.ceil(len(items) / every)):
            if error := news.get():
                raise error
            yield
    finally:
        for _ in queue:  # whoever leaves early leaves no work behind
            pass
        for thread in threads:
            thread.join()
