"""From measured costs to what to change next: why, how much it should gain, and where it is taught."""

import math
from dataclasses import dataclass
from typing import Any

from labkit.core import usable_cores
from labkit.tuning.training_loop import starts_workers, torch_loader

LITTLE = 0.05  # share of the time: smaller costs are not worth a change


@dataclass(frozen=True)
class Costs:
    """Seconds per batch.

    step: The step alone, on batches that are where it needs them.
    copy: What the step takes longer if batches have to be moved there.
    hand_over: Receiving a batch that a worker has ready.
    fetch: Waiting for a batch while storage delivers its bytes.
    prepare: Waiting for a batch while it is decoded, augmented or collated.
    start: Waiting for the first batch of an epoch, divided by the batches of an epoch.
    together: All of training.
    making: One process making one batch, on its own; None if unknown.
    waiting: Share of the making in which nothing is computed.
    step_cpu: Processor seconds of the step, which workers cannot use.
    """

    step: float
    copy: float
    hand_over: float
    fetch: float
    prepare: float
    start: float
    together: float
    making: float | None
    waiting: float
    step_cpu: float

    @property
    def lost(self) -> dict[str, float]:
        """Share of the time that training waits for data, by cause."""
        return {name: float(seconds / self.together) for name, seconds in self.lost_s.items()}

    @property
    def lost_s(self) -> dict[str, float]:
        """Seconds per batch that training waits for data, by cause."""
        return {
            "fetch": self.fetch, "prepare": self.prepare, "copy": self.copy, "hand-over": self.hand_over,
            "start": self.start,
        }  # fmt: skip


@dataclass(frozen=True)
class Recommendation:
    """What to change.

    rung: One of `"none"`, `"workers"`, `"storage"`, `"decoding"`, `"copy"`, `"hand-over"`, `"start"`.
    action: What to do, in a sentence.
    why: The measurement that supports it.
    speedup: How much faster training should be after it, at most.
    notebook: Where it is taught.
    """

    rung: str
    action: str
    why: str
    speedup: float
    notebook: str

    def __str__(self) -> str:
        gain = f" Should bring up to {self.speedup:.2f}x." if self.speedup > 1 else ""
        return f"{self.action} ({self.why}).{gain} Notebook {self.notebook}."


def advise(costs: Costs, loader: Any) -> list[Recommendation]:
    """What to change, the largest gain first; a single "none" if training does not wait for data."""
    found: dict[str, Recommendation] = {}
    for cause, share in sorted(costs.lost.items(), key=lambda item: -item[1]):
        if share >= LITTLE:
            advice = _advise_on(cause, share, costs, loader)
            found.setdefault(advice.rung, advice)
    return list(found.values()) or [_advise_nothing(costs)]


def _advise_nothing(costs: Costs) -> Recommendation:
    share = max(0.0, 1 - costs.step / costs.together)
    why = f"without waiting for data it would take {1 - share:.0%} of the time"
    return Recommendation("none", "Leave the loader as it is: it is not the bottleneck", why, 1.0, "07_cuda_prefetch")


# What the time goes into, then the rung, its usual action and the notebook, by cause.
_CAUSES = {
    "fetch": (
        "waiting for storage", "storage",
        "Bring the data nearer: shards read in sequence, a local disk, more requests at once", "08_shard_formats",
    ),
    "prepare": (
        "waiting for batches that are still decoded and augmented", "decoding",
        "Do less for each sample: lk.BatchLoader decodes only what a crop needs, lk.PixelStore decodes once, "
        "lk.DepthPairs(fast=True) makes Marigold's pairs without detours", "11_resize_once",
    ),
    "copy": (
        "copying batches to the device", "copy",
        "Hide the copy behind the step: pin_memory=True and lk.CUDAPrefetcher(loader, device)", "07_cuda_prefetch",
    ),
    "hand-over": (
        "receiving batches that are ready", "hand-over",
        "Hand over less: uint8 tensors that the device normalises, one tensor per batch, or lk.BatchLoader, whose "
        "threads need no hand-over", "06_kornia_gpu",
    ),
    "start": (
        "waiting for an epoch's first batch", "start",
        "Begin fewer epochs: let one go through the data several times, as a sampler or a data set can",
        "03_persistent_workers",
    ),
}  # fmt: skip


def _advise_on(cause: str, share: float, costs: Costs, loader: Any) -> Recommendation:
    spent_on, rung, action, notebook = _CAUSES[cause]
    why = f"{share:.0%} of the time goes into {spent_on}"
    workers, decoder = torch_loader(loader), of_data_set(loader, "decoder")
    if rung in ("storage", "decoding") and getattr(workers, "num_workers", math.inf) < usable_cores():
        return _advise_workers(costs, workers.num_workers, why)
    if rung == "storage" and getattr(of_data_set(loader, "store"), "mode", "index") != "index":
        action, notebook = "Read the tar through an index: TarStore(path, mode='index')", "09_marigold_storage"
    elif rung == "decoding" and isinstance(decoder, str) and decoder != "turbojpeg":
        action, notebook = f"Decode with turbojpeg instead of {decoder}", "02_read_image"
    elif rung == "start" and starts_workers(workers):
        action = "Keep the workers from epoch to epoch: persistent_workers=True"
    speedup = costs.together / max(costs.step, costs.together - costs.lost_s[cause])
    return Recommendation(rung, action, why, speedup, notebook)


def _advise_workers(costs: Costs, current: int, why: str) -> Recommendation:
    cores = usable_cores()
    action = f"Use {cores} persistent workers instead of {current}: num_workers={cores}, persistent_workers=True"
    busy = costs.step + costs.copy + costs.hand_over
    making = costs.making or (costs.fetch + costs.prepare) * max(1, current)
    computing = making * (1 - costs.waiting) + costs.step_cpu  # on the same cores
    expected = max(busy, making / cores, computing / cores)
    return Recommendation("workers", action, why, max(1.0, costs.together / expected), "03_persistent_workers")


def of_data_set(loader: Any, name: str) -> Any:
    """An attribute of the loader's data set, or of one that it wraps; None if none has it."""
    data = getattr(loader, "dataset", None)
    while data is not None:
        if getattr(data, name, None) is not None:
            return getattr(data, name)
        data = getattr(data, "dataset", None)
    return None
