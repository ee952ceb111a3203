"""diagnose: known stalls, and every kind of loader and step that it may be given."""

import multiprocessing
import random
import time
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import labkit as lk
from labkit.data.blobs import resident_fraction
from labkit.errors import CannotDiagnose
from labkit.watching import advice, diagnose as loop
from labkit.watching.diagnose import LoopParts, diagnose, torch_loader
from labkit.watching.findings import SHARES
from tests.noted_stalls import NotedStalls
from tests.stalling import RealClock, Stalls, stopped_time

pytestmark = pytest.mark.alone

KNOWN = {
    "nothing": (Stalls(), "none"),
    "workers that keep up": (Stalls(step=0.06, fetch=0.02, num_workers=2), "none"),
    "fetch": (Stalls(fetch=0.03), "workers"),
    "prepare": (Stalls(prepare=0.03), "workers"),
    "copy": (Stalls(copy=0.03), "copy"),
    "fetch, in workers": (Stalls(fetch=0.16, num_workers=2), "storage"),
    "prepare, in workers": (Stalls(prepare=0.16, num_workers=2), "decoding"),
    "hand-over": (Stalls(hand_over=0.04, fetch=0.01, num_workers=2), "hand-over"),
    "fetch and prepare": (Stalls(fetch=0.02, prepare=0.05), "workers"),
    "fetch and copy": (Stalls(fetch=0.02, copy=0.04), "copy"),
    "prepare and copy": (Stalls(prepare=0.04, copy=0.02), "workers"),
    "fetch and hand-over": (Stalls(fetch=0.24, hand_over=0.03, num_workers=2), "storage"),
    "prepare and hand-over": (Stalls(prepare=0.24, hand_over=0.03, num_workers=2), "decoding"),
    "copy and hand-over": (Stalls(copy=0.02, hand_over=0.05, num_workers=2), "hand-over"),
}


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 2)
    return stopped_time(monkeypatch)


@pytest.mark.parametrize(("stalls", "rung"), KNOWN.values(), ids=KNOWN)
def test_known_stalls(stalls, rung, clock):
    found = diagnose(*stalls.loader_and_step(clock), batches=8, rounds=3, device="fake")
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares == pytest.approx(stalls.shares(), abs=0.01)
    assert found.recommendation.rung == rung


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KNOWN)
def test_known_stalls_in_real_time(name, monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 2)
    stalls, rung = KNOWN[name]
    # A moment's load of the machine is no cause of a stall: three attempts. A wrong share is wrong in each of them.
    for _ in range(3):
        found, expected = NotedStalls(**vars(stalls)).diagnosed(batches=8, rounds=3)
        assert sum(found.shares.values()) == pytest.approx(1)
        off = max(abs(found.shares[cause] - expected[cause]) for cause in SHARES)
        if off < 0.05 and found.recommendation.rung == rung:
            return
    assert off < 0.05, f"found {found.shares}, true {expected}"
    assert found.recommendation.rung == rung


class TestDiagnosis:
    @pytest.fixture
    def slow(self, clock):
        return diagnose(*Stalls(step=0.03, fetch=0.09).loader_and_step(clock), batches=4, rounds=3, device="fake")

    def test_the_frame_holds_what_it_is_reckoned_from(self, slow):
        table = slow.frame.pivot(index="round", columns="variant", values="steady_s") / 4
        assert table["loader and step"].median() == pytest.approx(slow.costs.together)
        assert table["step"].median() == pytest.approx(slow.costs.step)
        assert slow.frame["n_images"].eq(16).all()
        assert not slow.frame["rung"].any()

    def test_the_spans_are_the_last_round_of_training(self, slow):
        spans = slow.spans
        assert list(spans.kind) == ["wait", "step"] * 4
        assert list(spans.batch) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (spans.end_s - spans.start_s).groupby(spans.kind).median().to_dict() == pytest.approx(
            {"wait": 0.09, "step": 0.03}, rel=0.01
        )
        assert list(spans.start_s[1:]) == pytest.approx(list(spans.end_s[:-1]))

    def test_the_ceiling_is_what_data_cost(self, slow):
        assert slow.ceiling == pytest.approx(slow.costs.together / slow.costs.step)
        assert slow.ceiling == pytest.approx(4, rel=1e-4)
        assert slow.ceiling_low <= slow.ceiling_high


def _refuse():
    raise OSError("not here")


def _short_nap(batch):
    time.sleep(0.005)


