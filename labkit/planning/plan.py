"""`lk.plan`: what a training on many GPUs asks of cores, storage and network, what limits it, and what would help.

From top to bottom: the inputs and their checks, what `diagnose` and `watch` saw as inputs, the cures (the cheapest
first), the plot, the page of text, the result, and `plan` itself.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from labkit.errors import ArgumentError
from labkit.measure.usage import SLOWED
from labkit.planning.formulas import DATA, RESOURCES, Estimate, LoaderCosts, Setup, as_estimate, format_number, of_draws
from labkit.planning.published import (
    IMAGENET_IMAGES,
    IMAGENET_KB,
    STORAGES,
    Storage,
    cores_of,
    demand_of,
    find_training,
    pcie,
    pcie_of,
    rented_cores,
)
from labkit.util.arguments import require_choice, require_int, require_positive
from labkit.util.files import write_atomic


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
            raise ArgumentError(f"{name} is no input of a plan: it takes {', '.join(INPUTS)}")
        if value is not None:
            found[name] = _check(name, value)
    return found


def _check(name: str, value: Any) -> Estimate:
    expected = INPUTS[name]
    if expected.is_count and not isinstance(value, Estimate):
        return Estimate(require_int(name, value))
    estimate = as_estimate(name, value)
    if estimate.value == 0 and not expected.may_be_zero:
        raise ArgumentError(f"{name} must be a number > 0, got {value!r}")
    return estimate


def inputs_of(seen: Any, batch_size: Any = None) -> dict[str, Estimate]:
    """Demand, the step's cores and the loader's core time of an image, as far as they were seen.

    Args:
        seen: A `Diagnosis`, a `WatchReport`, or the path of what `labkit watch --json` wrote.
        batch_size: Images of a batch, which a watch does not know.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not from `labkit watch`, or the batch size is missing.
    """
    if isinstance(seen, str | os.PathLike):
        return _of_watch(_read(seen), batch_size)
    if hasattr(seen, "to_dict"):
        return _of_watch(seen.to_dict(), batch_size)
    return _of_diagnosis(seen)


def is_seen(given: Any) -> bool:
    """Whether it is something that `inputs_of` takes."""
    return isinstance(given, str | os.PathLike) or hasattr(given, "costs")


def _read(path: str | os.PathLike) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_bytes())
        return {"costs_s": dict(found["costs_s"]), "ceiling_is_bound": bool(found["ceiling_is_bound"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is not a report of `labkit watch --json`: {error}") from error


def _of_diagnosis(found: Any) -> dict[str, Estimate]:
    steps = found.frame.loc[found.frame["variant"] == "step", "images_per_s"]
    n_images = float(found.frame["batch_size"].iloc[0])
    source = f"lk.diagnose, {len(steps)} rounds on {found.frame['env_id'].iloc[0]}"
    rate = float(steps.median())
    if not rate > 0:
        raise ArgumentError("the diagnosis counted no images in its batches: pass count= to lk.diagnose")
    demand = Estimate(rate, float(steps.min()), float(steps.max()), f"{source}: the step alone", "measured here")
    costs = {name: getattr(found.costs, name) for name in ("step", "step_cpu", "making", "waiting")}
    return {"images_per_s_per_gpu": demand, **_of_costs(costs, n_images, source)}


def _of_watch(found: Mapping[str, Any], batch_size: Any) -> dict[str, Estimate]:
    if batch_size is None:
        raise ArgumentError("batch_size is missing: a watch counts batches, so enter the images of one")
    n_images, source, costs = require_int("batch_size", batch_size), "labkit watch", found["costs_s"]
    why = ", the step as it was seen, which busy cores slow down" if found["ceiling_is_bound"] else ", steps repeated"
    demand = Estimate(n_images / costs["step"], source=source + why, kind="measured here")
    own = {"images_per_s_per_gpu": demand, **_of_costs(costs, n_images, source)}
    if "cpu_ms_per_image" in own:  # all the training ran beside it
        own["slowdown"] = Estimate(1.0, source="labkit watch saw the loader beside the training", kind="measured here")
    return own


def _of_costs(costs: Mapping[str, Any], n_images: float, source: str) -> dict[str, Estimate]:
    found = {}
    if (step_cpu := costs.get("step_cpu")) and step_cpu > 0:
        found["step_cores_per_gpu"] = Estimate(
            step_cpu / costs["step"], source=f"{source}: core time of the step", kind="measured here"
        )
    if (making := costs.get("making")) and (cpu_s := making * (1 - costs["waiting"])) > 0:
        ms = 1e3 * cpu_s / n_images
        found["cpu_ms_per_image"] = Estimate(
            ms, source=f"{source}: making a batch, without waiting", kind="measured here"
        )
    return found


EFFORTS = ("a setting", "a conversion, once", "hardware")
MIN_GAIN = 1.02  # times as fast: what brings less at best is no cure
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
    cures = [cure for cure in made if cure is not None and cure.gain[2] >= MIN_GAIN]
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_plan(data: "Plan", *, ax: "Axes | None" = None, **kwargs: Any) -> "Axes":
    """Images/s that each resource gives at most, the scarcest first, with 95 % intervals; the line is the demand.

    Args:
        data: The plan.
        ax: Where to draw.
        **kwargs: To `Axes.barh`.

    Taught in: notebooks/15_at_scale.ipynb
    """
    from labkit.measure.plots import PREDICTED, SMALL_PT, make_axes, mark_simulated, put_legend_below, write_title

    rows = data.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
    ax = ax or make_axes(1.5 + 0.45 * len(rows))
    spread = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
    style = {"height": 0.6, "color": PREDICTED, "hatch": "//", "edgecolor": "white", "capsize": 3, **kwargs}
    ax.barh(range(len(rows)), rows["value"], xerr=spread, **style)
    demand, low, high = data.value("demand")
    ax.axvspan(low, high, color="firebrick", alpha=0.12)
    ax.axvline(demand, color="firebrick", label=f"the GPUs ask for {format_number(demand)}")
    ax.set_xscale("log")
    left, right = ax.get_xlim()
    ax.set(xlim=(left / 2, right * (right / left) ** 0.18), ylim=(len(rows) - 0.4, -0.6), xlabel="images/s at most")
    ax.set_yticks(range(len(rows)), rows["quantity"])
    for row, (value, end) in enumerate(zip(rows["value"], rows["high"], strict=True)):
        ax.annotate(
            format_number(value), (end, row), (5, 0), textcoords="offset points", va="center", fontsize=SMALL_PT
        )
    put_legend_below(ax)
    mark_simulated(ax, "predicted")
    write_title(ax, f"{data.title}: {_tell_scarcest(rows.iloc[0], demand, low, high)}")
    return ax


def _tell_scarcest(row: Any, demand: float, low: float, high: float) -> str:
    """Whether the scarcest resource gives what the GPUs ask for: inconclusive if the two intervals meet."""
    given, asked = format_number(row["value"]), format_number(demand)
    if row["high"] < low:
        return f"{row['quantity']} allow {given} of {asked} images/s"
    if row["low"] > high:
        return f"each resource allows the {asked} images/s that are asked for"
    return f"{row['quantity']} allow {given} where {asked} images/s are asked for: inconclusive"


GROUPS = {
    "result": "Result (predicted)",
    "ceiling": "At most (predicted)",
    "need": "To keep the GPUs busy (predicted)",
    "input": "Inputs",
}


@dataclass(frozen=True)
class Page:
    """title, sentences, notes: In words.

    sections: Heading -> rows of (quantity, value, 95 % interval, formula or kind, numbers of sources).
    sources: In the order of their numbers, from 1.
    """

    title: str
    sentences: list[str]
    notes: list[str]
    sections: dict[str, list[tuple[str, str, str, str, str]]]
    sources: list[str]

    @classmethod
    def of(cls, plan: Any) -> "Page":
        """The page of a `Plan`."""
        frame = plan.frame
        numbers = {each: at for at, each in enumerate(dict.fromkeys(frame["sources"].explode().dropna()), 1)}
        sections = {
            heading: [page_row(row, numbers) for _, row in frame[frame["group"] == group].iterrows()]
            for group, heading in GROUPS.items()
        }
        return cls(plan.title, plan.sentences, plan.notes, sections, list(numbers))

    def __str__(self) -> str:
        lines = [self.title, "", *self.sentences, *self.notes]
        for heading, rows in self.sections.items():
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines += ["", heading]
            for quantity, value, interval, how, refs in rows:
                start = f"  {quantity:<{widths[0]}}  {value:>{widths[1]}}  {interval:<{widths[2]}}"
                lines.append(f"{start}  {how} {refs}".rstrip())
        return "\n".join([*lines, "", "Sources", *(f"  [{at}] {each}" for at, each in enumerate(self.sources, 1))])


def page_row(row: Mapping[str, Any] | pd.Series, numbers: Mapping[str, int]) -> tuple[str, str, str, str, str]:
    """A row of a plan's frame as texts: quantity, value, 95 % interval, formula or kind, numbers of its sources."""
    is_exact = row["low"] == row["high"]
    digits = f"{row['value']:,.10g}" if is_exact and row["group"] == "input" else format_number(row["value"])
    value = f"{digits} {row['unit']}".strip()
    interval = "" if is_exact else f"[{format_number(row['low'])}, {format_number(row['high'])}]"
    refs = ",".join(str(numbers[each]) for each in row["sources"])
    how = row["formula"] or row["status"]
    return row["quantity"], value, interval, how, f"[{refs}]" if refs else ""


