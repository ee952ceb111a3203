"""`lk.diagnose` finds stalls that are known, with every kind of loader and step that it may be given."""

import multiprocessing
import random
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

import labkit as lk
from labkit.data.blobs import resident_fraction
from labkit.errors import CannotDiagnose
from labkit.watching import advice, diagnose as loop
from labkit.watching.findings import SHARES
from labkit.watching.timings import Epochs, Making, making_in_one_process, waiting_of
from tests.encodings import Encoding
from tests.stalling import KNOWN, Host, RealClock, Stalls, stopped_time


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 2)
    return stopped_time(monkeypatch)


@pytest.mark.parametrize(("stalls", "rung"), KNOWN.values(), ids=KNOWN)
def test_known_stalls_are_found(stalls, rung, clock):
    found = lk.diagnose(*stalls.loader_and_step(clock), batches=8, rounds=3, device="fake")
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares == pytest.approx(stalls.shares(), abs=0.01)
    assert found.recommendation.rung == rung


@pytest.mark.exhaustive
@pytest.mark.alone
@pytest.mark.parametrize(("stalls", "rung"), KNOWN.values(), ids=KNOWN)
def test_known_stalls_are_found_in_real_time(stalls, rung, monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 2)
    # A moment's load of the machine is no cause of a stall: three attempts. A wrong share is wrong in each of them.
    for _ in range(3):
        clock = RealClock(rounds=3)
        with clock.noting_training():
            found = lk.diagnose(*stalls.loader_and_step(clock), batches=8, rounds=3, device="fake")
        expected = replace(stalls, **clock.medians()).shares()
        assert sum(found.shares.values()) == pytest.approx(1)
        off = max(abs(found.shares[cause] - expected[cause]) for cause in SHARES)
        if off < 0.05 and found.recommendation.rung == rung:
            return
    assert off < 0.05, f"found {found.shares}, true {expected}"
    assert found.recommendation.rung == rung


def test_the_figures_are_those_of_the_frame_and_the_last_round_is_on_the_timeline(clock):
    slow = lk.diagnose(*Stalls(step=0.03, fetch=0.09).loader_and_step(clock), batches=4, rounds=3, device="fake")
    table = slow.frame.pivot(index="round", columns="variant", values="steady_s") / 4
    assert table["loader and step"].median() == pytest.approx(slow.costs.together)
    assert table["step"].median() == pytest.approx(slow.costs.step)
    assert slow.frame["n_images"].eq(16).all()
    assert not slow.frame["rung"].any()
    assert slow.ceiling == pytest.approx(slow.costs.together / slow.costs.step)
    assert slow.ceiling == pytest.approx(4, rel=1e-4)
    assert slow.ceiling_low <= slow.ceiling_high
    spans = slow.spans
    assert list(spans.kind) == ["wait", "step"] * 4
    assert list(spans.batch) == [0, 0, 1, 1, 2, 2, 3, 3]
    medians = (spans.end_s - spans.start_s).groupby(spans.kind).median().to_dict()
    assert medians == pytest.approx({"wait": 0.09, "step": 0.03}, rel=0.01)
    assert list(spans.start_s[1:]) == pytest.approx(list(spans.end_s[:-1]))


