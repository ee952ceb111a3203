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
from time import monotonic  # goes on where the clock of a simulated device stands still
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.errors import NothingSeen
from labkit.measure.usage import core_time, tree_cpu_s
from labkit.watching.epochs import EpochFigures
from labkit.watching.hooks import Change, Hooks
from labkit.watching.lines import LineSampler
from labkit.watching.record import Record, describe_nothing
from labkit.watching.script import Terminal, before_exit

if TYPE_CHECKING:  # the libraries of a report are imported when there is one to make
    from labkit.watching.report import WatchReport


class Watched:
    """What `watch` observes; `report()` tells what it saw so far, and `epochs` the figures of each epoch."""

    def __init__(self, command: str = ""):
        self.record, self.command = Record(), command
        self.hooks = Hooks(self.record)
        self._began = core_time(), tree_cpu_s(), monotonic(), time.perf_counter()
        self._report: WatchReport | None = None
        self.loader_s: float | None = None
        self._figures = EpochFigures(self.record)
        self._epochs: list[dict[str, float]] | None = None  # once the observation has ended

    def start(self, more: Mapping[str, Change] = MappingProxyType({})) -> None:
        self.hooks.start(more)

    def begin_again(self) -> None:
        """Forget what was seen: this process was forked, and that was its parent's."""
        self.record.forget()
        self._figures, self._epochs = EpochFigures(self.record), None
        self._report, self._began = None, (core_time(), tree_cpu_s(), monotonic(), time.perf_counter())

    def stop(self) -> None:
        """End the observation; its report stays."""
        try:
            self._report = self.report()
        except NothingSeen:
            self._report = None
        finally:
            with suppress(Exception):  # what cannot be told must not end the script
                self._epochs = self.epochs
            self.hooks.stop()
            self.record.stop()

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The figures of each epoch of the training that has ended so far, as flat dicts for a logger.

        Each has `epoch` (from 0) and `n_batches`; the shares of the time as the report has them, in sum 1: `compute`,
        `fetch`, `prepare`, `copy`, `hand-over` and `start`; `ready`, the share of its batches that were ready when
        they were asked for; `step_p50_ms`, `step_p95_ms` and `step_p99_ms`; and the seconds of pauses until the next
        epoch, which are in none of the other figures: `validation_s`, of loops over other loaders, and
        `checkpoint_s`, of `torch.save`. What is not known is NaN. The first batches of an epoch count by `start` only,
        those of the very first one if every epoch starts its workers. An epoch that its loop leaves early has ended
        when the next one begins.

        >>> for epoch in range(90):  # doctest: +SKIP
        ...     train(loader)
        ...     wandb.log(watched.epochs[-1])
        """
        if self._epochs is not None:
            return self._epochs
        with self.record.with_loop():
            return self._figures.read()

    def report(self) -> "WatchReport":
        """What the training waited for.

        Raises:
            NothingSeen: a ValueError: fewer than two batches were asked for.
        """
        if self._report is not None:
            return self._report
        epochs = self.epochs
        with self.record.with_loop():
            return self._report_of(epochs)

    def _report_of(self, epochs: list[dict[str, float]]) -> "WatchReport":
        if all(loader.n_batches < 2 for loader in self.record.loaders):
            raise NothingSeen(describe_nothing(self.record))
        from labkit.watching.findings import make_report

        cores, own_s, real_s, began_s = self._began
        busy_s, own_s = (core_time() - cores).busy_s, tree_cpu_s() - own_s
        core_s = (monotonic() - real_s) * (os.cpu_count() or 1)
        self.record.device.read()
        return make_report(
            self.record, cpu_share=min(1.0, busy_s / core_s) if busy_s else None, epochs=epochs,
            others_share=max(0.0, busy_s - own_s) / core_s, loader_s=self.loader_s, command=self.command,
            observed_s=(began_s, time.perf_counter()),
        )  # fmt: skip


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
        change = self._watched.hooks.change
        self._watched.start({
            "multiprocessing.process": lambda process: change(process.BaseProcess, "start", self._starting)
        })  # fmt: skip
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
            from labkit.watching.ranks import combine

            note = "These are the figures of {}, which the script started"
            many = f"; of its {len(children)} processes this one waits longest for data."
            note += many if len(children) > 1 else "."
            return combine("process", children, note, self._watched.command)
        note = f"{len(children)} processes that the script started loaded data, too: they are not in these figures."
        return replace(own, notes=[*own.notes, note]) if children else own

    def _starting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def start(process: Any) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", None) or ""
            self._folder = self._folder or record.folder()
            if self._folder and not module.startswith(_WORKERS):
                stall_s = record.stalls.stall_s if record.stalls else 0.0
                process._labkit_begins = _Begins(self._folder, stall_s, LineSampler.is_allowed)
            try:
                original(process)
            finally:
                vars(process).pop("_labkit_begins", None)

        record = self._watched.record
        return start


class _Begins:
    """Begins an observation where it is unpickled."""

    def __init__(self, *own: Any):
        self._own = own

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, self._own


def _begin(folder: str, stall_s: float, takes_lines: bool) -> None:
    with suppress(Exception):  # the process must start
        LineSampler.is_allowed = LineSampler.is_allowed and takes_lines
        watched = Watched()
        watched.record.watch_stalls(stall_s, Terminal())
        children = Children(watched, folder)
        children.start()
        end = functools.cache(children.hand_over)
        before_exit(end)
        atexit.register(end)
