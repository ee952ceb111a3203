"""The parts of a run, by a clock that only work advances."""

import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from labkit.measure import steady
from labkit.measure.steady import NoBatch, Stopwatch
from labkit.measure.usage import CoreTime


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Loader:
    """A loader with a queue, whose batches can be repeated: `seconds(n)` is the wait for the n-th batch of a run."""

    repeats_batch_sampler = True

    def __init__(self, clock, seconds, *, sizes=(2, 2, 2, 2), in_flight=0, num_workers=0, start=0.0, end=0.0):
        self.clock, self.seconds, self.batch_sampler = clock, seconds, sizes
        self.batches_in_flight, self.num_workers, self._ends = in_flight, num_workers, (start, end)

    def __iter__(self):
        self.clock.now += self._ends[0]
        return self._batches()

    def _batches(self):
        requested, number = iter(self.batch_sampler), 0
        queue = [size for _, size in zip(range(self.batches_in_flight), requested, strict=False)]
        while True:
            queue += [size for _, size in zip(range(1), requested, strict=False)]
            if not queue:
                self.clock.now += self._ends[1]
                return
            self.clock.now += self.seconds(number)
            number += 1
            yield queue.pop(0)


def time_run(make, *, min_steady_s=4.0, lengthen=True, clock=None, is_warmup=False):
    clock = clock or Clock()
    watch = Stopwatch(int, clock, min_steady_s, is_warmup)
    return watch.time(lambda: make(clock), lengthen=lengthen)[1]


def test_every_part_of_a_run_has_its_own_time():
    seconds = [7.0, 0.1, 0.2] + 50 * [0.5]
    run = time_run(lambda clock: Loader(clock, seconds.__getitem__, in_flight=2, start=3.0, end=11.0))
    assert run["startup_s"] == pytest.approx(3.0)
    assert run["first_batch_s"] == pytest.approx(7.0)
    assert (run["settle_s"], run["n_settle_batches"]) == (pytest.approx(0.3), 2)
    assert (run["steady_s"], run["n_steady_batches"], run["n_steady_images"]) == (pytest.approx(4.0), 8, 16)
    assert run["images_per_s"] == pytest.approx(16 / 4.0)
    assert run["shutdown_s"] == pytest.approx(11.0)
    assert run["n_images"] == 2 * (1 + 2 + 8 + 2)  # what was under way is delivered, too
    assert run["is_steady"]


@pytest.mark.parametrize("n_batches", [1, 4, 64])
def test_the_rate_does_not_depend_on_the_length_of_an_epoch(n_batches):
    """A start, an end and a full queue, which read as a slow or a fast loader where an epoch is short."""
    seconds = [7.0, 0.0, 0.0, 0.0, 0.0] + 500 * [0.25]
    run = time_run(
        lambda clock: Loader(
            clock, seconds.__getitem__, sizes=(2,) * n_batches, in_flight=4, num_workers=2, start=3.0, end=9.0
        )
    )
    assert run["images_per_s"] == pytest.approx(8.0)
    assert run["is_steady"]


def test_a_steady_state_is_whole_passes_that_last_long_enough_or_as_many_as_fit():
    slow_third = lambda number: 3.0 if number % 3 == 0 else 0.5  # noqa: E731
    run = time_run(lambda clock: Loader(clock, slow_third, sizes=(1, 1, 1)))
    assert (run["n_steady_batches"], run["images_per_s"]) == (3, pytest.approx(3 / 4.0))
    run = time_run(lambda clock: Loader(clock, lambda number: 1.0, sizes=(1,) * 1000, num_workers=3))
    assert run["n_steady_batches"] == 18  # four times the 4 s that were asked for, and as many of each worker
    run = time_run(lambda clock: Loader(clock, lambda number: 100.0, sizes=(1,) * 1000, num_workers=3))
    assert run["n_steady_batches"] == 3
    run = time_run(lambda clock: Loader(clock, lambda number: 0.5, sizes=(1,), in_flight=5))
    assert run["n_steady_batches"] == 10  # twice what is under way


def test_a_warm_up_is_a_pass_but_no_longer_than_other_runs():
    def warm_up(*arguments, **options):
        return time_run(lambda clock: Loader(clock, *arguments, **options), is_warmup=True)

    assert warm_up(lambda number: 0.1, sizes=(1,) * 20)["n_images"] == 20
    assert warm_up(lambda number: 1.0, sizes=(1,) * 1000)["n_steady_batches"] == 16
    run = warm_up(lambda number: 0.1, sizes=(1,) * 2, num_workers=2, in_flight=4)
    assert (run["n_settle_batches"], run["n_steady_batches"], run["is_steady"]) == (4, 2, True)


