"""From measured costs to what to change next: why, how much it should gain, and where it is taught.

In come `Costs`, seconds per batch of each cause, and the loader's `LoaderTraits`; out go `Recommendation`s, the best
first.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from labkit.measure.usage import SLOWED
from labkit.util.machine import LEAST_TORCH
from labkit.util.ranks import cores_per_rank
from labkit.watching.lines import MAKING, is_own, short_path
from labkit.watching.loaders import LoaderTraits

MIN_SHARE = 0.05  # share of the time: smaller costs are not worth a change
NO_STEP = 1000  # times the step: a ceiling beyond it is no rate that training could reach
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


_THREADED = 1.2  # processor seconds a second: above, the step has several threads that wait for each other


def expected_s(num_workers: int, costs: Costs, cores: int, *, at_worst: bool = False) -> float:
    """Seconds per batch of training: workers share the making, and no core rests while there is work.

    Processes on all cores share caches, memory and the kernel: with two workers next to the step, nine trainings of
    public repositories took up to 1.28 times as long as the sum of their parts (`.github/records.md`).

    The threads of an operator end it together. While one of them has no core, as a worker has it, the others wait at
    the barrier, and OpenMP's threads wait by spinning. So the step takes up a core for as long as workers compute
    next to it; at worst as much again as it computes.

    Args:
        costs: `making` and its `waiting` of one process on its own, and `step` and `step_cpu`.
        at_worst: With what busy cores slow one another, and what spins meanwhile.

    Source: GCC's manual of libgomp, GOMP_SPINCOUNT and OMP_WAIT_POLICY
    """
    making_s = costs.making or 0.0
    if not num_workers:
        return making_s + costs.step
    making_cpu_s = making_s * (1 - costs.waiting)
    computing_s = making_cpu_s + costs.step_cpu
    if at_worst:
        is_threaded = costs.step_cpu > _THREADED * costs.step
        computing_s = SLOWED * computing_s + min(making_cpu_s, costs.step_cpu) * is_threaded
    return max(costs.step, making_s / num_workers, computing_s / cores)


@dataclass(frozen=True)
class Recommendation:
    """What to change.

    rung: One of `"none"`, `"workers"`, `"storage"`, `"decoding"`, `"transforms"`, `"copy"`, `"hand-over"`, `"start"`,
        `"order"`.
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


class SlowLine(NamedTuple):
    """The line of code that takes most of the time to make a batch.

    what: What it calls, or the name of a transform.
    place: Its file and number; empty: a library's, where nothing can be changed.
    share: Of the time to make a batch.
    kind: As in `labkit.watching.lines.Line`.
    """

    what: str
    place: str
    share: float
    kind: str


def slowest_line(rows: Sequence[Mapping[str, Any]]) -> SlowLine | None:
    """That of `lines` of a report; None: there is none, or nothing can be said of it."""
    row = next((row for row in rows if row["part"] == MAKING), None)
    if row is None:
        return None
    place = f"{short_path(row['path'])}:{row['number']}" if is_own(row["path"]) else ""
    return SlowLine(row["what"], place, row["share"], row["kind"]) if place or row["kind"] else None


def advise(
    costs: Costs,
    traits: LoaderTraits,
    in_line_s: float = 0.0,
    n_sharing: int = 1,
    most_workers: int | None = None,
    slowest: SlowLine | None = None,
) -> list[Recommendation]:
    """What to change, the largest gain first; a single "none" if training does not wait for data.

    Args:
        in_line_s: Seconds per batch that training waits for one while a later one is ready.
        n_sharing: Processes of the training that share the cores, as far as their launcher does not say so.
        most_workers: That there is room for; None: any number.
        slowest: The line that the making of a batch spends most of its time in, if that is known.
    """
    cores = cores_per_rank(n_sharing)
    if most_workers is not None:
        cores = max(1, min(cores, most_workers))
    found: dict[str, Recommendation] = {}
    for cause, share in sorted(costs.lost.items(), key=lambda item: -item[1]):
        if share >= MIN_SHARE and _applies(cause, traits):
            advice = _advise_on(cause, share, costs, traits, cores)
            found.setdefault(advice.rung, advice)
    best = list(found.values()) or [_advise_nothing(costs)]
    if slowest is not None:
        best = [_naming(change, slowest, costs, traits) for change in best]
    if traits.in_order and traits.may_reorder and found and in_line_s >= MIN_SHARE * costs.together:
        order = _advise_order(costs, in_line_s, traits.num_workers or 1)
        best += [order] * (order.speedup >= 1 + MIN_SHARE)
    return [_with_requirement(change) for change in sorted(best, key=lambda change: -change.speedup)]


