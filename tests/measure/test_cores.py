"""Time of all cores: as the kernel counts it, and by a host that takes some of it away."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from labkit.measure.usage import CoreTime, core_time
from tests.stealing import Host

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def test_as_the_kernel_counts():
    before, found, after = _counted(), core_time(), _counted()
    assert before.busy_s - _TICK_S <= found.busy_s <= after.busy_s + _TICK_S
    assert before.stolen_s - _TICK_S <= found.stolen_s <= after.stolen_s + _TICK_S


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_nothing_where_the_kernel_does_not_tell(error, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert core_time() == CoreTime(0.0, 0.0)
    assert core_time().with_stolen(0.25) == 0.25


def test_a_system_that_knows_no_theft(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=2.0, system=1.0, idle=5.0))
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
def test_what_was_stolen_is_shared_by_the_work_done(monkeypatch, busy_s, stolen_s, cpu_s, expected_s):
    host = Host()
    monkeypatch.setattr(psutil, "cpu_times", host.cpu_times)
    host.passes(busy_s=5, stolen_s=5)
    before = core_time()
    host.passes(busy_s=busy_s, stolen_s=stolen_s)
    assert before.with_stolen(cpu_s) == pytest.approx(expected_s)


def test_the_time_between_two_moments_is_never_less_than_nothing():
    assert CoreTime(5.0, 2.0) - CoreTime(3.0, 0.5) == CoreTime(2.0, 1.5)
    assert CoreTime(1.0, 2.0) - CoreTime(3.0, 4.0) == CoreTime(0.0, 0.0)


def _counted():
    """/proc/stat, by proc(5)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return CoreTime((user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S)
