"""diagnose: training loops with known stalls, and every kind of loader and step that it may be handed."""

import re

import pytest
from torch.utils.data import DataLoader

import labkit as lk
from labkit.tuning.diagnosis import SHARES
from labkit.tuning.stalls import diagnose
from tests.stalling import Stalls

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


@pytest.mark.parametrize("name", KNOWN)
def test_known_stalls(name, monkeypatch):
    monkeypatch.setattr("labkit.tuning.advice.usable_cores", lambda: 2)
    stalls, rung = KNOWN[name]
    # A moment's load of the machine is no cause of a stall: three attempts. A wrong share is wrong in each of them.
    for _ in range(3):
        found, expected = stalls.diagnosed(batches=8, rounds=3)
        assert sum(found.shares.values()) == pytest.approx(1)
        off = max(abs(found.shares[cause] - expected[cause]) for cause in SHARES)
        if off < 0.05 and found.recommendation.rung == rung:
            return
    assert off < 0.05, f"found {found.shares}, true {expected}"
    assert found.recommendation.rung == rung


@pytest.fixture(scope="module")
def slow():
    return Stalls(step=0.03, fetch=0.09).diagnosed(batches=4, rounds=3)[0]


class TestDiagnosis:
    def test_three_sentences(self, slow):
        lines = repr(slow).splitlines()
        assert len(lines) == 3
        assert re.match(r"Training waits for its data 7\d% of the time: fetch \d\d%", lines[0])
        assert re.match(r"Were data free, it would be \d\.\d\dx \[.+, .+\] as fast", lines[1])
        assert "num_workers=" in lines[2]
        assert "Notebook 03_persistent_workers" in lines[2]

    def test_a_picture_in_a_notebook(self, slow):
        shown = slow._repr_html_()
        assert 'src="data:image/png;base64,iVBOR' in shown
        assert shown.count("<p>") == 3

    def test_the_plot_ends_where_a_batch_ends(self, slow):
        ax = slow.plot()
        assert [label.get_text() for label in ax.get_yticklabels()] == ["training", "if data were free"]
        assert max(bar.get_x() + bar.get_width() for bar in ax.patches) == pytest.approx(slow.costs.together)

    def test_the_frame_holds_what_it_is_reckoned_from(self, slow):
        table = slow.frame.pivot(index="round", columns="variant", values="steady_s") / 4
        assert table["loader and step"].median() == pytest.approx(slow.costs.together)
        assert table["step"].median() == pytest.approx(slow.costs.step)
        assert slow.frame["n_images"].eq(16).all()
        assert not slow.frame["rung"].any()

    def test_the_ceiling_is_what_data_cost(self, slow):
        assert slow.ceiling == pytest.approx(slow.costs.together / slow.costs.step)
        assert slow.ceiling_low <= slow.ceiling_high


class TestCold:
    @pytest.fixture
    def photos(self, tmp_path):
        store = lk.FolderStore(lk.make_photos(tmp_path / "photos", 16))
        store.evict()
        if lk.resident_fraction(store.paths()) > 0.1:
            pytest.skip("this file system's pages cannot be evicted")
        return lk.ImageDataset(store, transform=lambda image: image[:, :64, :64])

    def test_the_store_is_evicted(self, photos):
        found = diagnose(DataLoader(photos, 4), _nap, batches=4, rounds=1)
        assert found.cold > 0
        assert "from a cold page cache the loader takes" in repr(found)

    def test_nothing_is_said_where_nothing_was_cold(self, photos):
        found = diagnose(DataLoader(photos, 4), _nap, batches=4, rounds=1, evict=lambda: 10**9)
        assert found.cold is None

    def test_nor_where_nothing_can_be_evicted(self, photos, monkeypatch):
        monkeypatch.setattr(lk.FolderStore, "evict", _refuse)
        assert diagnose(DataLoader(photos, 4), _nap, batches=4, rounds=1).cold is None


def _refuse(store):
    raise OSError("not here")


def _nap(batch):
    import time

    time.sleep(0.005)