_COLUMNS = ("group", "name", "quantity", "value", "low", "high", "unit", "formula", "sources", "status")
_CLOSE = 1.25  # two ceilings so close that queues cost
_MOST_CURES = 8


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What `plan` predicts.

    Attributes:
        setup: What it was computed from.
        title: The training.
    """

    setup: Setup
    title: str
    own_notes: Sequence[str] = field(default_factory=tuple)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each quantity.

        `group` (`input`, `need`: to keep the GPUs busy, `ceiling`: images/s at most, `result`), `name`, `quantity`,
        `value` (median), `low` and `high` (95 % interval), `unit`, `formula`, `sources` (of all inputs that it comes
        from, a list of `INPUT: SOURCE`), and `status`: of an input one of `KINDS`, of all others `predicted`.
        """
        sources = self._sources()
        rows = [
            (
                "input",
                name,
                INPUTS[name].label,
                each.value,
                *each.interval,
                INPUTS[name].unit,
                "",
                sources[name],
                each.kind,
            )
            for name, each in self.setup.inputs.items()
            if name in INPUTS and self._is_used(name)
        ]
        rows += [
            (line.group, line.name, line.label, *of_draws(self.setup.draws[line.name]), line.unit, line.formula,
             sources[line.name], "predicted")
            for line in self.setup.lines
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=_COLUMNS)

    def _is_used(self, name: str) -> bool:
        return any(name in line.uses for line in self.setup.lines)

    def _sources(self) -> dict[str, list[str]]:
        """Every input and line -> where it comes from, through all the lines that it uses."""
        found = {name: [f"{name}: {each.source}"] for name, each in self.setup.inputs.items()}
        found["n_storages"] = [] if self.setup.is_remote else found["n_nodes"]
        for line in self.setup.lines:
            used = [source for name in line.uses for source in found.get(name, [])]
            found[line.name] = list(dict.fromkeys(used))
        return found

    def value(self, name: str) -> tuple[float, float, float]:
        """Median and 95 % interval of a quantity, by its `name` in the frame. Raises KeyError."""
        row = self.frame.set_index("name").loc[name]
        return row["value"], row["low"], row["high"]

    @property
    def bottleneck(self) -> str:
        """The resource that gives the fewest images/s, in most of the draws."""
        return RESOURCES[self.setup.scarcest]

    @cached_property
    def cures(self) -> list[Cure]:
        """Changes against the bottleneck, the cheapest first; those of unknown effect last."""
        return find_cures(self.setup)

    def after(self, cure: Cure) -> "Plan":
        """The plan after a cure. Raises ValueError: its effect is not known."""
        if cure.setup is None:
            raise ArgumentError(f"the effect of {cure.action!r} is not known: measure lk.loader_costs")
        return Plan(cure.setup, self.title, self.own_notes)

    @cached_property
    def steps(self) -> list[Cure]:
        """The cheapest cure, then the cheapest after it, until the GPUs are the bottleneck."""
        found: list[Cure] = []
        plan = self
        while len(found) < _MOST_CURES and (known := [cure for cure in plan.cures if cure.is_known]):
            found.append(known[0])
            plan = plan.after(known[0])
        return found

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        said = [self._describe_bottleneck()]
        said += [f"{'Then' if number else 'Cheapest cure'}: {cure}." for number, cure in enumerate(self.steps)]
        said += [f"Perhaps: {cure}." for cure in self.cures if not cure.is_known]
        return said

    def _describe_bottleneck(self) -> str:
        draws, setup = self.setup.draws, self.setup
        rate, low, high = map(format_number, of_draws(setup.rate))
        share = of_draws(draws["busy_share"])
        often = [f"{RESOURCES[name]} in {share:.0%}" for name, share in setup.scarcities.items() if share >= 0.01]
        words = f"Bottleneck: {', '.join(often)} of the draws. "
        demand = format_number(setup.median("demand"))
        return words + (
            f"Predicted are {rate} [{low}, {high}] images/s of the {demand} that the GPUs ask for: they train "
            f"{share[0]:.0%} [{share[1]:.0%}, {share[2]:.0%}] of the time."
        )

    @property
    def notes(self) -> list[str]:
        """What the plan does not know."""
        setup = self.setup
        notes = list(self.own_notes)
        if setup.inputs["cpu_ms_per_image"].kind == "measured here":
            notes.append("Core times are those of the machine that measured them: other cores differ.")
        if "lock_ceiling" not in setup.draws and not self.own_notes:
            notes.append("gil_us_per_image is not known, so Python's lock is left out.")
        if setup.is_remote and "network_ceiling" not in setup.draws:
            notes.append("network_gbit_per_node is not known, so the network has no limit here.")
        medians = sorted(setup.median(name) for name in setup.apart)
        if medians[1] < _CLOSE * medians[0]:
            notes.append(
                "Two ceilings are close to each other: with few batches ahead and times that vary, the rate can be a "
                "third below the smaller one."
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "title": self.title, "storage": self.setup.storage, "data": self.setup.data,
            "bottleneck": self.bottleneck,
            "scarcest": {RESOURCES[name]: share for name, share in self.setup.scarcities.items()},
            "sentences": self.sentences, "notes": self.notes,
            "cures": [
                {"action": each.action, "effort": each.effort, "gain": each.gain, "images_per_s": each.images_per_s,
                 "then": RESOURCES[each.then], "is_known": each.is_known}
                for each in self.cures
            ],
            "lines": self.frame.to_dict(orient="records"),
        }  # fmt: skip

    def save_json(self, path: str | os.PathLike) -> Path:
        """Write the plan as JSON."""
        write_atomic(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return Path(path)

    def __repr__(self) -> str:
        return str(Page.of(self))

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in [*self.sentences, *self.notes])
        table = self.frame.drop(columns=["name", "sources"]).to_html(index=False, border=0, float_format=format_number)
        return f"<h3>{escape(self.title)}</h3>{words}{table}"


