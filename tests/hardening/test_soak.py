"""A small soak: loaders keep no files open. And the judges of the soak, with what they must find."""

import os

import numpy as np
import pandas as pd
import pytest
import torch

from labkit import FolderStore
from tests.hardening.soak import names, samples
from tests.hardening.soak.epochs import _judge_order, check_epoch, soak, summarize_epochs
from tests.hardening.soak.pictures import COUNT, Oracle
from tests.hardening.soak.places import made_places
from tests.hardening.soak.slope import LIMIT_KB, slope_of
from tests.hardening.soak.subjects import SUBJECTS, Subject, _over
from tests.hardening.soak.tree import EXACT

pytestmark = pytest.mark.alone

EPOCHS, WARM_UP = 12, 3
WHOLE = Subject(lambda places: [])


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return made_places(tmp_path_factory.mktemp("soak") / "places")


def changed(rows):
    """Return the counts that change after the warm-up."""
    return {name for row in rows[WARM_UP:] for name in EXACT if row[name] != rows[WARM_UP][name]}


@pytest.mark.parametrize(
    "name", ["make_loader, folder, fork", "make_loader, left early", "BatchLoader, pixels", "read_shards, fork"]
)
def test_nothing_is_left_open(places, name):
    rows = list(soak(name, places, EPOCHS))
    assert all(row["is_right"] for row in rows)
    assert len({row["crc32"] for row in rows}) == EPOCHS
    assert not changed(rows)


class Careless(FolderStore):
    """Opens a file now and then, and never closes it."""

    def read(self, key):
        if key.endswith("007.jpg"):
            os.open(self.root / key, os.O_RDONLY)
        return super().read(key)


def test_a_file_that_stays_open_is_seen(places, monkeypatch):
    loader = Subject(_over(lambda found: Careless(found.photos), "fork"))
    monkeypatch.setitem(SUBJECTS, "careless", loader)
    monkeypatch.setattr("tests.hardening.soak.tree._PATIENCE_S", 0.05)
    assert changed(list(soak("careless", places, WARM_UP + 2))) == {"fds_children"}


def batch_of(oracle, rows):
    return torch.from_numpy(oracle.images[rows].astype(np.uint8)), torch.from_numpy(oracle.labels[rows])


def test_order_and_content_are_checked(places):
    oracle = Oracle(places.photos)
    images, labels = batch_of(oracle, np.random.default_rng(0).permutation(COUNT))

    def is_right(images, labels):
        return check_epoch(WHOLE, iter([(images, labels)]), oracle, places)[1]

    assert is_right(images, labels)
    assert is_right(images.flip(3), labels)
    assert not is_right(images[1:], labels[1:])
    assert not is_right(images[[0, *range(COUNT - 1)]], labels[[0, *range(COUNT - 1)]])
    assert not is_right(images, labels.roll(1))
    assert not is_right(images.roll(1, dims=2), labels)
    assert not is_right(torch.cat([images[:-1], images[-1:] + 3]), labels)


def noise_kb(seed, step_kb, n_epochs=200):
    """Memory as an allocator has it: it keeps what it took for some epochs, and once it takes a step."""
    draws = np.random.default_rng(seed)
    kb = np.zeros(n_epochs)
    for epoch in range(1, n_epochs):
        kb[epoch] = 0.7 * kb[epoch - 1] + draws.normal(0, 25)
    return 450_000 + kb + step_kb * (np.arange(n_epochs) >= draws.integers(n_epochs))


EPOCH_NUMBERS = np.arange(200)


def epochs_of(**columns):
    counts = dict.fromkeys(["fds_main", "threads", "shm_files"], 3)
    kb = {"own_kb": noise_kb(0, step_kb=0), "written_kb": noise_kb(1, step_kb=0)}
    return pd.DataFrame({
        "epoch": EPOCH_NUMBERS, **counts, "fds_children": 4, "n_processes": 1, **kb, "is_right": True, **columns,
    })  # fmt: skip


def test_summary_of_a_soak():
    row = summarize_epochs(epochs_of(threads=np.where(EPOCH_NUMBERS == 9, 5, 3)))
    assert (row["epochs"], row["fds"], row["threads"], row["shm_files"]) == (200, "7", "3 to 5", "3")
    assert row["right"]
    row = summarize_epochs(epochs_of(written_kb=20.0 * EPOCH_NUMBERS, is_right=EPOCH_NUMBERS != 7))
    assert row["written"].startswith("+20.00 [")
    assert row["written"].endswith("grows")
    assert not row["right"]


@pytest.mark.parametrize(
    ("sums", "repeats", "verdict"),
    [
        ([1, 2, 3], False, "right"),
        ([1, 2, 2], False, "epochs repeat"),
        ([1, 3, 2], False, "differs from the first loader of this order"),
        ([1, 1, 2], True, "epochs differ"),
    ],
)
def test_order_of_epochs(sums, repeats, verdict):
    subject = Subject(lambda places: [], repeats=repeats)
    assert _judge_order(pd.Series(sums), subject, pd.Series([1, 2, 3])) == verdict


def test_noise_is_no_leak():
    verdicts = [slope_of(EPOCH_NUMBERS, noise_kb(seed, step_kb=100)).verdict for seed in range(60)]
    assert verdicts.count("zero") >= 45  # neighbours are alike, which looks like a slope now and then
    assert set(verdicts) <= {"zero", "flat", "inconclusive"}
    assert verdicts.count("inconclusive") <= 3


def test_a_leak_of_20_kb_an_epoch_is_one():
    slopes = [slope_of(EPOCH_NUMBERS, noise_kb(seed, step_kb=100) + 20 * EPOCH_NUMBERS) for seed in range(60)]
    assert {slope.verdict for slope in slopes} == {"grows"}


def test_the_interval_holds_the_slope():
    """Nearly always, though neighbours are alike."""
    slopes = [slope_of(EPOCH_NUMBERS, noise_kb(seed, step_kb=0) + 20 * EPOCH_NUMBERS) for seed in range(200)]
    assert np.mean([slope.low <= 20 <= slope.high for slope in slopes]) > 0.9


def test_an_uncertain_slope_is_not_flat():
    much = np.random.default_rng(0).normal(0, 20_000, 200)
    assert slope_of(EPOCH_NUMBERS, much).verdict == "inconclusive"
    assert slope_of(EPOCH_NUMBERS, -20.0 * EPOCH_NUMBERS).verdict == "shrinks"
    assert slope_of(EPOCH_NUMBERS, 0.9 * LIMIT_KB * EPOCH_NUMBERS).verdict == "flat"
    with pytest.raises(ValueError, match="at least 50"):
        slope_of(EPOCH_NUMBERS[:60], much[:60])


@pytest.mark.parametrize(("load", "count"), [(names, 10_000), (samples, 300)], ids=["names", "samples"])
def test_load_in_small(tmp_path, load, count):
    load.make(tmp_path, count)
    found = {case: work(tmp_path, count)["is_right"] for case, work in load.CASES.items()}
    assert found == dict.fromkeys(load.CASES, True)
