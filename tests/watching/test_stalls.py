"""`lk.watch` and `lk.diagnose` find stalls that are known, with every kind of loader and step that may be given."""

import random
import time
import warnings
from contextlib import suppress
from dataclasses import replace

import cv2
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import labkit as lk
from labkit.errors import CannotDiagnose
from labkit.measure import usage
from labkit.watching import diagnose as loop
from labkit.watching.loaders import torch_loader
from labkit.watching.replay import Steps
from labkit.watching.report import SHARES
from labkit.watching.worker import making
from tests.stalling import KNOWN, Host, RealClock, Stalls, stopped_time
from tests.watching.trained import optimizer, train


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("labkit.util.ranks.usable_cores", lambda: 2)
    return stopped_time(monkeypatch)


@pytest.mark.parametrize("name", [name for name, (stalls, _) in KNOWN.items() if not stalls.num_workers])
def test_known_stalls_are_found(name, clock):
    stalls, rung = KNOWN[name]
    found = lk.diagnose(*stalls.loader_and_step(clock), batches=8, rounds=3)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares == pytest.approx(stalls.shares(), abs=0.01)
    assert found.recommendation.rung == rung


N_STEPS = 30  # of a training in real time


class Ended(Exception):
    pass


def end():
    raise Ended


@pytest.mark.exhaustive
@pytest.mark.alone
@pytest.mark.parametrize("name", ["fetch and prepare", "prepare, in workers", "fetch and hand-over"])
def test_known_stalls_are_seen_in_real_time(name, monkeypatch):
    """A busy machine holds up a training beyond its known stalls: a stopwatch around each step says by how much."""
    monkeypatch.setattr("labkit.util.ranks.usable_cores", lambda: 2)
    (stalls, rung), clock, (_, steps), spans = KNOWN[name], RealClock(), optimizer(), []
    loader, step = stalls.loader_and_step(clock)
    with lk.watch() as watched, suppress(Ended):
        watched.record.control = Steps(watched.record, N_STEPS, end)
        for batch in loader:
            steps.step()
            began_s = time.perf_counter()
            step(batch)
            spans.append((began_s, time.perf_counter()))
    found, means, settled = watched.report(), clock.means(), spans[3:]  # in the first steps, workers start
    step_s = sum(ended_s - began_s for began_s, ended_s in settled[1:])
    compute = step_s / (settled[-1][1] - settled[0][1])
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["compute"] == pytest.approx(compute, abs=0.05)
    assert found.is_bound
    truth = replace(stalls, **means).shares()
    naps = {"fetch": stalls.fetch, "hand-over": stalls.hand_over}  # that end late, since there is no core
    late = sum(truth[cause] * (1 - nap_s / means[cause.replace("-", "_")]) for cause, nap_s in naps.items() if nap_s)
    by_machine = max(0.0, truth["compute"] - compute) + late  # to any cause
    if by_machine > 0.05:
        pytest.skip(f"this machine held up the training {by_machine:.0%} of the time, besides its known stalls")
    for cause in set(SHARES) - {"compute"}:
        assert found.shares[cause] == pytest.approx(truth[cause], abs=0.05 + by_machine), cause
    assert found.recommendation.rung == rung


def test_the_processor_time_of_labkits_own_samples_prepares_nothing(clock):
    class Sampled(Samples):
        def __getitem__(self, index):
            clock.wall_s, clock.cpu_s = clock.wall_s + 0.01, clock.cpu_s + 0.01
            making.lines.cpu_s += 0.01
            return super().__getitem__(index)

    found = lk.diagnose(DataLoader(Sampled(), 4), lambda batch: clock.sleep(0.04), batches=4, rounds=2)
    assert found.shares == pytest.approx(Stalls(fetch=0.04).shares(), abs=0.01)


def test_the_frame_has_the_loop_and_the_step_alone_round_by_round(clock):
    found = lk.diagnose(*Stalls(step=0.03, fetch=0.09).loader_and_step(clock), batches=4, rounds=3)
    rates = found.frame.groupby("variant")["images_per_s"]
    assert rates.count().to_dict() == {"loader and step": 3, "step": 3}
    assert rates.median().to_dict() == pytest.approx({"loader and step": 4 / 0.12, "step": 4 / 0.03}, rel=1e-3)
    assert (found.frame["n_images"] / found.frame["images_per_s"]).tolist() == pytest.approx(found.frame["steady_s"])
    assert found.frame["batch_size"].eq(4).all()
    assert not found.frame["rung"].any()
    assert found.costs.together == pytest.approx(0.12, rel=1e-3)
    assert found.ceiling == pytest.approx(4, rel=1e-3)
    assert not found.is_bound
    assert "optimizer" not in repr(found)


