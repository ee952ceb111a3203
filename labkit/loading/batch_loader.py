"""BatchLoader: threads write crops straight into batches, without worker processes or copies between them."""

import copy
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from labkit.data.dataset import SkipLog, Skipped
from labkit.data.labels import Labeled, check_same_classes, labels_of
from labkit.data.pixels import PixelStore
from labkit.data.stores import Store
from labkit.errors import ArgumentError, DecodeError
from labkit.loading.fill import BatchBuffers, CropPolicy, CropWriter, EncodedFiller, PixelFiller, PixelFormat, View
from labkit.loading.processes import ProcessPool
from labkit.loading.read_ahead import AfterReads, Reader, ReadsAhead, with_reads
from labkit.loading.resume import Pass, Progress, Resumable
from labkit.loading.samplers import SeededBatchSampler, choose_sampler
from labkit.loading.seeding import SeededIndices, derived_seed
from labkit.loading.torch_loader import cores_per_rank
from labkit.util.arguments import require_choice, require_fraction, require_int, require_range, require_seed
from labkit.util.process import PerProcess, use_one_torch_thread
from labkit.util.strings import PackedStrings


class BatchLoader(Labeled, Resumable):
    """Load random resized crops of a store's images as batches of bytes or of normalized floats.

    libjpeg-turbo and OpenCV release the GIL while they work, so threads can do what `DataLoader` needs processes for,
    and write into the batch itself. Only the rows and columns of a JPEG that the crop needs are decoded, at the
    smallest of 1/1, 1/2, 1/4 and 1/8 of its size at which the crop still has `size` pixels in height and width.

    Args:
        source: A store of encoded images, a path or URL of one, as `lk.open_store` takes it, or a `PixelStore`. Labels
            are those of `ImageDataset`, or the store's own.
        size: Height and width of the crops in pixels.
        crops: Several crops of each image: (size, scale, number) of each kind, and `size` and `scale` do not count. For
            DINO: `crops=[(224, (0.25, 1), 2), (96, (0.05, 0.25), 8)]`. Each image is read once, and decoded once.
        batch_size: Images in a batch.
        num_threads: Default: one per usable core, shared among the ranks that torchrun starts on this machine.
        num_processes: Worker processes that share out the threads, each with a lock (GIL) of its own. Default: none,
            threads of this process. They pay where one lock cannot feed all cores: it feeds at most
            1e6 / `labkit.measure.gil.gil_us_per_image` images per second. A batch is then copied once more, epochs are
            read one at a time, and `on_error="skip"` is refused. In a script, guard the training by
            `if __name__ == "__main__":`, since workers import it.
        antialias: True: the pixels of torchvision's v2 transforms, to within rounding. False: OpenCV's bilinear, as
            in Albumentations. They differ where a crop is shrunk.
        dtype: `torch.uint8`; or `torch.float32`, `float16` or `bfloat16`, which the threads write as they normalize.
            Floats take two to four times the memory of bytes, on the way to the GPU, too.
        mean, std: Of red, green and blue, for floats: what `v2.Normalize` takes. Default: floats from 0 to 1.
        memory_format: `torch.channels_last`, or `torch.contiguous_format`: planes of red, green and blue.
        seed: Of order, crops and flips, which depend only on (seed, epoch, index), and on how many times the index came
            before in the epoch.
        train: False: the center of each image, as Resize(256) and CenterCrop(224) keep it for `size=224`, and no draws.
        shuffle: A new order each epoch. Default: the value of `train`.
        sampler: Gives the indices instead, such as torch's `DistributedSampler`; its `set_epoch` is called, unless the
            training does so itself. Without one, the ranks that torchrun or `torch.distributed` started share out each
            epoch as that does: each has as many images, of which some may come a second time.
        drop_last: Leave out a last batch that is not full.
        scale: Smallest and largest share of the image area in a crop.
        ratio: Smallest and largest width / height of a crop.
        flip: Probability of mirroring.
        scaled_decoding: False: always decode at full size.
        prefetch_factor: Batches made ahead: of the loader, or of each of its `num_processes`.
        pin_memory: Page-locked batches. Default: if CUDA is available.
        reads_in_flight: Requests to the store at a time, by as many threads that only read, in addition to those that
            decode: for storage far away. Latency in seconds times the images per second that the cores can decode
            says how many it takes. They run ahead of the batches that are being made, and of a batch's end. Encoded
            images in memory are at most those of `prefetch_factor + 1` batches and `reads_in_flight` more; with
            `num_processes`, which share the requests out, those of one batch per process and `reads_in_flight` more.
            An `HttpStore`, an `ObjectStore` on S3 or a `TarStore` on either keeps as many connections. A `break` gives
            up what has not begun. Default: the threads that decode read, each its own image.
        on_error: `"raise"` passes errors on. `"skip"` leaves an image that cannot be decoded, or is gone, out of its
            batch and adds it to `skipped`, which is also printed at exit.
        classes: As for `ImageDataset`: `BatchLoader(val, classes=train.classes)` gives the numbers of the training set
            to a validation set that lacks some of its classes. A `PixelStore` must have been built with these.

    Batches: `(images, labels)`; images (batch_size, 3, size, size) RGB of `dtype` in `memory_format`, or with `crops` a
    list of such tensors, one for each crop; labels int64 (batch_size,). Floats are those of
    `v2.ToDtype(torch.float32, scale=True)` and `v2.Normalize`, of the half types rounded once. A batch may be kept: its
    memory is reused only when nobody holds it.

    Damage to a JPEG that shows only below the rows that a crop needs, or of a tiled one outside its pieces, goes
    unnoticed in that epoch. The threads end with the loader.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; `load_state_dict` sets it, too.
        classes, class_to_idx, labels: As of `ImageDataset`.

    >>> loader = lk.BatchLoader("photos", size=224, batch_size=4, seed=0)
    >>> images, labels = next(iter(loader))
    >>> images.shape, images.dtype
    (torch.Size([4, 3, 224, 224]), torch.uint8)

    Raises:
        ValueError: a wrong argument, folders that cannot be classes (see `ImageDataset`), an empty store, both
            `shuffle` and `sampler`, or `reads_in_flight` for a `PixelStore`.

    Taught in: notebooks/11b_raw_pixels.ipynb
    """

    num_workers = 0
    # Threads go on with the next batch, so one task per thread is enough; each further one hands over Python's lock.
    # There are four where a thread has to wait for the others: at the end of each batch of a worker.
    _tasks_overlap = True
    _reads_ahead: PerProcess[ReadsAhead] | None = None  # in worker processes
    repeats_batch_sampler = True  # `compare` may put another in its place, to go on with the next pass

    def __init__(
        self,
        source: Store | PixelStore | str | os.PathLike,
        *,
        size: int = 224,
        crops: Sequence[tuple[int, tuple[float, float], int]] | None = None,
        batch_size: int = 64,
        num_threads: int | None = None,
        num_processes: int = 0,
        antialias: bool = True,
        dtype: torch.dtype = torch.uint8,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        memory_format: torch.memory_format = torch.channels_last,
        seed: int = 0,
        train: bool = True,
        shuffle: bool | None = None,
        sampler: Sampler[int] | Iterable[int] | None = None,
        drop_last: bool = False,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        scaled_decoding: bool = True,
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        reads_in_flight: int | None = None,
        on_error: str = "raise",
        classes: Sequence[str] | None = None,
    ):
        self.batch_size = batch_size = require_int("batch_size", batch_size)
        self.size = size = require_int("size", size)
        self._seed = seed = require_seed(seed)
        self.num_threads = cores_per_rank() if num_threads is None else require_int("num_threads", num_threads)
        self.batches_in_flight = prefetch_factor = require_int("prefetch_factor", prefetch_factor)
        require_range("scale", scale, maximum=1.0)
        require_range("ratio", ratio)
        self._skips = SkipLog() if require_choice("on_error", on_error, ("raise", "skip")) == "skip" else None
        if require_int("num_processes", num_processes, 0) and self._skips:
            raise ArgumentError('on_error="skip" needs num_processes=0: what workers skip, nobody would list')
        require_fraction("flip", flip)
        self._has_crops = crops is not None
        self._views = []
        for number, (side, share) in enumerate([(size, scale)] if crops is None else _checked_crops(crops, train)):
            pixels = PixelFormat(side, dtype, mean, std, memory_format)
            draw = CropPolicy(side, train, derived_seed(seed, number) if number else seed, share, ratio, flip)
            self._views.append(View(pixels, draw, CropWriter(pixels, antialias)))
        if not isinstance(source, Store | PixelStore) or isinstance(source, type):
            from labkit.data.remote import as_store  # with the clients of servers, which local stores do without

            source = as_store(source)
        self._open(source, classes, scaled_decoding)
        self._reader = None if reads_in_flight is None else self._open_reader(source, reads_in_flight)
        shuffle = train if shuffle is None and sampler is None else shuffle
        sampler = choose_sampler(self.keys, sampler, shuffle, seed)
        self.batch_sampler = SeededBatchSampler(sampler, batch_size, drop_last, seed)
        self._start_counting()
        pinned = torch.cuda.is_available() and pin_memory is not False
        # Kept for all epochs, since OpenCV keeps about 1 KB for each thread that ended.
        self._pool = _thread_pool(self.num_threads)
        self._buffers = self._make_buffers(prefetch_factor + 2, pinned)
        self._processes = self._start_processes(num_processes, prefetch_factor, pinned) if num_processes else None

    def _make_buffers(self, n_kept: int, pin_memory: bool) -> list[BatchBuffers]:
        views = [view.pixels for view in self._views]
        return [BatchBuffers(one.shape(self.batch_size), one.array_dtype, n_kept, pin_memory) for one in views]

    def _start_processes(self, num_processes: int, prefetch_factor: int, pinned: bool) -> ProcessPool:
        """Send a copy of this loader to each process, with a share of the threads."""
        sent = copy.copy(self)
        sent.num_threads = -(-self.num_threads // num_processes)
        sent._tasks_overlap = False
        sent._pool = _thread_pool(sent.num_threads)
        sent._buffers = self._make_buffers(0, False)
        del sent.batch_sampler  # indices are drawn here, and a sampler may hold much
        self.batches_in_flight, self.num_workers = num_processes * prefetch_factor, num_processes
        sent._reader = self._reader and self._reader.share(num_processes)
        sent._reads_ahead = PerProcess(partial(ReadsAhead, sent._reader)) if sent._reader else None
        in_flight = sent._reader.reads_in_flight if sent._reader else 0
        return ProcessPool(sent._fill_batch, num_processes, prefetch_factor, pinned, in_flight)

    def _fill_batch(self, indices: SeededIndices, coming: Sequence[int] = ()) -> tuple[Any, Tensor]:
        """A batch, in a worker process, which goes on with the `coming` images."""
        reads = self._reads_ahead().take(indices.plain(), coming) if self._reads_ahead else None
        return self._finish_first(deque([self._start_batch(self._pool(), indices, reads)]))

    def _open_reader(self, source: Any, reads_in_flight: int) -> Reader:
        if isinstance(source, PixelStore):
            raise ArgumentError(
                f"reads_in_flight={reads_in_flight!r} is for encoded images: a PixelStore is a file of this machine, "
                "mapped into memory, and nothing of it is requested; leave reads_in_flight out"
            )
        return Reader(source, self.keys, require_int("reads_in_flight", reads_in_flight))

    def _open(self, source: Any, classes: Sequence[str] | None, scaled_decoding: bool) -> None:
        if isinstance(source, PixelStore):
            if classes is not None:
                remedy = "build it again, under another name, with the same classes="
                check_same_classes(str(source.path), source.classes, classes, remedy)
            self.keys, self.classes, self.labels = source.keys, source.classes, source.labels
            self._filler: PixelFiller | EncodedFiller = PixelFiller(source, self._views)
        else:
            self.keys = PackedStrings(source.keys())
            self.classes, self.labels = labels_of(self.keys, classes, source=source)
            self._filler = EncodedFiller(source, self.keys, self._views, scaled_decoding, self._skips)
        if not len(self.keys):
            raise ArgumentError(f"{source!r} holds no images")

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, with reasons."""
        return self._skips.read() if self._skips else []

    def __iter__(self) -> Pass:
        progress = self._begin_epoch()
        return Pass(self, self._epoch_of_batches(progress), progress)

    def _source(self) -> tuple[Any, int, int]:
        return self.keys, len(self.keys), self._seed

    def _epoch_of_batches(self, progress: Progress) -> Iterator[tuple[Any, Tensor]]:
        fill = self._processes.run if self._processes else self._fill_by_threads
        with closing(fill(_checked(self._batches_of(progress), len(self.keys)))) as batches:
            yield from batches

    def _fill_by_threads(self, batches: Iterable[SeededIndices]) -> Generator[Any, None, None]:
        started: deque[_Batch] = deque()
        pool = self._pool()
        try:
            for indices, reads in with_reads(self._reader, batches):
                started.append(self._start_batch(pool, indices, reads))
                del reads  # the batch alone holds its bytes, until they are decoded
                if len(started) > self.batches_in_flight:
                    yield self._finish_first(started)
            while started:
                yield self._finish_first(started)
        finally:  # also after an error, Ctrl-C, or `break` in the loop
            tasks = [task for batch in started for task in batch.tasks.values()]
            wait(task for task in tasks if not task.cancel())

    def _start_batch(
        self, pool: ThreadPoolExecutor, requests: SeededIndices, reads: Sequence[Future] | None = None
    ) -> "_Batch":
        taken = [buffers.take() for buffers in self._buffers]
        indices = np.array(requests.plain())
        n_tasks = self.num_threads * (1 if self._tasks_overlap and not reads else 4)
        step = max(self._filler.smallest_task, -(-len(indices) // n_tasks))
        plan = self._filler.plan(indices, requests.epoch, np.array(requests.occurrences))
        tasks = {}
        for start in range(0, len(indices), step):
            part = slice(start, min(start + step, len(indices)))
            fill = partial(self._filler.fill, [memory[part] for memory, _ in taken], indices[part], plan[part])
            tasks[start] = AfterReads(pool, reads[part], fill) if reads else pool.submit(fill)
        images = [view.pixels.as_batch(one[: len(indices)]) for view, (_, one) in zip(self._views, taken, strict=True)]
        return _Batch(indices, images, tasks)

    def _finish_first(self, started: "deque[_Batch]") -> tuple[Any, Tensor]:
        """Wait for the first batch and return it; it stays in `started` until it is complete."""
        batch = started[0]
        # One wait for all: waiting for one task after the other would take the GIL from the working threads each time.
        wait(batch.tasks.values(), return_when=FIRST_EXCEPTION)
        empty = [start + row for start, task in batch.tasks.items() for row in task.result()]
        labels = torch.from_numpy(self.labels[batch.indices])
        started.popleft()
        if not empty:
            return batch.images if self._has_crops else batch.images[0], labels
        if len(empty) == len(labels):
            key = self.keys[batch.indices[0]]
            reason = next(skip.reason for skip in self.skipped if skip.key == key)
            raise DecodeError(f"all {len(labels)} images of a batch were skipped, the first: {reason}")
        kept = torch.from_numpy(np.delete(np.arange(len(labels)), empty))
        images = [one[kept] for one in batch.images]
        return images if self._has_crops else images[0], labels[kept]


def _checked_crops(crops: Any, train: bool) -> Iterator[tuple[int, tuple[float, float]]]:
    """Size and scale of each crop; ValueError and TypeError say what `crops` must be."""
    if not train:
        raise ArgumentError("crops are drawn at random: leave them out with train=False, which takes the center alone")
    try:
        kinds = [(size, scale, number) for size, scale, number in crops]
    except (TypeError, ValueError):
        kinds = []
    if not kinds:
        raise ArgumentError(
            f"crops must be a list of (size, scale, number), as (224, (0.25, 1), 2), got {crops!r:.100}"
        )
    for size, scale, number in kinds:
        require_int("size", size)
        require_range("scale", scale, maximum=1.0)
        for _ in range(require_int("number", number)):
            yield size, scale


def _checked(batches: Iterable[SeededIndices], n: int) -> Iterator[SeededIndices]:
    """Batches of indices, each the number of one of `n` images; ValueError for another."""
    for indices in batches:
        for index in indices.plain():
            if not isinstance(index, int) or not -n <= index < n:
                raise ArgumentError(
                    f"the sampler gave {index!r:.100}, and BatchLoader takes the numbers of its {n} images, 0 to "
                    f"{n - 1}: loader.keys has their names, in this order. lk.make_loader takes any index of your data "
                    "set"
                )
        yield indices


def _thread_pool(num_threads: int) -> PerProcess:
    return PerProcess(partial(ThreadPoolExecutor, num_threads, "labkit-batches", use_one_torch_thread))


class _Batch(NamedTuple):
    """A batch being filled by threads; `tasks` maps the first row of each task to its future."""

    indices: np.ndarray
    images: list[Tensor]
    tasks: dict[int, Future]