class TestCold:
    @pytest.fixture
    def photos(self, tmp_path):
        store = lk.FolderStore(lk.make_photos(tmp_path / "photos", 16))
        store.evict()
        if resident_fraction(store.paths()) > 0.1:
            pytest.skip("this file system's pages cannot be evicted")
        return lk.ImageDataset(store, transform=lambda image: image[:, :64, :64])

    def test_the_store_is_evicted(self, photos):
        found = diagnose(DataLoader(photos, 4), _short_nap, batches=4, rounds=1)
        assert found.cold > 0

    @pytest.mark.parametrize("evicted", [lambda: 10**9, _refuse])  # nothing was cold, or can be evicted
    def test_nothing_is_said_otherwise(self, photos, evicted):
        assert diagnose(DataLoader(photos, 4), _short_nap, batches=4, rounds=1, evict=evicted).cold is None


def _loader(batch_size=4, **options):
    return DataLoader(TensorDataset(torch.zeros(40, 3, 8, 8)), batch_size, **options)


def _nap(batch):
    time.sleep(0.05)


def _raise(batch):
    raise ArithmeticError("loss is nan")


class TestLoaders:
    def test_a_loader_of_iterables(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.zeros(40, 3, 8, 8))

            def __len__(self):
                return 40

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's, about a length that is not kept to
            assert diagnose(DataLoader(Stream(), 4), _nap, batches=2, rounds=1).shares["compute"] > 0.5

    def test_a_data_set_of_whole_batches(self):
        assert diagnose(_loader(None), _nap, batches=2, rounds=1).shares["compute"] > 0.5

    def test_a_list(self, clock):
        found = diagnose([torch.zeros(4, 3, 8, 8)], lambda batch: clock.sleep(0.3), batches=2, rounds=1)
        assert found.recommendation.rung == "none"

    def test_batches_that_nobody_can_count(self):
        found = diagnose(["a", "b"], _nap, batches=2, rounds=1)
        assert found.frame["n_images"].eq(2).all()

    @pytest.mark.parametrize(
        ("loader", "step", "options", "error", "says"),
        [
            ((torch.zeros(1) for _ in range(5)), _nap, {}, ValueError, "a generator, can be iterated only once"),
            ([], _nap, {}, ValueError, "a list, gives no batch"),
            (_loader(), _raise, {}, ArithmeticError, "loss is nan"),
            (_loader(), lambda batch: (yield), {}, CannotDiagnose, "has not run"),
            (_loader(), 3, {}, ValueError, "step must be a function of one batch, got a int"),
            (_loader(), _nap, {"batches": 0}, ValueError, "batches must be an integer >= 1, got 0"),
            (_loader(), _nap, {"rounds": 0}, ValueError, "rounds must be an integer >= 1, got 0"),
        ],
    )
    def test_what_cannot_be_diagnosed(self, loader, step, options, error, says):
        with pytest.raises(error, match=says):
            diagnose(loader, step, **options)

    def test_the_limit_is_kept(self, clock):
        diagnose([torch.zeros(1, 3, 8, 8)], lambda batch: clock.sleep(0.05), batches=1000, rounds=2, limit_s=3)
        assert clock.wall_s < 3.5

    def test_receiving_may_take_no_time(self, clock, monkeypatch):
        monkeypatch.setattr(LoopParts, "receive", lambda parts: 0.0)
        frame = diagnose([torch.zeros(1, 3, 8, 8)], lambda batch: clock.sleep(0.05), batches=2, rounds=2).frame
        assert (frame.set_index("variant").loc["receive", "images_per_s"] == float("inf")).all()

    def test_only_batches_that_are_ready_are_received(self):
        loader = _loader(num_workers=1, prefetch_factor=1, persistent_workers=True)
        parts = LoopParts(loader, _nap, device=None, count=len)
        taken, batches = [], parts._batches
        parts._batches = (taken.append(len(batch)) or batch for batch in batches)
        parts.receive()
        assert len(taken) == 1  # the worker makes the next one only now
        batches.close()

    @pytest.mark.parametrize(("run_queue_s", "expected_s"), [(0.04, 0.01), (0.08, 0.0)])
    def test_standing_in_line_is_no_receiving(self, run_queue_s, expected_s, monkeypatch):
        assert self._received(_loader(num_workers=2), run_queue_s, monkeypatch) == pytest.approx(expected_s)

    @pytest.mark.parametrize("loader", [[1, 2], _loader()])
    def test_but_may_be_making_where_nobody_works_ahead(self, loader, monkeypatch):
        assert self._received(loader, 0.02, monkeypatch) == 0.03

    def _received(self, loader, run_queue_s, monkeypatch):
        """Two batches of 0.03 s, or one."""
        parts, clock = LoopParts(loader, _nap, device=None, count=len), iter((7.0, 7.0 + run_queue_s))
        monkeypatch.setattr(loop, "run_queue_s", lambda: next(clock))
        monkeypatch.setattr(parts, "_seconds_per_batch", lambda *args, **options: 0.03)
        return parts.receive()


