"""What `watch` observes: this process, and those that it starts by `multiprocessing`, which hand over their reports.

A forked one has the observation of its parent, which begins again. Any other finds in its process object what begins
one; that object is unpickled before the process runs anything of the script but its imports.
"""

import atexit
import functools
import os
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from labkit.errors import NothingSeen
from labkit.measure.usage import core_time
from labkit.watching.observe import Change, Observer, describe_nothing
from labkit.watching.script import before_exit

if TYPE_CHECKING:  # the libraries of a report are imported when there is one to make
    from labkit.watching.findings import WatchReport


class Watched:
    """What `watch` observes; `report()` tells what it saw so far."""

    def __init__(self, command: str = ""):
        self.observer = Observer()
        self.command = command
        self._cores, self._began_s = core_time(), time.perf_counter()
        self._report: WatchReport | None = None
        self.loader_s: float | None = None

    def start(self, more: Mapping[str, Change] = MappingProxyType({})) -> None:
        self.observer.start(more)

    def begin_again(self) -> None:
        """Forget what was seen: this process was forked, and that was its parent's."""
        self.observer.forget()
        self._report, self._cores, self._began_s = None, core_time(), time.perf_counter()

    def stop(self) -> None:
        """End the observation; its report stays."""
        try:
            self._report = self.report()
        except NothingSeen:
            self._report = None
        finally:
            self.observer.stop()

    def report(self) -> "WatchReport":
        """What the training waited for.

        Raises:
            NothingSeen: a ValueError: fewer than two batches were asked for.
        """
        if self._report is not None:
            return self._report
        if all(loader.n_batches < 2 for loader in self.observer.loaders):
            raise NothingSeen(describe_nothing(self.observer))
        used, seconds = core_time() - self._cores, time.perf_counter() - self._began_s
        from labkit.watching.findings import make_report

        self.observer.device.read()
        return make_report(self.observer, used, seconds, loader_s=self.loader_s, command=self.command)


_WORKERS = ("torch.utils.data.", "torchdata.", "multiprocessing.")  # modules whose processes train nothing


class Children:
    """Lets the processes that this one starts hand over their reports.

    Args:
        watched: What is observed in this process.
        folder: Where reports go. Default: one that is made when the first process starts.
    """

    def __init__(self, watched: Watched, folder: str | None = None):
        self._watched, self._folder = watched, folder

    def start(self) -> None:
        """Observe the processes that are started from now on."""
        self._watched.start({"multiprocessing.process": self._observe})
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._watched.begin_again)

    def hand_over(self) -> None:
        """Leave the report of this process, if it has one, where its parent looks."""
        if self._folder:
            with suppress(Exception):  # the process ends in its own way
                report = self._watched.report()
                import multiprocessing  # which the script started this process by

                name = multiprocessing.current_process().name
                path = Path(self._folder, f"{os.getpid()}.report")
                path.with_suffix(".part").write_bytes(pickle.dumps((name, report)))
                path.with_suffix(".part").rename(path)

    def stop(self) -> "WatchReport":
        """End the observation.

        Returns:
            The report of this process, or if it loaded nothing itself, of those that it started.

        Raises:
            NothingSeen: none of them has one.
        """
        paths = sorted(Path(self._folder or os.devnull).glob("*.report"))
        children = [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301 - from a folder of our own
        self._watched.stop()
        try:
            own = self._watched.report()
        except NothingSeen:
            if not children:
                raise
            return replace(_combine(children), command=self._watched.command)
        note = f"{len(children)} processes that the script started loaded data, too: they are not in these figures."
        return replace(own, notes=[*own.notes, note]) if children else own

    def _observe(self, process: ModuleType) -> None:
        self._watched.observer.change(process.BaseProcess, "start", self._starting)

    def _starting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def start(process: Any) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", None) or ""
            if not module.startswith(_WORKERS) and (folder := children._make_folder()):
                process._labkit_begins = _Begins(folder)
            try:
                original(process)
            finally:
                vars(process).pop("_labkit_begins", None)

        children = self
        return start

    def _make_folder(self) -> str | None:
        self._folder = self._folder or self._watched.observer.folder()
        return self._folder


class _Begins:
    """Begins an observation where it is unpickled."""

    def __init__(self, folder: str):
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (self._folder,)


def _begin(folder: str) -> None:
    with suppress(Exception):  # the process must start
        children = Children(Watched(), folder)
        children.start()
        end = functools.cache(children.hand_over)
        before_exit(end)
        atexit.register(end)


def _combine(children: list[tuple[str, "WatchReport"]]) -> "WatchReport":
    """The report of the process that waits longest for data, with a row for each."""
    import pandas as pd

    name, slowest = min(children, key=lambda child: child[1].shares["compute"])
    note = f"These are the figures of {name}, which the script started"
    note += "." if len(children) == 1 else f"; of its {len(children)} processes this one waits longest for data."
    rows = [{"process": name, "n_batches": each.n_batches, **each.shares} for name, each in children]
    ranks = pd.DataFrame(rows) if len(rows) > 1 else None
    return replace(slowest, ranks=ranks, notes=[*slowest.notes, note])