def _with_requirement(change: Recommendation) -> Recommendation:
    """The change, and what it needs of torch where this torch is older: watching does with less than the loaders."""
    version = re.findall(r"\d+", getattr(sys.modules.get("torch"), "__version__", ""))[:2]
    if "lk." not in change.action or not version or tuple(map(int, version)) >= LEAST_TORCH:
        return change
    needed = ".".join(map(str, LEAST_TORCH))
    return replace(change, action=f"{change.action} (what begins with lk. needs torch {needed} or newer)")


def advise_on_loop(costs: Costs, name: str) -> Recommendation:
    """What to change of a loop of whose loader nothing is known but how long it was waited for."""
    share = (costs.fetch + costs.prepare + costs.start) / costs.together
    if not costs.fetch + costs.prepare:
        action = f"Look at the lines of the step, in which a batch may be made: {name} was never seen to wait for one"
        return Recommendation("none", action, "it may ask for batches by a call of another name", 1.0, notebook="")
    if share < MIN_SHARE:
        return _advise_nothing(costs)
    action = "Make batches ahead of time in other processes or threads, or make the slowest lines faster"
    why = f"{share:.0%} of the time {name} waits for a batch"
    return Recommendation("decoding", action, why, costs.together / costs.step, "03_persistent_workers")


def _advise_order(costs: Costs, in_line_s: float, num_workers: int) -> Recommendation:
    why = (
        f"{in_line_s / costs.together:.0%} of the time a later batch was ready while the next one was still being made"
    )
    action = "Take batches in the order in which they are ready: in_order=False, or smaller batches"
    least_s = max(costs.step, (costs.making or 0.0) / num_workers)  # the order makes no worker faster
    speedup = max(1.0, costs.together / max(least_s, costs.together - in_line_s))
    return Recommendation("order", action, why, speedup, "03_persistent_workers", settings={"in_order": False})


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


# What training waits for, then the rung, its usual action and the notebook, by cause.
CAUSES = {
    "fetch": (
        "storage", "storage",
        "Read from a local disk or from shards, or have more requests in flight: more workers, which mostly wait, or "
        "reads_in_flight of lk.BatchLoader", "08_shard_formats",
    ),
    "prepare": (
        "batches to be decoded and augmented", "decoding",
        "Do less for each sample, in the lines that take longest: where they decode, lk.BatchLoader decodes only what "
        "a crop needs, and lk.PixelStore decodes once; where they augment, crop first, or augment on the GPU",
        "11_prepare_once",
    ),
    "copy": (
        "batches to be copied to the device", "copy",
        "Hide the copy behind the step: pin_memory=True and lk.CUDAPrefetcher(loader, device)", "07_cuda_prefetch",
    ),
    "hand-over": (
        "finished batches to arrive from the workers", "hand-over",
        "Send less from the workers: uint8 tensors that the device normalizes, one tensor per batch, or "
        "lk.BatchLoader, whose threads send nothing", "06_kornia_gpu",
    ),
    "start": (
        "the first batch of an epoch", "start",
        "Begin fewer epochs: let one go through the data several times, as a sampler or a data set can",
        "03_persistent_workers",
    ),
}  # fmt: skip
# Of the step and the causes, for the legend of a picture.
SHORT_NAMES = {
    "compute": "step", "fetch": "storage", "prepare": "making batches", "copy": "copying", "hand-over": "receiving",
    "start": "epoch start",
}  # fmt: skip


def _advise_on(cause: str, share: float, costs: Costs, traits: LoaderTraits, cores: int) -> Recommendation:
    awaited, rung, action, notebook = CAUSES[cause]
    if rung == "decoding" and traits.reads_far:
        awaited = "batches to be read and decoded"
    why = f"{share:.0%} of the time goes into waiting for {awaited}"
    num_workers = math.inf if traits.num_workers is None else traits.num_workers
    if rung in ("storage", "decoding") and num_workers < cores:
        return _advise_workers(costs, traits.num_workers or 0, why, cores)
    rung, action, notebook = _particular(rung, traits) or (rung, action, notebook)
    speedup = costs.together / max(costs.step, costs.together - costs.lost_s[cause])
    return Recommendation(rung, action, why, speedup, notebook, settings=_settings(rung, traits))