class Prepared(Dataset):
    """Samples that take as long to make."""

    def __init__(self, clock, seconds, count):
        self.clock, self.seconds, self.count = clock, seconds, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.clock.spend("prepare", self.seconds)
        return torch.zeros(3)


class TestALoaderOfTheStep:
    """A second one, such as of unlabeled images, whose batches the step takes itself."""

    @pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: Wrapped(loader)])
    def test_is_no_part_of_the_one_that_is_diagnosed(self, clock, wrap):
        others = []

        def step(batch):
            others[:] = others or [iter(DataLoader(Prepared(clock, 0.01, 4000), 4))]
            next(others[0])
            clock.spend("step", 0.1)

        found = lk.diagnose(wrap(DataLoader(Prepared(clock, 0.05, 400), 4)), step, batches=8, rounds=2)
        assert found.costs.making == pytest.approx(0.2, rel=1e-2)
        assert found.costs.step == pytest.approx(0.1, rel=1e-2)
        assert pd.DataFrame(found.loaders)["role"].tolist() == ["training", "other"]


class Wrapped:
    """What nobody knows, around a loader of torch's."""

    def __init__(self, loader):
        self._made_of = loader

    def __iter__(self):
        yield from self._made_of


@pytest.mark.parametrize("length", [24, 72])
def test_an_epoch_that_ends_with_the_observation_waits_for_no_storage(clock, monkeypatch, length):
    """What is computed is compared with the time that the loader alone takes, which needs some batches."""
    monkeypatch.setattr(loop, "tree_cpu_s", lambda: clock.cpu_s)

    class Loader:
        def __len__(self):
            return length

        def __iter__(self):
            for _ in range(length):
                clock.spend("prepare", 0.05)
                yield torch.zeros(4, 3, 8, 8)

    found = lk.diagnose(Loader(), lambda batch: clock.spend("step", 0.1))
    assert found.shares["fetch"] == pytest.approx(0, abs=1e-3)
    assert found.shares["prepare"] == pytest.approx(1 / 3, rel=1e-2)


def test_a_diagnosis_within_a_watched_program_leaves_its_watch_as_it_was():
    loader = DataLoader(TensorDataset(torch.zeros(40, 4)), 4)
    with lk.watch() as watched:
        train(loader)
        lk.diagnose([torch.zeros(2, 4)] * 10, len, batches=2, rounds=1)
        train(loader)
    assert [len(epoch.made_here) for epoch in watched.record.loaders[0].epochs] == [10, 10]


def test_what_nobody_can_look_into_waits_while_nothing_is_computed(clock, monkeypatch):
    monkeypatch.setattr(loop, "tree_cpu_s", lambda: clock.cpu_s)

    class Loader:
        def __iter__(self):
            clock.sleep(1.0)
            for _ in range(10):
                clock.spend("fetch", 0.04)
                clock.spend("prepare", 0.06)
                yield torch.zeros(4, 3, 8, 8)

    loader = Loader()
    found = lk.diagnose(loader, lambda batch: clock.spend("step", 0.1), batches=20, rounds=1)
    # an epoch of 10 batches takes a second more, and as it does nothing then, it also waits
    assert found.costs.start == pytest.approx(0.1, rel=1e-3)
    assert found.costs.fetch + found.costs.prepare == pytest.approx(0.1, rel=1e-3)
    assert found.costs.waiting == pytest.approx(0.4, abs=0.01)
    loader.num_threads = 2
    found = lk.diagnose(loader, lambda batch: clock.spend("step", 0.1), batches=20, rounds=1)
    assert found.costs.waiting == pytest.approx(0.7, abs=0.01)


class Samples(Dataset):
    """`make(index)` makes them."""

    def __init__(self, make=lambda index: torch.zeros(3, 8, 8), count=40):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(40, 3, 8, 8))

    def __len__(self):
        return 40


def loader_of(batch_size=4, **options):
    return DataLoader(TensorDataset(torch.zeros(40, 3, 8, 8)), batch_size, **options)


def nap(batch):
    time.sleep(0.005)