DTYPES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def plan(
    demand: Any = None,
    *,
    gpu: str = "",
    model: str = "ResNet-50",
    n_gpus: int = 1,
    n_nodes: int = 1,
    costs: LoaderCosts | str | os.PathLike | None = None,
    data: str = "photos",
    storage: str | Storage = "nvme",
    dtype: str = "uint8",
    vcpus_per_node: float | None = None,
    **inputs: float | Sequence[float] | Estimate | None,
) -> Plan:
    """Predict what a training on many GPUs asks for, which resource limits it, and what the cheapest cure brings.

    One number is exact; (low, high) and (low, value, high) are 95 % intervals; an `Estimate` also has a source. Random
    draws carry them through all formulas, each input apart. Nothing that is computed was measured. Needs no torch.

    Args:
        demand: Images/s of one GPU: a number, or what was measured: a `Diagnosis`, a `WatchReport` or the path of what
            `labkit watch --json` wrote (both with `batch_size`). None: what is published for `gpu` and `model`.
        gpu, model: As `course.PUBLISHED_TRAINING` names them, such as "h100"; also gives the bus, and rented cores.
        n_gpus, n_nodes: GPUs in all, and the machines that share them evenly.
        costs: What `lk.loader_costs` measured, or the path where it was saved.
        data: What is stored: "photos", "photos at 256" or "pixels at 256", for `costs`.
        storage: "nvme", "s3", "memory", or a `Storage`.
        dtype: Of the values that are sent to a GPU: uint8, float16, bfloat16 or float32.
        vcpus_per_node: In place of `cores_per_node`, for rented machines.
        **inputs: Any of `labkit.planning.plan.INPUTS`, such as `cores_per_node`, `cpu_ms_per_image`, `latency_ms`.

    Raises: FileNotFoundError, ValueError (a wrong or unknown argument, or one is missing that has no default).
    Taught in: notebooks/15_at_scale.ipynb
    """
    known = _known_costs(costs)
    entered = check_inputs({"n_gpus": n_gpus, "n_nodes": n_nodes, **inputs})
    _check_nodes(n_gpus, n_nodes)
    found = _defaults(require_choice("dtype", dtype, DTYPES)) | _of_gpu(gpu, model, n_gpus / n_nodes)
    found |= _of_demand(demand, inputs.get("batch_size")) | dict(
        known.by_data.get(require_choice("data", data, DATA), {})
    )
    if pixels := known.by_data.get("pixels at 256"):
        found["pixel_kb_per_image"] = pixels["kb_per_image"]
    found |= _of_vcpus(vcpus_per_node)
    place = _storage(storage)
    found |= {**place.rates, **_of_shards(entered), **entered}
    _check_complete(found)
    setup = Setup(found, place.name, not place.is_local, data, known.by_data)
    return Plan(setup, _title(gpu, model, n_gpus, n_nodes), known.notes)


