"""What helps against the scarcest resource of a plan: a table of changes, and what each brings for its effort."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from labkit.planning.formulas import DATA, RESOURCES, Estimate, Setup, of_draws
from labkit.planning.published import REQUEST_MB, STORAGES

EFFORTS = ("a setting", "a copy, once", "a conversion, once", "hardware")
_NEARLY = 0.75  # of the best gain: what reaches it is chosen by its effort
MIN_GAIN = 1.02  # times as fast: what brings less at best is no fix
_SURE = 0.975  # quantile of a need that a fix should meet


@dataclass(frozen=True, eq=False)
class Fix:
    """A change against the resource that is the scarcest after the GPUs.

    Attributes:
        action: What to do.
        effort: One of `EFFORTS`, the least first.
        gain: Times as fast, median and 95 % interval.
        setup: What a plan is computed from afterwards.
    """

    action: str
    effort: str
    gain: tuple[float, float, float]
    setup: Setup

    @property
    def next_limit(self) -> str:
        """The resource that is the scarcest afterwards."""
        return RESOURCES[self.setup.scarcest]

    def __str__(self) -> str:
        gain, low, high = self.gain
        what = f"{self.action} ({self.effort}): {gain:.2f} times as fast [{low:.2f}, {high:.2f}]"
        return f"{what}, then limited by {self.next_limit}"


def find_fixes(setup: Setup) -> list[Fix]:
    """Fixes for the scarcest resource, those first that bring nearly the most without hardware.

    Within these, and within the others, the least effort comes first. Empty if the GPUs are the scarcest in nearly all
    draws.
    """
    found = []
    for action, effort, change in _CHANGES.get(setup.to_fix or "", ()):
        after = change(setup)
        gain = of_draws(after.rate / setup.rate)
        if gain[2] >= MIN_GAIN:
            values = {name: each.value for name, each in after.inputs.items()}
            action = action.format(dataset_gb=setup.median("dataset_gb"), **values)
            found.append(Fix(action, effort, gain, after))
    most = max((fix.gain[0] for fix in found if fix.effort != _HARDWARE), default=0)

    def order(fix: Fix) -> tuple:
        is_less = fix.effort == _HARDWARE or fix.gain[0] < _NEARLY * most
        return is_less, EFFORTS.index(fix.effort), -fix.gain[0]

    return sorted(found, key=order)


def _needed(draws: np.ndarray) -> float:
    """What is enough in nearly all draws."""
    return float(np.quantile(draws, _SURE))


def _with(setup: Setup, **inputs: float | Estimate) -> Setup:
    """The setup with other inputs."""
    given = {
        name: each if isinstance(each, Estimate) else Estimate(each, source="this fix", kind="assumed")
        for name, each in inputs.items()
    }
    return replace(setup, inputs={**setup.inputs, **given})


def _more_of(setup: Setup, name: str, ceiling: str) -> Setup:
    """More of an input, by as much as its ceiling lacks."""
    lacks = max(1.0, _needed(setup.draws["demand"] / setup.draws[ceiling]))
    now = setup.inputs[name]
    value, low, high = (lacks * each for each in (now.value, *now.interval))
    return _with(setup, **{name: Estimate(value, low, high, "this fix", now.kind)})


def _more_requests(setup: Setup) -> Setup:
    """As many as keep up with what is the scarcest after them: more would only wait, or be refused."""
    draws = setup.draws
    next_limit = np.minimum.reduce([draws[name] for name in RESOURCES if name in draws and name != "in_flight_ceiling"])
    in_flight = next_limit / draws["images_per_request"] * draws["request_ms"] / 1e3 / draws["n_gpus"]
    wanted = max(2, math.ceil(_needed(in_flight)))
    n_ahead = math.ceil(wanted / setup.inputs["batch_size"].value) + 1
    is_too_few = not setup.is_sharded and n_ahead > setup.inputs["batches_ahead"].interval[0]
    return _with(setup, requests_in_flight_per_gpu=wanted, **({"batches_ahead": n_ahead} if is_too_few else {}))


def _more_prefixes(setup: Setup) -> Setup:
    needed = setup.draws["requests_needed_per_s"] / setup.draws["requests_per_s"]
    return _with(setup, n_prefixes=math.ceil(_needed(needed))) if setup.is_remote else setup


def _prepare(setup: Setup, data: str) -> Setup:
    """Nothing changes if the costs are not known. Prepared data are not prepared again."""
    known = setup.known_costs.get(data)
    return replace(setup, data=data, inputs={**setup.inputs, **known}) if known and setup.data == DATA[0] else setup


def _use_local_disks(setup: Setup, are_there: bool) -> Setup:
    """Nothing changes where disks are not to be used twice: those that a node has, or those that it lacks."""
    fit = "disk_gb_per_node" in setup.draws and _needed(setup.draws["dataset_gb"]) <= setup.median("disk_gb_per_node")
    if not setup.is_remote or fit != are_there:
        return setup
    kept = {name: value for name, value in setup.inputs.items() if name not in STORAGES["s3"]}
    return replace(setup, storage="nvme", inputs={**kept, **STORAGES["nvme"]})


# What to do, with the inputs that it leads to; its effort; the setup after it.
_Change = tuple[str, str, Callable[[Setup], Setup]]
_SETTING, _COPY, _CONVERSION, _HARDWARE = EFFORTS

_RESIZE_ONCE: _Change = (
    "Resize once, to JPEGs whose shorter side has 256 pixels: lk.tile_jpegs with short_side=256", _CONVERSION,
    lambda s: _prepare(s, "photos at 256"),
)  # fmt: skip
_DECODE_ONCE: _Change = (
    "Decode once, to prepared pixels: lk.PixelStore.build", _CONVERSION, lambda s: _prepare(s, "pixels at 256")
)  # fmt: skip
_COPY_TO_DISKS: _Change = (
    "Copy the images ({dataset_gb:,.0f} GB) to the local NVMe disks of each node, or into its memory", _COPY,
    lambda s: _use_local_disks(s, True),
)  # fmt: skip
_ADD_DISKS: _Change = (
    "Use nodes with local NVMe disks for the images ({dataset_gb:,.0f} GB), and copy them there", _HARDWARE,
    lambda s: _use_local_disks(s, False),
)  # fmt: skip
_USE_SHARDS: _Change = (
    "Write shards, and read them in ranges of 8 to 16 MB: lk.write_shards", _CONVERSION,
    lambda s: s if s.is_sharded or not s.is_remote else _with(s, shard_mb=150, request_mb=REQUEST_MB),
)  # fmt: skip

# Scarce resource -> changes; one that changes nothing gains nothing, and is not proposed.
_CHANGES: dict[str, list[_Change]] = {
    "core_ceiling": [
        _USE_SHARDS, _COPY_TO_DISKS, _RESIZE_ONCE, _DECODE_ONCE,
        ("Use nodes of {cores_per_node:,.0f} cores", _HARDWARE,
         lambda s: _more_of(s, "cores_per_node", "core_ceiling")),
    ],
    "lock_ceiling": [
        ("Load in {processes_per_gpu:.0f} processes a GPU, each with a lock of its own", _SETTING,
         lambda s: _with(s, processes_per_gpu=math.ceil(_needed(s.draws["processes_needed"])))),
        _USE_SHARDS, _COPY_TO_DISKS, _ADD_DISKS, _RESIZE_ONCE, _DECODE_ONCE,
    ],
    "pcie_ceiling": [
        ("Send bytes, and normalize on the GPU", _SETTING, lambda s: _with(s, bytes_per_value=1)),
    ],
    "network_ceiling": [
        _RESIZE_ONCE, _COPY_TO_DISKS, _ADD_DISKS,
        ("Use a network of {network_gbit_per_node:,.0f} Gbit/s a node", _HARDWARE,
         lambda s: _more_of(s, "network_gbit_per_node", "network_ceiling")),
    ],
    "request_rate_ceiling": [
        _USE_SHARDS, _COPY_TO_DISKS, _ADD_DISKS,
        ("Spread the keys over {n_prefixes:,.0f} prefixes", _CONVERSION,
         _more_prefixes),
    ],
    "bandwidth_ceiling": [
        _RESIZE_ONCE, _COPY_TO_DISKS, _ADD_DISKS,
        ("Use storage of {storage_mb_per_s:,.0f} MB/s", _HARDWARE,
         lambda s: _more_of(s, "storage_mb_per_s", "bandwidth_ceiling")),
    ],
    "in_flight_ceiling": [
        ("Keep {requests_in_flight_per_gpu:,.0f} requests in flight a GPU: read ahead in threads or asynchronously, "
         "apart from decoding, with {batches_ahead:,.0f} batches in memory", _SETTING, _more_requests),
        _USE_SHARDS, _COPY_TO_DISKS, _ADD_DISKS,
    ],
}  # fmt: skip
