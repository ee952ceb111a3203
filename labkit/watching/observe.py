"""What a training does with its loaders, seen from outside: torch's classes note it, the script stays as it is.

Nothing here imports torch: the script does, when it has set what torch reads as it starts. Modules are changed as the
program imports them.
"""

import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from labkit.watching.advice import LoaderTraits
from labkit.watching.timings import BatchTiming, DeviceTimes, TimedWorker, read_times, start_timing

Change = Callable[[ModuleType], object]


class WhenImported:
    """A finder of `sys.meta_path` that calls a function with a module once its code has run: at once, if it has.

    Attributes:
        failed: A line for each module for which the function failed, such as one of a version that is not known.
    """

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        self._looking = set[str]()
        self.failed: list[str] = []

    def start(self, changes: dict[str, Change]) -> None:
        """Call these functions, by the full names of their modules."""
        self._changes = changes
        for name in [name for name in changes if name in sys.modules]:
            self._imported(sys.modules[name])
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Call none of them any more."""
        self._changes = {}
        if self in sys.meta_path:  # a program may have put others in its place
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """What the other finders find; its loader tells this object when it has run the module's code."""
        if name not in self._changes or name in self._looking:  # another finder may ask all of them, too
            return None
        self._looking.add(name)
        try:
            specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            found = next((spec for spec in specs if spec is not None), None)
        finally:
            self._looking.discard(name)
        with suppress(AttributeError):  # a loader that cannot be followed still imports
            self._follow(found.loader)  # type: ignore[union-attr]
        return found

    def _follow(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is as it was, and the module's for good
            loader.exec_module(module)
            self._imported(module)

        loader.exec_module = exec_module

    def _imported(self, module: ModuleType) -> None:
        change = self._changes.pop(module.__name__, None)
        if change is not None:
            try:
                change(module)
            except Exception as error:  # the program's import must not fail
                self.failed.append(f"{module.__name__} is of a version that is not known: {error!r}")


REPLAY = "replay"  # the phase in which batches are repeated from memory
FEW = 20  # batches: with fewer the figures are rough
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
    made_here: list[BatchTiming] = field(default_factory=list)
    number: int = 0  # of the epoch of its iterator, as its workers count them


@dataclass
class SeenLoader:
    """A loader and its epochs.

    number: In the order in which loaders are first iterated, from 0.
    """

    number: int
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


class _Known:
    """What is noted of objects that are not ours, without a mark on them."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[ref[Any], Any]] = {}

    def get(self, thing: Any) -> Any:
        """What was noted of it; None if nothing was."""
        found = self._of.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def put(self, thing: Any, value: Any) -> None:
        self._of[id(thing)] = (ref(thing), value)


class Observer:
    """Notes every batch that the `DataLoader`s and `BatchLoader`s of the current process give.

    `start` and `stop` change torch's classes and restore them; those that are not imported yet, as they are.
    """

    def __init__(self) -> None:
        self.loaders: list[SeenLoader] = []
        self.device = DeviceTimes()
        self.control = Control()
        self.n_steps = 0
        self._imports = WhenImported()
        self._seen, self._epochs = _Known(), _Known()
        self._scratch: str | None = None
        self._undo = ExitStack()
        self._lock = threading.Lock()

    @property
    def training(self) -> list[SeenLoader]:
        """The loaders between whose batches optimizers step."""
        return [loader for loader in self.loaders if loader.trains]

    @property
    def failed(self) -> list[str]:
        """What could not be observed, and why."""
        return self._imports.failed

    def start(self, more: Mapping[str, Change] = MappingProxyType({})) -> None:
        """Observe; also call `more` functions with the modules of these names."""
        self._undo.callback(self._imports.stop)
        self._imports.start(
            {
                **more,
                "torch": self._observe_device,
                "torch.utils.data._utils.fetch": self._observe_making,
                "torch.utils.data.dataloader": self._observe_loaders,
                "torch.optim.optimizer": self._observe_steps,
                "torchdata.stateful_dataloader.stateful_dataloader": self._observe_stateful,
                "labkit.loading.batch_loader": self._observe_batch_loader,
                "multiprocessing.queues": self._observe_queues,
                "multiprocessing.resource_sharer": self._observe_memory,
            }
        )

    def stop(self) -> None:
        self._undo.close()

    def forget(self) -> None:
        """Begin again, in a forked process: what was seen so far is its parent's."""
        self.loaders, self.n_steps, self.control = [], 0, Control()
        self._seen, self._epochs, self._lock = _Known(), _Known(), threading.Lock()
        self.device.forget()

    def times(self, loader: SeenLoader) -> dict[int, dict[int, list[BatchTiming]]]:
        """What the workers noted of each batch, by the epoch that started them, and by worker; before `stop`."""
        return {first: read_times(folder) for first, folder in loader.folders.items()}

    def _observe_device(self, torch: ModuleType) -> None:
        self._undo.callback(self.device.start())

    def _observe_making(self, fetch: ModuleType) -> None:
        self._undo.callback(start_timing(self._made_here, fetch))

    def _observe_loaders(self, dataloader: Any) -> None:
        self.change(dataloader._BaseDataLoaderIter, "__init__", self._starting)
        self.change(dataloader._BaseDataLoaderIter, "_reset", self._resetting)
        self.change(dataloader._BaseDataLoaderIter, "__next__", self._giving)
        self.change(dataloader._MultiProcessingDataLoaderIter, "__init__", self._starting_workers)

    def _observe_stateful(self, stateful: Any) -> None:
        """torchdata's iterators are torch's, except for how they start workers."""
        self.change(stateful._StatefulMultiProcessingDataLoaderIter, "__init__", self._starting_workers)

    def _observe_steps(self, optimizer: Any) -> None:
        self._undo.callback(optimizer.register_optimizer_step_post_hook(self._stepped).remove)

    def _observe_batch_loader(self, module: Any) -> None:
        self.change(module.BatchLoader, "__iter__", self._iterating)

    def _observe_queues(self, queues: Any) -> None:
        self.change(queues, "_ForkingPickler", _timed_pickler)

    def _observe_memory(self, sharer: Any) -> None:
        if hasattr(sharer, "DupFd"):  # not on Windows
            self.change(sharer.DupFd, "detach", _answered)

    def change(self, owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
        """Put what `hook` makes of a method in its place, until `stop`."""
        original = owner.__dict__[name]
        setattr(owner, name, hook(original))
        self._undo.callback(setattr, owner, name, original)

    def _stepped(self, *_: Any) -> None:
        self.n_steps += 1

    def _made_here(self, made: BatchTiming) -> None:
        if (epoch := _asking.epoch) is not None:
            epoch.made_here.append(made)

    def _begin(self, loader: Any) -> tuple[SeenLoader, Epoch]:
        epoch = Epoch(time.perf_counter(), threading.get_ident())
        seen = self._seen.get(loader)
        if seen is None:
            with self._lock:
                kind = type(loader).__name__
                seen = SeenLoader(len(self.loaders), kind, _traits(loader))
                self.loaders.append(seen)
            self._seen.put(loader, seen)
        seen.epochs.append(epoch)
        return seen, epoch

    def _starting(self, original: Any) -> Any:
        """torch's iterators, also those that subclasses of its loader make for themselves, begin with their loader."""

        @functools.wraps(original)
        def __init__(self: Any, loader: Any) -> None:
            if not _is_part(loader):
                observer._epochs.put(self, observer._begin(loader))
            original(self, loader)

        observer = self
        return __init__

    def _starting_workers(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            own, folder = loader.worker_init_fn, None if _is_part(loader) else observer.folder()
            loader.worker_init_fn = TimedWorker(own, folder) if folder else own
            try:
                original(self, loader, *args, **kwargs)
            finally:
                loader.worker_init_fn = own
            if folder:
                seen, _ = observer._epochs.get(self)
                seen.folders[len(seen.epochs) - 1] = folder

        observer = self
        return __init__

    def folder(self) -> str | None:
        """A new folder for what other processes note, until `stop`; None where none can be made."""
        from labkit.util.files import ScratchFolder

        chosen = tempfile.tempdir  # None until it is asked for: the script may yet set TMPDIR
        try:
            if self._scratch is None:
                self._scratch = str(self._undo.enter_context(ScratchFolder(tempfile.gettempdir())))
            return tempfile.mkdtemp(dir=self._scratch)
        except OSError:
            return None
        finally:
            tempfile.tempdir = chosen

    def _resetting(self, original: Any) -> Any:
        @functools.wraps(original)
        def _reset(self: Any, loader: Any, first_iter: bool = False) -> Any:
            before = observer._epochs.get(self)
            if _is_part(loader):
                pass
            elif before is None or (not first_iter and before[1].batches):
                seen, epoch = observer._begin(loader)
                epoch.number = before[1].number + 1 if before else 0
                observer._epochs.put(self, (seen, epoch))
            return original(self, loader, first_iter)

        observer = self
        return _reset

    def _giving(self, original: Any) -> Any:
        @functools.wraps(original)
        def __next__(self: Any) -> Any:
            found = observer._epochs.get(self)
            if found is None:
                return original(self)
            seen, epoch = found
            return observer._give(seen, epoch, lambda: original(self), self)

        observer = self
        return __next__

    def _iterating(self, original: Any) -> Any:
        @functools.wraps(original)
        def __iter__(self: Any) -> Iterator[Any]:
            seen, epoch = observer._begin(self)
            return _Noted(original(self), lambda give: observer._give(seen, epoch, give, None))

        observer = self
        return __iter__

    def _give(self, seen: SeenLoader, epoch: Epoch, give: Callable[[], Any], iterator: Any) -> Any:
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


def _is_part(loader: Any) -> bool:
    """Whether it is torch's loader in a `BatchLoader` with processes, which is noted itself."""
    return type(getattr(loader, "dataset", None)).__module__ == "labkit.loading.processes"


def _traits(loader: Any) -> LoaderTraits:
    try:
        return LoaderTraits.of(loader)
    except Exception:  # it asks the script's own data sets and samplers, which need not answer
        return LoaderTraits()


class _Asking(threading.local):
    """The epoch whose next batch this thread waits for, to which a batch that it makes itself belongs."""

    epoch: Epoch | None = None
    loaded_s = 0.0


_asking = _Asking()


def _timed_pickler(pickler: Any) -> Any:
    """What queues between processes pickle with."""

    class TimedPickler(pickler):
        @staticmethod
        def loads(data: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            loaded = pickler.loads(data, **kwargs)
            _asking.loaded_s += time.perf_counter() - began_s
            return loaded

    return TimedPickler


def _answered(detach: Callable[[Any], int]) -> Callable[[Any], int]:
    """`DupFd.detach`, which asks a worker for the memory of a tensor, without its time."""

    @functools.wraps(detach)
    def timed_detach(self: Any) -> int:
        began_s = time.perf_counter()
        try:
            return detach(self)
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


def describe_nothing(observer: Observer) -> str:
    """Why there is nothing to report."""
    if observer.loaders:
        n_batches = max(loader.n_batches for loader in observer.loaders)
        said = f"too few batches were seen ({n_batches}): let the training take at least {FEW} steps"
    else:
        said = (
            "no torch.utils.data.DataLoader and no labkit.BatchLoader was iterated in this process, or in one that it "
            "started by multiprocessing and that has ended: other libraries' loaders cannot be watched, nor commands "
            "that the script starts; lk.diagnose(loader, step) takes any iterable"
        )
    return "; ".join([said, *observer.failed])