@pytest.mark.parametrize(
    ("stalls", "options", "queued_s", "seconds"),
    [
        (Stalls(hand_over=0.04, fetch=0.01, num_workers=2), {}, 0.0, 0.04),
        (Stalls(hand_over=0.04, fetch=0.01, num_workers=2), {}, 0.04, 0.02),  # of two batches
        (Stalls(hand_over=0.04, fetch=0.01, num_workers=2), {}, 0.2, 0.0),
        (Stalls(prepare=0.03), {}, 0.02, 0.03),  # may be making where nobody works ahead
        (Stalls(hand_over=0.04, fetch=0.2, num_workers=1), {"prefetch_factor": 1}, 0.0, 0.04),  # one is ready
    ],
)
def test_standing_in_line_for_a_core_is_no_receiving(clock, monkeypatch, stalls, options, queued_s, seconds):
    readings = iter(np.arange(1000) * queued_s)
    monkeypatch.setattr(loop, "run_queue_s", lambda: float(next(readings)))
    found = lk.diagnose(*stalls.loader_and_step(clock, **options), batches=4, rounds=2, device="fake")
    received = found.frame.set_index("variant").loc["receive"]
    assert (received["steady_s"] / 4).tolist() == pytest.approx([seconds] * 2, abs=1e-4)
    assert (received["images_per_s"] == float("inf")).all() == (seconds == 0)


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
        [(DataLoader(Stream(), 4), 8), (loader_of(None), 2), ([torch.zeros(4, 3, 8, 8)], 8), (["a", "b"], 2)],
        ids=["of iterables", "of whole batches", "a list", "of what nobody can count"],
    )
    def test_may_be_any_that_can_be_iterated_again(self, clock, loader, n_images):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's, about a length that is not kept to
            found = lk.diagnose(loader, lambda batch: clock.spend("prepare", 0.3), batches=2, rounds=1)
        assert found.shares["compute"] > 0.9
        assert found.costs.step_cpu == pytest.approx(0.3)
        assert found.recommendation.rung == "none"
        assert found.frame["n_images"].eq(n_images).all()

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

    @pytest.mark.alone
    def test_may_read_from_a_store_that_is_evicted_to_tell_a_cold_page_cache(self, first_photos):
        def refuse():
            raise OSError("not here")

        store = lk.FolderStore(first_photos(16))
        store.evict()
        if resident_fraction(store.paths()) > 0.1:
            pytest.skip("this file system's pages cannot be evicted")
        loader = DataLoader(lk.ImageDataset(store, transform=lambda image: image[:, :64, :64]), 4)
        assert lk.diagnose(loader, nap, batches=4, rounds=1).cold > 0
        for evicted in (lambda: 10**9, refuse):  # nothing was cold, or can be evicted
            assert lk.diagnose(loader, nap, batches=4, rounds=1, evict=evicted).cold is None


def as_transformers_gives_it(index):
    return {"pixel_values": torch.zeros(3, 8, 8), "labels": index}


class TestSteps:
    @pytest.mark.parametrize("collate", [default_collate, lambda samples: Encoding(default_collate(samples))])
    def test_get_batches_as_the_loader_gave_them(self, collate):
        def step(batch):
            batch.pop("labels")
            assert not batch["pixel_values"].any()
            batch["pixel_values"].add_(1)

        lk.diagnose(DataLoader(Samples(as_transformers_gives_it), 4, collate_fn=collate), step, batches=6, rounds=1)

    def test_may_change_a_nest_of_batches(self):
        def step(batch):
            (image, _), more = batch
            assert not image.any()
            image.add_(1)
            more["seen"] += 1

        nested = loader_of(collate_fn=lambda samples: ((torch.zeros(4, 3, 8, 8), [1, 2]), {"seen": torch.zeros(1)}))
        assert lk.diagnose(nested, step, batches=6, rounds=1).frame["n_images"].eq(24).all()

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

    @pytest.mark.exhaustive
    def test_that_are_interrupted_leave_no_worker(self):
        seen = []

        def step(batch):
            seen.append(batch)
            if len(seen) == 9:
                raise KeyboardInterrupt("stop")

        with pytest.raises(KeyboardInterrupt, match="stop") as caught:
            lk.diagnose(loader_of(num_workers=2), step, batches=4, rounds=1)
        assert caught.tb  # whoever keeps the traceback keeps no workers with it
        assert not multiprocessing.active_children()


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
        assert loop.torch_loader(Wrapper(Wrapper(inner))) is inner
        assert loop.torch_loader([1]) is None
        assert lk.diagnose(Wrapper(inner), step, batches=3, rounds=1).recommendation.rung == "workers"

    def test_may_be_where_alone_a_data_set_works_or_within_a_wrapper(self):
        inner = DataLoader(Samples(only_in_a_worker), 4, num_workers=2, persistent_workers=True)
        found = lk.diagnose(Wrapper(inner, torch.Tensor.float), nap, batches=3, rounds=1)
        assert sum(found.shares.values()) == pytest.approx(1)
        assert found.frame["num_workers"].eq(2).all()

    @pytest.mark.exhaustive
    @pytest.mark.alone
    def test_that_start_in_each_epoch_are_seen_to(self):
        options = {"num_workers": 1, "worker_init_fn": lambda worker: time.sleep(0.2)}
        step = lambda batch: time.sleep(0.05)  # noqa: E731
        found = lk.diagnose(loader_of(**options), step, batches=4, rounds=2)
        assert found.recommendation.rung == "start"
        assert "persistent_workers=True" in found.recommendation.action
        kept = lk.diagnose(loader_of(**options, persistent_workers=True), step, batches=4, rounds=2)
        assert kept.shares["start"] < found.shares["start"] / 2


