"""How busy the GPU is: the driver's answers, stood in for."""

import threading

import pytest
import torch

from labkit.tuning import gpu_utilization as utilization
from labkit.tuning.gpu_utilization import GpuUtilization


class Driver:
    """Answers as given, then fails, as NVML does where its package is missing."""

    def __init__(self, *answers: int):
        self.answers, self.asked = list(answers), threading.Event()

    def __call__(self) -> int:
        if not self.answers:
            self.asked.set()
            raise ModuleNotFoundError("pynvml")
        return self.answers.pop(0)


@pytest.mark.parametrize(("answers", "share"), [((100, 50, 0), 0.5), ((), None)])
def test_the_mean_of_what_the_driver_says(monkeypatch, answers, share):
    driver = Driver(*answers)
    monkeypatch.setattr(utilization, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", driver)
    with GpuUtilization() as gpu:
        assert driver.asked.wait(20)
    assert gpu.share == share
    assert not gpu._thread.is_alive()


def test_sampling_ends_with_the_block(monkeypatch):
    monkeypatch.setattr(utilization, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    asked = threading.Event()
    monkeypatch.setattr(torch.cuda, "utilization", lambda: asked.set() or 10)
    with GpuUtilization() as gpu:
        assert asked.wait(20)
        assert gpu._thread.daemon
    assert gpu.share == pytest.approx(0.1)
    assert not gpu._thread.is_alive()


def test_without_a_gpu_in_use_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: pytest.fail("asked"))
    with GpuUtilization() as gpu:
        assert not gpu._thread.is_alive()
    assert gpu.share is None
