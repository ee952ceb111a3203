"""`make_loader`: torch's DataLoader with the settings that are easy to get wrong already right.

`LoaderConfig` has defaults that fit the machine. Workers start from a server that has imported what they need, end with
the process that started them, and one that dies is named with its reason. Epochs repeat, and resume exactly.
"""

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, get_worker_info

from labkit.data.dataset import ImageDataset, collate
from labkit.data.remote import is_far
from labkit.data.stores import Store
from labkit.errors import ArgumentError, WorkerDied, WrongTypeError
from labkit.loading.bucket_sampler import check_batch_sampler, keys_of
from labkit.loading.resume import FailedBatch, Pass, Progress, Resumable
from labkit.loading.samplers import LoaderWarning, SeededBatchSampler, check_repeatable, choose_sampler
from labkit.loading.seeding import RandomSources, SeededIndices
from labkit.loading.workers import (
    are_same,
    attributes_of,
    delay_interrupts,
    explain_death,
    note_start,
    prepare_to_start_workers,
    set_up_worker,
    silence_deaths,
    worker_context,
)
from labkit.util.arguments import kind_of, require_callable, require_choice, require_flag, require_int, require_seed
from labkit.util.machine import core_limits, usable_cores
from labkit.util.process import on_cpu, preserve_rng_state, warn_caller
from labkit.util.ranks import cores_per_rank

_MINIMA = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1}


@dataclass(frozen=True)
class LoaderConfig:
    """How to load; what to load is `make_loader`'s other argument. None: what fits the machine.

    Args:
        batch_size: Images in a batch.
        num_workers: Worker processes. None: one per usable core, shared among the ranks on this machine.
        prefetch_factor: Batches that each worker keeps ready. None: torch's default, 2.
        persistent_workers: Keep the workers between epochs. None: yes.
        pin_memory: Page-locked batches, for copies that overlap. None: where CUDA is available.
        seed: Of the order of samples and of every random draw in them.
        start_method: `"fork"`, `"spawn"` or `"forkserver"`. None: `"forkserver"` in a notebook or console on Linux, as
            a fork may catch one of the kernel's threads holding a lock; elsewhere Python's default. A fork shares the
            data set with the workers; the others send a copy to each.
        oversubscribe: Allow more workers than usable cores. They are allowed without it where the data set has a
            `store` that reads over a network, for which they mostly wait.

    >>> config = lk.LoaderConfig(batch_size=128, num_workers=2, prefetch_factor=4)

    Raises:
        ValueError: a value that no loader can have; names the setting.
    """

    batch_size: int = 64
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    seed: int = 0
    start_method: str | None = None
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if getattr(self, name) is not None or name == "batch_size":
                object.__setattr__(self, name, require_int(name, getattr(self, name), minimum))
        object.__setattr__(self, "seed", require_seed(self.seed))
        for name in ("persistent_workers", "pin_memory", "oversubscribe"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_flag(name, getattr(self, name)))
        if self.start_method is not None:
            require_choice("start_method", self.start_method, multiprocessing.get_all_start_methods())

    def resolved(self) -> "LoaderConfig":
        """This configuration as it will be used on this machine, every None filled in. Warns of changes."""
        num_workers, usable, has_cuda = self.num_workers, usable_cores(), torch.cuda.is_available()
        if num_workers is None:
            num_workers = cores_per_rank()
        elif num_workers > usable and not self.oversubscribe:
            limits = ", ".join(f"{name} {value}" for name, value in core_limits().items())
            _warn(
                f"num_workers={num_workers} reduced to {usable}: this process may use {usable} cores ({limits}), and "
                "more would take turns. If yours wait for a network, LoaderConfig(oversubscribe=True) keeps them"
            )
            num_workers = usable
        if not num_workers:
            of_workers = ("persistent_workers", "prefetch_factor", "start_method")
            idle = [f"{name}={value!r}" for name in of_workers if (value := getattr(self, name))]
            if idle:
                _warn(f"{', '.join(idle)} left out: with num_workers=0 there is no worker to apply it to")
        if self.pin_memory and not has_cuda:
            _warn("pin_memory=True is left out: this machine has no CUDA device to copy to")
        return replace(
            self,
            num_workers=num_workers,
            prefetch_factor=(self.prefetch_factor or 2) if num_workers else None,
            persistent_workers=num_workers > 0 and self.persistent_workers is not False,
            pin_memory=has_cuda and self.pin_memory is not False,
            start_method=self.start_method if num_workers else None,
        )