def _particular(rung: str, traits: LoaderTraits) -> tuple[str, str, str] | None:
    """Rung, action and notebook where the loader's traits call for another action than usual."""
    if rung == "decoding" and (not traits.decodes or traits.is_fast):
        return "transforms", _AUGMENT_ON_DEVICE, "06_kornia_gpu"
    if rung == "decoding" and traits.makes_slow_pairs:
        return rung, "Make the pairs without detours: lk.DepthPairs(fast=True)", "09_marigold_storage"
    if rung == "decoding" and traits.reads_far:
        more = "Have more requests in flight: reads_in_flight=64 of lk.BatchLoader, or twice as many as now"
        return "storage", f"{more}; what that does not change is decoding", "08_shard_formats"
    if rung == "decoding" and traits.is_batch_loader:
        return (
            rung,
            "Decode once: give lk.BatchLoader a lk.PixelStore, which lk.PixelStore.build makes",
            "11_prepare_once",
        )
    if rung == "copy" and traits.pin_memory:
        return rung, "Hide the copy behind the step: lk.CUDAPrefetcher(loader, device)", "07_cuda_prefetch"
    if rung == "hand-over" and traits.is_batch_loader:
        return rung, "Pass on less: uint8, which the device normalizes, instead of floats", "11_prepare_once"
    if rung == "decoding" and traits.decoder not in (None, "turbojpeg"):
        return rung, f"Decode with turbojpeg instead of {traits.decoder}", "02_read_image"
    if rung == "start" and traits.starts_workers:
        action = "Keep the workers from epoch to epoch: one DataLoader for all of them, with persistent_workers=True"
        return rung, action, "03_persistent_workers"
    return None


def _naming(change: Recommendation, line: SlowLine, costs: Costs, traits: LoaderTraits) -> Recommendation:
    """The change with the line that takes longest in its action, if it asks for less work for each sample.

    Its gain is then at most what the training would gain if this line took no time.
    """
    waits_for_storage = not line.kind and costs.fetch >= MIN_SHARE * costs.together  # the line may be what waits
    if change.action not in (CAUSES["prepare"][2], _AUGMENT_ON_DEVICE) or waits_for_storage:
        return change
    waited_s = costs.fetch + costs.prepare
    # As long as training waits for its workers, it takes as long as they do.
    saved_s = min(waited_s, line.share * (costs.together - costs.start if traits.num_workers else waited_s))
    speedup = costs.together / max(costs.step, costs.together - saved_s)
    named = f"{line.what} ({line.place})" if line.place else line.what
    if line.kind == "decoding":
        action = f"Spend less on decoding in {named}: lk.BatchLoader decodes only what a crop needs, and "
        return replace(change, action=f"{action}lk.PixelStore decodes once", speedup=speedup)
    if line.kind == "transform":
        how = "crop before it, choose a cheaper one, or augment whole batches, best on a GPU"
        return replace(change, action=f"Spend less on {named}: {how}", speedup=speedup, notebook="06_kornia_gpu")
    how = "where it decodes, lk.BatchLoader decodes only what a crop needs, and lk.PixelStore decodes once; where it "
    how += "augments, crop before it; what is the same each time, store"
    return replace(change, action=f"Spend less on {named}: {how}", speedup=speedup)


def _settings(rung: str, traits: LoaderTraits) -> dict[str, Any]:
    """Arguments of the loader that do what the rung says."""
    if rung == "copy" and not traits.pin_memory:
        return {"pin_memory": True}
    return {"persistent_workers": True} if rung == "start" and traits.starts_workers else {}


def _advise_workers(costs: Costs, current: int, why: str, cores: int) -> Recommendation:
    workers = f"{cores} persistent worker{'s' * (cores != 1)}"
    action = f"Use {workers} instead of {current}: num_workers={cores}, persistent_workers=True"
    making = costs.making or (costs.fetch + costs.prepare) * max(1, current)
    busy = replace(costs, making=making, step=costs.step + costs.copy + costs.hand_over)
    best, worst = (costs.together / expected_s(cores, busy, cores, at_worst=at_worst) for at_worst in (False, True))
    settings = {"num_workers": cores, "persistent_workers": True}
    return Recommendation("workers", action, why, max(1.0, best), "03_persistent_workers", max(1.0, worst), settings)
