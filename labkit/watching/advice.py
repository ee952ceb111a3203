"""From measured costs to what to change next: why, how much it should gain, and where it is taught."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.measure.usage import SLOWED
from labkit.util.machine import usable_cores
from labkit.watching.timings import Making, epoch_length

if TYPE_CHECKING:
    from labkit.watching.timings import Making

_THREADED = 1.2  # processor seconds a second: above, the step has several threads that wait for each other


def expected_s(num_workers: int, making: "Making", step_s: float, step_cpu_s: float, cores: int) -> float:
    """Seconds per batch of training: workers share the making, and no core rests while there is work.

    Args:
        making: What a batch costs one process, on its own.
        step_s, step_cpu_s: Wall and processor seconds of the step, on its own.
    """
    return _shared_s(num_workers, making, step_s, step_cpu_s, cores, spun_s=0.0)


def worst_s(num_workers: int, making: "Making", step_s: float, step_cpu_s: float, cores: int) -> float:
    """The same at worst: busy cores slow one another, and threads that wait for one another keep theirs meanwhile.

    Processes on all cores share caches, memory and the kernel: with two workers next to the step, eleven trainings of
    public repositories took up to 1.28 times as long as the sum of their parts (`notebooks/guide/records.md`).

    The threads of an operator end it together. While one of them has no core, as a worker has it, the others wait at
    the barrier, and OpenMP's threads wait by spinning. So the step takes up a core for as long as workers compute
    next to it; at worst as much again as it computes.

    Source: GCC's manual of libgomp, GOMP_SPINCOUNT and OMP_WAIT_POLICY
    """
    threaded = step_cpu_s > _THREADED * step_s
    spun_s = min(_computing_s(making), step_cpu_s) if threaded else 0.0
    return _shared_s(num_workers, making, step_s, step_cpu_s, cores, spun_s, SLOWED)


def _shared_s(
    num_workers: int, making: "Making", step_s: float, step_cpu_s: float, cores: int, spun_s: float, slowed: float = 1.0
) -> float:
    if not num_workers:
        return making.known_s + step_s
    computing_s = slowed * (_computing_s(making) + step_cpu_s) + spun_s
    return max(step_s, making.known_s / num_workers, computing_s / cores)


def _computing_s(making: "Making") -> float:
    return making.known_s * (1 - making.waiting)


_WRAPPED = ("loader", "dataloader", "base_dataloader")  # where timm, Accelerate and labkit keep the loader they wrap
_MOST_WRAPPED = 20  # data sets: one may give itself for whatever attribute it is asked for


@dataclass(frozen=True)
class LoaderTraits:
    """A loader's settings.

    num_workers: Worker processes; None if it is no `torch.utils.data.DataLoader` and wraps none.
    starts_workers: Whether it starts them again for every epoch.
    prefetch_factor: Batches that each worker makes ahead.
    pin_memory: Whether batches are put into pinned memory.
    decoder: The data set's decoder, by name.
    decodes: Whether there is anything to decode: not in a `PixelStore`.
    is_batch_loader: Whether it is `lk.BatchLoader`, which decodes only what a crop needs.
    is_fast: Whether it gives `lk.DepthPairs` that are made without detours already.
    n_batches: Batches of an epoch.
    """

    num_workers: int | None = None
    starts_workers: bool = False
    prefetch_factor: int | None = None
    pin_memory: bool = False
    decoder: str | None = None
    decodes: bool = True
    is_batch_loader: bool = False
    is_fast: bool = False
    n_batches: int | None = None

    @classmethod
    def of(cls, loader: Any) -> "LoaderTraits":
        """The traits of a loader, or of the one that it wraps."""
        workers, decoder = torch_loader(loader), of_data_set(loader, "decoder")
        return cls(
            num_workers=getattr(workers, "num_workers", None), starts_workers=starts_workers(workers),
            prefetch_factor=getattr(workers, "prefetch_factor", None),
            pin_memory=bool(getattr(workers, "pin_memory", False)),
            decoder=decoder if isinstance(decoder, str) else None,
            decodes=not any(_is_labkits(data, "PixelStore") for data in [*_data_sets(loader), _source(loader)]),
            is_batch_loader=_is_labkits(loader, "BatchLoader"),
            is_fast=any(_is_labkits(data, "DepthPairs") and data.fast for data in _data_sets(loader)),
            n_batches=epoch_length(loader),
        )  # fmt: skip


def of_data_set(loader: Any, name: str) -> Any:
    """An attribute of the loader's data set, or of one that it wraps; None if none has it."""
    found = (getattr(data, name, None) for data in _data_sets(loader))
    return next((value for value in found if value is not None), None)


