"""The inputs of a plan: their names and units, what is assumed of them, and the check of what a reader entered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.core import require_int
from labkit.measure.cores import SLOWED
from labkit.tuning.plan.estimate import Estimate, as_estimate
from labkit.tuning.plan.published import IMAGENET_IMAGES, IMAGENET_KB


@dataclass(frozen=True)
class Input:
    """label, unit: For texts.

    default: What is assumed; None: a plan leaves out what needs it, or asks for it.
    is_count: An integer >= 1.
    may_be_zero: Else it must be > 0.
    """

    label: str
    unit: str
    default: Estimate | None = None
    is_count: bool = False
    may_be_zero: bool = False


def _assume(value: float, low: float | None = None, high: float | None = None, why: str = "") -> Estimate:
    return Estimate(value, low, high, why, "assumed")


INPUTS = {
    "images_per_s_per_gpu": Input("demand of a GPU", "images/s"),
    "n_gpus": Input("GPUs", "", is_count=True),
    "n_nodes": Input("nodes", "", is_count=True),
    "n_images": Input("images of an epoch", "", IMAGENET_IMAGES, is_count=True),
    "cores_per_node": Input("cores of a node", "cores"),
    "step_cores_per_gpu": Input(
        "cores of a GPU's step", "cores",
        _assume(1, 0.5, 1.2, "the training process launches kernels on about one core"), may_be_zero=True,
    ),
    "cpu_ms_per_image": Input("core time of an image", "ms"),
    "slowdown": Input(
        "slowdown with all cores busy", "x",
        _assume(1.1, 1.0, SLOWED, f"up to {SLOWED}, as eleven trainings showed"),
    ),
    "gil_us_per_image": Input("time of an image under Python's lock", "us"),
    "processes_per_gpu": Input(
        "loader processes a GPU", "", _assume(1, why="threads of the training process, as lk.BatchLoader has them"),
        is_count=True,
    ),
    "kb_per_image": Input("an image in storage", "KB", IMAGENET_KB),
    "pixel_kb_per_image": Input(
        "an image as prepared pixels", "KB",
        _assume(262, 236, 295, "256 pixels x 256 pixels x 3 bytes x 4/3, the shape of most photos"),
    ),
    "latency_ms": Input("latency of a request", "ms", may_be_zero=True),
    "mb_per_s_per_request": Input("rate of a request", "MB/s"),
    "requests_per_s": Input("requests that the storage answers", "requests/s"),
    "storage_mb_per_s": Input("rate of the storage", "MB/s"),
    "n_prefixes": Input("prefixes of the keys", "", is_count=True),
    "request_mb": Input("a request", "MB"),
    "shard_mb": Input("a shard", "MB"),
    "requests_in_flight_per_gpu": Input("requests that a GPU's loader keeps in flight", "requests"),
    "network_gbit_per_node": Input("network of a node", "Gbit/s"),
    "pcie_gb_per_s": Input("PCIe of a GPU", "GB/s"),
    "crop_size": Input("side of a crop", "pixels", _assume(224, why="the usual size"), is_count=True),
    "bytes_per_value": Input("bytes of a value", ""),
    "batch_size": Input("images of a batch, one GPU", "", _assume(256, why="a usual size"), is_count=True),
    "batches_ahead": Input("batches in memory, one GPU", "", _assume(4, 3, 6, "two ahead, one in use, one being made")),
    "process_gb": Input("memory of a loader process", "GB", _assume(0.3, 0.2, 0.6, "Python with torch and OpenCV")),
    "price_per_gpu_hour": Input("price of a GPU hour", "", may_be_zero=True),
    "price_per_1000_requests": Input("price of 1000 requests", "", may_be_zero=True),
}  # fmt: skip


def check_inputs(given: Mapping[str, Any]) -> dict[str, Estimate]:
    """What a reader entered, as estimates; None is left out.

    Raises:
        ValueError: an unknown name, or no such number.
    """
    found = {}
    for name, value in given.items():
        if name not in INPUTS:
            raise ValueError(f"{name} is no input of a plan: it takes {', '.join(INPUTS)}")
        if value is not None:
            found[name] = _check(name, value)
    return found


def _check(name: str, value: Any) -> Estimate:
    expected = INPUTS[name]
    if expected.is_count and not isinstance(value, Estimate):
        return Estimate(require_int(name, value))
    estimate = as_estimate(name, value)
    if estimate.value == 0 and not expected.may_be_zero:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")
    return estimate
