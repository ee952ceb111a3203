"""`lk.diagnose`: what a loader of any library costs a step: `watch` around a loop of both, and a replay of the step.

In come a loader and a step, or the name of a function that returns them; out goes a `Diagnosis`.
"""

import importlib
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from labkit.errors import CannotDiagnose
from labkit.measure.frames import make_frame
from labkit.measure.steady import count_images, synchronize
from labkit.measure.unchanged import unchanged
from labkit.measure.usage import core_time, tree_cpu_s
from labkit.util.arguments import require_int
from labkit.util.process import closing_pass
from labkit.watching.accounts import Accounts, find_accounts
from labkit.watching.findings import in_parts
from labkit.watching.loaders import REPLAY, Control, SeenLoader
from labkit.watching.program import Watched
from labkit.watching.record import Record
from labkit.watching.replay import KEPT, UNSETTLED, Replay, n_ahead
from labkit.watching.report import Diagnosis


def made_training(name: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """The loader and the step that a function returns, from the current folder or from what is installed.

    Args:
        name: `package.module:function`; it works without arguments.
        arguments: For the script's `sys.argv`, as if it were started with them.

    Raises:
        CannotDiagnose: another form, no such module or function, or it returns something else. What the module itself
            raises while it is imported is passed on.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or module_name.startswith(".") or module_name.endswith(".py"):
        example = "train:make_training for train.py in this folder"
        raise CannotDiagnose(f"{name!r}: write module:function, such as {example}")
    sys.argv = [module_name, *arguments]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise CannotDiagnose(
                f"there is no module {module_name} here ({os.getcwd()}) and none is installed"
            ) from None
        raise
    if not callable(function):
        raise CannotDiagnose(f"{module_name} has no function {function_name}")
    returned = function()
    parts = returned if isinstance(returned, tuple | list) else [returned]
    if len(parts) != 2 or not hasattr(parts[0], "__iter__") or not callable(parts[1]):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise CannotDiagnose(f"{name} gave {kinds}: return loader, step, where step(batch) trains on a batch")
    return parts[0], parts[1]


def counted(batch: Any) -> int:
    """Images in a batch; 1 if they cannot be counted, so that rates are batches per second."""
    try:
        return count_images(batch)
    except (TypeError, StopIteration):
        return 1


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    *,
    batches: int = 20,
    rounds: int = 3,
    limit_s: float = 100.0,
    count: Callable[[Any], int] | None = None,
) -> Diagnosis:
    """Find out what training waits for: `watch` around a loop of a loader and a step, then the step on kept batches.

    The step really trains, in the end on a few batches again and again: pass a copy of a model that you need. Batches
    arrive as the loader gave them, whatever the step does to them. The loader is left with the epoch, order and state
    that it had, also in the middle of a pass, and all random generators are as they were.

    Args:
        loader: Any iterable of batches that can be iterated again, also of another library.
        step: Called with each batch, as the loader gives it; moves it to the device itself.
        batches: In each round of the loop; fewer if they take too long.
        rounds: How many of them, and as many of the replay.
        limit_s: Seconds that it may take, about; a loader or a step of many seconds per batch takes longer.
        count: Returns the images of a batch, where `compare`'s rule does not fit.

    >>> loader = lk.BatchLoader("photos", size=64, batch_size=4)
    >>> found = lk.diagnose(loader, lambda batch: batch[0].float().sum(), batches=4, limit_s=5)
    >>> print(found)  # doctest: +SKIP
    labkit diagnose: 12 steps in 218 ms on the CPU, warm-up excluded
      waiting for data  71% of the run; without waiting, 3.4 times [3.1, 3.8] as fast
      ...

    Raises:
        CannotDiagnose: a ValueError: the loader gives nothing or can be iterated only once or not at all, the step
            cannot be called, or there are no batches or rounds.
    """
    _check_arguments(loader, step, batches, rounds)
    watched = Watched()
    with unchanged(loader):
        watched.start()
        try:
            given = _Batches(loader, watched.record)
            parts = watched.record.control = _Parts(watched.record, given, batches * rounds, limit_s)
            with closing(iter(given)) as endless, suppress(_Over):
                for batch in endless:
                    if inspect.isgenerator(result := step(batch)) or inspect.iscoroutine(result):
                        raise CannotDiagnose("step returns a generator or a coroutine and has not run: pass a function")
                    if parts.phase != "training":
                        synchronize()
            given.join_parts()
            report = watched.report()
            accounts: Any = find_accounts(watched.record)  # there are some, as there is a report
        finally:
            watched.record.control = Control()  # which holds no loader, and with it its workers
            watched.hooks.stop()
            watched.record.stop()
    n_images = statistics.fmean((count or counted)(batch) for batch in parts.kept)
    return Diagnosis(**vars(report), frame=_make_frame(accounts, rounds, n_images))


def _check_arguments(loader: Any, step: Any, batches: int, rounds: int) -> None:
    if not hasattr(loader, "__iter__"):
        raise CannotDiagnose(f"the loader must be an iterable of batches, got a {type(loader).__name__}")
    if not callable(step):
        raise CannotDiagnose(f"step must be a function of one batch, got a {type(step).__name__}")
    try:
        require_int("batches", batches)
        require_int("rounds", rounds)
    except ValueError as error:
        raise CannotDiagnose(str(error)) from None


class _Batches:
    """Endless batches of any loader, one epoch after the other, noted also where `watch` does not know it."""

    def __init__(self, loader: Iterable[Any], record: Record):
        self.loader, self._record = loader, record
        self._is_known: bool | None = None  # to a hook that notes it

    @property
    def seen(self) -> SeenLoader | None:
        return self._record.seen(self.loader if self._is_known else self)

    def __iter__(self) -> Generator[Any, None, None]:
        n_epochs = 0
        while True:
            n_batches = 0
            with closing_pass(self._start(), self.loader) as batches:
                for batch in batches:
                    n_batches += 1
                    yield batch
            if not n_batches:
                what = "can be iterated only once: pass an iterable that starts again" if n_epochs else "gives no batch"
                raise CannotDiagnose(f"the loader, a {type(self.loader).__name__}, {what}")
            n_epochs += 1

    def _start(self) -> Iterator[Any]:
        start = lambda: iter(self.loader)  # noqa: E731
        if self._is_known is None:
            batches = iter(self.loader)
            self._is_known, start = self._record.seen(self.loader) is not None, lambda: batches
        return start() if self._is_known else self._record.noted(start, self.loader, self)

    def join_parts(self) -> None:
        """Take what is known of loaders within this one for its own: their batches are not the training's.

        They began before it gave its first batch. Those that began later are the step's.
        """
        self._record.main = seen = self.seen
        if seen is None or self._is_known or not seen.n_batches:
            return
        first_s = seen.epochs[0].batches[0].received_s
        parts = [each for each in self._record.loaders if each is not seen and each.epochs[0].began_s <= first_s]
        for part in parts[:1]:  # of several, how one makes its batches stands for all
            seen.folders = part.folders
            for epoch, of_part in zip(seen.epochs, part.epochs, strict=False):
                epoch.number, epoch.made_here = of_part.number, of_part.made_here
        numbers = {part.number for part in parts}
        self._record.loaders = [each for each in self._record.loaders if each.number not in numbers]


class _Over(Exception):
    """Enough was seen."""


def _end() -> None:
    raise _Over


class _Parts(Replay):
    """Replays when enough batches were seen: fewer than it should be where they take too long."""

    def __init__(self, record: Record, given: _Batches, n_steps: int, limit_s: float):
        super().__init__(record, n_steps, _end)
        self._given, self._limit_s = given, limit_s

    def ended(self, seen: SeenLoader) -> None:
        """Another epoch follows."""

    def saving(self, loaders: list[SeenLoader]) -> None:
        """The step may save."""

    def _end_without_steps(self, seen: SeenLoader) -> None:
        """A step need not use an optimizer."""
        self._then()

    def _is_training(self, seen: SeenLoader) -> bool:
        """Whether it is the loader, and the epoch has enough batches left for all that follows, if any epoch has."""
        if seen is not self._given.seen:
            return False
        length = seen.traits.n_batches or 0
        needed = KEPT + n_ahead(seen) + getattr(self._given.loader, "batches_in_flight", 0) + _LEAST
        return length < needed or length - len(seen.epochs[-1].batches) >= needed

    def _n_observed(self, seen: SeenLoader) -> int:
        if seen.n_batches == UNSETTLED:
            noted = [batch for epoch in seen.epochs for batch in epoch.batches]
            a_batch_s = max(1e-9, (noted[-1].received_s - noted[0].received_s) / (UNSETTLED - 1))
            affordable = (self._limit_s / a_batch_s - UNSETTLED - KEPT) / 3  # in the loop, replayed, the loader alone
            self._n_steps = min(self._n_steps, max(_LEAST, int(affordable)))
        return self._n_steps

    def _load_alone(self, seen: SeenLoader, give: Callable[[], Any]) -> None:
        """Also see for how much of it nothing was computed, which says more of loaders that nobody looks into."""
        n_given = 0

        def give_one() -> Any:
            nonlocal n_given
            data = give()
            n_given += 1
            return data

        cores, cpu_s, began_s = core_time(), tree_cpu_s(), time.perf_counter()
        super()._load_alone(seen, give_one)
        if n_given < _LEAST:  # the epoch is over: nothing was waited for
            return
        wall_s, cpu_s = time.perf_counter() - began_s, cores.with_stolen(tree_cpu_s() - cpu_s)
        loader = self._given.loader
        n_workers = getattr(loader, "num_threads", None) or getattr(loader, "num_workers", None) or 1
        seen.waiting = min(1.0, max(0.0, 1 - cpu_s / max(1e-9, wall_s * n_workers)))


_LEAST = 4  # batches


def _make_frame(accounts: Accounts, rounds: int, n_images: float) -> Any:
    """Rows as of `compare`, by neighboring batches: of the loop, and of the step alone."""
    rows = list[dict[str, Any]]()
    for name, phase in (("loader and step", "training"), ("step", REPLAY)):
        steps = accounts.of(phase)
        each_s = [step.step_s + (step.wait_s if phase == "training" else 0.0) for step in steps]
        for number, of_round in enumerate(in_parts(each_s, min(rounds, len(each_s)) or 1)):
            seconds = max(1e-9, sum(of_round))
            rows.append({
                "variant": name, "round": number, "order": len(rows), "is_warmup": False, "steady_s": seconds,
                "n_images": len(of_round) * n_images, "images_per_s": len(of_round) * n_images / seconds,
            })  # fmt: skip
    own = {"batch_size": n_images, "num_workers": accounts.loader.traits.num_workers or 0}
    return make_frame(rows, experiment="diagnose", baseline="loader and step", rung=False, **own)
