"""make_loader(): torch's DataLoader with the settings that are easy to get wrong already right."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, Subset, dataloader

from labkit.core import preserve_rng_state
from labkit.data import collate
from labkit.pipeline.bucket_sampler import check_batch_sampler
from labkit.pipeline.loader.config import LoaderConfig
from labkit.pipeline.loader.torch_internals import WorkerLoader
from labkit.pipeline.loader.workers import (
    Epoch,
    WorkerDied,
    delay_interrupts,
    describe_death,
    start_worker,
    worker_context,
)
from labkit.pipeline.resume import Progress, Resumable
from labkit.pipeline.seeding import HasEpochs, RandomSources, choose_sampler


def make_loader(
    dataset: Dataset,
    config: LoaderConfig | None = None,
    *,
    shuffle: bool = False,
    sampler: Sampler[int] | Iterable[int] | None = None,
    batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] = collate,
    batch_transform: Callable[[Any], Any] | None = None,
) -> "Loader":
    """A DataLoader over a map-style data set: the same seed gives the same batches, for any number of workers.

    Args:
        dataset: Map-style: `__len__` and `__getitem__`, or `__getitems__` (then a batch is fetched by one call).
        config: How to load. Default: `LoaderConfig()`.
        shuffle: A new order each epoch, which depends on the seed alone.
        sampler: Where the indices come from instead, such as torch's `DistributedSampler`; its `set_epoch` is called.
        batch_sampler: Where the indices of each batch come from instead, such as `BucketBatchSampler`; its `set_epoch`
            is called, or that of its `sampler`. It decides on order, batch size and last batches; the seed is still
            that of all random draws.
        drop_last: Drop a last batch that is not full.
        collate_fn: Makes a batch of a list of samples.
        batch_transform: Called with each batch, in the worker.

    Returns:
        A `Loader`. It yields what `collate_fn` makes, by default tensors of shape (batch_size, ...).

    Raises:
        TypeError: an iterable data set, whose samples have no index to seed by.
        ValueError: an empty data set, two arguments that both decide on the order, or a `BucketBatchSampler` whose
            frame has other images than the data set.

    Taught in: notebooks/03_persistent_workers.ipynb
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} is not a map-style data set: use torch's DataLoader for it")
    if len(dataset) == 0:
        raise ValueError(f"{type(dataset).__name__} holds no sample: a loader needs at least one")
    settings = (config or LoaderConfig()).resolved()
    if batch_sampler is None:
        sampler = choose_sampler(dataset, sampler, shuffle, settings.seed)
        batch_sampler = BatchSampler(sampler, settings.batch_size, drop_last)
    else:
        check_batch_sampler(batch_sampler, dataset, shuffle=shuffle, sampler=sampler, drop_last=drop_last)
        settings = replace(settings, batch_size=getattr(batch_sampler, "batch_size", settings.batch_size))
    requests = _Requests(batch_sampler)
    return Loader(_SeededBatches(dataset, settings.seed, collate_fn, batch_transform), requests, settings)


class Loader(Resumable, WorkerLoader):
    """What `make_loader` returns: a DataLoader that numbers its epochs, resumes in them, and leaves no worker behind.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; `load_state_dict` sets it, too.
        config: The `LoaderConfig` in use.

    Iterating raises what a worker raised, with the key of the sample and the worker's traceback, or `WorkerDied`. After
    an error, or Ctrl-C while waiting for a batch, the workers are gone; the next epoch starts new ones.
    """

    def __init__(self, batches: "_SeededBatches", requests: "_Requests", config: LoaderConfig):
        options: dict[str, Any] = {}
        if config.num_workers:
            options = {
                "prefetch_factor": config.prefetch_factor,
                "persistent_workers": config.persistent_workers,
                "multiprocessing_context": worker_context(config.start_method),
                "worker_init_fn": start_worker,
            }
        with warnings.catch_warnings():  # LoaderConfig has already warned of too many workers
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            super().__init__(
                batches, batch_sampler=requests, num_workers=config.num_workers or 0, pin_memory=config.pin_memory,
                collate_fn=_return_batch,
                generator=torch.Generator().manual_seed(config.seed),  # else an epoch's start draws from the global one
                **options,
            )  # fmt: skip
        object.__setattr__(self, "batch_size", config.batch_size)  # DataLoader leaves None beside a batch sampler
        self.config = config
        self._batches, self._requests = batches, requests

    def __iter__(self) -> "Epoch":  # type: ignore[override]  # torch promises its own private class
        self._requests.progress = self._begin_epoch()
        try:
            return Epoch(self, super().__iter__(), self._requests.progress)
        except BaseException as error:
            death = describe_death(error, self._iterator)
            self.close()
            if death:
                raise WorkerDied(death) from None
            if self.num_workers and isinstance(error, _START_ERRORS):
                error.add_note(f"while starting {self.num_workers} workers: {_PICKLING_REMEDY}")
            raise

    def _sampler(self) -> Any:
        return self._requests.batches

    def _source(self) -> tuple[Any, int, int]:
        return getattr(self.dataset, "keys", None), len(self._batches), self.config.seed

    def _get_iterator(self) -> "dataloader._BaseDataLoaderIter":
        if not self.num_workers:
            return super()._get_iterator()
        with delay_interrupts(self.multiprocessing_context):
            return super()._get_iterator()


