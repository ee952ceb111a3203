"""BatchLoader: threads write crops straight into batches, without worker processes or copies between them."""

import copy
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler, Subset

from labkit.data.dataset import ImageDataset, Skipped
from labkit.data.labels import (
    Labeled,
    check_same_classes,
    chosen_keys,
    chosen_labels,
    labeled,
    labels_at,
)
from labkit.data.pixels import PixelStore
from labkit.data.stores import Store
from labkit.errors import ArgumentError, DecodeError
from labkit.loading.bucket_sampler import BucketBatchSampler, check_batch_sampler
from labkit.loading.crops import Size
from labkit.loading.fill import (
    BatchBuffers,
    BatchPart,
    CropPolicy,
    CropWriter,
    EncodedFiller,
    PixelFiller,
    PixelFormat,
    View,
)
from labkit.loading.own_transform import LockTime, OwnTransform
from labkit.loading.processes import ProcessPool
from labkit.loading.read_ahead import AfterReads, Reader, ReadsAhead, with_reads
from labkit.loading.resize import INTERPOLATIONS, Resizer
from labkit.loading.resume import Pass, Progress, Resumable
from labkit.loading.samplers import SeededBatchSampler, check_repeatable, choose_sampler
from labkit.loading.seeding import SeededIndices, derived_seed
from labkit.loading.torch_loader import cores_per_rank
from labkit.util.arguments import (
    kind_of,
    require_choice,
    require_flag,
    require_fraction,
    require_int,
    require_range,
    require_seed,
)
from labkit.util.process import PerProcess, use_one_torch_thread


