"""The complete ladder: one training, from its first loader to the fast path, every rung timed in one run."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.transforms import v2

from labkit.course.training import (
    ALONE,
    STEP_ALONE,
    TRAINING,
    ResNetStep,
    StandInStep,
    copied_ahead,
    measure_training,
    training_table,
    with_printed_ratio,
)
from labkit.data.dataset import ImageDataset, PILDataset
from labkit.data.pixels import PixelStore
from labkit.data.stores import Store
from labkit.errors import ArgumentError
from labkit.loading.augment import Recipe, make_augment
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.limits import decode_limit
from labkit.loading.torch_loader import Loader, LoaderConfig, make_loader
from labkit.measure.frames import measured_runs
from labkit.measure.plots import COLORS, LIMIT, RUNS, SMALL_PT, WIDTH_IN, make_axes, write_title
from labkit.measure.statistics import quiet_summary
from labkit.util.machine import Scale, usable_cores

EXPERIMENT = "11 ladder"
NOTEBOOK = "11_prepare_once"
FRAME, FIGURE = "11_ladder.csv", "11_ladder.png"  # next to the notebook, too

NAIVE = "PIL, one process"
TENSORS, WORKERS, BYTES, AHEAD = "02 tensors", "03 a worker per core", "04 bytes", "07 copied ahead"
THREADS, SMALL, PIXELS, QUICK = "11 threads", "11 small JPEGs", "11 raw pixels", "11 no antialiasing"

# The part of the work of the rungs before it that a rung, and each one after it, does without.
LEAVES_OUT = {
    BYTES: "normalizing, left to the device",
    SMALL: "photos of full size",
    PIXELS: "decoding",
    QUICK: "averaging",
}

# Of an epoch: the slow rungs then take seconds, and other photos are drawn in each, so that no cache holds them.
_MOST_PHOTOS = 256

_CROP_ONLY = Recipe(jitter=0)


def ladder_loaders(
    store: Store, small: Store, pixels: PixelStore, scale: Scale, step: StandInStep | ResNetStep
) -> dict[str, Iterable[Any]]:
    """The loader of every rung, each of which changes one thing in the one before it; for `measure_rungs`.

    All give random crops of 224 x 224, flipped or not, of up to 256 photos in an epoch, drawn anew. `LEAVES_OUT` says
    what some of them leave out.

    Args:
        store: Encoded photos.
        small: The same photos as small JPEGs.
        pixels: The same small photos as raw pixels.
        scale: Its `batch_size` is used, or a smaller one that gives each core a few batches.
        step: From `make_step`, for the rung that copies ahead.

    Raises:
        ValueError: the three do not hold the same photos.

    Taught in: notebooks/11_prepare_once.ipynb
    """
    keys = list(store.keys())
    for what, others in (("raw pixels", list(pixels.keys)), ("small photos", list(small.keys()))):
        if others != keys:
            raise ArgumentError(f"{len(others)} {what} and {len(keys)} photos differ: build them again")
    batch_size = max(1, min(scale.batch_size, min(len(pixels), _MOST_PHOTOS) // (2 * usable_cores())))
    tensors = ImageDataset(store, transform=make_augment(_CROP_ONLY, "v2"))
    as_bytes = _in_workers(ImageDataset(store, transform=make_augment(_CROP_ONLY, "v2", part="geometry")), batch_size)
    return {
        NAIVE: _in_one_process(PILDataset(store, transform=make_augment(_CROP_ONLY, "pil")), batch_size),
        TENSORS: _in_one_process(tensors, batch_size),
        WORKERS: _in_workers(tensors, batch_size),
        BYTES: as_bytes,
        AHEAD: copied_ahead(as_bytes, step),
        THREADS: copied_ahead(_in_threads(store, len(keys), batch_size, True), step),
        SMALL: copied_ahead(_in_threads(small, len(keys), batch_size, True), step),
        PIXELS: copied_ahead(_in_threads(pixels, len(keys), batch_size, True), step),
        QUICK: copied_ahead(_in_threads(pixels, len(keys), batch_size, False), step),
    }


def measure_rungs(
    loaders: Mapping[str, Iterable[Any]],
    step: StandInStep | ResNetStep,
    *,
    experiment: str,
    limits: Mapping[str, Callable[[], Any]] | None = None,
    factors: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Time every rung's loader alone and in the training, and the step alone, all in one interleaved run.

    Args:
        loaders: From `ladder_loaders`.
        step: From `make_step`.
        limits: Labels that end in "limit" -> factories for `lk.compare`; drawn as lines.
        experiment, factors: As for `lk.compare`.
    """
    factors = {"step": repr(step), **(factors or {})}
    return measure_training(loaders, step, experiment=experiment, more=limits, factors=factors)


