"""What a training does with its loaders, seen from outside: torch's classes note it, the script stays as it is."""

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, dataloader as torch_dataloader

from labkit.core import ScratchFolder
from labkit.pipeline.batch_loader import BatchLoader
from labkit.tuning.loader_traits import LoaderTraits
from labkit.tuning.watch.device_time import DeviceTimes
from labkit.tuning.watch.fetching import Made, TimedWorker, read_times, start_timing
from labkit.tuning.watch.settings import Settings

REPLAY = "replay"  # the phase in which batches are repeated from memory
MOST_NOTED = 50_000  # batches of an epoch, in about 10 MB


class Batch(NamedTuple):
    """One batch that a training asked for; times by `time.perf_counter()`.

    worker: Which worker made it; None if unknown, -1: this process.
    ready: Batches that were ready when it was asked for; None if unknown.
    n_steps: Steps of optimizers so far.
    loaded_s: What unpickling took meanwhile, of this batch or of one that came before its turn, without waiting for
        its worker to answer: one that makes another batch does so late.
    phase: `"training"`, or what else the loop was made to do, such as `REPLAY`.
    cpu_s: Processor seconds of the process so far, when it was asked for and when it was there.
    """

    asked_s: float
    received_s: float
    worker: int | None
    ready: int | None
    n_steps: int
    cpu_asked_s: float
    cpu_received_s: float
    loaded_s: float
    phase: str


class Control:
    """Decides what the loaders of an observed training give. This one lets them be."""

    phase = "training"

    def next(self, seen: "SeenLoader", give: Callable[[], Any]) -> Callable[[], Any]:
        """Called before each batch; returns what gives it. `give` makes the loader's own next one."""
        return give

    def received(self, seen: "SeenLoader", data: Any) -> None:
        """Called after each batch, before the training gets it."""

    def ended(self, seen: "SeenLoader") -> None:
        """Called when a loader has no more batches in this epoch."""


@dataclass
class Epoch:
    """One pass of one iterator; `ended_s` is None while it runs, or if the loop left it early."""

    began_s: float
    thread: int
    batches: list[Batch] = field(default_factory=list)
    ended_s: float | None = None
    made_here: list[Made] = field(default_factory=list)
    number: int = 0  # of the epoch of its iterator, as its workers count them


@dataclass
class SeenLoader:
    """A loader and its epochs.

    number: In the order in which loaders are first iterated, from 0.
    made: In the order in which `DataLoader`s are made; None for other loaders, and for those made before.
    """

    number: int
    made: int | None
    kind: str
    traits: LoaderTraits
    epochs: list[Epoch] = field(default_factory=list)
    folders: dict[int, str] = field(default_factory=dict)  # of the workers' times, by the epoch that started them

    @property
    def trains(self) -> bool:
        """Whether an optimizer stepped between its batches."""
        return any(epoch.batches[-1].n_steps > epoch.batches[0].n_steps for epoch in self.epochs if epoch.batches)

    @property
    def n_batches(self) -> int:
        return sum(len(epoch.batches) for epoch in self.epochs)


