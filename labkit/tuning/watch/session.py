"""watch(): observe the loaders of whatever runs in a block, and tell what it waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from labkit.measure import core_time
from labkit.tuning.watch.observing import NothingSeen, Observer, describe_nothing

if TYPE_CHECKING:  # the libraries of a report are imported when there is one to make
    from labkit.tuning.watch.report import WatchReport


class Watched:
    """What `watch` observes; `report()` tells what it saw so far."""

    def __init__(self, command: str = ""):
        self.observer = Observer()
        self.command = command
        self._cores, self._began_s = core_time(), time.perf_counter()
        self._report: WatchReport | None = None
        self.loader_s: float | None = None

    def start(self) -> None:
        self.observer.start()

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
        from labkit.tuning.watch.findings import make_report

        self.observer.device.read()
        return make_report(self.observer, used, seconds, loader_s=self.loader_s, command=self.command)


@contextmanager
def watch() -> Iterator[Watched]:
    """Observe what the training in this block waits for; nothing in it is changed.

    Every `torch.utils.data.DataLoader`, and whatever wraps one, and every `BatchLoader` is noted: when a batch was
    asked for and when it was there, how many were ready, and in the workers how long storage, `__getitem__` and the
    collate function took. On CUDA, events tell for how long the device had nothing to do.

    Yields:
        A `Watched`: its `report()` has the shares, the ceiling and what to change, in the block and after it.

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    watched = Watched()
    watched.start()
    try:
        yield watched
    finally:
        watched.stop()