def ladder_limits(store: Store) -> dict[str, Callable[[], Any]]:
    """Whole JPEGs decoded on all cores, and nothing else. A loader that decodes parts of them may be faster."""
    return {"decoding whole JPEGs, limit": lambda: decode_limit(store)}


def same_crops(store: Store, small: Store, pixels: PixelStore, n_photos: int = 32) -> pd.Series:
    """How far the middle of a photo, resized to 256 and cropped to 224, differs between the ladder's ways.

    Random crops cannot be compared, since each way draws its own.

    Args:
        store, small, pixels: As for `ladder_loaders`.
        n_photos: That are compared, at most.

    Returns:
        By way, the mean difference from PIL's values, in levels of 0 to 255.
    """
    middle = [v2.Resize(256, antialias=True), v2.CenterCrop(224)]
    by_pil = PILDataset(store, transform=transforms.Compose([*middle, transforms.PILToTensor()]))
    truth = torch.stack([by_pil[number][0] for number in range(min(n_photos, len(by_pil)))]).int()
    tensors = ImageDataset(store, transform=v2.Compose(middle))
    ways = {TENSORS: torch.stack([tensors[number][0] for number in range(len(truth))])}
    sources = {THREADS: (store, True), SMALL: (small, True), PIXELS: (pixels, True), QUICK: (pixels, False)}
    for name, (source, antialias) in sources.items():
        loader = BatchLoader(source, size=224, train=False, batch_size=len(truth), antialias=antialias)
        ways[name] = next(iter(loader))[0]
    return pd.Series({name: float((found.int() - truth).abs().sum() / truth.numel()) for name, found in ways.items()})


def is_limit(variants: pd.Series) -> pd.Series:
    """Which labels name a limit, drawn as a line to compare loaders with."""
    return variants.astype(str).str.endswith("limit")


def is_ladder(frame: pd.DataFrame) -> bool:
    """Whether these are the runs of a complete ladder, of any photos."""
    return str(frame["experiment"].iloc[0]).startswith(EXPERIMENT)


def ladder_table(runs: pd.DataFrame) -> pd.DataFrame:
    """The rungs, as a table to show: both rates, waiting, the ratio to the first rung, and what it does without.

    The ratio is that of the rates that stand beside it. The interval is that of the ratios within rounds.
    """
    table = training_table(runs)
    return pd.DataFrame({
        "loader alone (images/s)": table["alone"].map("{:,.0f}".format),
        "training (images/s)": table["training"].map("{:,.0f}".format),
        "waiting": table["waiting"].map("{:.0%}".format),
        "training, times as fast": [
            "" if number == 0 else f"{row.speedup:.1f} [{row.ci_low:.1f}, {row.ci_high:.1f}]"
            for number, row in enumerate(table.itertuples())
        ],
        "without": [LEAVES_OUT.get(str(name), "") for name in table.index],
    }, index=table.index.rename("rung"))  # fmt: skip


def alone_over(runs: pd.DataFrame, rung: str, other: str) -> pd.Series:
    """The ratio of two rungs' loaders alone: `speedup`, as the ratio of their rates, with `ci_low` and `ci_high`."""
    return with_printed_ratio(quiet_summary(runs, f"{other}{ALONE}"), f"{other}{ALONE}").loc[f"{rung}{ALONE}"]


