"""What a virtual machine's host takes away is no waiting for data: by the kernel, and by a host that takes all naps."""

from types import SimpleNamespace

import cv2
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from labkit.watching.diagnose import diagnose
from labkit.watching.timings import Making, making_in_one_process, waiting_of
from tests.stalling import RealClock, Stalls, stopped_time
from tests.stealing import Host


@pytest.fixture
def host(monkeypatch):
    host = Host(stopped_time(monkeypatch))
    monkeypatch.setattr(psutil, "cpu_times", host.cpu_times)
    return host


class Batches(Dataset):
    """Naps that the host takes for its own; `others_s` is what else runs on this machine meanwhile."""

    def __init__(self, host, *, takes=True, others_s=0.0):
        self.host, self.takes, self.others_s = host, takes, others_s

    def __len__(self):
        return 40

    def __iter__(self):
        return (self[index] for index in range(40))

    def __getitem__(self, index):
        self.host.clock.sleep(0.02)
        self.host.clock.burn(1e-6)  # who was stolen from did run
        self.host.passes(busy_s=self.others_s, stolen_s=0.02 * self.takes)
        return torch.zeros(3, 8, 8)


@pytest.mark.alone
class TestWaiting:
    @pytest.mark.parametrize(
        ("options", "above", "below"), [({}, -1, 0.2), ({"takes": False}, 0.8, 2), ({"others_s": 1.0}, 0.8, 2)],
        ids=["stolen", "not stolen", "stolen from others"],
    )  # fmt: skip
    def test_a_stolen_batch_was_not_waited_for(self, host, options, above, below):
        found = making_in_one_process(DataLoader(Batches(host, **options)), limit_s=2, n_batches=5)
        assert above < found.waiting < below

    @pytest.mark.parametrize(("takes", "cause"), [(True, "prepare"), (False, "fetch")])
    def test_of_any_loader(self, host, takes, cause):
        batches = Batches(host, takes=takes)
        found = diagnose(batches, lambda batch: host.clock.sleep(0.001), batches=4, rounds=1)
        assert found.shares[cause] > 0.9


def test_global_generators_are_given_back():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    making_in_one_process(DataLoader(TensorDataset(torch.zeros(40, 3)), 4, shuffle=True), limit_s=1, n_batches=3)
    assert torch.equal(torch.rand(3), expected)


def test_threads_are_given_back():
    before = (torch.get_num_threads(), cv2.getNumThreads())
    seen = _Seen(lambda: (torch.get_num_threads(), cv2.getNumThreads()))
    making_in_one_process(DataLoader(seen, 4), limit_s=1, n_batches=1)
    assert set(seen.noted) == {(1, 1)}
    assert (torch.get_num_threads(), cv2.getNumThreads()) == before


def test_the_same_batches_are_made():
    whole = _Seen()
    making_in_one_process(DataLoader(whole, None, sampler=[5, 7, 6]), limit_s=1, n_batches=2)
    assert whole.indices == [5, 7, 6]

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(9))

    sizes = []
    stream = DataLoader(Stream(), 4, drop_last=True, collate_fn=lambda batch: sizes.append(len(batch)))
    assert making_in_one_process(stream, limit_s=1, n_batches=5).seconds > 0
    assert sizes == [4, 4]


@pytest.mark.alone
def test_waiting_is_no_computing():
    napping, burning = (Stalls(**{cause: 0.1}).loader_and_step(RealClock)[0] for cause in ("fetch", "prepare"))
    assert making_in_one_process(napping, limit_s=2, n_batches=5).waiting > 0.9
    assert making_in_one_process(burning, limit_s=2, n_batches=5).waiting < 0.2


def test_any_loader_waits_while_nothing_is_computed():
    loader = SimpleNamespace(num_threads=2)
    assert waiting_of(loader, 2.0, 1.0) == Making(None, 0.75)
    assert waiting_of(SimpleNamespace(num_workers=4), 2.0, 2.0) == Making(None, 0.75)
    assert waiting_of([], 0.5, 0.125) == Making(None, 0.75)
    assert waiting_of([], 1.0, 3.0) == Making(None, 0.0)  # more threads than it says
    assert waiting_of([], 0.0, 0.0) == Making(None, 0.0)


class _Seen(Dataset):
    """Notes which samples were asked for, and what a function said then."""

    def __init__(self, note=lambda: None):
        self.indices, self.noted, self.note = [], [], note

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.indices.append(index)
        self.noted.append(self.note())
        return torch.zeros(3, 8, 8)
