"""The complete ladder: from the loader of the first tutorial to the fast path, every rung timed in one run."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, RandomSampler

from labkit.data.dataset import ImageDataset, PILDataset
from labkit.data.pixels import PixelStore
from labkit.data.stores import Store
from labkit.errors import ArgumentError
from labkit.loading.augment import Recipe, make_augment
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.limits import decode_limit, memcpy_limit
from labkit.loading.torch_loader import Loader, LoaderConfig, make_loader
from labkit.measure.compare import DifferentWorkWarning, compare
from labkit.measure.frames import measured_runs
from labkit.measure.plots import COLORS, LIMIT, RUNS, SMALL_PT, WIDTH_IN, make_axes, write_title
from labkit.measure.statistics import describe, quiet_summary
from labkit.util.machine import Scale, usable_cores

Factory = Callable[[], Iterable[Any]]

EXPERIMENT = "11 ladder"
NOTEBOOK = "11_prepare_once"
FRAME, FIGURE = "11_ladder.csv", "11_ladder.png"  # next to the notebook, too
NAIVE = "PIL, one process"

_CROP_ONLY = Recipe(jitter=0)


def ladder_variants(store: Store, pixels: PixelStore, scale: Scale) -> dict[str, Factory]:
    """The rungs, each of which changes one thing, and the limits; for `compare`.

    Args:
        store: Encoded photos.
        pixels: The same photos, as raw pixels.
        scale: Its `batch_size` is used, or a smaller one that gives each core a few batches.

    Returns:
        Label -> factory of one run's batches. Labels that end in "limit" are not loaders: see `is_limit`. A
        loader that decodes parts of JPEGs may exceed the limit for whole ones.

    Raises:
        ValueError: `store` and `pixels` do not hold the same photos.

    Taught in: notebooks/11_prepare_once.ipynb
    """
    if list(store.keys()) != list(pixels.keys):
        raise ArgumentError(f"{len(pixels)} raw pixels and {len(store.keys())} photos differ: build the pixels again")
    batch_size = max(1, min(scale.batch_size, len(pixels) // (2 * usable_cores())))
    naive = PILDataset(store, transform=make_augment(_CROP_ONLY, "pil"))
    tensors = ImageDataset(store, transform=make_augment(_CROP_ONLY, "v2"))
    bytes_only = ImageDataset(store, transform=make_augment(_CROP_ONLY, "v2", part="geometry"))
    return {
        NAIVE: partial(_load_in_one_process, naive, batch_size),
        "turbojpeg, crops of tensors": partial(_load_in_one_process, tensors, batch_size),
        "one worker per core": partial(_load_in_workers, tensors, batch_size),
        "uint8 instead of float": partial(_load_in_workers, bytes_only, batch_size),
        "threads: BatchLoader": partial(_load_in_threads, store, len(pixels), batch_size, True),
        "no antialiasing": partial(_load_in_threads, store, len(pixels), batch_size, False),
        "raw pixels: PixelStore": partial(_load_in_threads, pixels, len(pixels), batch_size, False),
        "whole JPEGs, decode limit": lambda: chain(*repeat(decode_limit(store), 2)),
        "memcpy limit": lambda: memcpy_limit(16_384),
    }


def measure_rungs(
    variants: dict[str, Factory], *, experiment: str, factors: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """Compare loaders and limits whose runs may load different numbers of images; the first is the baseline.

    Torch has one thread meanwhile, and the frame's rows carry no verdict, since limits are not loaders.
    """
    # Rates are per image, and an image costs the same work each time.
    baseline, num_threads = next(iter(variants)), torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: one process is to be one core
    try:
        with warnings.catch_warnings(action="ignore", category=DifferentWorkWarning):
            return compare(variants, baseline=baseline, experiment=experiment, verdicts=False, factors=factors)
    finally:
        torch.set_num_threads(num_threads)


def is_limit(variants: pd.Series) -> pd.Series:
    """Which labels name a limit, drawn as a line to compare loaders with."""
    return variants.astype(str).str.endswith("limit")


def is_ladder(frame: pd.DataFrame) -> bool:
    """Whether these are the runs of a complete ladder, of any photos."""
    return str(frame["experiment"].iloc[0]).startswith(EXPERIMENT)


def summarize_rungs(data: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """Summarize rungs, as `lk.summarize` does, with `speedup` as the ratio of the rates, which are printed beside it.

    Args:
        data: Runs from `compare`.
        baseline: The rung to compare with. Default: the first.
    """
    summary = quiet_summary(data, baseline)
    rates = summary["images_per_s"]
    return summary.assign(speedup=rates / rates[baseline or rates.index[0]])


def plot_rungs(data: pd.DataFrame, *, ax: Axes | None = None, about: str = "") -> Axes:
    """Draw images per second of each rung on a logarithmic axis: each run is a dot, each limit a dashed line.

    The title compares the fastest rung with the first.

    Args:
        data: Runs from `compare`. Labels that end in "limit" are drawn as lines.
        ax: Axes to draw on; default: a new figure.
        about: What was measured; the title ends with it.

    Taught in: notebooks/11_prepare_once.ipynb
    """
    summary = summarize_rungs(data)  # the dots show how runs vary
    runs = measured_runs(data)
    limits = is_limit(summary.index.to_series())
    rungs = summary[~limits]
    ax = ax or make_axes(_height_in(len(rungs)))
    for row, (label, rung) in enumerate(rungs.iterrows()):
        _draw_rung(ax, row, rung, runs.loc[runs["variant"] == label, "images_per_s"])
    for number, (label, rate) in enumerate(summary.loc[limits, "images_per_s"].sort_values().items()):
        _draw_limit(ax, label, rate, higher=number % 2 == 1)
    ax.set_yticks(range(len(rungs)), rungs.index)
    ax.set(xscale="log", xlabel="images per second", ylim=(len(rungs) - 0.4, -0.6))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    best = rungs["images_per_s"].idxmax()
    message = describe(rungs.loc[[best]], summary.index[0])
    write_title(ax, f"{message} ({about})" if about else message)
    return ax


def tell_rungs(data: pd.DataFrame) -> str:
    """What each rung brings over the one before it, and all together, in words."""
    summary = summarize_rungs(data)
    times = summary[~is_limit(summary.index.to_series())]["speedup"]  # over the first
    gains = [f"{label}, {ratio:.1f} times" for label, ratio in (times / times.shift()).iloc[1:].items()]
    whole = f"In all, that is {times.iloc[-1]:.1f} times as fast."
    return f"How fast each rung is, compared with the one before it: {'; '.join(gains)}. {whole}"


def draw_figure(runs: pd.DataFrame) -> Figure:
    """Draw a ladder as a new figure, with its photos and machine in the title."""
    n_rungs = int((~is_limit(runs["variant"].drop_duplicates())).sum())
    figure = Figure(figsize=(WIDTH_IN, _height_in(n_rungs)), layout="constrained")
    photos = runs["photos"].iloc[0] if "photos" in runs else runs["experiment"].iloc[0]
    plot_rungs(runs, ax=figure.add_subplot(), about=f"{photos}, {runs['env_id'].iloc[0]}")
    return figure


def _load_in_one_process(dataset: ImageDataset, batch_size: int) -> DataLoader:
    return DataLoader(dataset, batch_size, sampler=_shuffled(len(dataset)))


def _load_in_workers(dataset: ImageDataset, batch_size: int) -> Loader:
    """A loader whose workers end with the run: idle ones would count in the memory of other rungs."""
    return make_loader(dataset, LoaderConfig(batch_size, persistent_workers=False), sampler=_shuffled(len(dataset)))


def _load_in_threads(source: Store | PixelStore, n_photos: int, batch_size: int, antialias: bool) -> BatchLoader:
    return BatchLoader(source, batch_size=batch_size, antialias=antialias, sampler=_shuffled(n_photos))


def _shuffled(n_photos: int) -> RandomSampler:
    return RandomSampler(range(n_photos), generator=torch.Generator().manual_seed(0))


def _draw_rung(ax: Axes, row: int, rung: pd.Series, rates: pd.Series) -> None:
    ax.scatter(rates, [row] * len(rates), s=16, color=RUNS, zorder=2)
    ax.scatter(rung["images_per_s"], row, s=70, color=COLORS[0], zorder=3)
    ax.axhline(row, color="0.9", linewidth=1, zorder=0)
    ratio = "" if rung["verdict"] == "baseline" else f"  {rung['speedup']:.1f}x"
    ax.annotate(f"{rung['images_per_s']:,.0f}{ratio}", (1.01, row), xycoords=("axes fraction", "data"), va="center")


def _draw_limit(ax: Axes, label: str, rate: float, higher: bool) -> None:
    """Draw a line with its label; every second label is higher, since limits may be close together."""
    ax.axvline(rate, color=LIMIT, linestyle="--", linewidth=1.2, zorder=1)
    ax.annotate(
        f"{label} {rate:,.0f}", (rate, 1.0), (0, 13 if higher else 1), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="center", va="bottom", color=LIMIT, fontsize=SMALL_PT,
    )  # fmt: skip


def _height_in(n_rungs: int) -> float:
    return 1.5 + 0.4 * n_rungs
