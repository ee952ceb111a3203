"""What a virtual machine's host takes away is no waiting for data: by psutil, and by a host that takes all naps."""

import os
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from labkit.measure import stolen
from labkit.measure.stalls import diagnose
from labkit.measure.stolen import CoreTime, core_time
from labkit.measure.waiting import making_in_one_process

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Host:
    """A `/proc/stat` to write: ticks in which the cores ran something, or were not let."""

    def __init__(self, path):
        self.path, self.busy, self.stolen = path, 0, 0
        self.passes()

    def passes(self, *, busy_s=0.0, stolen_s=0.0):
        self.busy, self.stolen = self.busy + round(busy_s / _TICK_S), self.stolen + round(stolen_s / _TICK_S)
        self.path.write_text(f"cpu  {self.busy} 0 0 77 88 0 0 {self.stolen} 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(stolen, "_STAT", tmp_path / "stat")
    return Host(tmp_path / "stat")


class Batches(Dataset):
    """Naps that the host takes for its own; `others_s` is what else runs on this machine meanwhile."""

    def __init__(self, host, *, takes=True, others_s=0.0):
        self.host, self.takes, self.others_s = host, takes, others_s

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.02)
        self.host.passes(busy_s=self.others_s, stolen_s=0.02 * self.takes)
        return torch.zeros(3, 8, 8)


class TestCoreTime:
    def test_as_psutil_counts(self):
        before, found, after = psutil.cpu_times(), core_time(), psutil.cpu_times()
        assert before.steal - _TICK_S <= found.stolen_s <= after.steal + _TICK_S
        assert _busy_s(before) - _TICK_S <= found.busy_s <= _busy_s(after) + _TICK_S

    @pytest.mark.parametrize("text", [None, "", "cpu  1 2 3 4 5 6 7\n", "cpu  a b c d e f g h\n"])
    def test_nothing_where_the_kernel_does_not_tell(self, text, host):
        host.path.unlink()
        if text is not None:
            host.path.write_text(text)
        assert core_time() == CoreTime(0.0, 0.0)
        assert core_time().with_stolen(0.25) == 0.25

    def test_all_is_stolen_from_who_ran_alone(self, host):
        before = core_time()
        host.passes(busy_s=2, stolen_s=3)
        assert before.with_stolen(2.0) == pytest.approx(5.0)

    def test_and_a_part_of_it_from_who_did_a_part_of_the_work(self, host):
        before = core_time()
        host.passes(busy_s=2, stolen_s=3)
        assert before.with_stolen(0.5) == pytest.approx(0.5 + 0.75)
        assert before.with_stolen(0.0) == 0

    def test_never_more_than_was_stolen(self, host):
        before = core_time()
        host.passes(busy_s=0.01, stolen_s=1)  # ticks are coarse
        assert before.with_stolen(0.5) == pytest.approx(1.5)

    def test_nor_less_than_nothing(self, host):
        host.passes(busy_s=5, stolen_s=5)
        before = core_time()
        host.passes(stolen_s=-1)  # a machine that moved to another host
        assert before.with_stolen(0.5) == 0.5


@pytest.mark.alone
class TestWaiting:
    def test_a_stolen_batch_was_not_waited_for(self, host):
        assert making_in_one_process(_loader(host), limit_s=2, n_batches=5).waiting < 0.2

    def test_one_that_was_not_stolen_was(self, host):
        assert making_in_one_process(_loader(host, takes=False), limit_s=2, n_batches=5).waiting > 0.8

    def test_nor_one_that_was_stolen_from_others(self, host):
        assert making_in_one_process(_loader(host, others_s=1.0), limit_s=2, n_batches=5).waiting > 0.8

    @pytest.mark.parametrize(("takes", "cause"), [(True, "prepare"), (False, "fetch")])
    def test_of_any_loader(self, host, takes, cause):
        batches = Batches(host, takes=takes)
        found = diagnose(_Any(batches), lambda batch: time.sleep(0.001), batches=4, rounds=1)
        assert found.shares[cause] > 0.6


def _busy_s(times):
    return times.user + times.nice + times.system + times.irq + times.softirq


def _loader(host, **options):
    return DataLoader(Batches(host, **options))


class _Any:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (self.batches[index] for index in range(40))
