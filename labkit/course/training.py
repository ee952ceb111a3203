"""The course's training: its step, and what it gains from a change of its loader.

The step is a real ResNet-50 where there is CUDA, else a stand-in that behaves as a GPU. A GPU takes a batch at once and
works on it while Python goes on. The host waits for it where it asks for a number, as `loss.item()` does, or where it
is far ahead.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from labkit.errors import ArgumentError
from labkit.measure.compare import DifferentWorkWarning, compare
from labkit.measure.statistics import quiet_summary
from labkit.measure.steady import LoaderWrapper, with_step
from labkit.util.arguments import require_int, require_positive
from labkit.util.machine import is_thorough, scale

RESNET50_PER_S = 2180  # images of 224 pixels: training on one NVIDIA L40S, MLPerf Training v4.0
_BUS_BYTES_PER_S = 25e9  # from page-locked memory, about what PCIe 4.0 with 16 lanes reaches
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
    and a training's memory do. Its copy comes first, in the same queue, unless `copied_ahead` has made it beside the
    step before. Nothing is copied or computed.

    Args:
        images_per_s: How many images it trains in a second, once they are there.
        bus_bytes_per_s: How fast a batch is copied.
        clock, sleep: In place of `time`'s.
    """

    def __init__(
        self,
        images_per_s: float = RESNET50_PER_S,
        *,
        bus_bytes_per_s: float = _BUS_BYTES_PER_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Any] = time.sleep,
    ):
        self.images_per_s = require_positive("images_per_s", images_per_s)
        self.bus_bytes_per_s = require_positive("bus_bytes_per_s", bus_bytes_per_s)
        self._clock, self._sleep = clock, sleep
        self._ends = deque[float]()  # of the batches that it has taken, as far as somebody may wait for them
        self._copies = deque[tuple[Tensor, float]](maxlen=_N_PENDING)  # batches copied ahead, with the end of each copy
        self._bus_free_at = 0.0

    def __call__(self, images: Tensor, labels: Any) -> "StandInLoss":
        """Take a batch; returns when at most one other is not done."""
        if len(self._ends) == _N_PENDING:
            self._wait_until(self._ends.popleft())
        starts_at = max(self._clock(), self._ends[-1] if self._ends else 0.0)
        copied_at = [end for copied, end in self._copies if copied is images]
        starts_at = max(starts_at, *copied_at) if copied_at else starts_at + images.nbytes / self.bus_bytes_per_s
        self._ends.append(starts_at + len(images) / self.images_per_s)
        return StandInLoss(self, self._ends[-1])

    def copy_ahead(self, images: Tensor) -> None:
        """Copy a batch beside the steps, after other copies."""
        self._bus_free_at = max(self._clock(), self._bus_free_at) + images.nbytes / self.bus_bytes_per_s
        self._copies.append((images, self._bus_free_at))

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
    """torchvision's ResNet-50: mixed precision, channels last, SGD.

    Images may be normalized floats, or bytes, which are normalized on the device.

    Args:
        n_classes: Of the labels.
        device: Where it trains.
        n_steps: Of the whole training; its learning rate then rises and falls in one cycle. Default: it stays.
    """

    def __init__(self, n_classes: int = 1000, device: str = "cuda", *, n_steps: int | None = None):
        from torchvision.models import resnet50

        self._device = torch.device(device)
        self.model = resnet50(num_classes=n_classes).to(self._device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR
        self._schedule = cycle(self._optimizer, max_lr=0.1, total_steps=n_steps) if n_steps else None
        self._mean, self._std = (torch.tensor(three, device=self._device).view(3, 1, 1) for three in (_MEAN, _STD))

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on a batch; returns the loss, on the device."""
        labels = labels.to(self._device, non_blocking=True)
        with self._autocast():
            loss = torch.nn.functional.cross_entropy(self.model(self._normalized(images)), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        if self._schedule:
            self._schedule.step()
        return loss.detach()

    def accuracy(self, loader: Iterable[Any]) -> float:
        """The share of a loader's images that the model puts into the right class."""
        self.model.eval()
        n_right = n_images = 0
        with torch.inference_mode(), self._autocast():
            for images, labels in loader:
                scores = self.model(self._normalized(images))
                n_right += int((scores.argmax(1).cpu() == labels.cpu()).sum())
                n_images += len(labels)
        self.model.train()
        return n_right / n_images

    def _normalized(self, images: Tensor) -> Tensor:
        images = images.to(self._device, non_blocking=True)
        return (images - self._mean) / self._std if images.dtype == torch.uint8 else images

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda")

    def wait(self) -> None:
        """Wait until all batches are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __repr__(self) -> str:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "the CPU"
        return f"ResNet-50 on {name}"


class _CopiedAhead(LoaderWrapper):
    """What `copied_ahead` returns for a stand-in."""

    batches_ahead = 1

    def __init__(self, loader: Iterable[Any], step: StandInStep):
        self.loader, self._step = loader, step
        self.batch_size, self.num_workers = getattr(loader, "batch_size", None), getattr(loader, "num_workers", 0)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        ready = None
        for batch in self.loader:
            self._step.copy_ahead(batch[0])
            if ready is not None:
                yield ready
            ready = batch
        if ready is not None:
            yield ready


def copied_ahead(loader: Iterable[Any], step: "StandInStep | ResNetStep") -> Iterable[Any]:
    """The batches of a loader, each of which is copied to the device while the step before it runs.

    Args:
        loader: Of pairs of images and labels.
        step: From `make_step`. On CUDA this is `lk.CUDAPrefetcher`; a stand-in begins the copy when the batch comes.

    >>> for images, labels in course.copied_ahead(loader, step):
    ...     loss = step(images, labels)

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    if isinstance(step, StandInStep):
        return _CopiedAhead(loader, step)
    from labkit.loading.prefetch import CUDAPrefetcher

    return CUDAPrefetcher(loader, "cuda")


ALONE, TRAINING, STEP_ALONE = ", loader alone", ", training", "batches in memory, training"


def measure_training(
    loaders: Mapping[str, Iterable[Any]],
    step: "StandInStep | ResNetStep",
    *,
    experiment: str,
    more: Mapping[str, Callable[[], Any]] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Time each loader alone and in the training, all in turns, and the training on batches that are in memory already.

    As in `train.py`, each step is waited for. Torch has one thread meanwhile, and no row carries a verdict.

    Args:
        loaders: By name, of pairs of images and labels. The first training is what others are compared with.
        step: From `make_step`.
        more: Variants of `lk.compare` that take part.
        experiment, options: As for `lk.compare`.

    Returns:
        The runs: `training_table` reads them.
    """
    if not loaders:
        raise ArgumentError("no loaders to train on")

    def train(batch: Any) -> None:
        step(*batch).item()

    first = next(iter(loaders))
    kept = [next(iter(loaders[first]))] * (4 if scale().name == "ci" else 32)
    variants: dict[str, Callable[[], Any]] = {}
    for name, loader in loaders.items():
        variants[f"{name}{ALONE}"] = partial(_itself, loader)
        variants[f"{name}{TRAINING}"] = partial(with_step, loader, train)
    variants[STEP_ALONE] = partial(with_step, kept, train)
    variants |= more or {}
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: one process is to be one core
    try:
        with warnings.catch_warnings(action="ignore", category=DifferentWorkWarning):  # rates are per image
            return compare(variants, baseline=f"{first}{TRAINING}", experiment=experiment, verdicts=False, **options)
    finally:
        torch.set_num_threads(n_threads)


def _itself(loader: Iterable[Any]) -> Iterable[Any]:
    return loader


def training_table(runs: pd.DataFrame) -> pd.DataFrame:
    """What `measure_training` found, a row for each loader.

    Returns:
        Images per second of the loader `alone` and of the `training`; `waiting`, the share of the training's time in
        which its step has no batch, 1 - training / step alone; `speedup`, the ratio of the training's rate to the first
        one's; and the ends of its 95 % interval, `ci_low` and `ci_high`.
    """
    first = str(runs["baseline"].iloc[0])
    summary = with_printed_ratio(quiet_summary(runs, first), first)
    rates = summary["images_per_s"]
    trained = summary[[str(label).endswith(TRAINING) and label != STEP_ALONE for label in summary.index]]
    names = [str(label).removesuffix(TRAINING) for label in trained.index]
    return pd.DataFrame({
        "alone": [rates[f"{name}{ALONE}"] for name in names],
        "training": trained["images_per_s"].to_numpy(),
        "waiting": (1 - trained["images_per_s"] / rates[STEP_ALONE]).clip(lower=0).to_numpy(),
        **{name: trained[name].to_numpy() for name in ("speedup", "ci_low", "ci_high")},
    }, index=pd.Index(names, name="loader"))  # fmt: skip


def with_printed_ratio(summary: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """A summary whose `speedup` is the ratio of the rates that are printed beside it, within its interval."""
    ratio = summary["images_per_s"] / summary.loc[baseline, "images_per_s"]
    low, high = (
        summary[name].where(summary[name].isna(), ends(summary[name], ratio))
        for name, ends in (("ci_low", np.minimum), ("ci_high", np.maximum))
    )
    return summary.assign(speedup=ratio, ci_low=low, ci_high=high)


class TrainingNow:
    """The table that `training_now` shows.

    Attributes:
        frame: From `training_table`.
    """

    def __init__(self, frame: pd.DataFrame, step: "StandInStep | ResNetStep"):
        self.frame, self._step = frame, step

    def __repr__(self) -> str:
        return f"{self._shown().to_string()}\n{self._told()}"

    def _repr_html_(self) -> str:
        return f"{self._shown().to_html(border=0)}<p>{self._told()}</p>"

    def _shown(self) -> pd.DataFrame:
        shown = pd.DataFrame({
            "loader alone (images/s)": self.frame["alone"].map("{:,.0f}".format),
            "training (images/s)": self.frame["training"].map("{:,.0f}".format),
            "waiting": self.frame["waiting"].map("{:.0%}".format),
        })  # fmt: skip
        if is_thorough():
            intervals = [f"{row.speedup:.2f} [{row.ci_low:.2f}, {row.ci_high:.2f}]" for row in self.frame.itertuples()]
            shown["training, times as fast"] = ["", *intervals[1:]]
        shown.index.name = None
        return shown

    def _told(self) -> str:
        return f"The step is {self._step}; waiting is the share of the time in which it has no batch."


def training_now(
    loaders: Mapping[str, Iterable[Any]], *, experiment: str, step: "StandInStep | ResNetStep | None" = None
) -> TrainingNow:
    """Train with each loader for a moment, in turns: what a chapter's change brings to the training.

    Args:
        loaders: By name, of pairs of images and labels: the one before and the one after the change.
        experiment: As for `lk.compare`.
        step: Default: `make_step()`.

    Returns:
        A table to show, with intervals in a thorough tour; its numbers are in `.frame`, see `training_table`.

    >>> course.training_now({"PIL": before, "TorchCodec": after}, experiment="02 training now")
    """
    step = step or make_step()
    runs = measure_training(loaders, step, experiment=experiment, rung=False, progress=False)
    return TrainingNow(training_table(runs), step)