def plot_rungs(runs: pd.DataFrame, *, ax: Axes | None = None, about: str = "") -> Axes:
    """Draw each rung's two rates on a logarithmic axis: of its loader alone and of the training; limits are lines.

    Args:
        runs: From `measure_rungs`.
        ax: Axes to draw on; default: a new figure.
        about: What was measured; the title ends with it.

    Taught in: notebooks/11_prepare_once.ipynb
    """
    table, measured = training_table(runs), measured_runs(runs)
    ax = ax or make_axes(_height_in(len(table)))
    kinds = ((ALONE, "o", COLORS[0], "loader alone"), (TRAINING, "D", COLORS[2], "training"))
    for row, (name, rung) in enumerate(table.iterrows()):
        ax.axhline(row, color="0.9", linewidth=1, zorder=0)
        ax.plot([rung["training"], rung["alone"]], [row, row], color="0.7", linewidth=2, zorder=1)
        for ending, mark, color, kind in kinds:
            rates = measured.loc[measured["variant"] == f"{name}{ending}", "images_per_s"]
            ax.scatter(rates, [row] * len(rates), s=12, color=RUNS, zorder=2)
            rate = rung["alone" if ending == ALONE else "training"]
            ax.scatter(rate, row, s=60, marker=mark, color=color, zorder=3, label=None if row else kind)
        waits = f"{rung['training']:,.0f}  {rung['speedup']:.1f}x  {rung['waiting']:.0%}"
        ax.annotate(waits, (1.01, row), xycoords=("axes fraction", "data"), va="center")
    ax.annotate("training, waiting", (1.01, -0.65), xycoords=("axes fraction", "data"), va="bottom", fontsize=SMALL_PT)
    summary = quiet_summary(runs)["images_per_s"]
    lines = {label.removesuffix(", limit"): summary[label] for label in summary.index if label.endswith("limit")}
    lines["step alone"] = summary[STEP_ALONE]
    for number, (label, rate) in enumerate(sorted(lines.items(), key=lambda line: line[1])):
        _draw_line(ax, label, rate, higher=number % 2 == 1)
    names = [f"{name}\n(without {LEAVES_OUT[name]})" if name in LEAVES_OUT else name for name in table.index]
    ax.set_yticks(range(len(table)), names, fontsize=SMALL_PT)
    ax.set(xscale="log", xlabel="images per second", ylim=(len(table) - 0.4, -0.6))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.legend(loc="upper right", fontsize=SMALL_PT, frameon=True)
    message = _message(table)
    of_own = "-photos-" in str(runs["env_id"].iloc[0])  # a stored ladder is of the lab's
    write_title(ax, f"{message} ({about})" if about else message, of_photos=of_own)
    return ax


def tell_rungs(runs: pd.DataFrame) -> str:
    """What each rung brings over the one before it, and all together, in words."""
    table = training_table(runs)
    gains = [f"{label}, {ratio:.1f} times" for label, ratio in (table["training"] / table["training"].shift()).items()]
    return (
        f"How fast each rung trains, compared with the one before it: {'; '.join(gains[1:])}. {_message(table)}. "
        f"The step is {measured_runs(runs)['step'].iloc[0]}."
    )


def draw_figure(runs: pd.DataFrame) -> Figure:
    """Draw a ladder as a new figure, with its photos and machine in the title."""
    figure = Figure(figsize=(WIDTH_IN, _height_in(len(training_table(runs)))), layout="constrained")
    photos = runs["photos"].iloc[0] if "photos" in runs else runs["experiment"].iloc[0]
    plot_rungs(runs, ax=figure.add_subplot(), about=f"{photos}, {runs['env_id'].iloc[0]}")
    return figure


def _message(table: pd.DataFrame) -> str:
    best, loads = table["speedup"].max(), table["alone"].max() / table["alone"].iloc[0]
    return f"The training becomes {best:.1f} times as fast, its loader {loads:.0f} times"


def _in_one_process(dataset: ImageDataset, batch_size: int) -> DataLoader:
    return DataLoader(dataset, batch_size, sampler=_shuffled(len(dataset)))


def _in_workers(dataset: ImageDataset, batch_size: int) -> Loader:
    """A loader whose workers end with the run: idle ones would count in the memory of other rungs."""
    return make_loader(dataset, LoaderConfig(batch_size, persistent_workers=False), sampler=_shuffled(len(dataset)))


def _in_threads(source: Store | PixelStore, n_photos: int, batch_size: int, antialias: bool) -> BatchLoader:
    return BatchLoader(source, batch_size=batch_size, antialias=antialias, sampler=_shuffled(n_photos))


def _shuffled(n_photos: int) -> RandomSampler:
    drawn = min(n_photos, _MOST_PHOTOS)
    return RandomSampler(range(n_photos), num_samples=drawn, generator=torch.Generator().manual_seed(0))


def _draw_line(ax: Axes, label: str, rate: float, higher: bool) -> None:
    """Draw a line with its label; every second label is higher, since lines may be close together."""
    ax.axvline(rate, color=LIMIT, linestyle="--", linewidth=1.2, zorder=1)
    ax.annotate(
        f"{label} {rate:,.0f}", (rate, 1.0), (0, 13 if higher else 1), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="center", va="bottom", color=LIMIT, fontsize=SMALL_PT,
    )  # fmt: skip


def _height_in(n_rungs: int) -> float:
    return 1.7 + 0.45 * n_rungs