class Observer:
    """Notes every batch that `DataLoader`s and `BatchLoader`s of this process give.

    `start` and `stop` change torch's classes and restore them.
    """

    def __init__(self) -> None:
        self.loaders: list[SeenLoader] = []
        self.device = DeviceTimes()
        self.control = Control()
        self.settings = Settings()
        self.n_steps = self._n_made = 0
        self._of_loader: dict[int, tuple[ref[Any], SeenLoader]] = {}
        self._undo = ExitStack()
        self._lock = threading.Lock()

    @property
    def training(self) -> list[SeenLoader]:
        """The loaders between whose batches optimizers step."""
        return [loader for loader in self.loaders if loader.trains]

    def start(self) -> None:
        iterator = torch_dataloader._BaseDataLoaderIter
        self.scratch = self._undo.enter_context(_scratch())
        self._undo.callback(start_timing(self._made_here))
        self._undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
        self._undo.callback(self.device.start())
        self._undo.enter_context(mock.patch("multiprocessing.queues._ForkingPickler", _TimedPickler))
        if hasattr(resource_sharer, "DupFd"):  # not on Windows
            self.change(resource_sharer.DupFd, "detach", _answered)
        self.change(DataLoader, "__init__", self._making)
        self.change(DataLoader, "_get_iterator", self._starting)
        self.change(iterator, "_reset", self._resetting)
        self.change(iterator, "__next__", self._giving)
        self.change(BatchLoader, "__iter__", self._iterating)
        with suppress(ImportError):  # its loader has iterators of its own
            from torchdata.stateful_dataloader import stateful_dataloader as stateful

            self.change(stateful.StatefulDataLoader, "_get_iterator", self._starting)
            self.change(stateful._StatefulBaseDataLoaderIter, "_reset", self._resetting)
            self.change(stateful._StatefulBaseDataLoaderIter, "__next__", self._giving)

    def stop(self) -> None:
        self._undo.close()

    def times(self, loader: SeenLoader) -> dict[int, dict[int, list[Made]]]:
        """What the workers noted of each batch, by the epoch that started them, and by worker; before `stop`."""
        return {first: read_times(folder) for first, folder in loader.folders.items()}

    def change(self, owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
        """Put what `hook` makes of a method in its place, until `stop`."""
        original = owner.__dict__[name]
        setattr(owner, name, hook(original))
        self._undo.callback(setattr, owner, name, original)

    def _stepped(self, *_: Any) -> None:
        self.n_steps += 1

    def _made_here(self, made: Made) -> None:
        if (epoch := _asking.epoch) is not None:
            epoch.made_here.append(made)

    def _seen(self, loader: Any) -> SeenLoader:
        known = self._of_loader.get(id(loader))
        if known is None or known[0]() is not loader:
            with self._lock:
                seen = SeenLoader(
                    len(self.loaders),
                    loader.__dict__.get("_labkit_made"),
                    type(loader).__name__,
                    LoaderTraits.of(loader),
                )
                self.loaders.append(seen)
            known = self._of_loader[id(loader)] = (ref(loader), seen)
        return known[1]

    def _begin(self, loader: Any, began_s: float) -> tuple[SeenLoader, Epoch]:
        seen, epoch = self._seen(loader), Epoch(began_s, threading.get_ident())
        seen.epochs.append(epoch)
        return seen, epoch

    def _making(self, original: Any) -> Any:
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            number, self._n_made = self._n_made, self._n_made + 1
            self.settings.make(number, original, loader, *args, **kwargs)
            loader._labkit_made = number

        return functools.wraps(original)(__init__)

    def _starting(self, original: Any) -> Any:
        def _get_iterator(loader: Any) -> Any:
            seen, epoch = self._begin(loader, time.perf_counter())
            if not loader.num_workers:
                iterator = original(loader)
            else:
                own, folder = loader.worker_init_fn, tempfile.mkdtemp(dir=self.scratch)
                seen.folders[len(seen.epochs) - 1] = folder
                loader.worker_init_fn = TimedWorker(own, folder)
                try:
                    iterator = original(loader)
                finally:
                    loader.worker_init_fn = own
            iterator._labkit_seen = (seen, epoch)
            return iterator

        return _get_iterator

    def _resetting(self, original: Any) -> Any:
        def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> Any:
            before = iterator.__dict__.get("_labkit_seen")
            if not first_iter and before and before[1].batches:  # not again, in the method of a base class
                iterator._labkit_seen = self._begin(loader, time.perf_counter())
                iterator._labkit_seen[1].number = before[1].number + 1
            return original(iterator, loader, first_iter)

        return _reset

    def _giving(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            found = iterator.__dict__.get("_labkit_seen")
            if found is None:
                return original(iterator)
            seen, epoch = found
            return self._give(seen, epoch, lambda: original(iterator), iterator)

        return __next__

    def _iterating(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Iterator[Any]:
            seen, epoch = self._begin(loader, time.perf_counter())
            return _Noted(original(loader), lambda give: self._give(seen, epoch, give, None))

        return __iter__

    def _give(self, seen: SeenLoader, epoch: Epoch, give: Callable[[], Any], iterator: Any) -> Any:
        if _asking.epoch is epoch:  # the method of a base class
            return give()
        give = self.control.next(seen, give)
        worker, ready = _next_worker(iterator), _ready(iterator)
        outer, _asking.epoch, _asking.loaded_s = _asking.epoch, epoch, 0.0
        idle = self.device.asked()
        asked_s, cpu_asked_s = time.perf_counter(), time.process_time()
        try:
            data = give()
        except StopIteration:
            epoch.ended_s = asked_s
            self.control.ended(seen)
            raise
        finally:
            received_s, cpu_s = time.perf_counter(), time.process_time()
            _asking.epoch = outer
        phase = self.control.phase
        self.control.received(seen, data)
        self.device.received(idle)
        if len(epoch.batches) < MOST_NOTED:
            own = worker, ready, self.n_steps, cpu_asked_s, cpu_s, _asking.loaded_s, phase
            epoch.batches.append(Batch(asked_s, received_s, *own))
        return data


class _Asking(threading.local):
    """The epoch whose next batch this thread waits for, to which a batch that it makes itself belongs."""

    epoch: Epoch | None = None
    loaded_s = 0.0


_asking = _Asking()


class _TimedPickler(ForkingPickler):
    """What queues between processes pickle with."""

    @staticmethod
    def loads(data: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        began_s = time.perf_counter()
        loaded = ForkingPickler.loads(data, **kwargs)
        _asking.loaded_s += time.perf_counter() - began_s
        return loaded


def _answered(detach: Callable[[Any], int]) -> Callable[[Any], int]:
    """`DupFd.detach`, which asks a worker for the memory of a tensor, without its time."""

    def timed_detach(shared: Any) -> int:
        began_s = time.perf_counter()
        try:
            return detach(shared)
        finally:
            _asking.loaded_s -= time.perf_counter() - began_s

    return timed_detach


class _Noted:
    """An iterator whose every batch is asked for through `note`; it closes as the loader's own does."""

    def __init__(self, batches: Iterator[Any], note: Callable[[Callable[[], Any]], Any]):
        self._batches, self._note = batches, note

    def __iter__(self) -> "_Noted":
        return self

    def __next__(self) -> Any:
        return self._note(self._batches.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _next_worker(iterator: Any) -> int | None:
    """The worker that makes the batch which is next in order; -1: none, this process makes it."""
    if not getattr(iterator, "_num_workers", 0):
        return -1
    with suppress(AttributeError, LookupError, TypeError):  # another torch, or the end
        return iterator._task_info[iterator._rcvd_idx][0]
    return None


def _ready(iterator: Any) -> int | None:
    """Batches that workers have ready, in the queue or set aside because an earlier one is missing."""
    if not getattr(iterator, "_num_workers", 0):
        return None
    with suppress(AttributeError, NotImplementedError, OSError, RuntimeError):  # macOS counts no queue
        return iterator._data_queue.qsize() + sum(len(info) == 2 for info in list(iterator._task_info.values()))
    return None


@contextmanager
def _scratch() -> Iterator[str]:
    with ScratchFolder(tempfile.gettempdir()) as folder:
        yield str(folder)
