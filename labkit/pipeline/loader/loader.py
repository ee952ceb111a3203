"""make_loader(): torch's DataLoader with the settings that are easy to get wrong already right.

`BatchLoader`, which uses threads instead of worker processes, stands in `labkit.pipeline.batch_loader.loader`.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler, Subset

from labkit.core import preserve_rng_state
from labkit.data import collate
from labkit.pipeline.loader.config import LoaderConfig
from labkit.pipeline.loader.workers import (
    Epoch,
    WorkerDied,
    WorkersBatches,
    how_a_worker_died,
    interrupts_wait,
    own_count_of_workers,
    start_worker,
    worker_context,
)
from labkit.pipeline.samplers import Shuffled
from labkit.pipeline.seeding import RandomSources


def make_loader(
    dataset: Dataset,
    config: LoaderConfig | None = None,
    *,
    shuffle: bool = False,
    sampler: Sampler[int] | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] = collate,
    batch_transform: Callable[[Any], Any] | None = None,
) -> "Loader":
    """A DataLoader over a map-style data set: same seed, same batches, for any number of workers.

    Args:
        dataset: Map-style: `__len__` and `__getitem__`, or `__getitems__` (then a batch is fetched by one call).
        config: How to load. Default: `LoaderConfig()`.
        shuffle: A new order each epoch, which follows from the seed.
        sampler: Gives the indices instead, such as torch's `DistributedSampler`; its `set_epoch` is called.
        drop_last: Leave out a last batch that is not full.
        collate_fn: List of samples to batch.
        batch_transform: Called with each batch, in the worker.

    Returns:
        A `Loader`. It yields what `collate_fn` makes, by default tensors of shape (batch_size, ...).

    Raises:
        TypeError: an iterable data set, whose samples have no index to seed by.
        ValueError: an empty data set, or both `shuffle` and `sampler`.

    Taught in: notebooks/03_persistent_workers.ipynb
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} is not a map-style data set: hand it to torch's DataLoader itself")
    if len(dataset) == 0:
        raise ValueError(f"{type(dataset).__name__} holds no sample")
    if shuffle and sampler is not None:
        raise ValueError("shuffle=True and a sampler exclude each other: the sampler decides the order")
    settings = (config or LoaderConfig()).resolved()
    if sampler is None:
        sampler = Shuffled(len(dataset), settings.seed) if shuffle else SequentialSampler(dataset)
    requests = _Requests(sampler, settings.batch_size, drop_last)
    return Loader(_SeededBatches(dataset, settings.seed, collate_fn, batch_transform), requests, settings)


