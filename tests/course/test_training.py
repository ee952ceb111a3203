"""The stand-in behaves as a GPU, by a clock of its own; and `train.py`, the course's training, runs as a script."""

import re
import subprocess
import sys

import pytest
import torch

import labkit as lk
from labkit import course
from labkit.course.training import StandInStep
from tests.paths import REPO


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now, self.slept = 100.0, 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now, self.slept = self.now + seconds, self.slept + seconds


def step_of(clock, images_per_s=10):
    return StandInStep(images_per_s, clock=clock, sleep=clock.sleep)


class TestTheStandIn:
    def test_takes_two_batches_at_once_and_waits_for_the_first_with_the_third(self):
        clock = Clock()
        step = step_of(clock)
        for waited in (0, 0, 1, 2):
            step(torch.zeros(10, 3), None)
            assert clock.slept == pytest.approx(waited)
        step.wait()
        assert clock.now == pytest.approx(104)

    def test_lets_the_host_wait_where_it_asks_for_the_loss(self):
        clock = Clock()
        step = step_of(clock)
        losses = [step(torch.zeros(size, 3), None) for size in (10, 5)]
        losses[0].item()
        assert clock.now == pytest.approx(101)
        losses[1].item()
        assert clock.now == pytest.approx(101.5)
        losses[0].item()  # it is there
        assert clock.now == pytest.approx(101.5)

    def test_is_idle_while_no_batch_comes(self):
        clock = Clock()
        step = step_of(clock)
        step(torch.zeros(10, 3), None)
        clock.now += 5
        step(torch.zeros(10, 3), None).item()
        assert clock.now == pytest.approx(106)

    def test_trains_free_data_at_its_rate(self):
        clock = Clock()
        step = step_of(clock, images_per_s=2180)
        for _ in range(50):
            step(torch.zeros(64, 3), None)
        step.wait()
        assert 50 * 64 / (clock.now - 100) == pytest.approx(2180)

    def test_says_what_it_is(self):
        assert repr(StandInStep(2180)) == "a stand-in for a GPU that trains 2,180 images/s"

    @pytest.mark.parametrize("rate", [0, -1, "fast"])
    def test_refuses_what_is_no_rate(self, rate):
        with pytest.raises((ValueError, TypeError), match="images_per_s"):
            StandInStep(rate)


@pytest.mark.cuda
def test_with_cuda_a_resnet_trains_bytes_and_floats():
    step = course.make_step(10)
    images, labels = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8), torch.arange(4)
    for batch in (images, images.float() / 255):
        assert torch.isfinite(step(batch, labels)).item()
    step.wait()
    assert repr(step).startswith("ResNet-50 on ")


def test_train_py_runs_as_a_script_and_tells_rate_and_waiting(tmp_path):
    photos = lk.make_photos(tmp_path / "photos", 8, progress=False)
    command = [sys.executable, str(REPO / "notebooks/train.py"), str(photos), "--epochs", "2"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith("ResNet-50 on " if torch.cuda.is_available() else "a stand-in for a GPU")
    assert [re.sub(r"[\d,]+(?= images)|\d+(?=%)", "N", line) for line in said[1:]] == [
        f"epoch {epoch}: N images/s, N% of the time waiting for batches" for epoch in range(2)
    ]


def test_train_py_is_short():
    assert len((REPO / "notebooks/train.py").read_text().splitlines()) <= 60
