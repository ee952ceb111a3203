"""Judges of what 00 and 01 let a reader build: the share of waiting, and a stopwatch for each stage of a loader.

Time passes on a clock of their own, so that what is right is known exactly.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from multiprocessing import get_all_start_methods
from typing import Any

from torch.utils.data import DataLoader, Dataset

from labkit.course.exercises import _expect, is_close

Batch = tuple[list[int], list[int]]

_START_S, _END_S = 100.0, 13.0  # until the first batch, and until the loader says that there is no other
# Waits for the batches after the first one, and steps: few and unequal, so that each of them changes the share.
_EPOCHS_S = (((6.0, 1.0, 2.0), (3.0, 5.0, 2.0, 8.0)), ((1.0, 2.0, 1.0), (8.0, 2.0, 9.0, 5.0)), ((0.0,) * 3, (1.0,) * 4))
_PHOTOS_PER_BATCH, _STAGES_S, _COLLATE_S, _READING_S = 4, {"read": 20.0, "decode": 50.0, "transform": 30.0}, 40.0, 5.0


class _Clock:
    """Stands in for `time.perf_counter`: moves when it is told to, and by `reading_s` whenever it is read."""

    def __init__(self, reading_s: float = 0.0):
        self.now_s, self.is_read, self._reading_s = 0.0, False, reading_s

    def read(self) -> float:
        now_s, self.is_read = self.now_s, True
        self.spend(self._reading_s)
        return now_s

    def spend(self, duration_s: float) -> None:
        self.now_s += duration_s

    @contextmanager
    def replacing_perf_counter(self) -> Iterator[None]:
        own = time.perf_counter, time.perf_counter_ns
        time.perf_counter, time.perf_counter_ns = self.read, lambda: round(1e9 * self.read())
        try:
            yield
        finally:
            time.perf_counter, time.perf_counter_ns = own


class _Training:
    """A loader whose first batch comes after 100 seconds, and whose end is found after a wait, too; and its step."""

    def __init__(self, clock: _Clock, waits_s: tuple[float, ...], steps_s: tuple[float, ...]):
        self._clock, self._waits_s, self._steps_s = clock, (_START_S, *waits_s), steps_s
        self._n_passes, self.trained = 0, list[int]()

    def __len__(self) -> int:
        return len(self._steps_s)

    def __iter__(self) -> Iterator[Batch]:
        self._n_passes += 1
        _expect(self._n_passes == 1, "it begins the loader anew for each batch: call iter(loader) once")
        for number, wait_s in enumerate(self._waits_s):
            self._clock.spend(wait_s)
            yield [number] * 2, [number] * 2
        self._clock.spend(_END_S)

    def step(self, images: list[int], labels: list[int]) -> None:
        _expect(images == labels, "step gets the images and the labels of one batch")
        self._clock.spend(self._steps_s[len(self.trained) % len(self)])
        self.trained.append(images[0])


def judge_wait_share(wait_share: Callable[[Any, Any], float]) -> None:
    """Judge a function that trains for an epoch and returns the share of waiting, from the first batch to the end."""
    shares = []
    for waits_s, steps_s in _EPOCHS_S:
        clock = _Clock()
        training = _Training(clock, waits_s, steps_s)
        with clock.replacing_perf_counter():
            share: Any = wait_share(training, training.step)
        with suppress(TypeError, ValueError):
            share = float(share)  # of torch or NumPy, too
        n_trained, n = len(training.trained), len(training)
        _expect(training.trained == [*range(n)], f"it trained on {n_trained} of {n} batches")
        _expect(clock.is_read, "it does not read `time.perf_counter`, which is the check's clock")
        shares.append(share)
    told = _mistake_of(shares)
    for share, (waits_s, steps_s) in zip(shares, _EPOCHS_S, strict=True):
        wait_s, step_s = sum(waits_s), sum(steps_s)
        right = wait_s / (wait_s + step_s)
        shown = f"waits of {wait_s:g} s and steps of {step_s:g} s gave {share!r}; {right:.2f} is right"
        _expect(is_close(share, right), told or shown)


def _mistake_of(shares: list[Any]) -> str:
    """What explains the shares of all epochs: one classic mistake, or two at once; "" if none does."""
    epochs = [(sum(waits_s), sum(steps_s), _mistakes(sum(waits_s), steps_s)) for waits_s, steps_s in _EPOCHS_S]
    whys = [why for why, _, _ in epochs[0][2]]
    for made in [*((number,) for number in range(len(whys))), *combinations(range(len(whys)), 2)]:
        expected = [
            (wait_s + sum(mistakes[number][1] for number in made))
            / (wait_s + step_s + sum(mistakes[number][2] for number in made))
            for wait_s, step_s, mistakes in epochs
        ]
        if all(map(is_close, shares, expected)):
            return "; and ".join(whys[number] for number in made)
    return ""


def _mistakes(wait_s: float, steps_s: tuple[float, ...]) -> list[tuple[str, float, float]]:
    """What is said of each mistake, and the seconds that it adds to the wait and to the whole time."""
    begin, end = "let the clock begin when the first batch has come", "let the clock end with the last step"
    start, request = f"the start is in it: {begin}", "the request after the last batch"
    return [
        (start, _START_S, _START_S),
        (start, _START_S + _END_S, _START_S + _END_S),
        (f"the start is in the whole time: {begin}", 0, _START_S),
        (f"the start is in the whole time: {begin}", _END_S, _START_S + _END_S),
        (f"{request} counts as waiting: {end}", _END_S, _END_S),
        (f"{request} is in the whole time: {end}", 0, _END_S),
        (f"{request} counts as waiting: {end}", _END_S, 0),
        (f"the first step is left out of the whole time: {begin}", 0, -steps_s[0]),
        (f"the last step is left out of the whole time: {end}", 0, -steps_s[-1]),
        (
            "that is the share of the steps: time the requests for batches in place of the steps",
            sum(steps_s) - wait_s,
            0,
        ),
        ("the wait is divided by the steps alone: divide it by all the time, waits and steps", 0, -wait_s),
        ("that is in percent: return a share from 0 to 1", 99 * wait_s, 0),
    ]


class _Photos(Dataset):
    """Loads batches by the reader's function, and says how long each took. A photo is a number."""

    def __init__(self, load_batch: Callable[..., Any], clock: _Clock):
        self._load_batch, self._clock = load_batch, clock

    def __len__(self) -> int:
        return 4 * _PHOTOS_PER_BATCH

    def __getitems__(self, keys: list[int]) -> tuple[Any, float]:
        start_s = self._clock.now_s
        stages = {name: self._stage(name, duration_s) for name, duration_s in _STAGES_S.items()}
        return self._load_batch(keys, stages, self._collate), self._clock.now_s - start_s

    def _stage(self, name: str, duration_s: float) -> Callable[[Any], str]:
        def stage(item: Any) -> str:
            self._clock.spend(duration_s)
            return f"{item} {name}"

        return stage

    def _collate(self, samples: list[str]) -> str:
        self._clock.spend(_COLLATE_S)
        return ", ".join(samples)


