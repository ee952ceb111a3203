"""make_loader(): torch's DataLoader with the settings that are easy to get wrong already right."""

import multiprocessing.queues
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler, Subset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from labkit.data.datasets import collate
from labkit.measure.env import core_limits, usable_cores
from labkit.pipeline.seeding import RandomSources, derived_seed, kept_global_state

START_METHODS = ("fork", "spawn", "forkserver")

_SLOW_IMPORTS = ("torchvision.transforms.v2", "albumentations", "kornia", "cv2", "simplejpeg")


class LoaderWarning(UserWarning):
    """A setting was changed, because here it would do harm or nothing."""


class WorkerDied(RuntimeError):
    """A worker process ended without a word: killed by the system, or crashed in native code."""


@dataclass(frozen=True)
class LoaderConfig:
    """How to load; what to load is `make_loader`'s other argument. None stands for what fits the machine.

    Args:
        batch_size: Images in a batch.
        num_workers: Worker processes. None: one a usable core (shared among the ranks that torchrun starts here).
        prefetch_factor: Batches that each worker keeps ready. None: torch's default, 2.
        persistent_workers: Keep the workers between epochs. None: yes.
        pin_memory: Page-locked batches, for copies that overlap. None: where CUDA is available.
        seed: Of the order of samples and of every random draw in them.
        start_method: `"fork"`, `"spawn"` or `"forkserver"`. None: Python's default.
        oversubscribe: Allow more workers than usable cores.

    Raises:
        ValueError: a value that no loader can have.
    """

    batch_size: int = 64
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    seed: int = 0
    start_method: str | None = None
    oversubscribe: bool = False

    def __post_init__(self):
        least = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
                raise ValueError(f"{name}={value!r}: a whole number of at least {minimum} is wanted")
        if self.start_method is not None and self.start_method not in multiprocessing.get_all_start_methods():
            raise ValueError(f"start_method={self.start_method!r}: choose one of {', '.join(START_METHODS)}")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r}: a whole number is wanted")

    def resolved(self) -> "LoaderConfig":
        """This configuration as it will be used here: nothing left open, nothing that cannot be. Warns of changes."""
        num_workers = self._allowed_workers()
        idle = {} if num_workers else self._settings_without_workers()
        return replace(
            self,
            num_workers=num_workers,
            prefetch_factor=(self.prefetch_factor or 2) if num_workers else None,
            persistent_workers=num_workers > 0 and self.persistent_workers is not False,
            pin_memory=self._may_pin(),
            start_method=None if "start_method" in idle or not num_workers else self.start_method,
        )

    def _allowed_workers(self) -> int:
        usable = usable_cores()
        if self.num_workers is None:
            return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if self.num_workers <= usable or self.oversubscribe:
            return self.num_workers
        limits = ", ".join(f"{name} {value}" for name, value in core_limits().items())
        _warn(
            f"num_workers={self.num_workers} reduced to {usable}: this process may use {usable} cores ({limits}), and "
            "more workers only take turns. LoaderConfig(oversubscribe=True) keeps them"
        )
        return usable

    def _may_pin(self) -> bool:
        has_cuda = torch.cuda.is_available()
        if self.pin_memory and not has_cuda:
            _warn("pin_memory=True is left out: there is no CUDA device to copy to")
        return has_cuda and self.pin_memory is not False

    def _settings_without_workers(self) -> dict[str, Any]:
        asked = {
            "persistent_workers": self.persistent_workers,
            "prefetch_factor": self.prefetch_factor,
            "start_method": self.start_method,
        }
        idle = {name: value for name, value in asked.items() if value}
        if idle:
            listed = ", ".join(f"{name}={value!r}" for name, value in idle.items())
            _warn(f"{listed} left out: with num_workers=0 there is no worker that it could apply to")
        return idle


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
        sampler = _Shuffled(len(dataset), settings.seed) if shuffle else SequentialSampler(dataset)
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
                "multiprocessing_context": _context(config.start_method),
                "worker_init_fn": _start_worker,
            }
        with _own_count_of_workers():
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

    def __iter__(self) -> "_Epoch":
        self.batch_sampler.epoch = self.epoch
        self.epoch += 1
        try:
            return _Epoch(self, super().__iter__())
        except BaseException as error:
            died = _how_a_worker_died(error, self._iterator)
            self.close()
            if died:
                raise WorkerDied(died) from None
            if self.num_workers and isinstance(error, _START_ERRORS):
                error.add_note(f"while starting {self.num_workers} workers: {_PICKLING}")
            raise

    def _get_iterator(self) -> Iterator[Any]:
        if not self.num_workers:
            return super()._get_iterator()
        with _interrupts_wait(self.multiprocessing_context):
            return _WorkersBatches(self)


_PICKLING = (
    "spawn and forkserver pickle the data set, so it may hold no open file, lock or connection; open those "
    "where they are first used"
)
_START_ERRORS = (TypeError, AttributeError, multiprocessing.ProcessError, OSError)


