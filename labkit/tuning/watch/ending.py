"""Watching for a number of steps: then report, and let the script go on or end it."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.tuning.loader_traits import LoaderTraits
from labkit.tuning.watch.observing import REPLAY, Control, SeenLoader

if TYPE_CHECKING:
    from labkit.tuning.watch.session import Watched

_KEPT = 4  # batches to replay
_LEAST = 8  # batches in each part
_UNSETTLED = 8  # batches before the figures begin
_MOST_REST_S = 30.0


class Steps(Control):
    """Counts batches of the training, and acts when there are enough, or when their epoch ends before that.

    Args:
        n_steps: Batches to see, besides the first ones.
        then: Called once, after the last of them.
        at_end: Whether the end of an epoch of the training also calls it.
        progress: What else is told of each batch.
    """

    def __init__(self, n_steps: int, then: Callable[[], None], progress: Control, *, at_end: bool = True):
        self._n_steps, self._then, self._progress, self._at_end = n_steps, then, progress, at_end

    def next(self, seen: SeenLoader, give: Callable[[], Any]) -> Callable[[], Any]:
        if seen.trains and seen.n_batches >= self._n_steps + _UNSETTLED:
            self._then()
        return give

    def received(self, seen: SeenLoader, data: Any) -> None:
        self._progress.received(seen, data)

    def ended(self, seen: SeenLoader) -> None:
        if self._at_end and seen.trains:
            self._then()


class Replay(Steps):
    """After the observed steps, kept batches again in the script's own loop: the step alone; then the loader alone.

    An epoch must hold all of it, so that the loop does not end, nor a schedule of the learning rate. `then` must end
    the script.
    """

    def __init__(self, watched: "Watched", n_steps: int, then: Callable[[], None], progress: Control):
        super().__init__(n_steps, then, progress)
        self._watched, self._of, self._kept, self._n_replayed = watched, _NONE, list[Any](), 0

    def next(self, seen: SeenLoader, give: Callable[[], Any]) -> Callable[[], Any]:
        if self.phase == "training" and seen.trains and seen.n_batches >= self._n_observed(seen) + _UNSETTLED:
            self.phase, self._of = "keep", seen
        if seen is not self._of:
            return give
        if self.phase == "keep" and len(self._kept) == _KEPT:
            self.phase = REPLAY
            _rest(seen)
        if self.phase == REPLAY and self._n_replayed == self._n_observed(seen) + 2:
            self._watched.loader_s = _loader_alone(give, self._n_observed(seen))
            self._then()
        return self._kept_batch if self.phase == REPLAY else give

    def received(self, seen: SeenLoader, data: Any) -> None:
        super().received(seen, data)
        if self.phase == "keep" and seen is self._of:
            from labkit.measure import fresh  # torch comes with it, which the script has imported by now

            self._fresh = fresh
            self._kept.append(fresh(data, whole=True))

    def _kept_batch(self) -> Any:
        self._n_replayed += 1
        return self._fresh(self._kept[self._n_replayed % _KEPT], whole=True)

    def _n_observed(self, seen: SeenLoader) -> int:
        """Steps to observe, and again to replay: fewer if the epoch is short."""
        if seen.traits.n_batches is None:
            return self._n_steps
        return max(_LEAST, min(self._n_steps, (seen.traits.n_batches - _UNSETTLED - _KEPT - 4) // 2))


_NONE = SeenLoader(-1, None, "", LoaderTraits())  # no loader yet


def _rest(seen: SeenLoader) -> None:
    """Let workers fill their queue: working ahead would slow down what is timed."""
    batches = seen.epochs[-1].batches
    a_batch_s = (batches[-1].received_s - batches[0].received_s) / max(1, len(batches) - 1)
    n_ahead = (seen.traits.num_workers or 0) * (seen.traits.prefetch_factor or 2)
    time.sleep(min(_MOST_REST_S, 1.3 * n_ahead * a_batch_s))


def _loader_alone(give: Callable[[], Any], n_batches: int) -> float | None:
    """Seconds per batch of the loader alone, without those that it had ready; None at the end of the epoch."""
    began_s, times_s = time.perf_counter(), list[float]()
    with contextlib.suppress(StopIteration):
        for _ in range(n_batches):
            give()
            times_s.append(time.perf_counter())
    later = times_s[len(times_s) // 2 :]
    if len(later) < 2:
        return (times_s[-1] - began_s) / len(times_s) if times_s else None
    return (later[-1] - later[0]) / (len(later) - 1)


def end_process() -> None:
    """End this process and the workers that it started at once: nothing that the script does at its end is done."""
    import psutil

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, a pipe that nobody reads, or what a script put there
            stream.flush()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(0)