def judge_load_batch(load_batch: Callable[..., Any]) -> None:
    """Judge a function that loads a batch and returns it with the seconds of each stage, in this process and in two."""
    for num_workers in (0, 2):
        clock = _Clock(_READING_S)
        forking = "fork" if num_workers and "fork" in get_all_start_methods() else None  # what a notebook defines, too
        options: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": forking}
        photos = _Photos(load_batch, clock)
        with clock.replacing_perf_counter():
            found = list(DataLoader(photos, _PHOTOS_PER_BATCH, collate_fn=_unchanged, **options))
        for number, (loaded, whole_s) in enumerate(found):
            keys = range(number * _PHOTOS_PER_BATCH, (number + 1) * _PHOTOS_PER_BATCH)
            _judge_loaded(loaded, whole_s, ", ".join(f"{key} read decode transform" for key in keys))


def _judge_loaded(loaded: Any, whole_s: float, right: str) -> None:
    is_pair = isinstance(loaded, tuple) and len(loaded) == 2 and isinstance(loaded[1], Mapping)
    _expect(
        is_pair and loaded[1],
        "return the batch and its dictionary: one that is filled elsewhere stays empty in the training's process when "
        "workers load",
    )
    batch, seconds = loaded
    _expect(batch == right, f"the batch is {batch!r:.100}, and {right!r:.100} is right")
    names = [*_STAGES_S, "collate"]
    _expect(set(seconds) == set(names), f"it times {', '.join(seconds)}; the stages are {', '.join(names)}")
    total = sum(seconds.values()) / whole_s
    _expect(total < 1.01, "a batch's seconds hold those of the batch before: make a new dictionary for each batch")
    _expect(
        total > 0.95,
        f"the stages add up to {total:.0%} of the whole: time is lost between them. Let one reading of the clock end a "
        "stage and begin the next",
    )
    expected_s = {name: _PHOTOS_PER_BATCH * duration_s for name, duration_s in _STAGES_S.items()}
    for name, duration_s in {**expected_s, "collate": _COLLATE_S}.items():
        _expect(
            duration_s <= seconds[name] <= 1.3 * duration_s,
            f"{name} took {seconds[name]:g} s of the check's clock; about {duration_s:g} s is right",
        )


def _unchanged(loaded: Any) -> Any:
    return loaded
