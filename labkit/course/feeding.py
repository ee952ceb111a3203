"""Ways to feed a training step on a simulated device, and `explore`, which shows a frame by its factors."""

import math
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, islice, repeat
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.errors import ArgumentError
from labkit.measure.frames import COLUMNS, measured_runs
from labkit.measure.plots import (
    LIMIT,
    MARKERS,
    PREDICTED,
    SMALL_PT,
    WIDTH_IN,
    make_axes,
    mark_simulated,
    put_legend_below,
    write_title,
)
from labkit.measure.statistics import format_ratio
from labkit.simulation.context import SimulatedLoader, simulated_cuda
from labkit.simulation.simulated_device import SimulatedDevice
from labkit.simulation.timeline import trace
from labkit.util.arguments import require_choice, require_int, require_positive
from labkit.util.pictures import png_base64, png_bytes

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

METRICS = {
    "images_per_s": "images per second",
    "first_batch_s": "wait for the first batch (s)",
    "steady_s": "wait for the other batches (s)",
    "startup_s": "start-up (s)",
    "cpu_s": "CPU seconds",
    "peak_mem_mb": "peak memory (MB)",
}

# The columns of `labkit.measure.frames` that say what was chosen for a run; its other columns describe the run itself.
_CHOSEN = {"experiment", "variant", "batch_size", "num_workers", "torch_num_threads", "storage", "page_cache", "device"}
_NO_FACTORS = {*COLUMNS, "rung"} - _CHOSEN

_MAX_LEVELS = 24
_HEADROOM = 1.08  # no dot is cut by the frame