class TestLoaders:
    @pytest.mark.parametrize(
        ("loader", "n_images"),
        [(DataLoader(Stream(), 4), 4), (loader_of(None), 1), ([torch.zeros(4, 3, 8, 8)], 4), (["a", "b"], 1)],
        ids=["of iterables", "of whole batches", "a list", "of what nobody can count"],
    )
    def test_may_be_any_that_can_be_iterated_again(self, clock, loader, n_images):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # torch's, about a length that is not kept to
            found = lk.diagnose(loader, lambda batch: clock.spend("prepare", 0.3), batches=2, rounds=1)
        assert found.shares["compute"] > 0.9
        assert found.costs.step_cpu == pytest.approx(0.3)
        assert found.recommendation.rung == "none"
        assert found.frame["batch_size"].eq(n_images).all()

    @pytest.mark.parametrize(
        ("loader", "step", "options", "error", "says"),
        [
            ((torch.zeros(1) for _ in range(5)), nap, {}, ValueError, "a generator, can be iterated only once"),
            ([], nap, {}, ValueError, "a list, gives no batch"),
            (3, nap, {}, CannotDiagnose, "the loader must be an iterable of batches, got a int"),
            (loader_of(), lambda batch: (yield), {}, CannotDiagnose, "has not run"),
            (loader_of(), 3, {}, ValueError, "step must be a function of one batch, got a int"),
            (loader_of(), nap, {"batches": 0}, ValueError, "batches must be an integer >= 1, got 0"),
            (loader_of(), nap, {"rounds": 0}, ValueError, "rounds must be an integer >= 1, got 0"),
        ],
    )
    def test_and_steps_that_cannot_be_diagnosed_are_told(self, loader, step, options, error, says):
        with pytest.raises(error, match=says):
            lk.diagnose(loader, step, **options)

    def test_are_run_for_as_long_as_the_limit_says(self, clock):
        step = lambda batch: clock.sleep(0.05)  # noqa: E731
        lk.diagnose([torch.zeros(1, 3, 8, 8)], step, batches=1000, rounds=2, limit_s=3)
        assert clock.wall_s < 3.5


def as_transformers_gives_it(index):
    return {"pixel_values": torch.zeros(3, 8, 8), "labels": index}


class TestSteps:
    def test_get_batches_as_the_loader_gave_them(self):
        def step(batch):
            batch.pop("labels")
            assert not batch["pixel_values"].any()
            batch["pixel_values"].add_(1)

        lk.diagnose(DataLoader(Samples(as_transformers_gives_it), 4), step, batches=6, rounds=1)

    def test_may_keep_their_batches(self):
        kept = []
        lk.diagnose(loader_of(num_workers=1), lambda batch: kept.append(batch), batches=3, rounds=1)
        assert len({batch[0].data_ptr() for batch in kept}) > 4

    def test_leave_what_is_global_as_it_was(self):
        def state():
            states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
            threads = torch.get_num_threads(), cv2.getNumThreads()
            return *states, generator.get_state().tolist(), torch.backends.cudnn.benchmark, threads

        def step(batch):
            torch.rand(3), np.random.rand(3), random.random()

        generator = torch.Generator().manual_seed(1)
        before = state()
        lk.diagnose(loader_of(shuffle=True, generator=generator), step, batches=3, rounds=1)
        assert state() == before


def only_in_a_worker(index):
    assert get_worker_info() is not None, "opened by worker_init_fn"
    return torch.zeros(3, 8, 8)


class Wrapper:
    """A loader around a loader, as timm's `PrefetchLoader`."""

    def __init__(self, loader, change=lambda batch: batch):
        self.loader, self.change = loader, change

    def __iter__(self):
        return map(self.change, self.loader)


class TestWorkers:
    def test_are_found_in_a_wrapper(self, clock):
        inner, step = Stalls(prepare=0.03).loader_and_step(clock)
        assert torch_loader(Wrapper(Wrapper(inner))) is inner
        assert torch_loader([1]) is None
        found = lk.diagnose(Wrapper(inner), step, batches=3, rounds=1)
        assert (found.recommendation.rung, len(found.loaders)) == ("workers", 1)
        assert found.costs.making == pytest.approx(0.03, rel=0.01)

    def test_may_be_where_alone_a_data_set_works_or_within_a_wrapper(self):
        inner = DataLoader(Samples(only_in_a_worker), 4, num_workers=2, persistent_workers=True)
        found = lk.diagnose(Wrapper(inner, torch.Tensor.float), nap, batches=3, rounds=1)
        assert sum(found.shares.values()) == pytest.approx(1)
        assert found.frame["num_workers"].eq(2).all()


@pytest.mark.alone
@pytest.mark.parametrize(("stolen", "cause"), [(True, "prepare"), (False, "fetch")])
def test_what_a_virtual_machines_host_takes_away_is_no_waiting_for_data(clock, monkeypatch, stolen, cause):
    """By a host that takes all naps, or none."""

    def make(index):
        clock.spend("fetch", 0.02)
        clock.spend("prepare", 1e-6)  # who was stolen from did run
        host.passes(stolen_s=0.02 * stolen)
        return torch.zeros(3, 8, 8)

    host = Host()
    monkeypatch.setattr(usage, "cpu_times", host.cpu_times)
    found = lk.diagnose(Wrapper(range(40), make), lambda batch: clock.sleep(0.001), batches=4, rounds=1)
    assert found.shares[cause] > 0.9