def test_the_length_of_a_steady_state_is_planned_by_the_first_run():
    """Not by each run's own clock, which would cut slow runs short: a rate of 2 would read as 1.9."""
    clock, rng, seconds_per_image = Clock(), np.random.default_rng(0), []
    watch = Stopwatch(int, clock, 4.0, is_warmup=True)
    for number in range(2001):
        speed = rng.uniform(0.7, 1.3, size=3)  # of each pass of 8 batches: what others leave of the machine
        loader = Loader(clock, lambda batch, speed=speed: 0.5 * speed[batch // 8], sizes=(1,) * 8)
        _, run = watch.time(lambda loader=loader: loader)
        watch.is_warmup = False
        if number:
            assert run["n_steady_batches"] == 8
            seconds_per_image.append(1 / run["images_per_s"])
    assert np.mean(seconds_per_image) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "options", "planned"),
    [
        (0.3, {"sizes": (1,) * 8}, 16),  # 4 s are asked for: two passes of 2.4 s
        (0.5, {"sizes": (1,) * 8}, 8),
        (0.3, {"sizes": (1,) * 5, "num_workers": 2}, 20),  # whole passes, and as many batches of each worker
        (0.1, {"sizes": (1,), "in_flight": 60}, 120),  # twice what is under way
        (1.0, {"sizes": (1,) * 1000, "num_workers": 3}, 18),  # at most four times as long
    ],
)
def test_a_plan_is_whole_passes_that_last_long_enough_or_as_many_as_fit(seconds, options, planned):
    clock = Clock()
    watch = Stopwatch(int, clock, 4.0, is_warmup=True)
    watch.time(lambda: Loader(clock, lambda number: seconds, **options))
    assert watch.n_steady_batches == planned


def test_what_is_not_lengthened_has_a_steady_state_from_eight_batches_after_the_first_on():
    def delivered(n_batches):
        return time_run(
            lambda clock: Loader(clock, [5.0, *[0.5] * 20].__getitem__, sizes=(2,) * n_batches), lengthen=False
        )

    run = delivered(9)
    assert (run["is_steady"], run["images_per_s"]) == (True, pytest.approx(4.0))
    run = delivered(8)
    assert (run["is_steady"], run["images_per_s"]) == (False, pytest.approx(16 / 8.5))
    assert (run["n_steady_images"], run["steady_s"]) == (14, pytest.approx(3.5))
    run = delivered(1)
    assert (run["is_steady"], run["images_per_s"], run["steady_s"]) == (False, pytest.approx(2 / 5.0), 0.0)


def test_the_end_of_a_generator_is_no_part_of_its_steady_state():
    def batches(clock):
        for _ in range(10):
            clock.now += 1.0
            yield 3
        clock.now += 50.0

    run = time_run(batches)
    assert (run["steady_s"], run["shutdown_s"], run["images_per_s"]) == (pytest.approx(9.0), pytest.approx(50.0), 3.0)


def test_a_loader_that_ends_early_after_all_is_not_called_steady():
    class Stubborn(Loader):
        def _batches(self):
            self.clock.now += 1.0
            yield 4

    run = time_run(lambda clock: Stubborn(clock, None, in_flight=2))
    assert (run["is_steady"], run["images_per_s"], run["n_images"]) == (False, pytest.approx(4.0), 4)


def test_nothing_to_time():
    with pytest.raises(NoBatch):
        time_run(lambda clock: [])


def test_one_pass_is_counted_where_it_is_known():
    assert time_run(lambda clock: Loader(clock, lambda number: 1.0, sizes=(3, 3, 1)))["pass_images"] == 7
    assert time_run(lambda clock: Loader(clock, lambda number: 9.0, sizes=(1,) * 99))["pass_images"] is None
    assert time_run(lambda clock: [2, 2])["pass_images"] == 4


def test_costs_are_those_of_the_steady_state(monkeypatch):
    """Processor time is read where the clock is, and reading it takes none of the run's time."""
    clock = Clock()

    def used():
        clock.now += 0.125  # reading takes time, too
        return type("Usage", (), {"cpu_s": 10 * clock.now, "read_bytes": None})

    monkeypatch.setattr(steady, "tree_usage", used)
    monkeypatch.setattr(steady, "core_time", lambda: CoreTime(30 * clock.now, 2 * clock.now))
    monkeypatch.setattr(steady, "apart_cpu_s", lambda: 4 * clock.now)
    run = time_run(lambda clock: Loader(clock, lambda number: 0.5, in_flight=1, start=3.0), clock=clock)
    assert run["steady_s"] == pytest.approx(4.0)
    assert run["first_batch_s"] == pytest.approx(0.5)
    assert run["cpu_s"] == pytest.approx(10 * 4.125)
    assert run["steal_s"] == pytest.approx(2 * 4.125)
    assert run["others_cpu_s"] == pytest.approx((30 - 10 - 4) * 4.125)


class _Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.zeros(3, 2, 2)


def test_a_real_loader_with_workers_is_lengthened():
    loader = DataLoader(_Slow(), 1, num_workers=2, multiprocessing_context="fork")
    _, run = Stopwatch(len, time.perf_counter, 0.2).time(lambda: loader)
    assert run["is_steady"]
    assert run["n_steady_batches"] >= 12
    assert run["n_steady_batches"] % 4 == 0
    assert run["n_images"] == 1 + run["n_settle_batches"] + run["n_steady_batches"] + 4
    assert len(list(loader)) == 4