class _Samples(Dataset):
    """`make(index)` makes them."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.make(index)


def _as_transformers_gives_it(index):
    return {"pixel_values": torch.zeros(3, 8, 8), "labels": index}


class _Movable(UserDict):
    """A mapping with a method `to`, as `transformers.BatchEncoding`."""

    def to(self, device):
        return self


def _movable(samples):
    return _Movable(torch.utils.data.default_collate(samples))


class TestSteps:
    @pytest.mark.parametrize("collate", [None, _movable])
    def test_batches_are_as_the_loader_gave_them(self, collate):
        def step(batch):
            batch.pop("labels")
            assert not batch["pixel_values"].any()
            batch["pixel_values"].add_(1)

        diagnose(DataLoader(_Samples(_as_transformers_gives_it), 4, collate_fn=collate), step, batches=6, rounds=1)

    def test_a_nest_of_batches(self):
        def step(batch):
            (image, _), more = batch
            assert not image.any()
            image.add_(1)
            more["seen"] += 1

        def collate(samples):
            return (torch.zeros(4, 3, 8, 8), [1, 2]), {"seen": torch.zeros(1)}

        assert diagnose(_loader(collate_fn=collate), step, batches=6, rounds=1).frame["n_images"].eq(24).all()

    def test_a_step_may_keep_its_batches(self):
        kept = []
        diagnose(_loader(num_workers=1), lambda batch: kept.append(batch), batches=3, rounds=1)
        assert len({batch[0].data_ptr() for batch in kept}) > 4

    def test_what_is_global_stays(self):
        model, generator = torch.nn.Dropout().eval(), torch.Generator().manual_seed(1)
        loader = _loader(shuffle=True, generator=generator)
        before = _global_state(generator), torch.backends.cudnn.benchmark, torch.get_num_threads()

        def step(batch):
            torch.rand(3), np.random.rand(3), random.random()

        diagnose(loader, step, batches=3, rounds=1)
        assert (_global_state(generator), torch.backends.cudnn.benchmark, torch.get_num_threads()) == before
        assert not model.training

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
    @pytest.mark.parametrize("at", [1, 9])
    def test_no_worker_outlives_an_error(self, error, at):
        seen = []

        def step(batch):
            seen.append(batch)
            if len(seen) == at:
                raise error("stop")

        with pytest.raises(error, match="stop") as caught:
            diagnose(_loader(num_workers=2), step, batches=4, rounds=1)
        assert caught.tb  # whoever keeps the traceback keeps no workers with it
        assert not multiprocessing.active_children()


def _global_state(generator):
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    return *states, generator.get_state().tolist()


def _only_in_a_worker(index):
    assert get_worker_info() is not None, "opened by worker_init_fn"
    return torch.zeros(3, 8, 8)


class _Wrapper:
    """A loader around a loader, as timm's `PrefetchLoader`."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return (batch[0].float() for batch in self.loader)


def _slow_start(worker):
    time.sleep(0.2)


class TestWorkers:
    def test_what_a_wrapper_holds_is_found(self, monkeypatch):
        monkeypatch.setattr(advice, "usable_cores", lambda: 2)
        inner, _ = Stalls(prepare=0.03).loader_and_step(RealClock)
        assert torch_loader(_Wrapper(_Wrapper(inner))) is inner
        assert torch_loader([1]) is None
        found = diagnose(_Outer(inner), _nap, batches=3, rounds=1)
        assert found.recommendation.rung == "workers"

    def test_a_data_set_that_works_only_there(self):
        found = diagnose(DataLoader(_Samples(_only_in_a_worker), 4, num_workers=1), _nap, batches=3, rounds=1)
        assert sum(found.shares.values()) == pytest.approx(1)

    @pytest.mark.exhaustive
    def test_workers_that_start_anew(self):
        options = {"num_workers": 1, "worker_init_fn": _slow_start}
        found = diagnose(_loader(**options), _nap, batches=4, rounds=2)
        assert found.recommendation.rung == "start"
        assert "persistent_workers=True" in found.recommendation.action
        kept = diagnose(_loader(**options, persistent_workers=True), _nap, batches=4, rounds=2)
        assert kept.shares["start"] < found.shares["start"] / 2

    def test_iterables_in_workers_and_timm_like_batches(self):
        found = diagnose(_Wrapper(_loader(num_workers=2, persistent_workers=True)), _nap, batches=3, rounds=1)
        assert found.frame["num_workers"].eq(2).all()


class _Outer(_Wrapper):
    def __iter__(self):
        return iter(self.loader)
