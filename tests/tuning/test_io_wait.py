"""What a virtual machine's host takes away is no waiting for data: by the kernel, and by a host that takes all naps."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from labkit.tuning import io_wait
from labkit.tuning.io_wait import CoreTime, core_time, making_in_one_process
from labkit.tuning.stalls import diagnose

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Host:
    """What psutil tells, to be set: seconds in which the cores ran something, or were not let."""

    def __init__(self):
        self.busy_s = self.stolen_s = 0.0

    def passes(self, *, busy_s=0.0, stolen_s=0.0):
        self.busy_s, self.stolen_s = self.busy_s + busy_s, self.stolen_s + stolen_s

    def cpu_times(self):
        return SimpleNamespace(user=self.busy_s, nice=0.0, system=0.0, idle=77.0, iowait=88.0, steal=self.stolen_s)


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr(io_wait.psutil, "cpu_times", host.cpu_times)
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
        time.sleep(0.02)
        self.host.passes(busy_s=self.others_s, stolen_s=0.02 * self.takes)
        return torch.zeros(3, 8, 8)


class TestCoreTime:
    def test_as_the_kernel_counts(self):
        before, found, after = _counted(), core_time(), _counted()
        assert before.busy_s - _TICK_S <= found.busy_s <= after.busy_s + _TICK_S
        assert before.stolen_s - _TICK_S <= found.stolen_s <= after.stolen_s + _TICK_S

    @pytest.mark.parametrize("error", [OSError, ValueError])
    def test_nothing_where_the_kernel_does_not_tell(self, error, monkeypatch):
        def refuse():
            raise error

        monkeypatch.setattr(io_wait.psutil, "cpu_times", refuse)
        assert core_time() == CoreTime(0.0, 0.0)
        assert core_time().with_stolen(0.25) == 0.25

    def test_a_system_that_knows_no_theft(self, monkeypatch):
        monkeypatch.setattr(io_wait.psutil, "cpu_times", lambda: SimpleNamespace(user=2.0, system=1.0, idle=5.0))
        assert core_time() == CoreTime(3.0, 0.0)

    @pytest.mark.parametrize(
        ("busy_s", "stolen_s", "cpu_s", "expected_s"),
        [
            (2, 3, 2.0, 5.0),  # all is stolen from who ran alone
            (2, 3, 0.5, 0.5 + 0.75),  # and a part of it from who did a part of the work
            (2, 3, 0.0, 0.0),
            (0.01, 1, 0.5, 1.5),  # never more than was stolen: ticks are coarse
            (0, -1, 0.5, 0.5),  # nor less than nothing: a machine that moved to another host
        ],
    )
    def test_what_was_stolen_is_shared_by_the_work_done(self, host, busy_s, stolen_s, cpu_s, expected_s):
        host.passes(busy_s=5, stolen_s=5)
        before = core_time()
        host.passes(busy_s=busy_s, stolen_s=stolen_s)
        assert before.with_stolen(cpu_s) == pytest.approx(expected_s)


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
        found = diagnose(batches, lambda batch: time.sleep(0.001), batches=4, rounds=1)
        assert found.shares[cause] > 0.6


def _counted():
    """/proc/stat, by proc(5)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return CoreTime((user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S)
