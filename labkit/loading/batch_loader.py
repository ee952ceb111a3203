"""BatchLoader: threads write crops into batches, without worker processes or copies between them.

The way of a photo into a batch:

    BatchLoader.__iter__        begins a pass over an epoch: `Pass` in resume.py, of which `_ThreadsPass` is one
    _ThreadsPass._next_batch    takes the next indices from the sampler (samplers.py), and starts some batches ahead
    BatchLoader._start_batch    gets memory for the batch (rows.py), and gives each thread a slice of its rows
    EncodedImages.filler        draws random numbers for the whole batch (crops.py)
    EncodedImages._fill         in a thread: reads the files (stores.py), places the crops, decodes the boxes that they
                                need (partial_jpeg.py); of a `PixelStore`, `StoredImages` looks at the pixels
    RowWriter.write             resizes a crop, mirrors it, and converts it into its row (rows.py)
    BatchLoader._finish         waits for all rows, and adds the labels
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import current_thread
from typing import Any, NamedTuple

import numpy as np
import torch
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
from labkit.errors import ArgumentError, NothingLeft
from labkit.loading.bucket_sampler import BucketBatchSampler, check_batch_sampler
from labkit.loading.crops import CropPolicies, CropPolicy, Size
from labkit.loading.encoded import EncodedImages
from labkit.loading.own_transform import OwnTransform
from labkit.loading.read_ahead import AfterReads, Reader, with_reads
from labkit.loading.resume import FailedBatch, Pass, Progress, Resumable
from labkit.loading.rows import ARRAY_DTYPES, INTERPOLATIONS, Batch, BatchBuffers, Resizer, Rows, RowWriter
from labkit.loading.samplers import SeededBatchSampler, check_repeatable, choose_sampler
from labkit.loading.seeding import SeededIndices, derived_seed
from labkit.loading.stored import StoredImages
from labkit.util.arguments import (
    check_normalization,
    kind_of,
    require_choice,
    require_flag,
    require_fraction,
    require_int,
    require_range,
    require_seed,
)
from labkit.util.process import PerProcess, use_one_torch_thread
from labkit.util.ranks import cores_per_rank


class BatchLoader(Labeled, Resumable):
    """Load random resized crops of a store's images as batches of bytes or of normalized floats.

    libjpeg-turbo and OpenCV release the GIL while they work, so threads can do what `DataLoader` needs processes for,
    and write into the batch itself. Only the rows and columns of a JPEG that the crop needs are decoded, at the
    smallest of 1/1, 1/2, 1/4 and 1/8 of its size at which the crop still has `size` pixels in height and width.

    >>> train = lk.BatchLoader("photos", size=224, batch_size=4)
    >>> val = lk.BatchLoader("photos", size=224, batch_size=4, train=False, classes=train.classes)
    >>> for images, labels in train:
    ...     pass  # your training step; `images` are bytes, (4, 3, 224, 224)

    Args:
        source: A folder of images, or another path or URL that `lk.open_store` takes; a store; or a `PixelStore`.
        size: Side of the square crops in pixels, or their (height, width).
        batch_size: Images in a batch.
        train: False, for evaluation: nothing is drawn or shuffled. The center of each image is seen, resized as
            torchvision's v2 `Resize` and `CenterCrop` do, bit for bit.
        num_threads: Threads that load. Default: one per usable core, shared among the ranks of this machine.
        dtype: `torch.uint8`, to be normalized on the GPU; or `torch.float32`, `float16` or `bfloat16`, which the
            threads write as they normalize. Floats take two to four times the memory, on the way to the GPU, too.
        mean, std: Of red, green and blue, for floats: what `v2.Normalize` takes. Default: floats from 0 to 1.
        transform: Called with each crop, in the threads, before `dtype`, `mean` and `std`: an Albumentations or
            torchvision v2 transform, or a function of a uint8 tensor (3, height, width) that returns one of the same
            shape. `labkit.loading.own_transform.OwnTransform` has the rules. Python code of one's own holds Python's
            lock: where it takes long, `lk.make_loader` is faster, whose workers each have a lock of their own.
        labels: The label of each image, as for `ImageDataset`. Default: the number of its folder.
        seed: Of order, crops, flips and the draws of `transform`. They depend only on (seed, epoch, index), and on how
            many times the index came before in the epoch.

        crops: Several crops of each image: (size, scale, number) of each kind, and `size` and `scale` do not count. For
            DINO: `crops=[(224, (0.25, 1), 2), (96, (0.05, 0.25), 8)]`. Each image is read once, and decoded once.
        scale: Smallest and largest share of the image area in a crop.
        ratio: Smallest and largest width / height of a crop.
        flip: Probability of mirroring.
        antialias: True: the pixels of torchvision's v2 transforms, to within rounding. False: OpenCV's bilinear, as
            in Albumentations. They differ where a crop is shrunk.
        interpolation: `"bilinear"`, or `"bicubic"`, for which `antialias` must be on.
        resize: With `train=False`, the shorter side that an image is resized to before its center is cropped. Default:
            it just covers `size` / 0.875: 256 for `size=224`. timm's `crop_pct` of 0.95 is `resize=int(224 / 0.95)`.
        scaled_decoding: False: always decode at full size. Default: the value of `train`, as decoding at 1/2, 1/4 or
            1/8 gives slightly different pixels.
        shuffle: A new order each epoch. Default: the value of `train`.
        sampler: Gives the indices instead, such as torch's `DistributedSampler`; its `set_epoch` is called, unless the
            training does so itself. torch's random samplers without a generator of their own draw by (seed, epoch).
            With one of these, or without a sampler, the ranks of a training, whatever launched them, share out
            each epoch as `DistributedSampler` does: each has as many images, of which some may come a second time.
        batch_sampler: Gives the indices of each batch instead. A `BucketBatchSampler`, whose batches have several
            shapes, goes with `lk.ImageDataset(buckets=)` and `lk.make_loader`.
        drop_last: Leave out a last batch that is not full.
        keys, classes, return_keys: As for `ImageDataset`. `classes=train.classes` gives the numbers of the training set
            to a validation set that lacks some of its classes. A `PixelStore` has its own labels, whose classes must be
            these.
        on_error: `"raise"` passes errors on. `"skip"` leaves an image that cannot be decoded, or is gone, out of its
            batch and adds it to `skipped`, which is also printed at exit.
        prefetch_factor: Batches made ahead.
        pin_memory: Page-locked batches. Default: if CUDA is available.
        reads_in_flight: Requests to the store at a time, by as many threads that only read, in addition to those that
            decode: for storage far away. Latency in seconds times the images per second that the cores can decode
            says how many it takes. They run ahead of the batches that are being made, and of a batch's end. Encoded
            images in memory are at most those of `prefetch_factor + 1` batches and `reads_in_flight` more. An
            `HttpStore`, an `ObjectStore` on S3 or a `TarStore` on either keeps as many connections. A `break` gives up
            what has not begun. Default: the threads that decode read, each its own image.

    Batches: `(images, labels)`; images (batch_size, 3, height, width) RGB of `dtype`, channels last in memory, or with
    `crops` a list of such tensors, one for each crop; labels int64 (batch_size,), or what `labels` makes of them. With
    `return_keys`, a list of the keys follows. Floats are those of `v2.ToDtype(torch.float32, scale=True)` and
    `v2.Normalize`, of the half types rounded once. A batch may be kept: its memory is reused only when nobody holds it.

    Damage to a JPEG below the rows that a crop needs, or of a tiled one outside its pieces, goes unnoticed in that
    epoch. For evaluation each is decoded to its last row once, and one that is damaged is refused in each epoch. The
    threads end with the loader.

    An error of an image is raised when its batch is asked for, with the image's key. Whoever catches it gets the batch
    after that by the next `next`; the one that failed counts as given. A batch of which `on_error="skip"` leaves
    nothing is left out, but where there are several ranks, which must have equally many batches: there it raises
    `DecodeError`.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; `load_state_dict` sets it, too. Of several
            passes, it is set by that which gave a batch last.
        source: The store, or the `PixelStore`.
        dataset: An `ImageDataset` of the same images, or the `PixelStore`; `len(loader.dataset)` counts them.
        keys, classes, class_to_idx, labels: As of `ImageDataset`.

    Raises:
        ValueError: a wrong argument, folders that cannot be classes (see `ImageDataset`), an empty store, both
            `shuffle` and `sampler`, or `reads_in_flight` for a `PixelStore`.
        RuntimeError: an epoch without a batch, as by `drop_last` with fewer images than `batch_size`.

    Taught in: notebooks/11_prepare_once.ipynb
    """

    num_workers = 0
    repeats_batch_sampler = True  # `compare` may put another in its place, to go on with the next pass

    def __init__(
        self,
        source: Any,
        *,
        size: int | tuple[int, int] = 224,
        batch_size: int = 64,
        train: bool = True,
        num_threads: int | None = None,
        dtype: torch.dtype = torch.uint8,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        transform: Callable[[Any], Any] | None = None,
        labels: Any = None,
        seed: int = 0,
        crops: Sequence[tuple[int, tuple[float, float], int]] | None = None,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        antialias: bool = True,
        interpolation: str = "bilinear",
        resize: int | None = None,
        scaled_decoding: bool | None = None,
        shuffle: bool | None = None,
        sampler: Sampler[int] | Iterable[int] | None = None,
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
        drop_last: bool = False,
        keys: Iterable[str] | None = None,
        classes: Sequence[str] | None = None,
        return_keys: bool = False,
        on_error: str = "raise",
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        reads_in_flight: int | None = None,
    ):
        self.size = size
        self.batch_size = require_int("batch_size", batch_size)
        self._seed = seed = require_seed(seed)
        self.num_threads = cores_per_rank() if num_threads is None else require_int("num_threads", num_threads)
        self.batches_in_flight = prefetch_factor = require_int("prefetch_factor", prefetch_factor)
        require_choice("on_error", on_error, ("raise", "skip"))
        optional = {"scaled_decoding": scaled_decoding, "pin_memory": pin_memory}
        _check_flags(optional, antialias=antialias, train=train, return_keys=return_keys)
        _check_crops(scale, ratio, flip, train, resize)
        _check_pixels(dtype, mean, std, antialias, interpolation)
        self._returns_keys = bool(return_keys)
        self._has_crops = crops is not None
        kinds = [(size, scale)] if crops is None else list(_checked_crops(crops, train))
        resizer = Resizer(bool(antialias), interpolation)
        pinned = torch.cuda.is_available() and pin_memory is not False
        policies, self._writers = list[CropPolicy](), list[RowWriter]()
        for number, (side, share) in enumerate(kinds):
            height_width = _checked_size(side)
            own_seed = derived_seed(seed, number) if number else seed
            policies.append(CropPolicy(height_width, train, own_seed, share, ratio, flip, resize, resizer.radius))
            buffers = BatchBuffers(prefetch_factor + 2, pinned)
            rows = Rows(height_width, dtype, mean, std, buffers)
            own = None if transform is None else _checked_transform(transform, own_seed)
            self._writers.append(RowWriter(rows, resizer.resize_crop if train else resizer.resize_photo, own))
        self._policies = CropPolicies(policies)
        scaled_decoding = train if scaled_decoding is None else scaled_decoding
        self._open_source(source, keys, labels, classes, scaled_decoding, on_error)
        self._reader = None if reads_in_flight is None else _checked_reader(self.source, self.keys, reads_in_flight)
        if batch_sampler is None:
            shuffle = train if shuffle is None and sampler is None else shuffle
            sampler = choose_sampler(self.keys, sampler, shuffle, seed)
            self.batch_sampler: Any = SeededBatchSampler(sampler, batch_size, drop_last, seed)
        else:
            others = {"shuffle": shuffle, "sampler": sampler, "drop_last": drop_last, "crops": crops, "resize": resize}
            _check_batch_sampler(batch_sampler, self.dataset, others)
            self.batch_sampler, self.batch_size = batch_sampler, getattr(batch_sampler, "batch_size", batch_size)
        self._start_counting()  # of epochs
        # Kept for all epochs, since OpenCV keeps about 1 KB for each thread that ended.
        self._threads = PerProcess(partial(ThreadPoolExecutor, self.num_threads, _THREADS, use_one_torch_thread))

    def _open_source(
        self, source: Any, keys: Any, labels: Any, classes: Any, scaled_decoding: bool, on_error: str
    ) -> None:
        """Find the images of a source, with their names and labels, and what makes rows of them.

        A folder becomes a `FolderStore`, whose files are listed when an `ImageDataset` asks for their names; their
        folders are the labels.
        """
        if not isinstance(source, Store | PixelStore) or isinstance(source, type):
            from labkit.data.remote import as_store  # with the clients of servers, which local stores do without

            source = as_store(source)
        self.source = source
        if isinstance(source, PixelStore):
            self.keys, self.classes, self.labels, numbers = _chosen_pixels(source, keys, labels, classes)
            self.dataset: Any = source if numbers is None else Subset(source, numbers.tolist())
            self._images: StoredImages | EncodedImages = StoredImages(source, numbers, self._policies)
        else:
            self.dataset = data = ImageDataset(source, on_error=on_error, keys=keys, labels=labels, classes=classes)
            self.keys, self.classes, self.labels = data.keys, data.classes, data.labels
            self._images = EncodedImages(source, data.keys, self._policies, scaled_decoding, data._skips)
        if not len(self.keys):
            raise ArgumentError(f"{source!r} holds no images")

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, with reasons."""
        return getattr(self.dataset, "skipped", [])

    def __iter__(self) -> Pass:
        return _ThreadsPass(self)

    def _source(self) -> tuple[Any, int, int]:
        return self.keys, len(self.keys), self._seed

    def _index_check(self) -> Callable[[SeededIndices], None]:
        return partial(_check_indices, len(self.keys))

    def _start_batch(self, drawn: SeededIndices, reads: Sequence[Future] | None) -> "_StartedBatch":
        """Let the threads make a batch of images; `reads` has their bytes, unless the threads read them."""
        indices, occurrences = np.array(drawn.plain()), np.array(drawn.occurrences)
        batch, pool = Batch(self._writers, indices, occurrences, drawn.epoch), self._threads()
        fill = self._images.filler(batch)
        # Threads go on with the next batch, so one task per thread is enough; each further one hands over Python's
        # lock. Where tasks begin as their reads arrive, smaller ones begin sooner.
        n_tasks = self.num_threads * (4 if reads else 1)
        step, tasks = max(self._images.smallest_task, -(-len(indices) // n_tasks)), list[Future]()
        for start in range(0, len(indices), step):
            rows = slice(start, min(start + step, len(indices)))
            tasks.append(AfterReads(pool, reads[rows], partial(fill, rows)) if reads else pool.submit(fill, rows))
        return _StartedBatch(batch, tasks)

    def _finish(self, started: "_StartedBatch") -> tuple[Any, ...] | FailedBatch:
        """Wait until a batch is complete, and return it as users see it."""
        # One wait for all: waiting for one task after the other would take the GIL from the working threads each time.
        wait(started.tasks, return_when=FIRST_EXCEPTION)
        errors: Iterator[Any] = (task.exception() for task in started.tasks if task.done())
        if failed := next((FailedBatch(error) for error in errors if error is not None), None):
            started.cancel()
            return failed
        indices, images = started.batch.indices, started.batch.images
        if empty := [row for task in started.tasks for row in task.result()]:
            kept = np.delete(np.arange(len(indices)), empty)
            if not len(kept):
                key = self.keys[indices[0]]
                reason = next(skip.reason for skip in self.skipped if skip.key == key)
                return FailedBatch(NothingLeft(f"all {len(empty)} images of a batch were skipped, the first: {reason}"))
            indices, images = indices[kept], [one[torch.from_numpy(kept)] for one in images]
        keys = ([self.keys[index] for index in indices],) if self._returns_keys else ()
        return images if self._has_crops else images[0], labels_at(self.labels, indices), *keys


class _StartedBatch(NamedTuple):
    """A batch, and the tasks of the threads that make it."""

    batch: Batch
    tasks: list[Future]

    def cancel(self) -> list[Future]:
        """Cancel what has not begun; returns the tasks that run on."""
        return [task for task in self.tasks if not task.cancel()]


class _ThreadsPass(Pass):
    """A pass whose batches are filled by the loader's threads, some of them ahead of the one that is asked for.

    `Pass` calls `_start` when it begins, `_next_batch` for each `next`, and `_end` at the end, or when it is left.
    """

    _loader: BatchLoader

    def _start(self, progress: Progress) -> None:
        self._started = deque[_StartedBatch]()
        batches = self._loader._batches_of(progress)  # the sampler's lists of indices, each a `SeededIndices`
        self._drawn = with_reads(self._loader._reader, batches)  # each with None, if there is no reader

    def _next_batch(self) -> tuple[Any, ...] | FailedBatch:
        loader = self._loader
        while len(self._started) <= loader.batches_in_flight:
            drawn, reads = next(self._drawn, (None, None))
            if drawn is None:
                break
            self._started.append(loader._start_batch(drawn, reads))
            del reads  # the batch alone holds its bytes, until they are decoded
        if not self._started:
            raise StopIteration
        batch = loader._finish(self._started[0])  # still there, for `_end` to cancel it
        self._started.popleft()
        return batch

    def _end(self, error: BaseException | None) -> None:
        """Leave nothing running, also after Ctrl-C, or `break` in the loop."""
        if not self._progress.is_running:
            return
        super()._end(error)
        self._drawn.close()  # no more reads
        running = [task for batch in self._started for task in batch.cancel()]
        # Not where the threads have ended, and the names of modules are gone; nor in one of these threads, in which
        # Python's collector may find a pass that nobody holds any more: it would wait for its own task.
        if sys is not None and not sys.is_finalizing() and not current_thread().name.startswith(_THREADS):
            wait(running)
        self._started.clear()


_THREADS = "labkit-batches"  # as their names begin


# Arguments


def _check_flags(optional: dict[str, Any], **flags: Any) -> None:
    """Of the optional ones, None is a default."""
    for name, flag in {**flags, **{name: flag for name, flag in optional.items() if flag is not None}}.items():
        require_flag(name, flag)


def _check_crops(scale: Any, ratio: Any, flip: Any, train: bool, resize: Any) -> None:
    require_range("scale", scale, maximum=1.0)
    require_range("ratio", ratio)
    require_fraction("flip", flip)
    if resize is not None:
        require_int("resize", resize)
        if train:
            raise ArgumentError(
                f"resize={resize!r} goes with train=False: it is the shorter side before the center is cropped; crops "
                "for training are drawn by scale and ratio"
            )


def _check_pixels(dtype: Any, mean: Any, std: Any, antialias: bool, interpolation: Any) -> None:
    require_choice("interpolation", interpolation, INTERPOLATIONS)
    if interpolation != "bilinear" and not antialias:
        raise ArgumentError(f"interpolation={interpolation!r} needs antialias=True: OpenCV's own is bilinear here")
    require_choice("dtype", dtype, ARRAY_DTYPES)
    if (mean is None) != (std is None):
        raise ArgumentError(f"pass both mean and std, or neither: got mean={mean!r}, std={std!r}")
    if mean is not None:
        if dtype == torch.uint8:
            raise ArgumentError("mean and std need floats: pass dtype=torch.float32, torch.float16 or torch.bfloat16")
        check_normalization(mean, std)


def _checked_size(size: Any) -> Size:
    """Height and width; ValueError and TypeError say what `size` must be."""
    if isinstance(size, str) or not isinstance(size, Sequence):
        side = require_int("size", size)
        return side, side
    if len(size) != 2:
        raise ArgumentError(f"size must be a side in pixels, or (height, width), got {size!r:.100}")
    return require_int("height", size[0]), require_int("width", size[1])


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


def _checked_transform(transform: Any, seed: int) -> OwnTransform:
    own = OwnTransform(transform, seed % 2**64)
    if not own.shares_generator and not own.drawn_by:
        return own
    to_workers = "give it to lk.ImageDataset(source, transform=transform) and lk.make_loader, whose workers"
    if own.shares_generator:
        raise ArgumentError(
            f"transform= ({kind_of(transform)}) draws from a random generator that is a variable of a module, which "
            f"the threads would share: {to_workers} each have their own; or make the generator an attribute of the "
            "transform, and set transform.draws_globally = False"
        )
    raise ArgumentError(
        f"transform= ({kind_of(transform)}) may draw from the global random generators of random, NumPy or torch, by "
        f"{own.drawn_by}, and the training draws from them at the same time: {to_workers} seed these generators for "
        "each sample. If it does not draw from them, set transform.draws_globally = False, which functions and objects "
        "of your own allow; wrap any other, such as a bound method or a builtin, in a function. Transforms of "
        "Albumentations and torchvision's v2 alone need neither"
    )


def _checked_reader(source: Any, keys: Sequence[str], reads_in_flight: Any) -> Reader:
    if isinstance(source, PixelStore):
        raise ArgumentError(
            f"reads_in_flight={reads_in_flight!r} is for encoded images: a PixelStore is a file of this machine, "
            "mapped into memory, and nothing of it is requested; leave reads_in_flight out"
        )
    return Reader(source, keys, require_int("reads_in_flight", reads_in_flight))


def _check_batch_sampler(batch_sampler: Any, dataset: Any, others: dict[str, Any]) -> None:
    if isinstance(batch_sampler, BucketBatchSampler):
        raise ArgumentError(
            "the batches of a BucketBatchSampler have several shapes, and BatchLoader's have one: give it to "
            "lk.make_loader(lk.ImageDataset(source, buckets=sampler.buckets), batch_sampler=sampler)"
        )
    check_batch_sampler(batch_sampler, dataset, **others)
    check_repeatable("batch_sampler", batch_sampler)


def _chosen_pixels(
    store: PixelStore, keys: Any, labels: Any, classes: Any
) -> tuple[Any, list[str], np.ndarray, np.ndarray | None]:
    """What `keys`, `labels` and `classes` mean for a `PixelStore`: names, classes and labels; and the numbers of the
    images in the store, or None for all."""
    chosen, numbers = chosen_keys(store, keys), None
    if keys is not None:
        numbers_of = {key: number for number, key in enumerate(store.keys)}
        numbers = np.array([numbers_of[key] for key in chosen])
    if labels is not None:
        return *labeled(store, keys, classes, labels), numbers
    if classes is not None:
        remedy = "build it again, under another name, with the same classes="
        check_same_classes(str(store.path), store.classes, classes, remedy)
    own = store.labels
    return chosen, store.classes, own if numbers is None else chosen_labels(own, numbers), numbers


def _check_indices(n_images: int, indices: SeededIndices) -> None:
    """ValueError if these are not the numbers of some of `n_images` images."""
    if not indices:
        raise ArgumentError("the batch_sampler gave an empty list: a batch needs the index of at least one image")
    for index in indices.plain():
        if not isinstance(index, int) or not -n_images <= index < n_images:
            raise ArgumentError(
                f"the sampler gave {index!r:.100}, and BatchLoader takes the numbers of its {n_images} images, 0 to "
                f"{n_images - 1}: loader.keys has their names, in this order. lk.make_loader takes any index of your "
                "data set"
            )