class Loader(DataLoader):
    """What `make_loader` returns: a DataLoader whose epochs are numbered, and which leaves nothing behind.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; set it with `set_epoch` to resume.
        config: The `LoaderConfig` in use.

    Iterating raises what a worker raised, with the key of the sample and the worker's traceback, or `WorkerDied`. After
    an error, or Ctrl-C while waiting for a batch, the workers are gone; the next epoch starts new ones.
    """

    def __init__(self, batches: "_SeededBatches", requests: "_Requests", config: LoaderConfig):
        workers = {}
        if config.num_workers:
            workers = {
                "prefetch_factor": config.prefetch_factor,
                "persistent_workers": config.persistent_workers,
                "multiprocessing_context": worker_context(config.start_method),
                "worker_init_fn": start_worker,
            }
        with own_count_of_workers():
            super().__init__(
                batches, batch_sampler=requests, num_workers=config.num_workers, pin_memory=config.pin_memory,
                collate_fn=_as_it_is,
                generator=torch.Generator().manual_seed(config.seed),  # else an epoch's start draws from the global one
                **workers,
            )  # fmt: skip
        object.__setattr__(self, "batch_size", config.batch_size)  # DataLoader leaves None beside a batch sampler
        self.epoch = 0
        self.config = config

    def set_epoch(self, epoch: int) -> None:
        """Continue with this epoch."""
        self.epoch = epoch

    def close(self) -> None:
        """End persistent workers now, instead of when the loader is forgotten."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None

    def __iter__(self) -> "Epoch":
        self.batch_sampler.epoch = self.epoch
        self.epoch += 1
        try:
            return Epoch(self, super().__iter__())
        except BaseException as error:
            died = how_a_worker_died(error, self._iterator)
            self.close()
            if died:
                raise WorkerDied(died) from None
            if self.num_workers and isinstance(error, _START_ERRORS):
                error.add_note(f"while starting {self.num_workers} workers: {_PICKLING}")
            raise

    def _get_iterator(self) -> Iterator[Any]:
        if not self.num_workers:
            return super()._get_iterator()
        with interrupts_wait(self.multiprocessing_context):
            return WorkersBatches(self)


_PICKLING = (
    "spawn and forkserver pickle the data set, so it may hold no open file, lock or connection; open those "
    "where they are first used"
)
_START_ERRORS = (TypeError, AttributeError, multiprocessing.ProcessError, OSError)


class _Requests(BatchSampler):
    """Batches of (epoch, index): persistent workers learn the epoch with the index, having no other way."""

    epoch = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        # Not a generator itself: torch calls this early and asks for the first batch later, in another epoch perhaps.
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        return self._batches(self.epoch, super().__iter__())

    @staticmethod
    def _batches(epoch: int, batches: Iterator[list[int]]) -> Iterator[list[tuple[int, int]]]:
        for batch in batches:
            yield [(epoch, index) for index in batch]


class _SeededBatches(Dataset):
    """Fetches, collates and transforms one batch, every sample after seeding by (seed, epoch, index).

    Everything else is the data set's own: `loader.dataset.classes` works.
    """

    def __init__(self, dataset: Dataset, seed: int, collate_fn: Callable, batch_transform: Callable | None):
        self._parts = dataset, collate_fn, batch_transform
        self._seed = seed
        self._sources: RandomSources | None = None

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int) -> Any:
        return self._parts[0][index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while unpickling there are no parts yet
            raise AttributeError(name)
        return getattr(self._parts[0], name)

    def __getstate__(self) -> dict[str, Any]:
        import cloudpickle  # it pickles what plain pickle cannot: classes and lambdas of a notebook's cells

        return {"_parts": cloudpickle.dumps(self._parts), "_seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import pickle

        # Whoever unpickles this object, a worker that was started with it, trusts these bytes already.
        self.__dict__.update(state, _parts=pickle.loads(state["_parts"]), _sources=None)  # noqa: S301

    def __getitems__(self, requests: list[tuple[int, int]]) -> Any:
        if self._sources is None:
            self._sources = RandomSources(*self._parts)
        if torch.utils.data.get_worker_info() is not None:
            return self._batch(requests)
        with preserve_rng_state():
            return self._batch(requests)

    def _batch(self, requests: list[tuple[int, int]]) -> Any:
        dataset, collate_fn, batch_transform = self._parts
        samples = self._samples(dataset, requests)
        # What a batch draws as a whole. Private generators are numbered from 0: no stream of theirs is this one.
        self._sources.seed(self._seed, *requests[0], -1)
        try:
            batch = collate_fn(samples)
            return batch_transform(batch) if batch_transform else batch
        except Exception as error:
            keys = [key_of(dataset, index) for _, index in requests]
            error.add_note(f"while making a batch of {len(keys)} samples, the first: {keys[0]}{_sizes(samples)}")
            raise

    def _samples(self, dataset: Dataset, requests: list[tuple[int, int]]) -> list[Any]:
        if callable(getattr(dataset, "__getitems__", None)):
            self._sources.seed(self._seed, *requests[0])
            return dataset.__getitems__([index for _, index in requests])
        return [self._sample(dataset, epoch, index) for epoch, index in requests]

    def _sample(self, dataset: Dataset, epoch: int, index: int) -> Any:
        self._sources.seed(self._seed, epoch, index)
        try:
            return dataset[index]
        except Exception as error:
            error.add_note(f"while loading {key_of(dataset, index)}")
            raise


def key_of(dataset: Dataset, index: int) -> str:
    """How a data set calls a sample: its key, where it has `keys`, else its number."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    keys = getattr(dataset, "keys", None)
    return str(keys[index]) if isinstance(keys, Sequence) else f"sample {index}"


def _sizes(samples: list[Any]) -> str:
    """The images' sizes where they differ: the usual reason why a batch cannot be made."""
    images = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    shapes = {tuple(image.shape) for image in images if isinstance(image, torch.Tensor)}
    if len(shapes) < 2:
        return ""
    return f"; its images have {len(shapes)} sizes, such as {sorted(shapes)[:2]}: let the transform crop or resize them"


def _as_it_is(batch: Any) -> Any:
    return batch


def __getattr__(name: str) -> Any:
    if name != "BatchLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.pipeline.batch_loader import BatchLoader

    return BatchLoader