def allow_waiting_workers(config: LoaderConfig, dataset: Any) -> LoaderConfig:
    """The configuration with as many workers as it asks for, where they mostly wait for a network."""
    return replace(config, oversubscribe=config.oversubscribe or is_far(getattr(dataset, "store", None)))


def _warn(message: str) -> None:
    warn_caller(message, LoaderWarning)


def make_loader(
    dataset: Dataset | Store | str | os.PathLike,
    config: LoaderConfig | None = None,
    *,
    batch_size: int | None = None,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    pin_memory: bool | None = None,
    seed: int | None = None,
    start_method: str | None = None,
    oversubscribe: bool | None = None,
    shuffle: bool = False,
    sampler: Sampler[int] | Iterable[int] | None = None,
    batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] = collate,
    batch_transform: Callable[[Any], Any] | None = None,
) -> "Loader":
    """A DataLoader over a map-style data set: the same seed gives the same batches, for any number of workers.

    Args:
        dataset: Map-style: `__len__` and `__getitem__`, or `__getitems__` (then a batch is fetched by one call). Of a
            path, URL or store, the images of an `ImageDataset`, which must all have one size.
        config: How to load. Default: `LoaderConfig()`.
        batch_size, num_workers, prefetch_factor, persistent_workers, pin_memory, seed, start_method, oversubscribe:
            The settings of `LoaderConfig`, in place of one.
        shuffle: A new order each epoch, which depends on the seed alone.
        sampler: Where the indices come from instead, such as torch's `DistributedSampler`; its `set_epoch` is called,
            unless the training does so itself. torch's `RandomSampler`, `SubsetRandomSampler` and
            `WeightedRandomSampler` draw by the loader's seed and the epoch, unless they have a `generator`. An index
            may come several times in an epoch, each with its own draws. It is what the data set takes: an integer, a
            string, bytes, or a tuple of these, such as (number, size).
        batch_sampler: Where the indices of each batch come from instead, such as `BucketBatchSampler`; its `set_epoch`
            is called, or that of its `sampler`. It decides on order, batch size and last batches; the seed is still
            that of all random draws.
        drop_last: Drop a last batch that is not full.
        collate_fn: Makes a batch of a list of samples.
        batch_transform: Called with each batch, in the worker. The loader's own `collate_fn` then does both.

    Returns:
        A `Loader`. It yields what `collate_fn` makes, by default tensors of shape (batch_size, ...). Without `sampler`
        and `batch_sampler`, or with one of the three samplers that draw by the loader's seed, the ranks of a
        training, whatever launched them, share out each epoch as torch's `DistributedSampler` does: each has as many
        samples, of which some may come a second time.

    >>> dataset = lk.ImageDataset("photos", transform=lk.make_augment("light"))
    >>> loader = lk.make_loader(dataset, batch_size=4, num_workers=0, shuffle=True)
    >>> images, labels = next(iter(loader))

    Raises:
        TypeError: an iterable data set, whose samples have no index to seed by; or a sampler that can be read only
            once, such as a generator.
        ValueError: an empty data set, a `config` together with one of its settings, two arguments that both decide on
            the order, or a `BucketBatchSampler` whose frame has other images than the data set.

    Taught in: notebooks/03_persistent_workers.ipynb
    """
    given: dict[str, Any] = {
        "batch_size": batch_size, "num_workers": num_workers, "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers, "pin_memory": pin_memory, "seed": seed, "start_method": start_method,
        "oversubscribe": oversubscribe,
    }  # fmt: skip
    config = _config_of(config, {name: value for name, value in given.items() if value is not None})
    samples: Any = dataset
    if isinstance(dataset, str | os.PathLike) or (isinstance(dataset, Store) and not hasattr(dataset, "__getitem__")):
        samples = ImageDataset(dataset)
    for name, function in (("collate_fn", collate_fn), ("batch_transform", batch_transform)):
        require_callable(name, function)
    has_samples = hasattr(samples, "__getitem__") or hasattr(samples, "__getitems__")
    if isinstance(samples, IterableDataset | type) or not hasattr(samples, "__len__") or not has_samples:
        raise WrongTypeError(
            f"{kind_of(samples)} is not a map-style data set, which has __len__ and __getitem__: use torch's "
            "DataLoader for iterable ones, and of a loader its `dataset`"
        )
    if len(samples) == 0:
        raise ArgumentError(f"{type(samples).__name__} holds no sample: a loader needs at least one")
    settings = allow_waiting_workers(config, samples).resolved()
    order: dict[str, Any] = {"batch_sampler": batch_sampler}
    if batch_sampler is None:
        chosen = choose_sampler(samples, sampler, shuffle, settings.seed)
        order = {"sampler": chosen, "batch_size": settings.batch_size, "drop_last": drop_last}
    else:
        check_batch_sampler(batch_sampler, samples, shuffle=shuffle, sampler=sampler, drop_last=drop_last)
        check_repeatable("batch_sampler", batch_sampler)
    if settings.num_workers:
        order |= {
            "prefetch_factor": settings.prefetch_factor, "persistent_workers": settings.persistent_workers,
            "multiprocessing_context": worker_context(settings.start_method), "worker_init_fn": start_worker,
        }  # fmt: skip
    if batch_transform is not None:
        collate_fn = partial(_collate_and_transform, collate_fn, batch_transform)
    return Loader(
        samples, seed=settings.seed, collate_fn=collate_fn, num_workers=settings.num_workers or 0,
        pin_memory=bool(settings.pin_memory), **order,
    )  # fmt: skip