class _WorkersBatches(_MultiProcessingDataLoaderIter):
    """torch's iterator over workers, except that only whoever waits for a batch is told of a dead worker.

    torch's signal handler would raise wherever the main thread is just then: in a training step, between two epochs,
    or in code that has nothing to do with the thread that iterates.
    """

    def __init__(self, loader: Loader):
        super().__init__(loader)
        signal_handling._remove_worker_pids(id(self))
        self._worker_pids_set = False

    def _try_get_data(self, timeout: float = 1.0) -> tuple[bool, Any]:
        return super()._try_get_data(timeout)  # at each timeout it looks for the dead; its own default is 5 s


class _Epoch:
    """One pass over a Loader; ends its workers when anything goes wrong."""

    def __init__(self, loader: Loader, batches: Iterator[Any]):
        self._loader, self._batches = loader, batches

    def __iter__(self) -> "_Epoch":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        except BaseException as error:
            died = _how_a_worker_died(error, self._batches)
            self._end_workers()
            if died:
                raise WorkerDied(died) from None
            raise

    def _end_workers(self) -> None:
        batches, self._batches = self._batches, None
        if self._loader._iterator is batches:
            self._loader._iterator = None
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


def _how_a_worker_died(error: BaseException, batches: Iterator[Any] | None) -> str | None:
    """What to say if torch found a worker dead, else None."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker (pid"):
        return None
    dead = {worker.pid: worker.exitcode for worker in getattr(batches, "_workers", ()) if worker.exitcode}
    causes = [f"worker {pid} {_cause(code)}" for pid, code in dead.items()]
    return "; ".join(causes) or text


def _cause(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL): most often the system ran out of memory. Use fewer workers, a smaller batch or a "
            "smaller prefetch_factor"
        )
    if exitcode == -signal.SIGBUS:
        return "ended with SIGBUS: most often /dev/shm is full. Enlarge it (docker run --shm-size), or load less ahead"
    if exitcode < 0:
        return f"ended with {signal.Signals(-exitcode).name}: native code crashed, or something killed it"
    return f"ended with exit status {exitcode}; its own message stands on stderr"


class _Shuffled(Sampler[int]):
    """All indices in an order that follows from (seed, epoch)."""

    def __init__(self, n_samples: int, seed: int):
        self._n_samples, self._seed, self._epoch = n_samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._n_samples

    def __iter__(self) -> Iterator[int]:
        seed = derived_seed(self._seed, self._epoch) & 0x7FFFFFFFFFFFFFFF
        yield from torch.randperm(self._n_samples, generator=torch.Generator().manual_seed(seed)).tolist()


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

        self.__dict__.update(state, _parts=pickle.loads(state["_parts"]), _sources=None)

    def __getitems__(self, requests: list[tuple[int, int]]) -> Any:
        if self._sources is None:
            self._sources = RandomSources(*self._parts)
        if torch.utils.data.get_worker_info() is not None:
            return self._batch(requests)
        with kept_global_state():
            return self._batch(requests)

    def _batch(self, requests: list[tuple[int, int]]) -> Any:
        dataset, collate_fn, batch_transform = self._parts
        samples = self._samples(dataset, requests)
        self._sources.seed(self._seed, *requests[0], 1)  # what a batch draws as a whole
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


def _context(start_method: str | None):
    context = multiprocessing.get_context(start_method)
    if context.get_start_method() == "forkserver":
        # The server imports these once, and forks every worker from itself: a tenth of a second instead of seconds.
        loaded = [name for name in _SLOW_IMPORTS if name in sys.modules]
        context.set_forkserver_preload(["__main__", "labkit.pipeline.loaders", *loaded])
    return context


@contextmanager
def _own_count_of_workers() -> Iterator[None]:
    """Without torch's warning of too many workers: `LoaderConfig` has warned, or was told to keep them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


@contextmanager
def _interrupts_wait(context: Any) -> Iterator[None]:
    """Hold Ctrl-C back while workers start: half a worker cannot be ended, and one that is importing would complain."""
    if context.get_start_method() != "fork":
        multiprocessing.resource_tracker.ensure_running()  # started later, it would let signals through again
    waiting = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *call: waiting.append(call)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the workers inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def _start_worker(worker_id: int) -> None:
    """Ctrl-C is for the main process, which ends its workers; OpenCV's threads would fight the other workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OPENCV_FOR_THREADS_NUM"] = "1"  # for a cv2 that is imported later
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_what_went_wrong


def _send_what_went_wrong(queue: Any, error: Exception, message: tuple[int, Any]) -> None:
    """In place of a batch or an exception that cannot be pickled: else the main process would wait for it for ever."""
    number, content = message
    if not isinstance(content, ExceptionWrapper):
        error.add_note("while sending a batch to the main process: it may hold only what can be pickled")
        content = ExceptionWrapper((type(error), error, error.__traceback__), where="in a DataLoader worker process")
    content.exc_type = RuntimeError
    queue.put((number, content))


def _warn(message: str) -> None:
    warnings.warn(message, LoaderWarning, stacklevel=5)