@pytest.mark.alone
class TestStolenTime:
    """What a virtual machine's host takes away is no waiting for data: by a host that takes all naps."""

    @pytest.fixture
    def batches(self, monkeypatch):
        """`batches(stolen=, others_s=)`: `others_s` is what else runs on this machine meanwhile."""
        host = Host(stopped_time(monkeypatch))
        monkeypatch.setattr(psutil, "cpu_times", host.cpu_times)

        def make(*, stolen=True, others_s=0.0):
            def nap(index):
                host.clock.spend("fetch", 0.02)
                host.clock.spend("prepare", 1e-6)  # who was stolen from did run
                host.passes(busy_s=others_s, stolen_s=0.02 * stolen)
                return torch.zeros(3, 8, 8)

            return Samples(nap), host.clock

        return make

    @pytest.mark.parametrize(
        ("options", "above", "below"), [({}, -1, 0.2), ({"stolen": False}, 0.8, 2), ({"others_s": 1.0}, 0.8, 2)],
        ids=["stolen", "not stolen", "stolen from others"],
    )  # fmt: skip
    def test_was_not_waited_for(self, batches, options, above, below):
        found = making_in_one_process(DataLoader(batches(**options)[0]), limit_s=2, n_batches=5)
        assert above < found.waiting < below

    @pytest.mark.parametrize(("stolen", "cause"), [(True, "prepare"), (False, "fetch")])
    def test_of_any_loader_is_told_apart(self, batches, stolen, cause):
        samples, clock = batches(stolen=stolen)
        loader = Wrapper(range(40), samples.make)
        found = lk.diagnose(loader, lambda batch: clock.sleep(0.001), batches=4, rounds=1)
        assert found.shares[cause] > 0.9


class TestMaking:
    """What one process needs to make a batch, and how much of it is waiting."""

    def test_uses_one_thread_and_gives_back_threads_and_generators(self):
        def note(index):
            noted.append((index, torch.get_num_threads(), cv2.getNumThreads()))
            return torch.zeros(3)

        noted, threads = [], (torch.get_num_threads(), cv2.getNumThreads())
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        making_in_one_process(DataLoader(Samples(note), 4, shuffle=True), limit_s=1, n_batches=3)
        assert torch.equal(torch.rand(3), expected)
        assert {each[1:] for each in noted} == {(1, 1)}
        assert (torch.get_num_threads(), cv2.getNumThreads()) == threads
        noted.clear()
        making_in_one_process(DataLoader(Samples(note), None, sampler=[5, 7, 6]), limit_s=1, n_batches=2)
        assert [index for index, *_ in noted] == [5, 7, 6]
        sizes = []
        stream = DataLoader(Stream(), 15, drop_last=True, collate_fn=lambda batch: sizes.append(len(batch)))
        assert making_in_one_process(stream, limit_s=1, n_batches=5).seconds > 0
        assert sizes == [15, 15]

    @pytest.mark.alone
    def test_tells_waiting_from_computing(self):
        clock = RealClock()
        napping, burning = (Stalls(**{cause: 0.1}).loader_and_step(clock)[0] for cause in ("fetch", "prepare"))
        assert making_in_one_process(napping, limit_s=2, n_batches=5).waiting > 0.9
        assert making_in_one_process(burning, limit_s=2, n_batches=5).waiting < 0.2

    @pytest.mark.parametrize(
        ("loader", "seconds", "cpu_s", "waiting"),
        [
            (SimpleNamespace(num_threads=2), 2.0, 1.0, 0.75), (SimpleNamespace(num_workers=4), 2.0, 2.0, 0.75),
            ([], 0.5, 0.125, 0.75), ([], 1.0, 3.0, 0.0), ([], 0.0, 0.0, 0.0),
        ],
    )  # fmt: skip
    def test_of_any_other_loader_waits_while_nothing_is_computed(self, loader, seconds, cpu_s, waiting):
        assert waiting_of(loader, seconds, cpu_s) == Making(None, waiting)


class TestEpochs:
    @pytest.mark.parametrize(
        ("loader", "starts_workers", "gaps_s", "waiting_s", "starting_s"),
        [
            (range(10), False, [0.5, 0.7, 0.6], 0.1, 0.05),  # shared among the batches
            (range(10), True, [0.5, 0.7, 0.6], 1.0, 0),
            (range(10), True, [], 0, 0.04),  # the first epoch counts until a second begins
            (range(10), False, [], 0, 0),
            (iter(()), True, [], 0, 0),  # without a length
        ],
    )
    def test_cost_a_batch_a_part_of_their_start(self, loader, starts_workers, gaps_s, waiting_s, starting_s):
        epochs = Epochs(loader, starts_workers=starts_workers)
        epochs.gaps_s, epochs.first_s = gaps_s, 0.4
        assert epochs.starting_s(waiting_s) == pytest.approx(starting_s)