def _config_of(config: Any, settings: dict[str, Any]) -> LoaderConfig:
    if config is None:
        return LoaderConfig(**settings)
    if not isinstance(config, LoaderConfig):
        example = f"batch_size={config}" if isinstance(config, int) else "batch_size=64"
        raise WrongTypeError(
            f"config must be a LoaderConfig, such as lk.LoaderConfig({example}), got {config!r}; its settings are also "
            f"keywords, as lk.make_loader(dataset, {example})"
        )
    if settings:
        raise ArgumentError(
            f"got config and {', '.join(settings)}: pass a LoaderConfig, or its settings as keywords, not both"
        )
    return config


def _collate_and_transform(collate_fn: Callable, batch_transform: Callable, samples: list[Any]) -> Any:
    batch = batch_transform(collate_fn(samples))
    if batch is None:
        raise WrongTypeError("batch_transform= returned None, and not a batch: does it lack a `return`?")
    return batch


class Loader(Resumable, DataLoader):
    """What `make_loader` returns: a DataLoader that numbers its epochs, resumes in them, and leaves no worker behind.

    Its `dataset`, `sampler`, `batch_sampler` and `collate_fn` are those that it was given, for whoever wants to read
    them, set something on them, or make another loader of them. Where it made the batch sampler itself, the batches of
    indices carry the seeds of their samples into that other loader.

    Args:
        dataset: Map-style.
        seed: Of all random draws of samples and batches.
        options: The other arguments of torch's DataLoader.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one; `load_state_dict` sets it, too, and so
            does a call of the sampler's own `set_epoch`. Of several passes, it is set by that which gave a batch last.

    Iterating raises what a worker raised, with the key of the sample and the worker's traceback. Whoever catches that
    gets the next batch by the next `next`, as from torch's loader; the batch that failed counts as given. After
    `WorkerDied`, or Ctrl-C while waiting for a batch, the pass has ended, and so have its workers; the next one starts
    new ones. A batch of which `on_error="skip"` leaves nothing is left out, but where there are several ranks, which
    must have equally many batches: there it raises `DecodeError`. What is set on
    the data set between two epochs holds from the next one on: persistent workers then start again. So it is with what
    is changed in its lists, dictionaries, sets, tensors and arrays of up to 64 MiB, but not within the items of one
    that has over 1,000 of them. Two passes may run at a time; each has its own workers.
    """

    def __init__(self, dataset: Any, *, seed: int = 0, **options: Any):
        given = options.get("batch_sampler")
        options.setdefault("generator", torch.Generator().manual_seed(seed))  # else a start draws from the global one
        super().__init__(dataset, **options)
        self.seed = seed
        parts = vars(self)  # DataLoader.__setattr__ refuses what follows
        if given is None:
            order = self.sampler, self.batch_size or 1, self.drop_last
            parts["batch_sampler"] = SeededBatchSampler(*order, seed=seed, dataset=dataset)
        else:  # what DataLoader leaves empty if it has a batch sampler
            parts["sampler"] = getattr(given, "sampler", given)
            parts["batch_size"] = getattr(given, "batch_size", None)
            if isinstance(given, SeededBatchSampler):
                given.seed, given.dataset = seed, dataset
        self._start_counting()
        self._idle_runs: list[_Run] = []

    def __iter__(self) -> Pass:  # type: ignore[override]  # torch promises its own private class
        return _WorkersPass(self)

    def __getstate__(self) -> dict[str, Any]:
        # Workers cannot be sent, nor can torch's iterator over them: a copy starts its own. The generator, whose draws
        # decide on nothing here, would go by a shared file that torch cannot open again.
        return {**super().__getstate__(), "_idle_runs": [], "_iterator": None, "generator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, generator=torch.Generator().manual_seed(state["seed"]))

    def check_worker_number_rationality(self) -> None:
        """Nothing: torch would warn of many workers here, and `LoaderConfig` has done so."""

    def close(self) -> None:
        """End idle persistent workers now, instead of when the loader is forgotten."""
        while self._idle_runs:
            self._idle_runs.pop().end()

    def _source(self) -> tuple[Any, int, int]:
        keys = keys_of(self.dataset)
        if keys is None and isinstance(self.dataset, Subset):
            keys = list(map(str, self.dataset.indices))
        return keys, len(self.dataset), self.seed  # type: ignore[arg-type]


class _Run:
    """torch's own DataLoader over whole seeded batches, which keeps its workers from one pass to the next."""

    def __init__(self, loader: Loader):
        self._loader, self._requests = copy.copy(loader), _Requests()
        self._loader._idle_runs = []  # else this would hold itself, and the workers stay
        self._iterator: Any = None
        self._attributes: list[Any] = []  # of what the persistent workers were started with

    @property
    def workers(self) -> list[Any]:
        """The running processes; a torch that calls them otherwise has none to explain the end of."""
        return list(getattr(self._iterator, "_workers", ()))

    def start(self, loader: Loader, progress: Progress) -> Iterator[Any]:
        """The batches of a pass."""
        parts = loader.dataset, loader.collate_fn
        attributes = attributes_of(parts) if loader.persistent_workers else []
        if not are_same(self._attributes, attributes) or getattr(self._iterator, "_shutdown", False):
            self.end()
        self._attributes = attributes
        self._requests.indices = loader._batches_of(progress)
        vars(self._loader).update(dataset=_Batches(*parts), batch_sampler=self._requests, collate_fn=_return_batch)
        starts = loader.num_workers > 0 and self._iterator is None
        if starts:
            prepare_to_start_workers()
        with on_cpu(), delay_interrupts() if starts else nullcontext():
            self._iterator = DataLoader.__iter__(self._loader)
        if starts:
            silence_deaths(self._iterator)
        return self._iterator

    def end(self) -> None:
        """End the workers; the next pass starts new ones."""
        iterator, self._iterator, self._loader._iterator = self._iterator, None, None
        getattr(iterator, "_shutdown_workers", lambda: None)()  # else they end with the iterator


class _Requests:
    """A batch sampler that torch's iterator keeps as long as its workers run: it gives one pass after another."""

    indices: Iterator[SeededIndices] = iter(())

    def __iter__(self) -> Iterator[SeededIndices]:
        return self.indices


class _WorkersPass(Pass):
    """A pass that ends its workers when it is broken off, and hands on those that persist."""

    _loader: Loader
    _run: _Run | None = None
    _batches: Iterator[Any] = iter(())

    def _start(self, progress: Progress) -> None:
        loader = self._loader
        self._run = loader._idle_runs.pop() if loader._idle_runs else _Run(loader)
        try:
            self._batches = self._run.start(loader, progress)
        except BaseException as error:
            if loader.num_workers:
                note_start(error, loader.num_workers)
            raise

    def _next_batch(self) -> Any:
        return next(self._batches)

    def _shutdown_workers(self) -> None:
        """Leave the pass and end its workers, also those that persist, as an iterator of torch's can."""
        self._end(GeneratorExit())

    def _end(self, error: BaseException | None) -> None:
        if not self._progress.is_running:
            return
        super()._end(error)
        run, self._run, self._batches = self._run, None, iter(())
        if run is None:
            return
        is_whole = error is None or isinstance(error, StopIteration)
        if is_whole and self._loader.persistent_workers and not self._loader._idle_runs:
            self._loader._idle_runs.append(run)
            return
        death = "" if is_whole or error is None else explain_death(error, run.workers)
        run.end()
        if death:
            raise WorkerDied(death) from None


class _Batches(Dataset):
    """Fetches and collates batches; seeds by (seed, epoch, index) before each sample.

    It goes to the workers in the loader's place of a data set.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]):
        self.dataset, self._collate_fn = dataset, collate_fn
        self._sources: RandomSources | None = None

    def __getstate__(self) -> dict[str, Any]:
        import cloudpickle  # unlike pickle, it handles classes and lambdas from a notebook's cells

        return {"parts": cloudpickle.dumps((self.dataset, self._collate_fn))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*pickle.loads(state["parts"]))  # type: ignore[misc]  # noqa: S301 - came inside a pickle that is trusted

    def __getitems__(self, requests: SeededIndices) -> Any:
        with on_cpu(), preserve_rng_state() if get_worker_info() is None else nullcontext():
            if self._sources is None:
                self._sources = RandomSources(self.dataset, self._collate_fn)
            requests.sources = self._sources
            samples, current = [], None
            try:
                if _takes_batches(self.dataset):
                    self._sources.seed(*requests.numbers_of_batch())
                    samples = self.dataset.__getitems__(requests)
                else:
                    for current in requests:
                        samples.append(self.dataset[current])
                    current = None
                self._sources.seed(*requests.numbers_of_batch())
                return self._collate_fn(samples)
            except Exception as error:
                note = f"a batch of {len(requests)} samples"
                if current is not None:
                    note = key_of(self.dataset, current)
                elif requests:
                    note += f", the first: {key_of(self.dataset, requests[0])}{_describe_sizes(samples)}"
                if isinstance(error, StopIteration):  # would end the epoch as if no sample were left
                    error = RuntimeError(
                        "the data set, collate_fn or batch_transform raised StopIteration, which is no end of the "
                        "epoch: it comes from a next() on something that was used up; next(..., None) returns None"
                    ).with_traceback(error.__traceback__)
                error.add_note(f"while loading {note}")
                if "not fork-safe" in str(error):
                    error.add_note(_FORK_REMEDY)
                return FailedBatch(error)


def _takes_batches(dataset: Any) -> bool:
    """Whether a call fetches a whole batch. A `Subset`'s does not: it takes one sample after another, unless what it is
    a subset of takes batches."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def key_of(dataset: Any, index: Any) -> str:
    """A sample's key, if the data set has `keys` and takes numbers, else its index."""
    with suppress(TypeError, IndexError):  # what the data set itself makes of such an index is the error to tell
        while isinstance(dataset, Subset):
            index, dataset = dataset.indices[index], dataset.dataset
        keys = getattr(dataset, "keys", None)
        if isinstance(keys, Sequence):
            return str(keys[index])
    return f"sample {index!r}"


def _describe_sizes(samples: list[Any]) -> str:
    """The images' sizes if they differ: the usual reason why a batch cannot be made."""
    images = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    if any(type(image).__module__.startswith("PIL.") for image in images):
        return "; its images are still PIL images: let the transform end with one that makes tensors, as v2.ToImage()"
    shapes = {tuple(image.shape) for image in images if isinstance(image, torch.Tensor)}
    if len(shapes) < 2:
        return ""
    return (
        f"; its images have {len(shapes)} sizes, such as {sorted(shapes)[:2]}: let the transform crop or resize them, "
        "as lk.ImageDataset(source, transform=torchvision.transforms.v2.RandomResizedCrop(224)), or use "
        "lk.BatchLoader, which crops them itself; with buckets, collect the sizes again, without caches, which state "
        "no orientation: collect_sizes(root, caches=False)"
    )


def start_worker(worker_id: int) -> None:
    """Set up a worker process, in which the data set is the loader's, as in torch's own workers, for whoever asks."""
    set_up_worker()
    about = get_worker_info()
    if about is not None and isinstance(about.dataset, _Batches):
        object.__setattr__(about, "dataset", about.dataset.dataset)


def _return_batch(batch: Any) -> Any:
    return batch


_FORK_REMEDY = (
    "this is a file system of fsspec's, such as s3fs, which only the process that opened it can use, and it was opened "
    "before the worker was forked: call fsspec.filesystem(...) within __getitem__, which keeps one for each process, "
    "or pass LoaderConfig(start_method='spawn')"
)