def _defaults(dtype: str) -> dict[str, Estimate]:
    found = {name: each.default for name, each in INPUTS.items() if each.default is not None}
    return {**found, "bytes_per_value": Estimate(DTYPES[dtype], source=f"dtype {dtype}")}


def _of_vcpus(vcpus: Any) -> dict[str, Estimate]:
    return {} if vcpus is None else {"cores_per_node": cores_of(require_positive("vcpus_per_node", vcpus))}


def _check_nodes(n_gpus: int, n_nodes: int) -> None:
    if n_gpus % n_nodes:
        raise ArgumentError(f"n_gpus must be a multiple of n_nodes, got {n_gpus} GPUs on {n_nodes} nodes")


def _known_costs(costs: Any) -> LoaderCosts:
    if costs is None:
        return LoaderCosts({})
    if isinstance(costs, LoaderCosts):
        return costs
    if isinstance(costs, str | os.PathLike):
        return LoaderCosts.load_json(costs)
    raise ArgumentError(f"costs must be what lk.loader_costs gives, or its file, got a {type(costs).__name__}")


def _of_gpu(gpu: str, model: str, gpus_per_node: float) -> dict[str, Estimate]:
    """Rate, bus and rented cores, as published."""
    if not gpu:
        return {"pcie_gb_per_s": pcie()}
    key, _ = find_training(gpu, model)
    cores = rented_cores(key, gpus_per_node)
    own = {"images_per_s_per_gpu": demand_of(key), "pcie_gb_per_s": pcie_of(key)}
    return own if cores is None else {**own, "cores_per_node": cores}