class Explorer:
    """A picture of runs, and the menus that change it.

    Attributes:
        x, hue, metric: What is drawn now; `hue` may be None.
        where: Factor -> level: only runs with this level are drawn.
        ax: The current axes.
        controls: Menus by name, `x`, `hue`, `metric` and `where <factor>`; empty if ipywidgets is not installed.
    """

    def __init__(self, runs: pd.DataFrame, x: str, hue: str | None, metric: str):
        self.runs, self.x, self.hue, self.metric = runs, x, hue, metric
        self.where: dict[str, Any] = {}
        self.controls: dict[str, Any] = {}
        self._box: Any = None
        self._picture: Any = None
        self.draw()
        with suppress(ImportError):
            import ipywidgets

            self._make_controls(ipywidgets)

    def draw(self) -> Axes:
        """Draw the current choice again."""
        runs = self.runs
        for factor, level in self.where.items():
            runs = runs[runs[factor] == level]
        figure = self._figure = Figure(figsize=(WIDTH_IN, 4), layout="constrained")
        self.ax = plot_runs(runs, x=self.x, hue=self.hue, metric=self.metric, ax=figure.add_subplot())
        if chosen := self._limits(runs):
            write_title(self.ax, f"{self.ax.get_title('left')}; {chosen}")
        return self.ax

    def _limits(self, runs: pd.DataFrame) -> str:
        parts = [f"{factor}: {level}" for factor, level in self.where.items()]
        if pooled := pooled_over(runs, [self.x, self.hue]):
            parts.append(f"pooled over {', '.join(pooled)}")
        return "; ".join(parts)

    def _make_controls(self, widgets: Any) -> None:
        factors = factors_of(self.runs)
        metrics = [(METRICS[name], name) for name in _available_metrics(self.runs)]
        menus = {
            "x": widgets.Dropdown(options=factors, value=self.x),
            "hue": widgets.Dropdown(options=[("none", None), *[(name, name) for name in factors]], value=self.hue),
            "metric": widgets.Dropdown(options=metrics, value=self.metric),
        }
        for factor in factors:
            levels = [(str(level), level) for level in levels_of(self.runs, factor)]
            menus[f"where {factor}"] = widgets.Dropdown(options=[("all", None), *levels], value=None)
        for name, menu in menus.items():
            menu.description, menu.style = name, {"description_width": "initial"}
            menu.observe(lambda change, name=name: self._choose(name, change["new"]), names="value")
        self.controls = menus
        self._picture = widgets.Image(value=png_bytes(self._figure), format="png", layout={"max_width": "100%"})
        row = widgets.Box(list(menus.values()), layout={"flex_flow": "row wrap"})
        self._box = widgets.VBox([row, self._picture])

    def _choose(self, name: str, value: Any) -> None:
        factor = name.removeprefix("where ")
        if factor == name:
            setattr(self, name, value)
        elif value is None:
            self.where.pop(factor, None)
        else:
            self.where[factor] = value
        self.draw()
        self._picture.value = png_bytes(self._figure)

    def __repr__(self) -> str:
        factors = f"{self.x} and {self.hue}" if self.hue and self.hue != self.x else self.x
        text = f"{METRICS[self.metric]} by {factors}, {len(self.runs)} runs"
        menus = "" if self.controls else " (no menus: ipywidgets is not installed)"
        return f"{text}. Another view{menus}: course.explore(frame, x=..., hue=..., metric=...)"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The menus, and in the same output the picture, for readers without a kernel."""
        return widget_bundle(repr(self), self._figure, self._box)


def widget_bundle(text: str, figure: Figure, box: Any) -> dict[str, Any]:
    """What a notebook shows of a picture with controls: `box`, a widget or None, and the picture without a kernel."""
    bundle = {"text/plain": text, "image/png": png_base64(figure)}
    if box is not None:
        bundle[WIDGET_VIEW] = box._repr_mimebundle_()[WIDGET_VIEW]
    return bundle


def explore(
    frame: pd.DataFrame, *, x: str | None = None, hue: str | None = None, metric: str = "images_per_s"
) -> Explorer:
    """Look at runs by any factor that varies between them: each run is a dot, with the median of its group.

    In a notebook, menus choose the factor on the axis, the colored factor, the metric, and the levels to keep.
    Without menus (a stored notebook, HTML, a script, no ipywidgets) it is the picture of its arguments.

    Args:
        frame: Runs of one machine from `compare`; runs of several experiments may be concatenated.
        x: Column on the axis. None: `variant`, or the first factor.
        hue: Column shown by colors and markers. None: the first other factor that varies within `x`.
        metric: Measured column, such as `first_batch_s`, `cpu_s` or `peak_mem_mb`.

    Returns:
        An `Explorer`; a notebook shows it. `explore(frame).ax.figure.savefig(path)` saves the picture.

    Raises:
        ValueError: no runs, runs of different machines, nothing that varies, or an unknown column.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    peaks = frame.groupby(["experiment", "variant"], dropna=False)["peak_mem_mb"].transform("max")  # taken in warm-ups
    runs = measured_runs(frame.assign(peak_mem_mb=peaks)).reset_index(drop=True)
    machines = runs["env_id"].unique()
    if len(machines) != 1:
        raise ArgumentError(f"runs must come from one machine, got {', '.join(map(str, machines)) or 'no runs'}")
    factors = factors_of(runs)
    if not factors:
        raise ArgumentError(
            "nothing varies between these runs: explore() needs two variants, or two levels of a factor"
        )
    x = require_choice("x", x or ("variant" if "variant" in factors else factors[0]), factors)
    require_choice("hue", hue or x, factors)
    require_choice("metric", metric, _available_metrics(runs))
    for name in factors:  # menus cannot show a missing level without a name
        runs[name] = runs[name].astype(object).where(runs[name].notna(), "not stated")
    return Explorer(runs, x, hue or next(iter(pooled_over(runs, [x])), None), metric)


def factors_of(runs: pd.DataFrame) -> list[str]:
    """Columns with at least two levels, and few enough levels to tell apart."""
    names = [name for name in runs if name not in _NO_FACTORS]
    if "cold" not in set(runs["page_cache"]):
        names.remove("page_cache")  # sometimes warm, sometimes unknown: nobody chose that
    return [name for name in names if 2 <= runs[name].nunique(dropna=False) <= min(_MAX_LEVELS, len(runs) - 1)]


def levels_of(runs: pd.DataFrame, factor: str) -> list[Any]:
    """A factor's levels: numbers by size, names in order of appearance."""
    levels = list(dict.fromkeys(runs[factor]))
    numbers = all(isinstance(level, (int, float)) for level in levels)
    return sorted(levels) if numbers else levels


