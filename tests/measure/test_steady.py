"""A loader's start, first batch, steady state and end, by a clock that only work advances; epochs of any length.

Loaders that can be repeated go on with the next pass, and are themselves again afterwards.
"""

import itertools
import os
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import labkit as lk
from labkit.measure import steady
from labkit.measure.steady import Stopwatch, batches_in_flight, count_images, repeating
from labkit.measure.usage import CoreTime
from tests.timing import Clock

NUMBERS = TensorDataset(torch.arange(10))
FORK = {"num_workers": 2, "multiprocessing_context": "fork"}


pytestmark = pytest.mark.usefixtures("unsampled")


class Loader:
    """A loader with a queue, whose batches can be repeated: `seconds(n)` is the wait for the n-th batch of a run."""

    repeats_batch_sampler = True

    def __init__(self, clock, seconds, *, sizes=(2, 2, 2, 2), in_flight=0, num_workers=0, start=0.0, end=0.0):
        self.clock, self.batch_sampler, self._ends = clock, sizes, (start, end)
        self.seconds = seconds if callable(seconds) else lambda number: seconds
        self.batches_in_flight, self.num_workers = in_flight, num_workers

    def __iter__(self):
        self.clock.now += self._ends[0]
        return self._batches()

    def _batches(self):
        requested = iter(self.batch_sampler)
        queue = list(itertools.islice(requested, self.batches_in_flight))
        for number in itertools.count():
            queue += itertools.islice(requested, 1)
            if not queue:
                self.clock.now += self._ends[1]
                return
            self.clock.now += self.seconds(number)
            yield queue.pop(0)


class Once(Loader):
    repeats_batch_sampler = False


def time_run(seconds, *, is_warmup=False, kind=Loader, **options):
    """The columns of a run whose steady state should last 4 s."""
    clock = Clock()
    watch = Stopwatch(int, clock, 4.0, is_warmup)
    return watch.time(lambda: kind(clock, seconds, **options))[1]