def _data_sets(loader: Any) -> Iterator[Any]:
    """The loader's data set, and those that it wraps."""
    data = getattr(loader, "dataset", None)
    for _ in range(_MOST_WRAPPED):
        if data is None:
            return
        yield data
        data = getattr(data, "dataset", None)


def _source(loader: Any) -> Any:
    """What a `BatchLoader` reads; None for other loaders."""
    return getattr(getattr(loader, "_filler", None), "_store", None)


def _is_labkits(value: Any, name: str) -> bool:
    """Whether it is of that class of labkit's, which is not imported here: NumPy and Pillow would come with it."""
    return any(kind.__name__ == name and kind.__module__.startswith("labkit.") for kind in type(value).__mro__)


def torch_loader(loader: Any) -> Any:
    """The `torch.utils.data.DataLoader` that a loader is, or wraps like timm's and labkit's prefetchers; or None."""
    from torch.utils.data import DataLoader

    for _ in range(4):
        if loader is None or isinstance(loader, DataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        loader = next((attributes[name] for name in _WRAPPED if name in attributes), None)
    return None


def starts_workers(loader: Any) -> bool:
    """Whether torch's loader starts its workers again for every epoch."""
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


MIN_SHARE = 0.05  # share of the time: smaller costs are not worth a change
_SHORT_EPOCH = 100  # batches: in a shorter one the start weighs more than it will in any real training


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

    rung: One of `"none"`, `"workers"`, `"storage"`, `"decoding"`, `"transforms"`, `"copy"`, `"hand-over"`, `"start"`.
    action: What to do, in a sentence.
    why: The measurement that supports it.
    speedup: How much faster training should be after it, at most.
    notebook: Where it is taught; empty if there is nothing to change.
    speedup_low: How much at least, where that can be said; 1.0: it depends on what replaces what.
    settings: Arguments of `torch.utils.data.DataLoader` that do it; empty if they cannot.
    """

    rung: str
    action: str
    why: str
    speedup: float
    notebook: str
    speedup_low: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action} ({self.why}).{self._gain}" + (f" Notebook {self.notebook}." if self.notebook else "")

    @property
    def _gain(self) -> str:
        if self.speedup <= 1:
            return ""
        if round(self.speedup_low, 2) in (1.0, round(self.speedup, 2)):
            return f" Should bring up to {self.speedup:.2f}x."
        return f" Should bring {self.speedup_low:.2f}x to {self.speedup:.2f}x."


def advise(costs: Costs, traits: LoaderTraits) -> list[Recommendation]:
    """What to change, the largest gain first; a single "none" if training does not wait for data."""
    found: dict[str, Recommendation] = {}
    for cause, share in sorted(costs.lost.items(), key=lambda item: -item[1]):
        if share >= MIN_SHARE and _applies(cause, traits):
            advice = _advise_on(cause, share, costs, traits)
            found.setdefault(advice.rung, advice)
    return list(found.values()) or [_advise_nothing(costs)]


def _applies(cause: str, traits: LoaderTraits) -> bool:
    """Whether the cause would be there in a long training, too."""
    of_a_trial = (traits.n_batches or _SHORT_EPOCH) < _SHORT_EPOCH and not traits.starts_workers
    return cause != "start" or not of_a_trial


_AUGMENT_ON_DEVICE = "Do less for each sample on the CPU: crop and augment whole batches where the step runs"


def _advise_nothing(costs: Costs) -> Recommendation:
    share = max(0.0, 1 - costs.step / costs.together)
    why = f"without waiting for data it would take {1 - share:.0%} of the time"
    start = costs.lost["start"]
    if start >= MIN_SHARE:  # of an epoch so short that nothing is advised against it
        why += f"; {start:.0%} is the start of an epoch, which weighs less in a longer one"
    return Recommendation("none", "Leave the loader as it is: it is not the bottleneck", why, 1.0, notebook="")


# What the time goes into, then the rung, its usual action and the notebook, by cause.
_CAUSES = {
    "fetch": (
        "waiting for storage", "storage",
        "Bring the data nearer: shards read in sequence, a local disk, more requests at once", "08_shard_formats",
    ),
    "prepare": (
        "waiting for batches that are still being decoded and augmented", "decoding",
        "Do less for each sample: lk.BatchLoader decodes only what a crop needs, lk.PixelStore decodes once, "
        "lk.DepthPairs(fast=True) makes Marigold's pairs without detours", "11_resize_once",
    ),
    "copy": (
        "copying batches to the device", "copy",
        "Hide the copy behind the step: pin_memory=True and lk.CUDAPrefetcher(loader, device)", "07_cuda_prefetch",
    ),
    "hand-over": (
        "receiving batches that are ready", "hand-over",
        "Hand over less: uint8 tensors that the device normalizes, one tensor per batch, or lk.BatchLoader, whose "
        "threads need no hand-over", "06_kornia_gpu",
    ),
    "start": (
        "waiting for an epoch's first batch", "start",
        "Begin fewer epochs: let one go through the data several times, as a sampler or a data set can",
        "03_persistent_workers",
    ),
}  # fmt: skip


def _advise_on(cause: str, share: float, costs: Costs, traits: LoaderTraits) -> Recommendation:
    spent_on, rung, action, notebook = _CAUSES[cause]
    why = f"{share:.0%} of the time goes into {spent_on}"
    num_workers = math.inf if traits.num_workers is None else traits.num_workers
    if rung in ("storage", "decoding") and num_workers < usable_cores():
        return _advise_workers(costs, traits.num_workers or 0, why)
    rung, action, notebook = _particular(rung, traits) or (rung, action, notebook)
    speedup = costs.together / max(costs.step, costs.together - costs.lost_s[cause])
    return Recommendation(rung, action, why, speedup, notebook, settings=_settings(rung, traits))


def _particular(rung: str, traits: LoaderTraits) -> tuple[str, str, str] | None:
    """Rung, action and notebook where the loader's traits call for another action than usual."""
    if rung == "decoding" and (not traits.decodes or traits.is_fast):
        return "transforms", _AUGMENT_ON_DEVICE, "06_kornia_gpu"
    if rung == "decoding" and traits.is_batch_loader:
        return (
            rung,
            "Decode once: give lk.BatchLoader a lk.PixelStore, which lk.PixelStore.build makes",
            "11b_raw_pixels",
        )
    if rung == "copy" and traits.pin_memory:
        return rung, "Hide the copy behind the step: lk.CUDAPrefetcher(loader, device)", "07_cuda_prefetch"
    if rung == "hand-over" and traits.is_batch_loader:
        return rung, "Hand over less: uint8 instead of floats, or threads alone: num_processes=0", "11b_raw_pixels"
    if rung == "decoding" and traits.decoder not in (None, "turbojpeg"):
        return rung, f"Decode with turbojpeg instead of {traits.decoder}", "02_read_image"
    if rung == "start" and traits.starts_workers:
        return rung, "Keep the workers from epoch to epoch: persistent_workers=True", "03_persistent_workers"
    return None


def _settings(rung: str, traits: LoaderTraits) -> dict[str, Any]:
    """Arguments of the loader that do what the rung says."""
    if rung == "copy" and not traits.pin_memory:
        return {"pin_memory": True}
    return {"persistent_workers": True} if rung == "start" and traits.starts_workers else {}


def _advise_workers(costs: Costs, current: int, why: str) -> Recommendation:
    cores = usable_cores()
    action = f"Use {cores} persistent workers instead of {current}: num_workers={cores}, persistent_workers=True"
    making = Making(costs.making or (costs.fetch + costs.prepare) * max(1, current), costs.waiting)
    busy = costs.step + costs.copy + costs.hand_over
    at_best, at_worst = (
        costs.together / model(cores, making, busy, costs.step_cpu, cores) for model in (expected_s, worst_s)
    )
    settings = {"num_workers": cores, "persistent_workers": True}
    return Recommendation(
        "workers", action, why, max(1.0, at_best), "03_persistent_workers", max(1.0, at_worst), settings
    )
