"""What helps against the scarcest resource of a plan, the cheapest first: a table of changes, and what each brings."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from labkit.planning.formulas import DATA, RESOURCES, Estimate, Setup, of_draws
from labkit.planning.published import REQUEST_MB, STORAGES

EFFORTS = ("a setting", "a conversion, once", "hardware")
MIN_GAIN = 1.02  # times as fast: what brings less at best is no fix
_SURE = 0.975  # quantile of a need that a fix should meet


@dataclass(frozen=True, eq=False)
class Fix:
    """A change against the resource that is the scarcest after the GPUs.

    Attributes:
        action: What to do.
        effort: One of `EFFORTS`, the cheapest first.
        gain: Times as fast, median and 95 % interval; if the effect is not known, the most that it can bring.
        images_per_s: Of the training afterwards, in the same way.
        next_limit: The resource that is the scarcest afterwards.
        setup: What a plan is computed from afterwards; None: its effect is not known, since nothing was measured.
    """

    action: str
    effort: str
    gain: tuple[float, float, float]
    images_per_s: tuple[float, float, float]
    next_limit: str
    setup: Setup | None

    @property
    def is_known(self) -> bool:
        """Whether its effect is known."""
        return self.setup is not None

    def __str__(self) -> str:
        what, (gain, low, high) = f"{self.action} ({self.effort})", self.gain
        if not self.is_known:
            return f"{what}: at most {gain:.2f}x [{low:.2f}, {high:.2f}]; lk.loader_costs measures what it brings"
        return f"{what}: {gain:.2f}x [{low:.2f}, {high:.2f}], then limited by {RESOURCES[self.next_limit]}"


def find_fixes(setup: Setup) -> list[Fix]:
    """Fixes for the scarcest resource: the cheapest first, of one effort the most useful first.

    Those whose effect is not known come last. Empty if the GPUs are the scarcest in nearly all draws.
    """
    scarce, found = setup.to_fix or "", []
    for action, effort, change in _CHANGES.get(scarce, ()):
        after = change(setup)
        if after is not None:
            rate = after.rate
        else:  # at most as if the resource had no limit
            rate = np.minimum.reduce([setup.draws[name] for name in setup.independent_ceilings if name != scarce])
        gain = of_draws(rate / setup.rate)
        if gain[2] >= MIN_GAIN:
            values = {name: each.value for name, each in (after or setup).inputs.items()}
            action = action.format(dataset_gb=setup.median("dataset_gb"), **values)
            found.append(Fix(action, effort, gain, of_draws(rate), (after or setup).scarcest, after))
    return sorted(found, key=lambda fix: (not fix.is_known, EFFORTS.index(fix.effort), -fix.gain[0]))


def _with(setup: Setup, **inputs: float | Estimate) -> Setup:
    """The setup with other inputs."""
    given = {
        name: each if isinstance(each, Estimate) else Estimate(each, source="this fix", kind="assumed")
        for name, each in inputs.items()
    }
    return replace(setup, inputs={**setup.inputs, **given})


def _enough(setup: Setup, need: str) -> int:
    """How much is needed in nearly all draws."""
    return math.ceil(np.quantile(setup.draws[need], _SURE))


def _more_of(setup: Setup, name: str, ceiling: str) -> Setup:
    """More of an input, by as much as its ceiling lacks."""
    lacks = max(1.0, float(np.quantile(setup.draws["demand"] / setup.draws[ceiling], _SURE)))
    now = setup.inputs[name]
    low, high = now.interval
    return _with(setup, **{name: Estimate(now.value * lacks, low * lacks, high * lacks, "this fix", now.kind)})


def _more_requests(setup: Setup) -> Setup:
    wanted = max(2, _enough(setup, "in_flight_needed_per_gpu"))
    after = _with(setup, requests_in_flight_per_gpu=wanted)
    n_ahead = math.ceil(wanted / setup.inputs["batch_size"].value) + 1
    is_too_few = "request_mb" not in setup.inputs and n_ahead > setup.inputs["batches_ahead"].interval[0]
    return _with(after, batches_ahead=n_ahead) if is_too_few else after


def _prepare(setup: Setup, data: str) -> Setup | None:
    """None: what it brings is not known. Prepared data are not prepared again."""
    if setup.data != DATA[0]:
        return setup
    known = setup.known_costs.get(data)
    return replace(setup, data=data, inputs={**setup.inputs, **known}) if known else None


def _use_local_disks(setup: Setup) -> Setup:
    if not setup.is_remote:
        return setup
    of_storages = {name for storage in STORAGES.values() for name in storage.rates}
    kept = {name: value for name, value in setup.inputs.items() if name not in of_storages}
    disk = STORAGES["nvme"]
    return replace(setup, storage=disk.name, is_remote=False, inputs={**kept, **disk.rates})


# What to do, with the inputs that it leads to; its effort; the setup after it.
_Change = tuple[str, str, Callable[[Setup], Setup | None]]
_SETTING, _CONVERSION, _HARDWARE = EFFORTS

_RESIZE_ONCE: _Change = (
    "Resize once, to JPEGs whose shorter side has 256 pixels", _CONVERSION, lambda s: _prepare(s, "photos at 256")
)  # fmt: skip
_DECODE_ONCE: _Change = (
    "Decode once, to prepared pixels: lk.PixelStore.build", _CONVERSION, lambda s: _prepare(s, "pixels at 256")
)  # fmt: skip
_COPY_TO_DISKS: _Change = (
    "Copy the images to a local NVMe disk of each node ({dataset_gb:,.0f} GB)", _HARDWARE, _use_local_disks
)  # fmt: skip
_USE_SHARDS: _Change = (
    "Write shards, and read them in ranges of 8 to 16 MB: lk.write_shards", _CONVERSION,
    lambda s: s if "request_mb" in s.inputs else _with(s, shard_mb=500, request_mb=REQUEST_MB),
)  # fmt: skip

# Scarce resource -> changes; one that changes nothing gains nothing, and is not proposed.
_CHANGES: dict[str, list[_Change]] = {
    "core_ceiling": [
        _RESIZE_ONCE, _DECODE_ONCE,
        ("Use nodes of {cores_per_node:,.0f} cores", _HARDWARE,
         lambda s: _more_of(s, "cores_per_node", "core_ceiling")),
    ],
    "lock_ceiling": [
        ("Load in {processes_per_gpu:.0f} processes a GPU, each with a lock of its own", _SETTING,
         lambda s: _with(s, processes_per_gpu=_enough(s, "processes_needed"))),
        _RESIZE_ONCE, _DECODE_ONCE,
    ],
    "pcie_ceiling": [
        ("Send bytes, and normalize on the GPU", _SETTING, lambda s: _with(s, bytes_per_value=1)),
    ],
    "network_ceiling": [
        _RESIZE_ONCE, _COPY_TO_DISKS,
        ("Use a network of {network_gbit_per_node:,.0f} Gbit/s a node", _HARDWARE,
         lambda s: _more_of(s, "network_gbit_per_node", "network_ceiling")),
    ],
    "request_rate_ceiling": [
        _USE_SHARDS, _COPY_TO_DISKS,
        ("Spread the keys over {n_prefixes:,.0f} prefixes", _CONVERSION,
         lambda s: _with(s, n_prefixes=_enough(s, "prefixes_needed")) if "prefixes_needed" in s.draws else s),
    ],
    "bandwidth_ceiling": [
        _RESIZE_ONCE, _COPY_TO_DISKS,
        ("Use storage of {storage_mb_per_s:,.0f} MB/s", _HARDWARE,
         lambda s: _more_of(s, "storage_mb_per_s", "bandwidth_ceiling")),
    ],
    "in_flight_ceiling": [
        ("Keep {requests_in_flight_per_gpu:,.0f} requests in flight a GPU: read ahead in threads or asynchronously, "
         "apart from decoding, with {batches_ahead:,.0f} batches in memory", _SETTING, _more_requests),
        _USE_SHARDS, _COPY_TO_DISKS,
    ],
}  # fmt: skip