class TestARun:
    def test_every_part_has_its_own_time(self):
        seconds = [7.0, 0.1, 0.2] + 50 * [0.5]
        run = time_run(seconds.__getitem__, in_flight=2, start=3.0, end=11.0)
        assert run["startup_s"] == pytest.approx(3.0)
        assert run["first_batch_s"] == pytest.approx(7.0)
        assert (run["settle_s"], run["n_settle_batches"]) == (pytest.approx(0.3), 2)
        assert (run["steady_s"], run["n_steady_batches"], run["n_steady_images"]) == (pytest.approx(4.0), 8, 16)
        assert run["images_per_s"] == pytest.approx(16 / 4.0)
        assert run["shutdown_s"] == pytest.approx(11.0)
        assert run["n_images"] == 2 * (1 + 2 + 8 + 2)  # what was under way is delivered, too
        assert run["is_steady"]

    @pytest.mark.parametrize("n_batches", [1, 4, 64])
    def test_the_rate_does_not_depend_on_the_length_of_an_epoch(self, n_batches):
        """A start, an end and a full queue, which read as a slow or a fast loader where an epoch is short."""
        seconds = [7.0, 0.0, 0.0, 0.0, 0.0] + 500 * [0.25]
        options = {"in_flight": 4, "num_workers": 2, "start": 3.0, "end": 9.0}
        run = time_run(seconds.__getitem__, sizes=(2,) * n_batches, **options)
        assert (run["images_per_s"], run["is_steady"]) == (pytest.approx(8.0), True)

    @pytest.mark.parametrize(
        ("seconds", "options", "n_batches"),
        [
            (0.5, {"sizes": (1,) * 8}, 8),
            (0.3, {"sizes": (1,) * 8}, 16),  # 4 s are asked for: two passes of 2.4 s
            (0.3, {"sizes": (1,) * 5, "num_workers": 2}, 20),  # whole passes, and as many batches of each worker
            (0.5, {"sizes": (1,), "in_flight": 5}, 10),  # twice what is under way
            (1.0, {"sizes": (1,) * 1000, "num_workers": 3}, 18),  # at most four times the 4 s
            (100.0, {"sizes": (1,) * 1000, "num_workers": 3}, 3),  # but a batch of each
        ],
    )
    def test_a_steady_state_is_whole_passes_that_last_long_enough(self, seconds, options, n_batches):
        assert time_run(seconds, **options)["n_steady_batches"] == n_batches
        clock = Clock()
        planning = Stopwatch(int, clock, 4.0, is_warmup=True)
        planning.time(lambda: Loader(clock, seconds, **options))
        assert planning.n_steady_batches == n_batches  # of the runs after the warm-up

    @pytest.mark.parametrize(
        ("seconds", "options", "n_settled", "n_steady"),
        [
            (0.1, {"sizes": (1,) * 20}, 0, 19),  # one pass
            (1.0, {"sizes": (1,) * 1000}, 0, 16),  # no longer than other runs
            (0.1, {"sizes": (1,) * 2, "num_workers": 2, "in_flight": 4}, 4, 2),
        ],
    )
    def test_a_warm_up_is_a_pass_but_no_longer_than_other_runs(self, seconds, options, n_settled, n_steady):
        run = time_run(seconds, is_warmup=True, **options)
        assert (run["n_settle_batches"], run["n_steady_batches"], run["is_steady"]) == (n_settled, n_steady, True)

    def test_its_length_is_planned_by_the_first_one(self):
        """Not by each run's own clock, which would cut slow runs short: a rate of 2 would read as 1.9."""
        clock, rng, seconds_per_image = Clock(), np.random.default_rng(0), []
        watch = Stopwatch(int, clock, 4.0, is_warmup=True)
        # Of each pass of 8 batches: what others leave of the machine.
        speeds = [np.ones(3), *np.transpose([rng.permutation(np.linspace(0.7, 1.3, 101)) for _ in range(3)])]
        for speed in speeds:
            run = watch.time(lambda speed=speed: Loader(clock, lambda n: 0.5 * speed[n // 8], sizes=(1,) * 8))[1]
            if not watch.is_warmup:
                assert run["n_steady_batches"] == 8
                seconds_per_image.append(1 / run["images_per_s"])
            watch.is_warmup = False
        assert np.mean(seconds_per_image) == pytest.approx(0.5, rel=1e-6)

    @pytest.mark.parametrize(
        ("n_batches", "is_steady", "rate", "steady"),
        [(9, True, 4.0, (16, 4.0)), (8, False, 16 / 8.5, (14, 3.5)), (1, False, 2 / 5.0, (0, 0.0))],
    )
    def test_what_is_not_lengthened_is_steady_from_eight_further_batches_on(self, n_batches, is_steady, rate, steady):
        run = time_run([5.0, *[0.5] * 20].__getitem__, sizes=(2,) * n_batches, kind=Once)
        assert (run["is_steady"], run["images_per_s"]) == (is_steady, pytest.approx(rate))
        assert (run["n_steady_images"], run["steady_s"]) == pytest.approx(steady)

    def test_the_end_of_a_generator_is_no_part_of_its_steady_state(self):
        def batches(clock, seconds):
            for _ in range(10):
                clock.now += seconds
                yield 3
            clock.now += 50.0

        run = time_run(1.0, kind=batches)
        assert (run["steady_s"], run["shutdown_s"], run["images_per_s"]) == pytest.approx((9.0, 50.0, 3.0))

    def test_a_loader_that_ends_early_after_all_is_not_called_steady(self):
        class Stubborn(Loader):
            def _batches(self):
                self.clock.now += 1.0
                yield 4

        run = time_run(None, kind=Stubborn, in_flight=2)
        assert (run["is_steady"], run["images_per_s"], run["n_images"]) == (False, pytest.approx(4.0), 4)

    def test_one_pass_is_counted_where_it_is_known(self):
        assert time_run(1.0, sizes=(3, 3, 1))["pass_images"] == 7
        assert time_run(9.0, sizes=(1,) * 99)["pass_images"] is None
        assert time_run(1.0, kind=lambda clock, seconds: [2, 2])["pass_images"] == 4
        assert time_run(0.0, kind=Once)["images_per_s"] == float("inf")

    def test_costs_are_those_of_the_steady_state(self, monkeypatch):
        """Processor time is read where the clock is, and reading it takes none of the run's time."""
        clock = Clock()

        def used():
            clock.now += 0.125  # reading takes time, too
            return type("Usage", (), {"cpu_s": 10 * clock.now, "read_bytes": None})

        monkeypatch.setattr(steady, "tree_usage", used)
        monkeypatch.setattr(steady, "core_time", lambda: CoreTime(30 * clock.now, 2 * clock.now))
        monkeypatch.setattr(steady, "excluded_cpu_s", lambda: 4 * clock.now)
        run = Stopwatch(int, clock, 4.0).time(lambda: Loader(clock, 0.5, in_flight=1, start=3.0))[1]
        assert (run["steady_s"], run["first_batch_s"]) == pytest.approx((4.0, 0.5))
        costs = [run[name] / 4.125 for name in ("cpu_s", "steal_s", "others_cpu_s")]
        assert costs == pytest.approx([10, 2, 30 - 10 - 4])


class TestAnEpoch:
    @pytest.mark.parametrize("n_batches", [1, 2, 100])
    def test_of_any_length_is_the_sum_of_its_parts(self, n_batches):
        def wait(number):
            return 5.0 if number == 0 else 0.25 if number < 3 else 1.0

        clock = Clock()
        variants = {
            "a": lambda: Loader(clock, wait, in_flight=2, start=3.0, end=7.0),
            "b": lambda: Loader(clock, wait),
        }
        table = lk.epoch_time(lk.compare(variants, baseline="a", clock=clock, rounds=3), n_batches)
        row, expected_s = table.loc["a"], 3.0 + sum(map(wait, range(n_batches))) + 7.0
        assert row.epoch_s == pytest.approx(expected_s)
        assert row[["startup_s", "first_batch_s", "batches_s", "shutdown_s"]].sum() == pytest.approx(row.epoch_s)
        assert row.overhead == pytest.approx(1 - n_batches / expected_s)
        assert list(table.index) == ["a", "b"]

    def test_has_medians_and_quartiles_over_runs(self):
        clock, factors = Clock(), iter([1.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        runs = lk.compare({"a": lambda: Loader(clock, next(factors))}, baseline="a", clock=clock, rounds=5)
        row = lk.epoch_time(runs, 10).loc["a"]
        assert (row.epoch_s_low, row.epoch_s, row.epoch_s_high) == pytest.approx((20.0, 30.0, 40.0))
        once = lk.compare({"a": lambda: iter(Loader(clock, 4.0, sizes=(8,)))}, baseline="a", clock=clock, rounds=1)
        assert lk.epoch_time(once, 3).loc["a", "epoch_s"] == 12.0

    def test_of_no_batches_is_refused(self):
        with pytest.raises(ValueError, match="n_batches must be an integer >= 1, got 0"):
            lk.epoch_time(lk.compare({"a": lambda: [1]}, baseline="a", rounds=1), 0)


def numbers(batches) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def take(loader, n_batches) -> list:
    """The batches of a run in which no more are wanted after `n_batches`, those under way included."""
    taken = []
    with repeating(loader, lambda: len(taken) < n_batches) as per_pass:
        for batch in loader:
            taken.append(batch)
    assert per_pass == len(loader)
    return taken


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.zeros(3, 2, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class TestPasses:
    @pytest.mark.parametrize("options", [{}, FORK, {**FORK, "persistent_workers": True}], ids=["here", "new", "kept"])
    def test_follow_one_another_and_afterwards_the_loader_is_itself(self, options):
        loader = DataLoader(NUMBERS, 4, **options)
        one_pass = numbers(loader)
        for _ in range(2):  # persistent workers keep what they were given at first
            found = numbers(take(loader, 8))
            assert 8 <= len(found) <= 8 + batches_in_flight(loader)
            assert found == list(itertools.islice(itertools.cycle(one_pass), len(found)))
            assert numbers(loader) == one_pass
        assert len(loader) == 3

    def test_of_a_real_loader_are_timed_with_the_workers_that_run(self):
        seen = set()
        loader = DataLoader(Slow(), 1, collate_fn=lambda samples: (default_collate(samples), os.getpid()), **FORK)
        count = lambda batch: seen.add(batch[1]) or len(batch[0])  # noqa: E731
        run = Stopwatch(count, time.perf_counter, 0.2).time(lambda: loader)[1]
        assert run["is_steady"]
        assert run["n_steady_batches"] >= 12
        assert run["n_steady_batches"] % 4 == 0
        assert run["n_images"] == 1 + run["n_settle_batches"] + run["n_steady_batches"] + 4
        assert len(seen) == 2  # a worker that starts anew has another process id
        assert len(list(loader)) == 4

    def test_are_cut_when_no_more_is_wanted(self):
        assert numbers(take(DataLoader(NUMBERS, 1), 4)) == [[0], [1], [2], [3]]
        assert len(take(DataLoader(NUMBERS, 1), 0)) == 1  # the first batch is always asked for
        assert len(take(DataLoader(NUMBERS, batch_size=None), 25)) == 25
        with repeating(empty := DataLoader(NUMBERS, sampler=[]), lambda: True):
            assert list(empty) == []
        with repeating(loader := DataLoader(NUMBERS, 4), lambda: True):  # what else a sampler has can be asked for
            assert (loader.batch_sampler.batch_size, len(loader.batch_sampler)) == (4, 3)

    @pytest.mark.parametrize("iterable", [DataLoader(Stream()), [1, 2], iter([1]), None])
    def test_of_what_has_no_indices_are_not_repeated(self, iterable):
        with repeating(iterable, lambda: True) as per_pass:
            assert per_pass is None
        assert batches_in_flight(iterable) == 0

    def test_are_seen_through_wrappers(self, first_photos):
        steps = []
        inner = DataLoader(NUMBERS, 4, **FORK, prefetch_factor=3)
        wrapped = lk.with_step(lk.CUDAPrefetcher(inner, "cpu", depth=2), lambda batch: steps.append(len(batch[0])))
        assert (batches_in_flight(wrapped), len(wrapped), wrapped.num_workers) == (8, 3, 2)
        assert len(take(wrapped, 9)) == len(steps) >= 9
        assert steps[:6] == [4, 4, 2, 4, 4, 2]
        threads = lk.BatchLoader(lk.FolderStore(first_photos(3)), batch_size=2, size=16, prefetch_factor=3)
        assert (batches_in_flight(threads), threads.batch_size, threads.num_workers) == (3, 2, 0)
        assert [len(images) for images, _ in take(threads, 4)][:4] == [2, 1, 2, 1]
        assert [len(images) for images, _ in threads] == [2, 1]
        replay = lk.ReplayLoader([torch.zeros(2, 3, 4, 4)], 1, length=2)
        assert len(take(replay, 5)) == 5
        assert len(list(replay)) == len(replay) == 2

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_of_make_loader_are_shuffled_each_in_its_own_order(self, num_workers):
        loader = lk.make_loader(NUMBERS, lk.LoaderConfig(4, num_workers, seed=3), shuffle=True)
        found = numbers(take(loader, 6))[:6]
        assert sorted(itertools.chain(*found[:3])) == sorted(itertools.chain(*found[3:])) == list(range(10))
        assert loader.epoch == 1
        assert sorted(itertools.chain(*numbers(loader))) == list(range(10))
        loader.close()


@dataclass
class Labeled:
    images: torch.Tensor
    names: list


@pytest.mark.parametrize(
    ("batch", "n_images"),
    [
        (torch.zeros(7, 3, 4, 4), 7), (np.zeros((5, 4, 4, 3)), 5), (torch.zeros(3, 9, 9), 1), (6, 6),
        ((torch.zeros(4, 3, 2, 2), torch.zeros(4)), 4), ({"rgb": torch.zeros(2, 3, 2, 2)}, 2), (torch.zeros(8), 8),
        (Labeled(torch.zeros(9, 3, 2, 2), ["a"]), 9),
    ],
)  # fmt: skip
def test_images_of_a_batch_are_counted_by_the_first_thing_in_it(batch, n_images):
    assert count_images(batch) == n_images


def one(number: float = 1.0) -> torch.Tensor:
    return torch.tensor([number])


def batches(n_batches: int):
    return (({"image": one(number)}, number) for number in range(n_batches))


class TestReplay:
    @pytest.mark.parametrize(("length", "expected"), [(None, [0, 1, 2]), (7, [0, 1, 2, 0, 1, 2, 0]), (2, [0, 1])])
    def test_gives_the_first_batches_again_and_again(self, length, expected):
        source = batches(10)
        loader = lk.ReplayLoader(source, 3, length=length)
        assert next(source)[1] == 3  # no more is taken than kept
        assert len(loader) == len(expected)
        two_passes_at_once = [(one, other) for (_, one), (_, other) in zip(loader, loader, strict=True)]
        assert two_passes_at_once == list(zip(expected, expected, strict=True))

    def test_looks_like_its_loader(self):
        loader = lk.ReplayLoader(DataLoader(list(range(10)), batch_size=4), 2)
        assert (loader.batch_size, loader.num_workers) == (4, 0)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert lk.ReplayLoader(batches(1), 1).batch_size is None
        [kept] = lk.ReplayLoader([plain := torch.zeros(3)], 1)
        assert kept is plain  # no copy

    def test_moves_batches_to_the_device_once_and_leaves_the_loaders_own(self):
        loader = lk.ReplayLoader(batches(2), 2, device="meta")
        images = [batch["image"] for batch, _ in loader]
        assert [image.device.type for image in images] == ["meta", "meta"]
        assert next(iter(loader))[0]["image"] is images[0]

    @pytest.mark.parametrize("wrong", [{"n_batches": 0}, {"n_batches": 1, "length": 0}])
    def test_refuses_less_than_one(self, wrong):
        with pytest.raises(ValueError, match=f"{[*wrong][-1]} must be an integer >= 1"):
            lk.ReplayLoader(batches(2), **wrong)

    def test_of_workers_holds_no_file_open(self):
        """Each tensor in shared memory does: a thousand of them, and the process can open no more."""
        data = torch.arange(24).view(8, 3)
        loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="fork")
        assert all(batch.is_shared() for batch in loader)
        replay = list(lk.ReplayLoader(loader, 2))
        assert not any(batch.is_shared() for batch in replay)
        assert torch.equal(torch.cat(replay), data)


def test_the_seconds_of_a_stage_add_up_also_after_an_error():
    watch = lk.StageClock(clock=itertools.accumulate([0, 2, 10, 3, 100, 4]).__next__)
    with watch("decode"):
        pass
    with watch("resize"):
        pass
    with pytest.raises(ZeroDivisionError), watch("decode"):
        raise ZeroDivisionError
    assert watch.seconds == {"decode": 6, "resize": 3}
    rows = watch.frame("pil").to_dict("list")
    assert rows == {"variant": ["pil", "pil"], "stage": ["decode", "resize"], "seconds": [6, 3]}
    assert list(lk.StageClock().frame("pil")) == ["variant", "stage", "seconds"]
