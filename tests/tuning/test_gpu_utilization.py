"""How busy the GPU is: the driver's answers, stood in for."""

import threading

import pytest
import torch

from labkit.watching import timings as utilization


@pytest.fixture(autouse=True)
def in_use(monkeypatch):
    """A GPU that is asked every millisecond."""
    monkeypatch.setattr(utilization, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def sampling():
    return [thread for thread in threading.enumerate() if thread.name == "labkit-gpu-utilization"]


@pytest.mark.parametrize("answers", [[100, 50, 0], []])
def test_what_the_driver_says_until_it_fails(monkeypatch, answers):
    """As NVML does where its package is missing."""
    left, failed = list(answers), threading.Event()

    def answer():
        if not left:
            failed.set()
            raise ModuleNotFoundError("pynvml")
        return left.pop(0)

    monkeypatch.setattr(torch.cuda, "utilization", answer)
    with utilization.gpu_utilization() as samples:
        assert failed.wait(20)
    assert samples == [answer / 100 for answer in answers]
    assert not sampling()


def test_sampling_ends_with_the_block(monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(torch.cuda, "utilization", lambda: asked.set() or 10)
    with utilization.gpu_utilization() as samples:
        assert asked.wait(20)
        assert [thread.daemon for thread in sampling()] == [True]
    assert set(samples) == {0.1}
    assert not sampling()


def test_without_a_gpu_in_use_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with utilization.gpu_utilization() as samples:
        assert not sampling()
    assert samples == []