def pooled_over(runs: pd.DataFrame, drawn: list[str | None]) -> list[str]:
    """Factors that vary within the groups that are drawn."""
    groups = runs.groupby(list(dict.fromkeys(name for name in drawn if name)))
    others = [name for name in factors_of(runs) if name not in drawn]
    return [name for name in others if groups[name].nunique().max() > 1]


def _available_metrics(runs: pd.DataFrame) -> list[str]:
    return [name for name in METRICS if name in runs and runs[name].replace(np.inf, np.nan).notna().any()]


def plot_runs(
    data: pd.DataFrame, *, x: str, hue: str | None = None, metric: str = "images_per_s", ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:  # fmt: skip
    """Draw a measured column by one or two factors: each run is a dot, the median of each group a marker.

    Args:
        data: Runs from `compare`.
        x: Factor on the axis.
        hue: Factor shown by colors and markers.
        metric: Measured column. If it spans more than a factor of 20, the axis is logarithmic.
        ax: Axes to draw on; default: a new figure.
        **kwargs: Passed on to `seaborn.stripplot`.
    """
    ax = ax or make_axes(4)
    if data.empty:
        ax.text(0.5, 0.5, "no run has these levels", ha="center", transform=ax.transAxes)
        ax.set(xticks=[], yticks=[])
        return ax
    hue = None if hue == x else hue
    names = levels_of(data, x)
    groups = {"data": data, "x": x, "y": metric, "order": names, "ax": ax, **_color_options(data, hue)}
    sns.stripplot(**groups, dodge=hue is not None, legend=False, **{"size": 4, "alpha": 0.45, **kwargs})
    _plot_medians(groups)
    is_wide = data[metric].max() > 20 * data[metric].min() > 0
    ax.set(yscale="log") if is_wide else ax.set_ylim(0, _HEADROOM * data[metric].max() or None)
    room = max(5, 70 // len(names))  # characters for each
    ax.set_xticks(range(len(names)), [textwrap.fill(str(name), room) for name in names], fontsize=SMALL_PT)
    ax.set(xlabel=x, ylabel=METRICS[metric] + (", logarithmic" if is_wide else ""))
    write_title(ax, _tell_medians(data, [x, *([hue] if hue else [])], metric))
    return ax


def _tell_medians(data: pd.DataFrame, factors: list[str], metric: str) -> str:
    """The group of the highest median, and its ratio to that of the lowest."""
    names = data[factors].astype(str).agg(", ".join, axis=1)
    medians = data.groupby(names, sort=False)[metric].median()
    high, low = medians.idxmax(), medians.idxmin()
    told = f"{METRICS[metric]}: most {medians.max():,.4g} ({high})"
    ratio = "" if high == low or medians.min() <= 0 else format_ratio(medians.max() / medians.min())
    return f"{told}, {ratio}x of the least ({low})" if ratio else told


def _color_options(data: pd.DataFrame, hue: str | None) -> dict[str, Any]:
    palette = sns.color_palette("colorblind")
    if hue is None:
        return {"color": palette[0]}
    levels = levels_of(data, hue)
    return {"hue": hue, "hue_order": levels, "palette": list(islice(cycle(palette), len(levels)))}


def _plot_medians(groups: dict[str, Any]) -> None:
    n_hues = len(groups.get("hue_order", [None]))
    style = {"estimator": "median", "errorbar": None, "linestyle": "none", "markersize": 7}
    markers = list(islice(cycle(MARKERS), n_hues)) if "hue" in groups else MARKERS[0]
    sns.pointplot(**groups, dodge=0.8 - 0.8 / n_hues if n_hues > 1 else False, markers=markers, **style)
    if "hue" in groups:
        sns.move_legend(
            groups["ax"], "upper center", bbox_to_anchor=(0.5, -0.3), ncols=3, frameon=False, fontsize=SMALL_PT
        )


# Way -> is the batch in page-locked memory, and how `course.trace` copies it.
WAYS = {
    "pageable": (False, "blocking"),
    "pinned": (True, "blocking"),
    "pinned, non_blocking": (True, "non_blocking"),
    "prefetched": (True, "prefetch"),
}
_N_STEPS = 8


@dataclass(frozen=True)
class Feeding:
    """A training loop to simulate.

    Args:
        step_s: Seconds that the device computes for a batch.
        load_s: Seconds that one worker takes for a batch.
        num_workers: 0: the loop loads.
        batch_bytes: What is copied to the device for a batch.
        pcie_bytes_per_s: Rate of a copy from page-locked memory.
        staging_bytes_per_s: At which the host itself copies pageable memory, into the driver's buffer.
    """

    step_s: float
    load_s: float
    num_workers: int = 4
    batch_bytes: int = 64 * 3 * 224 * 224
    pcie_bytes_per_s: float = 25e9
    staging_bytes_per_s: float = 8e9

    def __post_init__(self) -> None:
        for name in ("step_s", "load_s", "pcie_bytes_per_s", "staging_bytes_per_s"):
            require_positive(name, getattr(self, name))
        require_int("batch_bytes", self.batch_bytes)
        require_int("num_workers", self.num_workers, minimum=0)

    @property
    def parts_s(self) -> dict[str, float]:
        """What each part would take per batch if it were alone."""
        load_s = self.load_s / max(1, self.num_workers)
        return {"load": load_s, "copy": self.batch_bytes / self.pcie_bytes_per_s, "compute": self.step_s}


def simulate_feeding(way: str, feeding: Feeding, *, n_steps: int = _N_STEPS) -> pd.DataFrame:
    """Run training steps on a simulated device, fed in one of `WAYS`; the step is a kernel of a stated time.

    The loop is that of a real device: `course.trace` and `lk.CUDAPrefetcher`, unchanged.

    Returns:
        Spans as of `course.trace`, with `simulated`; `plot_timeline` draws them, `step_seconds` sums them up.

    Raises:
        ValueError: unknown way.

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    return _simulate(way, feeding, n_steps, warmup_s=feeding.step_s)


def _simulate(way: str, feeding: Feeding, n_steps: int, *, warmup_s: float) -> pd.DataFrame:
    """Args: warmup_s: Time of each of the two steps before the first that is recorded; workers load beside them."""
    require_choice("way", way, WAYS)
    is_pinned, copy = WAYS[way]
    n_bytes = min(feeding.batch_bytes, 4096)  # stand for the whole batch, at rates to match
    part = n_bytes / feeding.batch_bytes
    device = SimulatedDevice(
        pcie_bytes_per_s=part * feeding.pcie_bytes_per_s, staging_bytes_per_s=part * feeding.staging_bytes_per_s
    )
    with simulated_cuda(device):
        batch = torch.zeros(n_bytes, dtype=torch.uint8)
        batch = batch.pin_memory() if is_pinned else batch
        n_batches = n_steps + 3  # two warm up, and the prefetcher has the next one ahead in the last step, too
        loader = SimulatedLoader(
            lambda number: batch, n_batches, load_s=feeding.load_s, num_workers=feeding.num_workers
        )
        seconds = chain([warmup_s] * 2, repeat(feeding.step_s))
        return trace(
            loader,
            lambda batch: torch.cuda._sleep(round(next(seconds) * device.clock_hz)),
            n_batches=n_steps,
            device="cuda",
            copy=copy,
        )


def step_seconds(spans: pd.DataFrame) -> float:
    """Seconds from the end of one step's computing to the end of the next, over the later half of a timeline."""
    ends = spans.loc[spans["kind"] == "compute", "end_s"].sort_values().to_numpy()
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


def feeding_times(feeding: Feeding, n_steps: int = _N_STEPS) -> pd.DataFrame:
    """Each way's `ms_per_step`, and how many times as long as the longest part it is.

    Args:
        feeding: The loop.
        n_steps: To simulate, of which the later half counts; rounded up, so that this half is whole rounds of the
            workers. Workers that are slower than the step finish together, so batches come in groups.
    """
    workers = max(1, feeding.num_workers)
    n_steps = 2 * workers * math.ceil(n_steps / (2 * workers))
    longest_s = max(feeding.parts_s.values())
    # Batches that workers load beside long steps to warm up would be a lead that lasts into the half that counts.
    seconds = {way: step_seconds(_simulate(way, feeding, n_steps, warmup_s=0.0)) for way in WAYS}
    frame = pd.DataFrame({"ms_per_step": {way: 1e3 * s for way, s in seconds.items()}})
    return frame.rename_axis("way").assign(over_longest=frame["ms_per_step"] / (1e3 * longest_s), simulated=True)


def plot_feeding(data: Feeding, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Milliseconds for a step in each way, beside what loading, copying and computing alone would take.

    Args:
        data: The loop.
        **kwargs: To `Axes.barh`.
    """
    times = feeding_times(data)
    ax = ax or Figure(figsize=(WIDTH_IN, 3.2), layout="constrained").add_subplot()
    ax.barh(range(len(times)), times["ms_per_step"], **{"height": 0.6, "color": PREDICTED, **kwargs})
    labels = {part: f"{part} alone" for part in data.parts_s}
    if data.num_workers > 1:
        labels["load"] += f", by {data.num_workers} workers"
    for (part, seconds), style in zip(data.parts_s.items(), (":", "--", "-"), strict=True):
        ax.axvline(1e3 * seconds, linestyle=style, color=LIMIT, label=labels[part])
    for row, value in enumerate(times["ms_per_step"]):
        ax.annotate(f"{value:.2f}", (value, row), (4, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(times)), times.index)
    ax.set(xlabel="milliseconds per step", ylim=(len(times) - 0.4, -0.6), xlim=(0, 1.2 * times["ms_per_step"].max()))
    put_legend_below(ax)
    mark_simulated(ax)
    slow, fast = times["ms_per_step"].idxmax(), times["ms_per_step"].idxmin()
    ratio = format_ratio(times.loc[slow, "ms_per_step"] / times.loc[fast, "ms_per_step"])
    told = f"{times.loc[fast, 'ms_per_step']:.3g} ms per step"
    write_title(ax, f"each way: {told}" if ratio == "1.00" else f"{fast}: {told}, {ratio}x as fast as {slow}")
    return ax


# Slider -> its name, lowest and highest value, and how many of its units a field of `Feeding` has.
_SLIDERS: dict[str, tuple[str, float, float, float]] = {
    "step_s": ("step (ms)", 1, 200, 1e-3),
    "load_s": ("loading, one worker (ms)", 1, 500, 1e-3),
    "num_workers": ("workers", 0, 16, 1),
    "batch_bytes": ("batch (MB)", 1, 200, 1e6),
    "pcie_bytes_per_s": ("PCIe (GB/s)", 1, 64, 1e9),
}


class FeedingExplorer:
    """`plot_feeding` with sliders; without ipywidgets, or without a kernel, the picture.

    Attributes:
        feeding: What is drawn now.
        sliders: By field of `Feeding`; empty if ipywidgets is not installed.
    """

    def __init__(self, feeding: Feeding):
        self.feeding = feeding
        self.sliders: dict[str, Any] = {}
        self._box: Any = None
        self._draw()
        with suppress(ImportError):
            import ipywidgets

            self._make_sliders(ipywidgets)

    def _draw(self) -> None:
        self._figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
        plot_feeding(self.feeding, ax=self._figure.add_subplot())

    def _make_sliders(self, widgets: Any) -> None:
        for field, (name, low, high, unit) in _SLIDERS.items():
            kind = widgets.IntSlider if field == "num_workers" else widgets.FloatLogSlider
            value = asdict(self.feeding)[field] / unit
            limits: dict[str, Any] = {"min": low, "max": high}
            if kind is widgets.FloatLogSlider:
                limits = {"min": math.log10(low), "max": math.log10(high)}
            slider = kind(value=value, description=name, continuous_update=False, **limits)
            slider.style, slider.layout.width = {"description_width": "15em"}, "34em"
            slider.observe(lambda change, field=field, unit=unit: self._choose(field, change["new"] * unit), "value")
            self.sliders[field] = slider
        self._picture = widgets.Image(value=png_bytes(self._figure), format="png", layout={"max_width": "100%"})
        self._box = widgets.VBox([*self.sliders.values(), self._picture])

    def _choose(self, field: str, value: float) -> None:
        changed: dict[str, Any] = {field: int(value) if field in ("num_workers", "batch_bytes") else value}
        self.feeding = replace(self.feeding, **changed)
        self._draw()
        self._picture.value = png_bytes(self._figure)

    def __repr__(self) -> str:
        return f"{self.feeding} (simulated)"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return widget_bundle(repr(self), self._figure, self._box)
