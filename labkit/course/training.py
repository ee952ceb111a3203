"""The step of the course's training: a real ResNet-50 where there is CUDA, else a stand-in that behaves as a GPU.

A GPU takes a batch at once and works on it while Python goes on. The host waits for it where it asks for a number, as
`loss.item()` does, or where it is far ahead.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.util.arguments import require_int, require_positive

RESNET50_PER_S = 2180  # images of 224 pixels: training on one NVIDIA L40S, MLPerf Training v4.0
_N_PENDING = 2  # batches that the stand-in lets wait for it
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of bytes


def make_step(n_classes: int = 1000, *, images_per_s: float = RESNET50_PER_S) -> "StandInStep | ResNetStep":
    """What trains on a batch: `loss = step(images, labels)`.

    Args:
        n_classes: Of the labels.
        images_per_s: How many images a stand-in trains in a second; a GPU takes what it takes.

    Returns:
        A `ResNetStep` if CUDA is available, else a `StandInStep`, which says so: print it.

    >>> step = course.make_step()
    >>> loss = step(torch.zeros(4, 3, 224, 224), torch.zeros(4, dtype=torch.int64))
    >>> step.wait()

    Raises:
        ValueError: fewer than one class, or a rate that is not above 0.
    """
    require_int("n_classes", n_classes)
    return ResNetStep(n_classes) if torch.cuda.is_available() else StandInStep(images_per_s)


class StandInStep:
    """A GPU that is not there: it accepts a batch at once, is busy with it for a time, and uses no core for that.

    A batch begins when the one before it is done, and the host waits for two batches that are not done, as CUDA's queue
    and a training's memory do. Nothing is computed.

    Args:
        images_per_s: How many images it trains in a second.
        clock, sleep: In place of `time`'s.
    """

    def __init__(
        self,
        images_per_s: float = RESNET50_PER_S,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Any] = time.sleep,
    ):
        self.images_per_s = require_positive("images_per_s", images_per_s)
        self._clock, self._sleep = clock, sleep
        self._ends = deque[float]()  # of the batches that it has taken, as far as somebody may wait for them

    def __call__(self, images: Tensor, labels: Any) -> "StandInLoss":
        """Take a batch; returns when at most one other is not done."""
        if len(self._ends) == _N_PENDING:
            self._wait_until(self._ends.popleft())
        free_at = self._ends[-1] if self._ends else 0.0
        self._ends.append(max(self._clock(), free_at) + len(images) / self.images_per_s)
        return StandInLoss(self, self._ends[-1])

    def wait(self) -> None:
        """Wait until all batches are done, as `torch.cuda.synchronize()` does."""
        if self._ends:
            self._wait_until(self._ends[-1])

    def __repr__(self) -> str:
        return f"a stand-in for a GPU that trains {self.images_per_s:,.0f} images/s"

    def _wait_until(self, end: float) -> None:
        while (left := end - self._clock()) > 0:
            self._sleep(left)


class StandInLoss:
    """What a `StandInStep` returns: a number that is there when its batch is done."""

    def __init__(self, step: StandInStep, end: float):
        self._step, self._end = step, end

    def item(self) -> float:
        """Wait for the batch. There is no loss, so it is NaN."""
        self._step._wait_until(self._end)
        return float("nan")


class ResNetStep:
    """torchvision's ResNet-50 on CUDA: mixed precision, channels last, SGD.

    Images may be normalized floats, or bytes, which are normalized on the device.
    """

    def __init__(self, n_classes: int = 1000):
        from torchvision.models import resnet50

        self._device = torch.device("cuda")
        self.model = resnet50(num_classes=n_classes).to(self._device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._mean, self._std = (torch.tensor(three, device=self._device).view(3, 1, 1) for three in (_MEAN, _STD))

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on a batch; returns the loss, on the device."""
        images, labels = (batch.to(self._device, non_blocking=True) for batch in (images, labels))
        if images.dtype == torch.uint8:
            images = (images - self._mean) / self._std
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Wait until all batches are done."""
        torch.cuda.synchronize(self._device)

    def __repr__(self) -> str:
        return f"ResNet-50 on {torch.cuda.get_device_name(self._device)}"
