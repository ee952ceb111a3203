"""A small soak: loaders keep no files open. And the judges of the soak, with what they must find."""

import os
import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.signal import lfilter

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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["make_loader, folder, fork", "make_loader, left early", "BatchLoader, pixels", "read_shards, fork"]
)
def test_nothing_is_left_open(places, name):
    rows = list(soak(name, places, EPOCHS))
    assert all(row["is_right"] for row in rows)
    assert len({row["crc32"] for row in rows}) == EPOCHS
    assert changed(rows) == set()


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


def test_order_and_content_are_checked(places):
    oracle = Oracle(places.photos)
    rows = np.random.default_rng(0).permutation(COUNT)
    images, labels = torch.from_numpy(oracle.images[rows].astype(np.uint8)), torch.from_numpy(oracle.labels[rows])
    twice = [0, *range(COUNT - 1)]
    right = [(images, labels), (images.flip(3), labels)]
    wrong = [
        (images[1:], labels[1:]), (images[twice], labels[twice]), (images, labels.roll(1)),
        (images.roll(1, dims=2), labels), (torch.cat([images[:-1], images[-1:] + 3]), labels),
    ]  # fmt: skip
    verdicts = [check_epoch(WHOLE, iter([batch]), oracle, places)[1] for batch in right + wrong]
    assert verdicts == [True] * 2 + [False] * 5


EPOCH_NUMBERS = np.arange(200)


def noise_kb(seed, step_kb):
    """Memory as an allocator has it: it keeps what it took for some epochs, and once it takes a step."""
    draws = np.random.default_rng(seed)
    kb = lfilter([1], [1, -0.7], [0, *draws.normal(0, 25, 199)])
    return 450_000 + kb + step_kb * (draws.integers(200) <= EPOCH_NUMBERS)


def slopes(count, step_kb, leak_kb=0):
    return [slope_of(EPOCH_NUMBERS, noise_kb(seed, step_kb) + leak_kb * EPOCH_NUMBERS) for seed in range(count)]


def epochs_of(**columns):
    counts = dict.fromkeys(["fds_main", "threads", "shm_files"], 3)
    kb = {"own_kb": noise_kb(0, step_kb=0), "written_kb": noise_kb(1, step_kb=0)}
    return pd.DataFrame({
        "epoch": EPOCH_NUMBERS, **counts, "fds_children": 4, "n_processes": 1, **kb, "is_right": True, **columns,
    })  # fmt: skip


def test_summary_of_a_soak():
    row = summarize_epochs(epochs_of(threads=np.where(EPOCH_NUMBERS == 9, 5, 3)))
    expected = {"epochs": 200, "fds": "7", "threads": "3 to 5", "shm_files": "3", "right": True}
    assert {name: row[name] for name in expected} == expected
    row = summarize_epochs(epochs_of(written_kb=20.0 * EPOCH_NUMBERS, is_right=EPOCH_NUMBERS != 7))
    assert re.fullmatch(r"\+20\.00 \[.*grows", row["written"])
    assert not row["right"]


@pytest.mark.parametrize(
    ("sums", "repeats", "verdict"),
    [
        ([1, 2, 3], False, "right"), ([1, 2, 2], False, "epochs repeat"), ([1, 1, 2], True, "epochs differ"),
        ([1, 3, 2], False, "differs from the first loader of this order"),
    ],
)  # fmt: skip
def test_order_of_epochs(sums, repeats, verdict):
    subject = Subject(lambda places: [], repeats=repeats)
    assert _judge_order(pd.Series(sums), subject, pd.Series([1, 2, 3])) == verdict


def test_noise_is_no_leak():
    verdicts = [slope.verdict for slope in slopes(60, step_kb=100)]
    assert verdicts.count("zero") >= 45  # neighbours are alike, which looks like a slope now and then
    assert set(verdicts) <= {"zero", "flat", "inconclusive"}
    assert verdicts.count("inconclusive") <= 3


def test_a_leak_of_20_kb_an_epoch_is_found():
    assert {slope.verdict for slope in slopes(60, step_kb=100, leak_kb=20)} == {"grows"}
    # The interval nearly always holds the slope, though neighbours are alike.
    assert np.mean([slope.low <= 20 <= slope.high for slope in slopes(200, step_kb=0, leak_kb=20)]) > 0.9


def test_a_slope_that_rounds_to_zero_has_one_sign():
    falling = slope_of(EPOCH_NUMBERS, -0.001 * EPOCH_NUMBERS)
    assert str(falling) == "+0.00 [+0.00, +0.00] flat"


def test_an_uncertain_slope_is_not_flat():
    much = np.random.default_rng(0).normal(0, 20_000, 200)
    assert slope_of(EPOCH_NUMBERS, much).verdict == "inconclusive"
    assert slope_of(EPOCH_NUMBERS, -20.0 * EPOCH_NUMBERS).verdict == "shrinks"
    assert slope_of(EPOCH_NUMBERS, 0.9 * LIMIT_KB * EPOCH_NUMBERS).verdict == "flat"
    with pytest.raises(ValueError, match="at least 50"):
        slope_of(EPOCH_NUMBERS[:60], much[:60])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("load", "count"), [(names, 10_000), (samples, 300)], ids=["names", "samples"])
def test_load_in_small(tmp_path, load, count):
    load.make(tmp_path, count)
    found = {case: work(tmp_path, count)["is_right"] for case, work in load.CASES.items()}
    assert found == dict.fromkeys(load.CASES, True)
