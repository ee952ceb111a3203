"""What of torch is changed while a training is watched, and restored.

In come modules, as the program imports them; out go calls of one method of the `Record`, or of `making`, by each hook,
which stands in the place of a method of theirs and decides nothing itself. Nothing here imports torch: the script does,
when it has set what torch reads as it starts.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from labkit.watching.record import Record, asking
from labkit.watching.worker import making, one_by_one

Change = Callable[[ModuleType], object]


class WhenImported:
    """A finder of `sys.meta_path` that calls a function with a module once its code has run: at once, if it has.

    Args:
        failed: Gets a line for each module for which the function fails, as of a version that is not known.
    """

    def __init__(self, failed: list[str]) -> None:
        self._changes: dict[str, Change] = {}
        self._looking = set[str]()
        self._failed = failed

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
                self._failed.append(f"{module.__name__} is of a version that is not known: {error!r}")


class Hooks:
    """The hooks of a training.

    Args:
        record: What they tell.
    """

    def __init__(self, record: Record):
        self._record, self._imports, self._undo = record, WhenImported(record.failed), ExitStack()

    def start(self, more: Mapping[str, Change] = MappingProxyType({})) -> None:
        """Change what is imported, and what will be; also call `more` functions with the modules of these names."""
        self._undo.callback(self._imports.stop)
        iterators = "_BaseDataLoaderIter", "_MultiProcessingDataLoaderIter", "_StatefulMultiProcessingDataLoaderIter"
        base, of_workers, of_torchdata = iterators  # torchdata's are torch's, except for how they start workers
        self._imports.start({
            **more,
            "torch": self._torch,
            "torch.optim.optimizer": self._optimizers,
            "torch.utils.data.dataloader": self._changing(
                (base, "__init__", self._starts), (base, "_reset", self._begins_again), (base, "__next__", self._gives),
                (of_workers, "__init__", self._starts_workers),
            ),
            "torchdata.stateful_dataloader.stateful_dataloader": self._changing(
                (of_torchdata, "__init__", self._starts_workers)
            ),
            "torch.utils.data._utils.fetch": self._makes,
            "torch.utils.data._utils.pin_memory": self._changing(("", "pin_memory", self._pins)),
            "labkit.loading.batch_loader": self._changing(("BatchLoader", "__iter__", self._iterates)),
            "labkit.loading.seeding": self._changing(("SeededIndices", "__iter__", one_by_one)),
            "multiprocessing.queues": self._changing(("", "_ForkingPickler", timed_pickler)),
            "multiprocessing.resource_sharer": self._changing(("DupFd", "detach", answered)),
        })  # fmt: skip

    def stop(self) -> None:
        """Restore all that was changed."""
        self._undo.close()

    def change(self, owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
        """Put what `hook` makes of a method in its place, until `stop`."""
        original = owner.__dict__[name]
        setattr(owner, name, hook(original))
        self._undo.callback(setattr, owner, name, original)

    def _changing(self, *hooks: tuple[str, str, Callable[[Any], Any]]) -> Change:
        """What puts hooks in the place of methods, by class (empty: of the module itself) and name."""

        def change(module: ModuleType) -> None:
            for owner, name, hook in hooks:
                self.change(getattr(module, owner) if owner else module, name, hook)

        return change

    def _torch(self, torch: Any) -> None:
        self._undo.callback(self._record.device.start())
        self.change(torch.autograd, "backward", self._differentiates)
        saving = self._saves(torch.save)
        for owner in (torch, torch.serialization):  # one function under two names, as pickle wants it
            self.change(owner, "save", lambda _: saving)

    def _optimizers(self, optimizer: Any) -> None:
        self._undo.callback(optimizer.register_optimizer_step_post_hook(self._record.stepped).remove)

    def _makes(self, fetch: ModuleType) -> None:
        before, making.put = making.put, self._record.made_here  # another record may be at work, as around `diagnose`
        self._undo.callback(setattr, making, "put", before)
        change_fetchers(fetch, self.change)

    def _starts(self, original: Any) -> Any:
        """torch's iterators, also those that subclasses of its loader make for themselves, begin with their loader."""

        @wraps(original)
        def __init__(iterator: Any, loader: Any) -> None:
            self._record.starts(iterator, loader)
            original(iterator, loader)

        return __init__

    def _starts_workers(self, original: Any) -> Any:
        @wraps(original)
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            with self._record.starting_workers(iterator, loader, change_for_good):
                original(iterator, loader, *args, **kwargs)

        return __init__

    def _begins_again(self, original: Any) -> Any:
        @wraps(original)
        def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> Any:
            self._record.begins_again(iterator, loader, is_first=first_iter)
            return original(iterator, loader, first_iter)

        return _reset

    def _gives(self, original: Any) -> Any:
        @wraps(original)
        def __next__(iterator: Any) -> Any:
            return self._record.gives(iterator, lambda: original(iterator))

        return __next__

    def _iterates(self, original: Any) -> Any:
        @wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:
            return self._record.noted(lambda: original(loader), loader)

        return __iter__

    def _saves(self, original: Any) -> Any:
        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            with self._record.saving():
                return original(*args, **kwargs)

        return save

    def _pins(self, original: Any) -> Any:
        """What pins a batch, in torch's thread or where the batch is made; it calls itself for the parts of one."""

        @wraps(original)
        def pin_memory(*args: Any, **kwargs: Any) -> Any:
            return self._record.pins(original, args, kwargs)

        return pin_memory

    def _differentiates(self, original: Any) -> Any:
        @wraps(original)
        def differentiate(*args: Any, **kwargs: Any) -> Any:
            return self._record.differentiates(original, args, kwargs)

        return differentiate


def change_fetchers(fetch: ModuleType, change: Callable[[Any, str, Any], None]) -> None:
    """Let torch's fetchers note every batch that this process makes for a `DataLoader`, where `making` puts them.

    Args:
        fetch: `torch.utils.data._utils.fetch`.
        change: Puts what a hook makes of a method in its place, given the class, the name and the hook.
    """
    change(fetch._BaseDatasetFetcher, "__init__", _begins_epoch)
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        change(kind, "fetch", _fetches)


def change_for_good(fetch: ModuleType) -> None:
    """The same in a worker that was not forked; and its indices, if they are labkit's."""
    change_fetchers(fetch, _change_for_good)
    if seeding := sys.modules.get("labkit.loading.seeding"):
        _change_for_good(seeding.SeededIndices, "__iter__", one_by_one)


def _change_for_good(owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
    setattr(owner, name, hook(getattr(owner, name)))


def _begins_epoch(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(fetcher: Any, *args: Any, **kwargs: Any) -> None:
        init(fetcher, *args, **kwargs)
        making.begin_epoch(fetcher)

    return __init__


def _fetches(fetch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fetch)
    def timed_fetch(self: Any, possibly_batched_index: Any) -> Any:
        return making.make(fetch, self, possibly_batched_index)

    return timed_fetch


def timed_pickler(pickler: Any) -> Any:
    """What queues between processes pickle with."""

    class TimedPickler(pickler):
        @staticmethod
        def loads(data: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            loaded = pickler.loads(data, **kwargs)
            asking.loaded_s += time.perf_counter() - began_s
            return loaded

    return TimedPickler


def answered(detach: Callable[[Any], int]) -> Callable[[Any], int]:
    """`DupFd.detach`, which asks a worker for the memory of a tensor, without its time."""

    @wraps(detach)
    def timed_detach(self: Any) -> int:
        began_s = time.perf_counter()
        try:
            return detach(self)
        finally:
            asking.loaded_s -= time.perf_counter() - began_s

    return timed_detach
