"""BatchLoader: threads that write crops straight into batches, with no worker processes and no copies between them."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from labkit.core import PackedStrings, PerProcess, usable_cores, use_one_torch_thread
from labkit.data import DecodeError, SkipLog, Skipped, labels_of
from labkit.data.stores import Store
from labkit.pipeline.batch_loader.buffers import BatchBuffers
from labkit.pipeline.batch_loader.fillers import Draw, EncodedFiller, PixelFiller
from labkit.pipeline.samplers import Shuffled


class BatchLoader:
    """Random resized crops of a store's images, as uint8 batches.

    libjpeg-turbo and OpenCV let other threads run while they work, so threads can do what `DataLoader` needs processes
    for, and write into the batch itself. Of a JPEG only the rows and columns that the crop needs are decoded, at the
    smallest of 1/1, 1/2, 1/4, 1/8 of its size that has the crop's pixels.

    Args:
        source: A store of encoded images, or a `PixelStore`. Labels are the folders' numbers in alphabetical order.
        size: Height and width of the crops in pixels.
        batch_size: Images in a batch.
        num_threads: None: one a usable core (shared among the ranks that torchrun starts here).
        antialias: True: pixels as of torchvision v2's transforms, to within rounding. False: OpenCV's bilinear, as
            Albumentations. They differ where a crop is shrunk.
        seed: Of order, crops and flips, which depend on (seed, epoch, index) and on nothing else.
        train: False: the middle of each image, as Resize(256) and CenterCrop(224) keep it; nothing random.
        shuffle: A new order each epoch. None: as `train`.
        sampler: Gives the indices instead, such as torch's `DistributedSampler`; its `set_epoch` is called.
        drop_last: Leave out a last batch that is not full.
        scale: Least and largest share of the image's area in a crop.
        ratio: Least and largest width / height of a crop.
        flip: Probability of mirroring.
        scaled_decoding: False: always decode at full size.
        prefetch_factor: Batches that are made ahead.
        pin_memory: Page-locked batches. None: where CUDA is available.
        on_error: `"raise"` passes `DecodeError` on. `"skip"` leaves the image out of its batch; read `skipped` at the
            end; what was skipped is also printed at exit.

    Batches: `(images, labels)`; images uint8 (batch_size, 3, size, size) RGB in channels-last memory, labels int64
    (batch_size,). A batch may be kept: its memory is used again only when nobody holds it.

    A JPEG damaged below the rows that its crop needs is not noticed in that epoch. The threads end with the loader.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; set it with `set_epoch` to resume.

    Raises:
        ValueError: an argument that no loader can have, an empty store, or both `shuffle` and `sampler`.

    Taught in: notebooks/11_resize_once.ipynb
    """

    num_workers = 0

    def __init__(
        self,
        source: Store | Any,
        *,
        size: int = 224,
        batch_size: int = 64,
        num_threads: int | None = None,
        antialias: bool = True,
        seed: int = 0,
        train: bool = True,
        shuffle: bool | None = None,
        sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        scaled_decoding: bool = True,
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        on_error: str = "raise",
    ):
        _check_counts(size=size, batch_size=batch_size, num_threads=num_threads, prefetch_factor=prefetch_factor)
        _check_range("scale", scale, 1.0)
        _check_range("ratio", ratio, float("inf"))
        if not 0 <= flip <= 1:
            raise ValueError(f"flip={flip}: a probability between 0 and 1 is wanted")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: choose 'raise' or 'skip'")
        if shuffle and sampler is not None:
            raise ValueError("shuffle=True and a sampler exclude each other: the sampler decides the order")
        self.batch_size, self.size, self.epoch = batch_size, size, 0
        self.num_threads = num_threads or max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._prefetch_factor = prefetch_factor
        self._skips = SkipLog() if on_error == "skip" else None
        draw = Draw(size, antialias, train, seed, scale, ratio, flip)
        self._open(source, draw, scaled_decoding)
        if sampler is None:
            shuffled = train if shuffle is None else shuffle
            sampler = Shuffled(len(self.keys), seed) if shuffled else SequentialSampler(self.keys)
        self._requests = BatchSampler(sampler, batch_size, drop_last)
        pinned = torch.cuda.is_available() and pin_memory is not False
        # Kept for all epochs: OpenCV holds about 1 KB for each thread that has ended. They end with this object.
        self._pool = PerProcess(partial(ThreadPoolExecutor, self.num_threads, "labkit-batches", use_one_torch_thread))
        self._buffers = BatchBuffers((batch_size, size, size, 3), prefetch_factor + 2, pinned)

    def _open(self, source: Any, draw: Draw, scaled_decoding: bool) -> None:
        if hasattr(source, "pixels"):
            self.keys, self.classes, self._labels = source.keys, source.classes, source.labels
            self._filler = PixelFiller(source, draw)
        else:
            self.keys = PackedStrings(source.keys())
            self.classes, self._labels = labels_of(self.keys)
            self._filler = EncodedFiller(source, self.keys, draw, scaled_decoding, self._skips)
        if not len(self.keys):
            raise ValueError(f"{source!r} holds no image")

    def __len__(self) -> int:
        return len(self._requests)

    def set_epoch(self, epoch: int) -> None:
        """Continue with this epoch."""
        self.epoch = epoch

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far."""
        return self._skips.read() if self._skips else []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._epoch_of_batches(epoch)

    def _epoch_of_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        if hasattr(self._requests.sampler, "set_epoch"):
            self._requests.sampler.set_epoch(epoch)
        started: deque[_Batch] = deque()
        pool = self._pool()
        try:
            for indices in self._requests:
                started.append(self._start(pool, np.array(indices), epoch))
                if len(started) > self._prefetch_factor:
                    yield self._finish(started)
            while started:
                yield self._finish(started)
        finally:  # an error, Ctrl-C, or a loop that was left
            tasks = [task for batch in started for task in batch.tasks.values()]
            wait(task for task in tasks if not task.cancel())

    def _start(self, pool: ThreadPoolExecutor, indices: np.ndarray, epoch: int) -> "_Batch":
        memory, images = self._buffers.take()
        # Several tasks a thread: at the end of an epoch none waits long for another.
        step = max(self._filler.smallest_task, -(-len(indices) // (4 * self.num_threads)))
        plan = self._filler.plan(indices, epoch)
        tasks = {}
        for start in range(0, len(indices), step):
            part = slice(start, min(start + step, len(indices)))
            tasks[start] = pool.submit(self._filler.fill, memory[part], indices[part], plan[part])
        return _Batch(indices, images[: len(indices)].permute(0, 3, 1, 2), tasks)

    def _finish(self, started: "deque[_Batch]") -> tuple[Tensor, Tensor]:
        """The first of what was started, which stays there until it is whole."""
        batch = started[0]
        # Waiting for one after the other would take Python's lock from the threads at work each time.
        wait(batch.tasks.values(), return_when=FIRST_EXCEPTION)
        empty = [start + row for start, task in batch.tasks.items() for row in task.result()]
        labels = torch.from_numpy(self._labels[batch.indices])
        started.popleft()
        if not empty:
            return batch.images, labels
        if len(empty) == len(labels):
            key = self.keys[batch.indices[0]]
            reason = next(skip.reason for skip in self.skipped if skip.key == key)
            raise DecodeError(f"all {len(labels)} images of a batch were skipped, the first: {reason}")
        kept = torch.from_numpy(np.delete(np.arange(len(labels)), empty))
        return batch.images[kept], labels[kept]


class _Batch(NamedTuple):
    """A batch that threads are filling: `tasks` maps the first row of each task to its future."""

    indices: np.ndarray
    images: Tensor
    tasks: dict[int, Future]


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r}: a whole number of at least 1 is wanted")


def _check_range(name: str, values: tuple[float, float], largest: float) -> None:
    least, most = values
    if not 0 < least <= most <= largest:
        raise ValueError(f"{name}={values}: two numbers above 0, the smaller first, are wanted")