_PICKLING_REMEDY = (
    "spawn and forkserver pickle the data set, so it may hold no open file, lock or connection; open those "
    "where they are first used"
)
_START_ERRORS = (TypeError, AttributeError, multiprocessing.ProcessError, OSError)


class _Requests(Sampler):
    """Batches of (epoch, index): persistent workers have no other way to learn the epoch."""

    def __init__(self, batches: Any):
        self.batches, self.progress = batches, Progress(0)

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # there are none yet while unpickling
            raise AttributeError(name)
        return getattr(self.batches, name)  # batch_size, sampler, ...

    def __iter__(self) -> Iterator[list[Any]]:
        progress = self.progress  # now: torch may ask for the first batch only when the next epoch has begun
        for sampler in (self.batches, getattr(self.batches, "sampler", None)):
            if isinstance(sampler, HasEpochs):
                sampler.set_epoch(progress.epoch)
        return ([(progress.epoch, index) for index in batch] for batch in progress.draw(self.batches))


class _SeededBatches(Dataset):
    """Fetches, collates and transforms batches; seeds by (seed, epoch, index) before each sample.

    All other attributes are the data set's: `loader.dataset.classes` works.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Callable, batch_transform: Callable | None):
        self._parts = dataset, collate_fn, batch_transform
        self._seed = seed
        self._sources: RandomSources | None = None

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int) -> Any:
        return self._parts[0][index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # there are no parts yet while unpickling
            raise AttributeError(name)
        return getattr(self._parts[0], name)

    def __getstate__(self) -> dict[str, Any]:
        import cloudpickle  # unlike pickle, it handles classes and lambdas from a notebook's cells

        return {"_parts": cloudpickle.dumps(self._parts), "_seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import pickle

        # These bytes came inside a pickle that is already trusted.
        self.__dict__.update(state, _parts=pickle.loads(state["_parts"]), _sources=None)  # noqa: S301

    def __getitems__(self, requests: list[tuple[int, int]]) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            return self._make_batch(requests)
        with preserve_rng_state():
            return self._make_batch(requests)

    def _random_sources(self) -> RandomSources:
        if self._sources is None:
            self._sources = RandomSources(*self._parts)
        return self._sources

    def _make_batch(self, requests: list[tuple[int, int]]) -> Any:
        dataset, collate_fn, batch_transform = self._parts
        samples = self._load_samples(dataset, requests)
        # For what the batch as a whole draws. Private generators are numbered from 0, so none has this stream.
        self._random_sources().seed(self._seed, *requests[0], -1)
        try:
            batch = collate_fn(samples)
            return batch_transform(batch) if batch_transform else batch
        except Exception as error:
            keys = [key_of(dataset, index) for _, index in requests]
            error.add_note(
                f"while making a batch of {len(keys)} samples, the first: {keys[0]}{_describe_sizes(samples)}"
            )
            raise

    def _load_samples(self, dataset: Any, requests: list[tuple[int, int]]) -> list[Any]:
        if callable(getattr(dataset, "__getitems__", None)):
            self._random_sources().seed(self._seed, *requests[0])
            return dataset.__getitems__([index for _, index in requests])
        return [self._load_sample(dataset, epoch, index) for epoch, index in requests]

    def _load_sample(self, dataset: Any, epoch: int, index: int) -> Any:
        self._random_sources().seed(self._seed, epoch, index)
        try:
            return dataset[index]
        except Exception as error:
            error.add_note(f"while loading {key_of(dataset, index)}")
            raise


def key_of(dataset: Dataset, index: int) -> str:
    """A sample's key, if the data set has `keys`, else its number."""
    while isinstance(dataset, Subset):
        index, dataset = dataset.indices[index], dataset.dataset
    keys = getattr(dataset, "keys", None)
    return str(keys[index]) if isinstance(keys, Sequence) else f"sample {index}"


def _describe_sizes(samples: list[Any]) -> str:
    """The images' sizes if they differ: the usual reason why a batch cannot be made."""
    images = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    shapes = {tuple(image.shape) for image in images if isinstance(image, torch.Tensor)}
    if len(shapes) < 2:
        return ""
    return (
        f"; its images have {len(shapes)} sizes, such as {sorted(shapes)[:2]}: let the transform crop or resize them; "
        "with buckets, collect the sizes again, without caches, which state no orientation: "
        "collect_sizes(root, caches=False)"
    )


def _return_batch(batch: Any) -> Any:
    return batch
