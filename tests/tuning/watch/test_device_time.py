"""What a CUDA device is seen to wait for, on the simulated device and on a real one."""

import threading
from contextlib import nullcontext
from time import sleep

import pytest
import torch

from labkit.watching import timings
from labkit.watching.timings import DeviceTimes


def test_without_cuda_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    times = DeviceTimes()
    stop = times.start()
    times.received(times.asked())
    torch.zeros(1).to(torch.float64)
    stop()
    assert (times.idle_s, times.copy_s) == ([], [])


def test_a_wait_behind_a_kernel_is_no_idle_time(cuda):
    """A busy device does not stand still while the host waits, and copies of the host's tensors are timed."""
    torch.zeros(1, device="cuda")
    times = DeviceTimes()
    stop = times.start()
    try:
        large = torch.zeros(1 << 22).to("cuda")
        for _ in range(3):
            large = large * 2
        times.received(times.asked())
    finally:
        stop()
    assert len(times.copy_s) == 1
    assert times.copy_s[0] > 0
    assert times.idle_s == [pytest.approx(0, abs=1e-4)]


class ReachedSoon:
    """An event of a busy device."""

    def query(self):
        sleep(0)  # another thread goes on here
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1000.0


def test_threads_of_a_script_may_copy_at_once(monkeypatch):
    """Without a lock two threads took the same event from the list, and the script's `.to()` raised IndexError."""
    monkeypatch.setattr(timings, "_has_device", lambda: True)
    monkeypatch.setattr(timings, "_event", ReachedSoon)
    monkeypatch.setattr(timings, "gpu_utilization", lambda: nullcontext([]))
    times, errors, together = DeviceTimes(), [], threading.Barrier(8)

    def train():
        try:
            for _ in range(100):
                together.wait()
                for _ in range(10):
                    times.received(times.asked())
                times.read()
        except Exception as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=train) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.read(wait=True)
    assert errors == []
    assert times.idle_s == [1.0] * 8000
