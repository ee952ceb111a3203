"""A hosted run: which batches are timed, and how many epochs it takes. With a clock that only the loader moves."""

import numpy as np
import pytest

from labkit.measure.usage import CoreTime
from labkit.peers import run
from labkit.peers.peer import JPEG_FILES, Peer, Work
from labkit.peers.run import PeerRun

CORES = CoreTime(0.0, 0.0)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(run, "_n_epochs", {})


@pytest.fixture
def photos(tmp_path):
    for number in range(128):
        path = tmp_path / "photos" / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path / "photos"


def make_run(photos, clock, waits_s, end_s=0.0, min_steady_s=1.0, epochs=None, num_workers=2):
    """A run over batches of 8 photos, which come after these seconds; after the last one, `end_s` go by."""
    epochs = [] if epochs is None else epochs

    def loader(work):
        epochs.append(clock())
        for wait_s in waits_s:
            clock.seconds += wait_s
            yield np.zeros((8, 2, 2, 3))
        clock.seconds += end_s

    work = Work(photos, photos.parent, batch_size=8, min_steady_s=min_steady_s, num_workers=num_workers)
    return PeerRun(Peer("fake", JPEG_FILES, True, "", (), loader=loader), work, clock)


def read(a_run):
    a_run.start()
    n_first = a_run.take_first()
    a_run.take_rest()
    return n_first


def test_the_first_quarter_of_an_epoch_and_its_end_are_not_timed(photos):
    clock = Clock()
    a_run = make_run(photos, clock, [5.0, 0.0, 0.0, 1.0] + 12 * [0.25], end_s=7.0)
    run._n_epochs["fake"] = 1
    assert read(a_run) == 8
    found = a_run.timing.columns(4.0, CoreTime(6.0, 0.8))
    assert found["images_per_s"] == pytest.approx(8 / 0.25)
    assert (found["n_steady_batches"], found["n_steady_images"], found["steady_s"]) == (12, 96, pytest.approx(3.0))
    assert found["is_steady"]
    found_costs = [found[name] for name in ("cpu_s", "others_cpu_s", "steal_s")]
    assert found_costs == pytest.approx([4.0 * 96 / 128, 2.0 * 96 / 128, 0.8 * 96 / 128])


@pytest.mark.parametrize(("num_workers", "n_steady"), [(1, 12), (3, 10), (4, 12), (8, 8)])
def test_the_queue_settles_by_whole_rounds_of_the_workers(photos, num_workers, n_steady):
    a_run = make_run(photos, Clock(), 16 * [0.25], num_workers=num_workers)
    run._n_epochs["fake"] = 1
    read(a_run)
    assert a_run.timing.columns(0.0, CORES)["n_steady_batches"] == n_steady


def test_an_epoch_that_compiles_or_starts_workers_plans_nothing(photos):
    clock, waits_s = Clock(), 16 * [0.025]
    first = make_run(photos, clock, waits_s)
    first.start()
    clock.seconds += 50.0  # before its first batch
    first.take_first()
    first.take_rest()
    assert run._n_epochs["fake"] == 4


def test_a_loaders_first_run_plans_the_epochs_of_all(photos):
    clock, epochs = Clock(), []
    waits_s = 16 * [0.025]  # twelve of them are timed: 0.3 s
    for n_epochs in (2, 4, 4):
        epochs.clear()
        a_run = make_run(photos, clock, waits_s, epochs=epochs)
        read(a_run)
        assert len(epochs) == n_epochs
    assert a_run.timing.columns(0.0, CORES)["images_per_s"] == pytest.approx(8 / 0.025)
    assert a_run.timing.columns(0.0, CORES)["n_steady_images"] == 4 * 96


def test_slow_runs_are_not_cut_short(photos):
    """A run takes the epochs that were planned, however long they take."""
    clock, epochs = Clock(), []
    read(make_run(photos, clock, 16 * [0.025]))
    read(make_run(photos, clock, 16 * [0.1], epochs=epochs))
    assert len(epochs) == 4


def test_an_epoch_of_few_batches_counts_as_a_whole(photos):
    clock = Clock()
    run._n_epochs["fake"] = 1
    a_run = make_run(photos, clock, [2.0, 1.0, 1.0])
    read(a_run)
    found = a_run.timing.columns(3.0, CORES)
    assert not found["is_steady"]
    assert found["images_per_s"] == pytest.approx(24 / 4.0)
    assert found["cpu_s"] == 3.0


def test_a_queue_that_was_full_does_not_ask_for_endless_epochs(photos):
    clock, epochs = Clock(), []
    for _ in range(2):
        epochs.clear()
        read(make_run(photos, clock, [1.0] + 15 * [1e-9], epochs=epochs))
    assert len(epochs) == run._MAX_SHARE


def test_a_loader_without_batches_gives_none(photos):
    a_run = make_run(photos, Clock(), [])
    a_run.start()
    assert a_run.take_first() == 0