def _of_demand(demand: Any, batch_size: Any) -> dict[str, Estimate]:
    if demand is None:
        return {}
    if is_seen(demand):
        return inputs_of(demand, batch_size)
    return check_inputs({"images_per_s_per_gpu": demand})


def _storage(storage: Any) -> Storage:
    if isinstance(storage, Storage):
        return Storage(storage.name, check_inputs(storage.rates), storage.is_local)
    return STORAGES[require_choice("storage", storage, STORAGES)]


def _of_shards(entered: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Shards are read in ranges, of which none is longer than a shard."""
    if "shard_mb" not in entered or "request_mb" in entered:
        return {}
    whole = entered["shard_mb"]
    return {"request_mb": whole if whole.value < REQUEST_MB.value else REQUEST_MB}


_MISSING = {
    "images_per_s_per_gpu": "enter demand, the images/s of a GPU, or gpu, one of course.PUBLISHED_TRAINING",
    "cores_per_node": "enter cores_per_node, or vcpus_per_node of a rented machine",
    "cpu_ms_per_image": "enter it, or measure it: costs=lk.loader_costs(FOLDER), or demand=lk.diagnose(loader, step)",
}


def _check_complete(inputs: Mapping[str, Estimate]) -> None:
    for name, remedy in _MISSING.items():
        if name not in inputs:
            raise ArgumentError(f"the {INPUTS[name].label} is not known ({name}): {remedy}")


def _title(gpu: str, model: str, n_gpus: int, n_nodes: int) -> str:
    what = find_training(gpu, model)[0] if gpu else "own rate"
    gpus = f"{n_gpus} GPU{'s' if n_gpus > 1 else ''}"
    return f"{gpus} on {n_nodes} node{'s' if n_nodes > 1 else ''}, {what}"