class BatchLoader(Labeled, Resumable):
    """Load random resized crops of a store's images as batches of bytes or of normalized floats.

    libjpeg-turbo and OpenCV release the GIL while they work, so threads can do what `DataLoader` needs processes for,
    and write into the batch itself. Only the rows and columns of a JPEG that the crop needs are decoded, at the
    smallest of 1/1, 1/2, 1/4 and 1/8 of its size at which the crop still has `size` pixels in height and width.

    Args:
        source: A store of encoded images, a path or URL of one, as `lk.open_store` takes it, or a `PixelStore`.
        size: Side of the square crops in pixels, or their (height, width).
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
        train: False: no draws. Each image is seen as `fit` says, with the pixels of torchvision's v2.
        resize: With `train=False`, the shorter side that an image is resized to before its center is cropped. Default:
            it just covers `size` / 0.875: 256 for `size=224`. timm's `crop_pct` of 0.95 is `resize=int(224 / 0.95)`.
        fit: With `train=False`: `"crop"` keeps the center; `"pad"` the whole image in its shape, with `fill` around it
            (letterbox, for detection); `"stretch"` the whole image, whatever its shape.
        fill: Red, green and blue, 0 to 255, of what lies beyond an image, or one number for all three.
        interpolation: `"bilinear"`, or `"bicubic"`, for which `antialias` must be on.
        shuffle: A new order each epoch. Default: the value of `train`.
        sampler: Gives the indices instead, such as torch's `DistributedSampler`; its `set_epoch` is called, unless the
            training does so itself. torch's random samplers without a generator of their own draw by (seed, epoch).
            With one of these, or without a sampler, the ranks that torchrun or `torch.distributed` started share out
            each epoch as `DistributedSampler` does: each has as many images, of which some may come a second time.
        batch_sampler: Gives the indices of each batch instead. With a `BucketBatchSampler`, `size` does not count: each
            image is resized to cover its bucket's shape, and cropped to the center, as by `ImageDataset(buckets=)`.
        drop_last: Leave out a last batch that is not full.
        scale: Smallest and largest share of the image area in a crop.
        ratio: Smallest and largest width / height of a crop.
        flip: Probability of mirroring.
        scaled_decoding: False: always decode at full size. Default: the value of `train`, as decoding at 1/2, 1/4 or
            1/8 gives slightly other pixels.
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
        keys, labels, classes, return_keys: As for `ImageDataset`. `BatchLoader(val, classes=train.classes)`
            gives the numbers of the training set to a validation set that lacks some of its classes. A `PixelStore` has
            its own labels, whose classes must be these.
        transform: Called with each crop, in the threads, before `dtype`, `mean` and `std`: an Albumentations or
            torchvision v2 transform, or a function of a uint8 tensor (3, height, width) that returns one of the same
            shape. Its draws, too, depend only on (seed, epoch, index). `labkit.loading.own_transform.OwnTransform` has
            the rules, and `transform_time` what it takes.

    Batches: `(images, labels)`; images (batch_size, 3, height, width) RGB of `dtype` in `memory_format`, or with
    `crops` a list of such tensors, one for each crop; labels int64 (batch_size,), or what `labels` makes of them. With
    `return_keys`, a list of the keys follows. Floats are those of `v2.ToDtype(torch.float32, scale=True)` and
    `v2.Normalize`, of the half types rounded once. A batch may be kept: its memory is reused only when nobody holds it.

    Damage to a JPEG that shows only below the rows that a crop needs, or of a tiled one outside its pieces, goes
    unnoticed in that epoch. The threads end with the loader.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; `load_state_dict` sets it, too.
        dataset: An `ImageDataset` of the same images, or the `PixelStore`; `len(loader.dataset)` counts them.
        keys, classes, class_to_idx, labels: As of `ImageDataset`.

    >>> loader = lk.BatchLoader("photos", size=224, batch_size=4, seed=0)
    >>> images, labels = next(iter(loader))
    >>> images.shape, images.dtype
    (torch.Size([4, 3, 224, 224]), torch.uint8)

    Raises:
        ValueError: a wrong argument, folders that cannot be classes (see `ImageDataset`), an empty store, both
            `shuffle` and `sampler`, or `reads_in_flight` for a `PixelStore`.
        RuntimeError: an epoch without a batch, as by `drop_last` with fewer images than `batch_size`.

    Taught in: notebooks/11b_raw_pixels.ipynb
    """

    num_workers = 0
    # Threads go on with the next batch, so one task per thread is enough; each further one hands over Python's lock.
    # There are four where a thread has to wait for the others: at the end of each batch of a worker.
    _tasks_overlap = True
    _reads_ahead: PerProcess[ReadsAhead] | None = None  # in worker processes
    repeats_batch_sampler = True  # `compare` may put another in its place, to go on with the next pass

    _bucket_numbers: np.ndarray | None = None  # of each image, if the batch sampler has buckets
    _bucket_shapes: Sequence[Size] = ()

    def __init__(
        self,
        source: Any,
        *,
        size: int | tuple[int, int] = 224,
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
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
        drop_last: bool = False,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        scaled_decoding: bool | None = None,
        resize: int | None = None,
        fit: str = "crop",
        fill: int | tuple[int, int, int] = 0,
        interpolation: str = "bilinear",
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        reads_in_flight: int | None = None,
        on_error: str = "raise",
        keys: Iterable[str] | None = None,
        labels: Any = None,
        classes: Sequence[str] | None = None,
        return_keys: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ):
        self.batch_size = batch_size = require_int("batch_size", batch_size)
        self.size = size
        self._seed = seed = require_seed(seed)
        self.num_threads = cores_per_rank() if num_threads is None else require_int("num_threads", num_threads)
        self.batches_in_flight = prefetch_factor = require_int("prefetch_factor", prefetch_factor)
        require_range("scale", scale, maximum=1.0)
        require_range("ratio", ratio)
        require_choice("on_error", on_error, ("raise", "skip"))
        require_choice("memory_format", memory_format, (torch.channels_last, torch.contiguous_format))
        if require_int("num_processes", num_processes, 0) and on_error == "skip":
            raise ArgumentError('on_error="skip" needs num_processes=0: what workers skip, nobody would list')
        require_fraction("flip", flip)
        flags = {"antialias": antialias, "train": train, "return_keys": return_keys}
        given = {"scaled_decoding": scaled_decoding, "pin_memory": pin_memory}
        for name, flag in {**flags, **{name: value for name, value in given.items() if value is not None}}.items():
            require_flag(name, flag)
        self._has_crops = crops is not None
        resizer = _checked_resizer(antialias, interpolation, train, resize, fit, fill)
        self._views, self._bucket_views = list[View](), dict[int, Sequence[View]]()
        for number, (side, share) in enumerate([(size, scale)] if crops is None else _checked_crops(crops, train)):
            pixels = PixelFormat(_checked_size(side), dtype, mean, std, memory_format == torch.channels_last)
            own_seed = derived_seed(seed, number) if number else seed
            draw = CropPolicy(pixels.size, train, own_seed, share, ratio, flip, resize, fit)
            own = None if transform is None else OwnTransform(transform, own_seed % 2**64)
            if own and own.draws_globally and not num_processes:
                raise ArgumentError(
                    f"transform= ({kind_of(transform)}) may draw from the global random generators of random, NumPy or "
                    "torch, which the training draws from at the same time: pass num_processes=1 or more, where it is "
                    "alone; or, if it does not draw from them, set transform.draws_globally = False. Transforms of "
                    "Albumentations and torchvision's v2 alone need neither"
                )
            self._views.append(View(pixels, draw, CropWriter(pixels, resizer, own)))
        if not isinstance(source, Store | PixelStore) or isinstance(source, type):
            from labkit.data.remote import as_store  # with the clients of servers, which local stores do without

            source = as_store(source)
        of_set = {"keys": keys, "labels": labels, "classes": classes}
        self._open(source, of_set, train if scaled_decoding is None else scaled_decoding, on_error)
        self._returns_keys = bool(return_keys)
        self._reader = None if reads_in_flight is None else self._open_reader(source, reads_in_flight)
        if batch_sampler is None:
            shuffle = train if shuffle is None and sampler is None else shuffle
            sampler = choose_sampler(self.keys, sampler, shuffle, seed)
            self.batch_sampler = SeededBatchSampler(sampler, batch_size, drop_last, seed)
        else:
            others = {"shuffle": shuffle, "sampler": sampler, "drop_last": drop_last, "crops": crops, "resize": resize}
            check_batch_sampler(batch_sampler, self.dataset, **others)
            check_repeatable("batch_sampler", batch_sampler)
            self.batch_sampler, self.batch_size = batch_sampler, getattr(batch_sampler, "batch_size", batch_size)
        if isinstance(batch_sampler, BucketBatchSampler):
            self._bucket_numbers = batch_sampler.buckets_of(len(self.keys))
            self._bucket_shapes = batch_sampler.buckets.shapes
        self._start_counting()
        pinned = torch.cuda.is_available() and pin_memory is not False
        # Kept for all epochs, since OpenCV keeps about 1 KB for each thread that ended.
        self._pool = _thread_pool(self.num_threads)
        self._buffers = self._make_buffers(prefetch_factor + 2, pinned)
        self._processes = self._start_processes(num_processes, prefetch_factor, pinned) if num_processes else None

    def _make_buffers(self, n_kept: int, pin_memory: bool) -> list[BatchBuffers]:
        return [BatchBuffers(n_kept, pin_memory) for _ in self._views]

    def _views_of(self, indices: np.ndarray) -> Sequence[View]:
        """What images of a batch become: they share a bucket, if there are buckets."""
        if self._bucket_numbers is None:
            return self._views
        number = int(self._bucket_numbers[indices[0]])
        if number not in self._bucket_views:
            width, height = self._bucket_shapes[number]
            self._bucket_views[number] = [view.of_bucket((height, width)) for view in self._views]
        return self._bucket_views[number]

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

    def _fill_batch(self, indices: SeededIndices, coming: Sequence[int] = ()) -> tuple[Any, ...]:
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

    def _open(self, source: Any, of_set: dict[str, Any], scaled_decoding: bool, on_error: str) -> None:
        if isinstance(source, PixelStore):
            keys, labels, classes = of_set["keys"], of_set["labels"], of_set["classes"]
            self.keys, rows = chosen_keys(source, keys), None
            if keys is not None:
                numbers = {key: number for number, key in enumerate(source.keys)}
                rows = np.array([numbers[key] for key in self.keys])
            if labels is not None:
                self.keys, self.classes, self.labels = labeled(source, keys, classes, labels)
            else:
                if classes is not None:
                    remedy = "build it again, under another name, with the same classes="
                    check_same_classes(str(source.path), source.classes, classes, remedy)
                own = source.labels
                self.classes, self.labels = source.classes, own if rows is None else chosen_labels(own, rows)
            self.dataset: Any = source if rows is None else Subset(source, rows.tolist())
            self._filler: PixelFiller | EncodedFiller = PixelFiller(source, rows)
        else:
            self.dataset = data = ImageDataset(source, on_error=on_error, **of_set)
            self.keys, self.classes, self.labels = data.keys, data.classes, data.labels
            self._filler = EncodedFiller(source, data.keys, scaled_decoding, data._skips)
        if not len(self.keys):
            raise ArgumentError(f"{source!r} holds no images")

    @property
    def transform_time(self) -> LockTime | None:
        """What `transform` takes, and what threads lose by it, as far as it was measured in this process."""
        own = self._views[0].writer.transform
        return own.lock_time() if own else None

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, with reasons."""
        return getattr(self.dataset, "skipped", [])

    def __iter__(self) -> Pass:
        progress = self._begin_epoch()
        return Pass(self, self._epoch_of_batches(progress), progress)

    def _source(self) -> tuple[Any, int, int]:
        return self.keys, len(self.keys), self._seed

    def _epoch_of_batches(self, progress: Progress) -> Iterator[tuple[Any, ...]]:
        fill = self._processes.run if self._processes else self._fill_by_threads
        with closing(fill(_checked(self._batches_of(progress), len(self.keys)))) as batches:
            for images, labels, *keys in batches:
                yield images, labels, *keys

    def _fill_by_threads(self, batches: Iterable[SeededIndices]) -> Generator[Any, None, None]:
        started: deque[_Batch] = deque()
        pool, is_finalizing = self._pool(), sys.is_finalizing
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
            if not is_finalizing():  # else the threads have ended, and the names of modules are gone
                wait(task for task in tasks if not task.cancel())

    def _start_batch(
        self, pool: ThreadPoolExecutor, requests: SeededIndices, reads: Sequence[Future] | None = None
    ) -> "_Batch":
        indices, occurrences = np.array(requests.plain()), np.array(requests.occurrences)
        n_tasks = self.num_threads * (1 if self._tasks_overlap and not reads else 4)
        step = max(self._filler.smallest_task, -(-len(indices) // n_tasks))
        views = self._views_of(indices)
        pairs = zip(views, self._buffers, strict=True)
        taken = [view.pixels.take_batch(buffers, len(indices)) for view, buffers in pairs]
        plan = self._filler.plan(views, indices, requests.epoch, occurrences)
        tasks = {}
        for start in range(0, len(indices), step):
            rows = slice(start, min(start + step, len(indices)))
            part = BatchPart(
                views, [memory[rows] for memory, _ in taken], indices[rows], occurrences[rows], requests.epoch,
                plan[rows],
            )  # fmt: skip
            fill = partial(self._filler.fill, part)
            tasks[start] = AfterReads(pool, reads[rows], fill) if reads else pool.submit(fill)
        return _Batch(indices, [images for _, images in taken], tasks)

    def _finish_first(self, started: "deque[_Batch]") -> tuple[Any, ...]:
        """Wait for the first batch and return it; it stays in `started` until it is complete."""
        batch = started[0]
        # One wait for all: waiting for one task after the other would take the GIL from the working threads each time.
        wait(batch.tasks.values(), return_when=FIRST_EXCEPTION)
        empty = [start + row for start, task in batch.tasks.items() for row in task.result()]
        started.popleft()
        kept, images = np.delete(np.arange(len(batch.indices)), empty), batch.images
        if not len(kept):
            key = self.keys[batch.indices[0]]
            reason = next(skip.reason for skip in self.skipped if skip.key == key)
            raise DecodeError(f"all {len(empty)} images of a batch were skipped, the first: {reason}")
        if empty:
            images = [one[torch.from_numpy(kept)] for one in images]
        indices = batch.indices[kept]
        labels = labels_at(self.labels, indices)
        if own := self._views[0].writer.transform:
            own.warn_if_it_limits()
        keys = ([self.keys[index] for index in indices],) if self._returns_keys else ()
        return images if self._has_crops else images[0], labels, *keys


def _checked_size(size: Any) -> Size:
    """Height and width; ValueError and TypeError say what `size` must be."""
    if isinstance(size, str) or not isinstance(size, Sequence):
        side = require_int("size", size)
        return side, side
    if len(size) != 2:
        raise ArgumentError(f"size must be a side in pixels, or (height, width), got {size!r:.100}")
    return require_int("height", size[0]), require_int("width", size[1])


def _checked_resizer(
    antialias: bool, interpolation: str, train: bool, resize: int | None, fit: str, fill: Any
) -> Resizer:
    require_choice("interpolation", interpolation, INTERPOLATIONS)
    if interpolation != "bilinear" and not antialias:
        raise ArgumentError(f"interpolation={interpolation!r} needs antialias=True: OpenCV's own is bilinear here")
    if require_choice("fit", fit, ("crop", "pad", "stretch")) != "crop" and train:
        raise ArgumentError(f"fit={fit!r} goes with train=False: crops for training are drawn by scale and ratio")
    if resize is not None:
        require_int("resize", resize)
        if train or fit != "crop":
            raise ArgumentError(
                f'resize={resize!r} goes with train=False and fit="crop": it is the shorter side before the center is '
                "cropped; crops for training are drawn by scale and ratio"
            )
    colors = tuple(fill) if isinstance(fill, Sequence) and not isinstance(fill, str) else (fill,) * 3
    if len(colors) != 3 or not all(require_int("fill", color, 0) <= 255 for color in colors):
        raise ArgumentError(f"fill must be red, green and blue from 0 to 255, or one number for all, got {fill!r:.100}")
    return Resizer(bool(antialias), interpolation, colors)


def _checked_crops(crops: Any, train: bool) -> Iterator[tuple[Any, tuple[float, float]]]:
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
        _checked_size(size)
        require_range("scale", scale, maximum=1.0)
        for _ in range(require_int("number", number)):
            yield size, scale


def _checked(batches: Iterable[SeededIndices], n: int) -> Iterator[SeededIndices]:
    """Batches of indices, each the number of one of `n` images; ValueError for another."""
    for indices in batches:
        if not indices:
            raise ArgumentError("the batch_sampler gave an empty list: a batch needs the index of at least one image")
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
