"""Ways to feed a training step, on a simulated device: as timelines, as times, and with sliders."""

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.core import png_bytes, require_choice, require_int, require_positive
from labkit.measure import (
    LIMIT,
    PREDICTED,
    WIDTH_IN,
    format_ratio,
    mark_simulated,
    put_legend_below,
    write_title,
)  # fmt: skip
from labkit.pipeline import trace
from labkit.pipeline.simulation import SimulatedDevice, SimulatedLoader, simulated_cuda
from labkit.teach.explore import widget_bundle

# Way -> is the batch in page-locked memory, and how `lk.trace` copies it.
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

    The loop is that of a real device: `lk.trace` and `lk.CUDAPrefetcher`, unchanged.

    Returns:
        Spans as of `lk.trace`, with `simulated`; `plot_timeline` draws them, `step_seconds` sums them up.

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
            lambda number: batch, n_batches, load_s=feeding.load_s, num_workers=feeding.num_workers, stamped=True
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
