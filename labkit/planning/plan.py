"""`lk.plan`: what a training on many GPUs asks of cores, storage and network, what limits it, and what would help.

From top to bottom: the inputs and their checks, what `diagnose` and `watch` saw as inputs, the plot, the result, and
`plan` itself.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit.errors import ArgumentError
from labkit.measure.usage import SLOWED
from labkit.planning.fixes import EFFORTS, MIN_GAIN, Fix, find_fixes
from labkit.planning.formulas import (
    DATA,
    FORMULAS,
    RESOURCES,
    Estimate,
    LoaderCosts,
    Setup,
    as_estimate,
    format_number,
    of_draws,
)
from labkit.planning.published import (
    IMAGENET_IMAGES,
    IMAGENET_KB,
    REQUEST_MB,
    STORAGES,
    cores_of,
    find_training,
    pcie,
    published_inputs,
)
from labkit.util.arguments import require_choice, require_int, require_positive, require_report
from labkit.util.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _assume(value: float, low: float | None = None, high: float | None = None, *, why: str) -> Estimate:
    return Estimate(value, low, high, why, "assumed")


# What a plan is computed from, with its unit: `name_of_something_per_node` says what it is.
INPUTS = {
    "images_per_s_per_gpu": "images/s", "n_gpus": "", "n_nodes": "", "n_images": "", "cores_per_node": "cores",
    "step_cores_per_gpu": "cores", "cpu_ms_per_image": "ms", "slowdown": "x", "gil_us_per_image": "us",
    "request_cpu_ms": "ms", "request_lock_share": "of 1", "processes_per_gpu": "", "kb_per_image": "KB",
    "latency_ms": "ms", "mb_per_s_per_request": "MB/s", "requests_per_s": "requests/s", "storage_mb_per_s": "MB/s",
    "n_prefixes": "", "request_mb": "MB", "shard_mb": "MB", "requests_in_flight_per_gpu": "requests",
    "disk_gb_per_node": "GB", "network_gbit_per_node": "Gbit/s", "pcie_gb_per_s": "GB/s", "crop_size": "pixels",
    "bytes_per_value": "", "batch_size": "", "batches_ahead": "", "process_gb": "GB",
}  # fmt: skip
_COUNTS = ("n_gpus", "n_nodes", "n_images", "processes_per_gpu", "n_prefixes", "crop_size", "batch_size")
_MAY_BE_ZERO = ("step_cores_per_gpu", "request_cpu_ms", "latency_ms")
DEFAULTS = {
    "n_images": IMAGENET_IMAGES,
    "kb_per_image": IMAGENET_KB,
    "step_cores_per_gpu": _assume(1, 0.5, 1.2, why="the training process launches kernels on about one core"),
    "slowdown": _assume(1.1, 1.0, SLOWED, why=f"with all cores busy, up to {SLOWED}, as eleven trainings showed"),
    "request_lock_share": _assume(0.85, 0.8, 0.9, why="0.84 over HTTP and 0.88 with s3fs, by py-spy"),
    "processes_per_gpu": _assume(1, why="threads of the training process, as lk.BatchLoader has them"),
    "pcie_gb_per_s": pcie(),
    "crop_size": _assume(224, why="the usual size"),
    "bytes_per_value": _assume(1, why="uint8, normalized on the GPU"),
    "batch_size": _assume(256, why="a usual size"),
    "batches_ahead": _assume(4, 3, 6, why="two ahead, one in use, one being made"),
    "process_gb": _assume(0.3, 0.2, 0.6, why="Python with torch and OpenCV"),
}


def check_inputs(given: Mapping[str, Any]) -> dict[str, Estimate]:
    """What a reader entered, as estimates; None is left out.

    Raises:
        ValueError: an unknown name, or no such number.
    """
    found = {}
    for name, value in given.items():
        if name not in INPUTS:
            raise ArgumentError(f"{name} is no input of a plan: it takes {', '.join(INPUTS)}")
        if value is None:
            continue
        if name in _COUNTS and not isinstance(value, Estimate):
            require_int(name, value)
        found[name] = as_estimate(name, value)
        if found[name].value == 0 and name not in _MAY_BE_ZERO:
            raise ArgumentError(f"{name} must be a number > 0, got {value!r}")
    return found


def inputs_of(seen: Any, batch_size: Any = None) -> dict[str, Estimate]:
    """Demand, the step's cores and the loader's core time of an image, as far as they were seen.

    Args:
        seen: A `Diagnosis`, a `WatchReport`, or the path of what `labkit watch --json` wrote.
        batch_size: Images of a batch, which a watch does not know.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not from `labkit watch`, or from a later one, or the batch size is missing.
    """
    found: dict[str, Estimate] = {}

    def note(name: str, value: float, source: str, low: float | None = None, high: float | None = None) -> None:
        found[name] = Estimate(value, low, high, source, "measured here")

    is_watch = not hasattr(seen, "frame")
    if is_watch:
        to_dict = getattr(seen, "to_dict", None)
        report = to_dict() if to_dict else require_report("demand", seen, "costs_s", "ceiling_is_bound")
        if batch_size is None:
            raise ArgumentError("batch_size is missing: a watch counts batches, so enter the images of one")
        n_images, source, costs = float(require_int("batch_size", batch_size)), "labkit watch", report["costs_s"]
        why = "the step as it was seen, which busy cores slow down" if report["ceiling_is_bound"] else "steps repeated"
        note("images_per_s_per_gpu", n_images / costs["step"], f"{source}, {why}")
    else:
        steps = seen.frame.loc[seen.frame["variant"] == "step", "images_per_s"]
        n_images, costs = float(seen.frame["batch_size"].iloc[0]), vars(seen.costs)
        source = f"lk.diagnose, {len(steps)} rounds on {seen.frame['env_id'].iloc[0]}"
        if not steps.median() > 0:
            raise ArgumentError("the diagnosis counted no images in its batches: pass count= to lk.diagnose")
        rates = float(steps.median()), f"{source}: the step alone", float(steps.min()), float(steps.max())
        note("images_per_s_per_gpu", *rates)
    if costs.get("step_cpu"):
        note("step_cores_per_gpu", costs["step_cpu"] / costs["step"], f"{source}: core time of the step")
    if (cpu_s := (costs.get("making") or 0.0) * (1 - costs["waiting"])) > 0:
        note("cpu_ms_per_image", 1e3 * cpu_s / n_images, f"{source}: making a batch, without waiting")
        if is_watch:  # the training ran at the same time
            note("slowdown", 1.0, "labkit watch saw the loader while the training ran")
    return found


def plot_plan(data: "Plan", *, title: str = "", ax: "Axes | None" = None) -> "Axes":
    """Images/s that each resource gives at most, the scarcest first, with 95 % intervals; red is below the demand.

    Args:
        data: The plan.
        title: In place of the generated one.
        ax: Where to draw.

    Taught in: notebooks/15_at_scale.ipynb
    """
    from labkit.measure.plots import PREDICTED, SMALL_PT, make_axes, mark_simulated, put_legend_below, write_title

    rows = data.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
    ax = ax or make_axes(1.5 + 0.4 * len(rows))
    demand, low, high = data.value("demand")
    style: dict[str, Any] = {"fmt": "o", "capsize": 4, "markersize": 8}
    for row, (value, start, end) in enumerate(zip(rows["value"], rows["low"], rows["high"], strict=True)):
        color = PREDICTED if value >= demand else "firebrick"
        ax.errorbar(value, row, xerr=[[value - start], [end - value]], color=color, **style)
        ax.text(end, row, f"  {format_number(value)}", va="center", fontsize=SMALL_PT)
    ax.axvspan(low, high, color="gray", alpha=0.15)
    ax.axvline(demand, color="gray", label=f"the GPUs could use {format_number(demand)}")
    ax.set_xscale("log")
    left, right = ax.get_xlim()
    ax.set(xlim=(left / 1.2, right * (right / left) ** 0.18), ylim=(len(rows) - 0.4, -0.6), xlabel="images/s at most")
    ax.set_yticks(range(len(rows)), rows["quantity"])
    put_legend_below(ax)
    mark_simulated(ax, "predicted")
    first, asked = rows.iloc[0], format_number(demand)
    enough = f"each resource allows the {asked} images/s that the GPUs could use"
    scarce = f"{first['quantity']} allow {format_number(first['value'])} images/s of {asked}"
    write_title(ax, title or f"{data.title}: {enough if first['low'] > high else scarce}")
    return ax


_GROUPS = {
    "result": "Result (predicted)",
    "ceiling": "At most (predicted)",
    "need": "To keep the GPUs busy (predicted)",
    "input": "Inputs",
}
_COLUMNS = ("group", "name", "quantity", "value", "low", "high", "unit", "formula", "sources", "status")
_CLOSE = 1.25  # two ceilings so close that queues cost


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What `plan` predicts. Printed, it is a page: the result in words, each quantity with its formula, and sources.

    Attributes:
        setup: What it was computed from.
        title: The training.
        cost_notes: What `lk.loader_costs` could not measure.
    """

    setup: Setup
    title: str
    cost_notes: Sequence[str] = field(default_factory=tuple)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each quantity.

        `group` (`input`, `need`: to keep the GPUs busy, `ceiling`: images/s at most, `result`), `name`, `quantity`
        (the resource of a ceiling), `value` (median), `low` and `high` (95 % interval), `unit`, `formula` (of other
        names), `sources` (of all inputs that it comes from, a list of `INPUT: SOURCE`), and `status`: of an input one
        of `KINDS`, of all others `predicted`.
        """
        setup = self.setup
        formulas = [formula for formula in FORMULAS if formula.name in setup.draws]
        used = {source for formula in formulas for source in setup.sources[formula.name]}
        rows: list[tuple] = [
            ("input", name, "", each.value, *each.interval, INPUTS[name], "", setup.sources[name], each.kind)
            for name, each in setup.inputs.items() if used.issuperset(setup.sources[name])
        ]  # fmt: skip
        rows += [
            (each.group, each.name, RESOURCES.get(each.name, ""), *of_draws(setup.draws[each.name]), each.unit,
             each.text, setup.sources[each.name], "predicted")
            for each in formulas
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=list(_COLUMNS))

    def value(self, name: str) -> tuple[float, float, float]:
        """Median and 95 % interval of a quantity, by its `name` in the frame. Raises KeyError."""
        row = self.frame.set_index("name").loc[name]
        return row["value"], row["low"], row["high"]

    @property
    def bottleneck(self) -> str:
        """The resource that gives the fewest images/s, in most of the draws."""
        return RESOURCES[self.setup.scarcest]

    @cached_property
    def fixes(self) -> list[Fix]:
        """Changes against the bottleneck, as `find_fixes` orders them."""
        return find_fixes(self.setup)

    def after(self, fix: Fix) -> "Plan":
        """The plan after a fix."""
        return Plan(fix.setup, self.title, self.cost_notes)

    @cached_property
    def steps(self) -> list[Fix]:
        """The first fix, then the first after it, until the GPUs are the bottleneck."""
        first = self.fixes[:1]
        return [*first, *self.after(first[0]).steps] if first and first[0].gain[0] >= MIN_GAIN else []

    @property
    def sentences(self) -> list[str]:
        """The result in words."""
        often = [f"{RESOURCES[name]} in {share:.0%}" for name, share in self.setup.scarcities.items() if share >= 0.01]
        rate, low, high = map(format_number, self.value("images_per_s"))
        demand = format_number(self.value("demand")[0])
        busy, least, most = self.value("busy_share")
        others = [fix for fix in self.fixes[1:] if self.steps and fix.effort != EFFORTS[-1]]
        settings = [[fix for fix in self.after(other).steps[:1] if fix.effort == EFFORTS[0]] for other in others]
        return [
            f"Predicted: {rate} [{low}, {high}] images/s of the {demand} that the GPUs could use, which train "
            f"{busy:.0%} [{least:.0%}, {most:.0%}] of the time. The limit: {', '.join(often)} of the draws.",
            *(f"{'Then' if number else 'First'}: {fix}." for number, fix in enumerate(self.steps)),
            *(f"Or: {'; then: '.join(map(str, [fix, *then]))}." for fix, then in zip(others, settings, strict=True)),
        ]

    @property
    def notes(self) -> list[str]:
        """What the plan does not know."""
        setup = self.setup
        notes = list(self.cost_notes)
        if setup.inputs["cpu_ms_per_image"].kind == "measured here":
            notes.append("Core times are those of the machine that measured them: other cores differ.")
        if "gil_us_per_image" not in setup.inputs and not self.cost_notes:
            known = "counts the storage's client only" if "lock_ceiling" in setup.draws else "is left out"
            notes.append(f"gil_us_per_image is not known, so Python's lock {known}.")
        if setup.is_remote and setup.median("request_rate_ceiling") < setup.median("demand"):
            notes.append(
                "An object store answers requests beyond its rate with 503 Slow Down, and clients wait and try again: "
                "more requests in flight do not help there."
            )
        if not setup.known_costs and setup.scarcest in ("core_ceiling", "lock_ceiling"):
            notes.append("lk.loader_costs measures what it would bring to resize or decode the images once.")
        if setup.is_remote and "network_ceiling" not in setup.draws:
            notes.append("network_gbit_per_node is not known, so the network has no limit here.")
        # That of requests follows from that of the cores, if the threads that decode send them.
        follows = "requests_in_flight_per_gpu" not in setup.inputs and setup.to_fix != "in_flight_ceiling"
        names = setup.draws.keys() & RESOURCES.keys() - ({"in_flight_ceiling"} if follows else set())
        smallest, second = sorted(map(setup.median, names))[:2]
        if second < _CLOSE * smallest:
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
            "fixes": [
                {"action": each.action, "effort": each.effort, "gain": each.gain,
                 "next_limit": each.next_limit}
                for each in self.fixes
            ],
            "lines": self.frame.to_dict(orient="records"),
        }  # fmt: skip

    def save_json(self, path: str | os.PathLike) -> Path:
        """Write the plan as JSON."""
        write_atomic(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        return Path(path)

    def __repr__(self) -> str:
        numbers = {each: at for at, each in enumerate(dict.fromkeys(self.frame["sources"].explode().dropna()), 1)}
        lines = [self.title, "", *self.sentences, *self.notes]
        for group, heading in _GROUPS.items():
            rows = []
            for row in self.frame[self.frame["group"] == group].to_dict(orient="records"):
                is_exact = row["low"] == row["high"]
                is_entered = is_exact and group == "input"
                value = f"{row['value']:,.10g}" if is_entered else format_number(row["value"])
                interval = "" if is_exact else f"[{format_number(row['low'])}, {format_number(row['high'])}]"
                refs = ",".join(str(numbers[each]) for each in row["sources"])
                what = f"{row['formula'] or row['status']} [{refs}]"
                rows.append((row["name"], f"{value} {row['unit']}".strip(), interval, what))
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            lines += ["", heading]
            lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}" for a, b, c, d in rows]
        return "\n".join([*lines, "", "Sources", *(f"  [{at}] {each}" for each, at in numbers.items())])


_MISSING = {
    "images_per_s_per_gpu": "enter demand, the images/s of a GPU, or gpu, one of course.PUBLISHED_TRAINING",
    "cores_per_node": "enter cores_per_node, or vcpus_per_node of a rented machine",
    "cpu_ms_per_image": "enter it, or measure it: costs=lk.loader_costs(FOLDER), or demand=lk.diagnose(loader, step)",
}


def plan(
    demand: Any = None,
    *,
    gpu: str = "",
    model: str = "ResNet-50",
    n_gpus: int = 1,
    n_nodes: int = 1,
    costs: LoaderCosts | str | os.PathLike | None = None,
    data: str = "photos",
    storage: str = "nvme",
    vcpus_per_node: float | None = None,
    **inputs: float | Sequence[float] | Estimate | None,
) -> Plan:
    """Predict what a training on many GPUs asks for, which resource limits it, and what the cheapest fix brings.

    One number is exact; (low, high) and (low, value, high) are 95 % intervals; an `Estimate` also has a source. Random
    draws carry them through all formulas, each input on its own. Nothing that is computed was measured. Needs no torch.

    Args:
        demand: Images/s of one GPU: a number, or what was measured: a `Diagnosis`, a `WatchReport` or the path of what
            `labkit watch --json` wrote (both with `batch_size`). None: what is published for `gpu` and `model`.
        gpu, model: As `course.PUBLISHED_TRAINING` names them, such as "h100"; also gives the bus, and rented cores.
        n_gpus, n_nodes: GPUs in all, and the machines that share them evenly.
        costs: What `lk.loader_costs` measured, or the path where it was saved.
        data: What is stored: "photos", "photos at 256" or "pixels at 256", for `costs`.
        storage: "nvme", "s3" or "memory".
        vcpus_per_node: In place of `cores_per_node`, for rented machines.
        **inputs: Any of `labkit.planning.plan.INPUTS`, such as `cores_per_node`, `cpu_ms_per_image`, `latency_ms`.

    >>> plan = lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=2.5, storage="nvme")
    >>> print(plan)  # doctest: +SKIP

    Raises: FileNotFoundError, ValueError (a wrong or unknown argument, or one is missing that has no default).
    Taught in: notebooks/15_at_scale.ipynb
    """
    if costs is not None and not isinstance(costs, LoaderCosts | str | os.PathLike):
        raise ArgumentError(f"costs must be what lk.loader_costs gives, or its file, got a {type(costs).__name__}")
    known = LoaderCosts.load_json(costs) if isinstance(costs, str | os.PathLike) else costs or LoaderCosts({})
    entered = check_inputs({"n_gpus": n_gpus, "n_nodes": n_nodes, **inputs})
    if n_gpus % n_nodes:
        raise ArgumentError(f"n_gpus must be a multiple of n_nodes, got {n_gpus} GPUs on {n_nodes} nodes")

    # From what is assumed to what was entered: each replaces what came before it.
    found = dict(DEFAULTS)
    training = find_training(gpu, model) if gpu else "own rate"
    if gpu:
        found |= published_inputs(training, n_gpus / n_nodes)
    if isinstance(demand, str | os.PathLike) or hasattr(demand, "costs"):
        found |= inputs_of(demand, inputs.get("batch_size"))
    elif demand is not None:
        found |= check_inputs({"images_per_s_per_gpu": demand})
    found |= known.by_data.get(require_choice("data", data, DATA), {})
    if vcpus_per_node is not None:
        found["cores_per_node"] = cores_of(require_positive("vcpus_per_node", vcpus_per_node))
    found |= STORAGES[require_choice("storage", storage, STORAGES)]
    if shard_mb := entered.get("shard_mb"):  # read in ranges, of which none is longer than a shard
        found["request_mb"] = min(shard_mb, REQUEST_MB, key=lambda each: each.value)
    found |= entered
    for name, remedy in _MISSING.items():
        if name not in found:
            raise ArgumentError(f"{name} is not known: {remedy}")

    setup = Setup(found, storage, data, known.by_data)
    machines = f"{n_gpus} GPU{'s' if n_gpus > 1 else ''} on {n_nodes} node{'s' if n_nodes > 1 else ''}"
    return Plan(setup, f"{machines}, {training}", known.notes)
