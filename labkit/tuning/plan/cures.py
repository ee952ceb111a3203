"""What would help against the scarcest resource, the cheapest first, and how much."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from labkit.tuning.plan.ceilings import RESOURCES
from labkit.tuning.plan.estimate import Estimate, of_draws
from labkit.tuning.plan.published import STORAGES
from labkit.tuning.plan.setup import Setup

EFFORTS = ("a setting", "a conversion, once", "hardware")
LITTLE = 1.02  # times as fast: what brings less at best is no cure
_SURE = 0.975  # quantile of a need that a cure should meet


@dataclass(frozen=True, eq=False)
class Cure:
    """A change against the resource that is the scarcest beside the GPUs.

    Attributes:
        action: What to do.
        effort: One of `EFFORTS`, the cheapest first.
        gain: Times as fast, median and 95 % interval; if the effect is not known, the most that it can bring.
        images_per_s: Of the training afterwards, in the same way.
        then: The resource that is the scarcest afterwards.
        setup: What a plan is computed from afterwards; None: its effect is not known, since nothing was measured.
    """

    action: str
    effort: str
    gain: tuple[float, float, float]
    images_per_s: tuple[float, float, float]
    then: str
    setup: Setup | None

    @property
    def is_known(self) -> bool:
        return self.setup is not None

    def __str__(self) -> str:
        what, (gain, low, high) = f"{self.action} ({self.effort})", self.gain
        if not self.is_known:
            return f"{what}: at most {gain:.2f}x [{low:.2f}, {high:.2f}]; lk.loader_costs measures what it brings"
        return f"{what}: {gain:.2f}x [{low:.2f}, {high:.2f}], then limited by {RESOURCES[self.then]}"


def find_cures(setup: Setup) -> list[Cure]:
    """Cures against the scarcest resource: the cheapest first, of one effort the most useful first.

    Those whose effect is not known come last. Empty if the GPUs are the scarcest in nearly all draws.
    """
    made = [make(setup) for make in _CURES.get(setup.to_cure or "", ())]
    cures = [cure for cure in made if cure is not None and cure.gain[2] >= LITTLE]
    return sorted(cures, key=lambda cure: (not cure.is_known, EFFORTS.index(cure.effort), -cure.gain[0]))


def _changed(setup: Setup, action: str, effort: int, **inputs: Estimate) -> Cure:
    return _cure(setup, replace(setup, inputs={**setup.inputs, **inputs}), action, effort)


def _cure(before: Setup, after: Setup, action: str, effort: int) -> Cure:
    gain = of_draws(after.rate / before.rate)
    return Cure(action, EFFORTS[effort], gain, of_draws(after.rate), after.scarcest, after)


def _unknown(setup: Setup, action: str, effort: int) -> Cure:
    most = setup.next_ceiling()
    return Cure(action, EFFORTS[effort], of_draws(most / setup.rate), of_draws(most), setup.scarcest, None)


def _enough(setup: Setup, name: str) -> float:
    """As much of a need as meets it in nearly all draws."""
    return float(np.quantile(setup.draws[name], _SURE))


def _planned(value: float) -> Estimate:
    return Estimate(value, source="this cure", kind="assumed")


def _more_processes(setup: Setup) -> Cure:
    wanted = math.ceil(_enough(setup, "processes_needed"))
    action = f"Load in {wanted} processes a GPU, each with a lock of its own"
    return _changed(setup, action, 0, processes_per_gpu=_planned(wanted))


def _more_requests(setup: Setup) -> Cure:
    wanted = max(2, math.ceil(_enough(setup, "in_flight_needed_per_gpu")))
    inputs = {"requests_in_flight_per_gpu": _planned(wanted)}
    action = f"Keep {wanted:,} requests in flight a GPU: read ahead in threads or asynchronously, apart from decoding"
    n_ahead = math.ceil(wanted / setup.inputs["batch_size"].value) + 1
    if "request_mb" not in setup.inputs and n_ahead > setup.inputs["batches_ahead"].interval[0]:
        inputs["batches_ahead"] = _planned(n_ahead)
        action += f", with {n_ahead} batches in memory"
    return _changed(setup, action, 0, **inputs)


def _send_bytes(setup: Setup) -> Cure | None:
    if setup.inputs["bytes_per_value"].value <= 1:
        return None
    return _changed(setup, "Send bytes, and normalise on the GPU", 0, bytes_per_value=_planned(1))


def _more_prefixes(setup: Setup) -> Cure | None:
    if "prefixes_needed" not in setup.draws:
        return None
    wanted = math.ceil(_enough(setup, "prefixes_needed"))
    return _changed(setup, f"Spread the keys over {wanted:,} prefixes", 1, n_prefixes=_planned(wanted))


def _use_shards(setup: Setup) -> Cure | None:
    if "request_mb" in setup.inputs:
        return None
    inputs = {"shard_mb": _planned(500), "request_mb": REQUEST_MB}
    return _changed(setup, "Write shards, and read them in ranges of 8 to 16 MB: lk.write_shards", 1, **inputs)


REQUEST_MB = Estimate(
    11.3, 8, 16, "ranges of 8 to 16 MB, https://docs.aws.amazon.com/AmazonS3/latest/userguide/"
    "optimizing-performance-design-patterns.html", "published",
)  # fmt: skip

_PREPARED = {
    "photos at 256": "Resize once, to JPEGs whose shorter side has 256 pixels",
    "pixels at 256": "Decode once, to prepared pixels: lk.PixelStore.build",
}


def _prepare(data: str) -> Callable[[Setup], Cure | None]:
    def make(setup: Setup) -> Cure | None:
        if setup.data != "photos":
            return None
        action = _PREPARED[data]
        if data not in setup.known:
            return _unknown(setup, action, 1)
        return _cure(setup, replace(setup, data=data, inputs={**setup.inputs, **setup.known[data]}), action, 1)

    return make


def _copy_to_local_disks(setup: Setup) -> Cure | None:
    if not setup.is_remote:
        return None
    action = f"Copy the images to a local NVMe disk of each node ({setup.median('dataset_gb'):,.0f} GB)"
    of_remote = {name for storage in STORAGES.values() for name in storage.rates}
    kept = {name: value for name, value in setup.inputs.items() if name not in of_remote}
    disk = STORAGES["nvme"]
    after = replace(setup, storage=disk.name, is_remote=False, inputs={**kept, **disk.rates})
    return _cure(setup, after, action, 2)


def _faster(name: str, ceiling: str, action: str) -> Callable[[Setup], Cure]:
    """More of an input, by as much as its ceiling lacks."""

    def make(setup: Setup) -> Cure:
        lacks = float(np.quantile(setup.draws["demand"] / setup.draws[ceiling], _SURE))
        wanted = setup.inputs[name].times(max(1.0, lacks), "this cure")
        return _changed(setup, action.format(wanted.value), 2, **{name: wanted})

    return make


_prepared = tuple(_prepare(data) for data in _PREPARED)

_CURES: dict[str, tuple[Callable[[Setup], Cure | None], ...]] = {
    "core_ceiling": (*_prepared, _faster("cores_per_node", "core_ceiling", "Use nodes of {:,.0f} cores")),
    "lock_ceiling": (_more_processes, *_prepared),
    "pcie_ceiling": (_send_bytes,),
    "network_ceiling": (
        _prepare("photos at 256"), _copy_to_local_disks,
        _faster("network_gbit_per_node", "network_ceiling", "Use a network of {:,.0f} Gbit/s a node"),
    ),
    "request_rate_ceiling": (_use_shards, _more_prefixes, _copy_to_local_disks),
    "bandwidth_ceiling": (
        _prepare("photos at 256"), _copy_to_local_disks,
        _faster("storage_mb_per_s", "bandwidth_ceiling", "Use storage of {:,.0f} MB/s"),
    ),
    "in_flight_ceiling": (_more_requests, _use_shards, _copy_to_local_disks),
}  # fmt: skip
