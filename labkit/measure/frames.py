"""Frames of runs: one row per run, made from measurements, saved and loaded; and what they say of an epoch.

What `compare` fills in, seconds by the wall clock:

experiment, variant, baseline: Labels: of the comparison, of what ran, and of the variant that speed-ups are over.
round, order, is_warmup: The round, the place of the run in it, and whether it only warmed up, and counts nowhere.
startup_s, first_batch_s: The factory and `iter()`; the wait for the first batch.
settle_s, n_settle_batches: The batches that were requested before the first one came.
steady_s, n_steady_batches, n_steady_images: The steady state. torch's DataLoader, `make_loader`, `BatchLoader` and
    `ReplayLoader`, also in a `CUDAPrefetcher` or `with_step`, are lengthened: they go on with the next pass until it
    has lasted `lk.scale().min_steady_s`. Other iterables run as they are; theirs begins after the first batch.
shutdown_s: From the last batch to the end of the iterable: the end of the workers.
is_steady: False if an iterable ended within 8 batches after its first. `images_per_s` and the costs are then those of
    the whole run, the wait for the first batch included, and otherwise those of the steady state alone.
images_per_s: `n_steady_images` / `steady_s`. `epoch_time` tells what an epoch of some length takes.
cpu_s, steal_s, others_cpu_s: Of all processes of the run; stolen from all cores; used on all cores by others.
n_images: All images of the run.
peak_mem_mb: Taken in the first round only, since reading it would disturb the others.
batch_size, num_workers: Of the loader, if it has attributes of these names.
torch_num_threads: torch's threads when `compare` was called, the same for all variants.
storage: A factor: where the data lie. A name that contains "simulated" marks plots.
page_cache: Whether the data were in it: "warm" if nothing was read from storage, else "unknown".
seed: Of the order of the runs.
n_looks, has_verdict: How often the runs were looked at before `compare` stopped; whether `summarize` judges.
device, env_id: "cpu", "cuda" or "cuda (simulated)"; the machine, by `labkit.util.machine.env_id`.
scale: Of the run.
rung: Whether it is a notebook's main comparison.
"""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.errors import ArgumentError, WrongTypeError
from labkit.util.arguments import require_a, require_file, require_int, require_local_path
from labkit.util.files import write_atomic
from labkit.util.machine import device_kind, env_id, scale
from labkit.util.redact import redact

# Raise it when figures change their meaning, as when a rate leaves out what it included: stored runs are then too old.
MEASURE_VERSION = 4

# Column -> what `load_frame` insists on: text, finite numbers, or anything. Units are in the names. Any further column
# is a factor, and a file may lack a column that is younger than it.
_KINDS: dict[str, type] = {
    "experiment": str,
    "variant": str,
    "baseline": str,
    "round": float,
    "order": float,
    "is_warmup": object,
    "n_images": float,
    "startup_s": float,
    "first_batch_s": float,
    "settle_s": float,
    "n_settle_batches": object,
    "steady_s": float,
    "n_steady_batches": object,
    "n_steady_images": object,
    "shutdown_s": float,
    "is_steady": object,
    "images_per_s": float,
    "cpu_s": float,
    "steal_s": object,
    "others_cpu_s": object,
    "peak_mem_mb": float,
    "batch_size": object,
    "num_workers": object,
    "torch_num_threads": object,
    "storage": str,
    "page_cache": str,
    "device": str,
    "seed": object,
    "n_looks": object,
    "has_verdict": object,
    "env_id": str,
}
COLUMNS = tuple(_KINDS)
_NEEDED = ("variant", "round", "is_warmup", "images_per_s", "env_id")  # without them, a file is no frame of runs


def make_frame(rows: Iterable[dict[str, Any]], **factors: Any) -> pd.DataFrame:
    """The frame of `rows`: `COLUMNS` first, then every other key. `factors` fill columns that no row has.

    User names, passwords and queries are removed from URLs in labels and factors, since frames are saved and shown.
    """
    frame = pd.DataFrame(list(rows))
    defaults = {"env_id": env_id(), "device": device_kind(), "scale": scale().name, "rung": True}
    for name, value in {**defaults, **factors}.items():
        if name not in frame:
            frame[name] = value
    for name in [name for name, kind in frame.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]:
        frame[name] = frame[name].map(lambda value: redact(value) if isinstance(value, str) else value)
    return frame.reindex(columns=[*COLUMNS, *[name for name in frame if name not in COLUMNS]])


def from_timeit(result: Any, label: str, n_images: int) -> pd.DataFrame:
    """Runs of `%timeit -o` as a frame.

    Args:
        result: IPython's `TimeitResult`.
        label: Name of the variant.
        n_images: Images that one loop of the statement handles.

    A run is IPython's mean over `result.loops` loops. IPython reports neither warm-ups nor start-up, and runs of
    different `%timeit` calls are not interleaved: `order` is empty, and `summarize` notes it.

    >>> result = %timeit -o -q for batch in loader: pass  # doctest: +SKIP
    >>> lk.from_timeit(result, "my loader", n_images=len(loader.dataset))  # doctest: +SKIP
    """
    if not hasattr(result, "all_runs"):
        raise WrongTypeError(f"result must be what `result = %timeit -o ...` gives, got {result!r:.100}")
    return _frame_of_seconds([run / result.loops for run in result.all_runs], label, n_images, "timeit")


def from_timer(measurement: Any, label: str, n_images: int) -> pd.DataFrame:
    """Runs of `torch.utils.benchmark.Timer` (a `Measurement`) as a frame; arguments as in `from_timeit`.

    >>> from torch.utils.benchmark import Timer
    >>> measured = Timer("sum(x)", globals={"x": [1, 2, 3]}).blocked_autorange(min_run_time=0.01)
    >>> frame = lk.from_timer(measured, "sum", n_images=3)
    """
    if not hasattr(measurement, "times"):
        raise WrongTypeError(f"measurement must be what torch's Timer gives, got {measurement!r:.100}")
    return _frame_of_seconds(measurement.times, label, n_images, "timer")


def _frame_of_seconds(seconds: Iterable[float], label: str, n_images: int, timer: str) -> pd.DataFrame:
    own = {"variant": label, "is_warmup": False, "n_images": require_int("n_images", n_images)}
    rows = [
        {**own, "round": number, "steady_s": run, "images_per_s": n_images / run} for number, run in enumerate(seconds)
    ]
    return make_frame(rows, experiment=timer)


def measured_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of a frame without its warm-ups."""
    require_a(
        pd.DataFrame, "the runs", frame, "a frame, as lk.compare returns or labkit.measure.frames.load_frame reads it"
    )
    if "is_warmup" not in frame:
        raise ArgumentError(f"this is no frame of runs: it lacks is_warmup, and has {', '.join(map(str, frame))[:200]}")
    return frame[~frame["is_warmup"].astype(bool)]


def save_frame(frame: pd.DataFrame, path: str | os.PathLike) -> Path:
    """Write a frame as CSV; a file is replaced as a whole or not at all."""
    text = frame.to_csv(index=False)
    if "\r" in text:  # in a label: pandas quotes it only if lines end with it too
        text = frame.to_csv(index=False, lineterminator="\r\n")
    path = require_local_path("path", path)
    write_atomic(path, text.encode("utf-8", "surrogateescape"))  # labels may be file names
    return path


def load_frame(path: str | os.PathLike) -> pd.DataFrame:
    """Read a saved frame. Labels come back unchanged, even "1" and "None".

    A column that the file lacks, as it is older than the column, comes back empty.

    >>> runs.to_csv("runs.csv", index=False)  # doctest: +SKIP
    >>> runs = load_frame("runs.csv")  # doctest: +SKIP

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not a frame of runs, or a column holds an impossible value; names the file.
    """
    # pandas would convert the label "1" to a number and "None" to a missing value: text columns are read as text.
    text: dict[str, Any] = {name: object for name, kind in _KINDS.items() if kind is str}
    options: dict[str, Any] = {"index_col": False, "encoding_errors": "surrogateescape"}
    path = require_file("path", path, "name the saved frame in it, such as runs.csv")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of a row that is longer than the header
            empty = {name: ["", "nan", "NaN"] for name in pd.read_csv(path, nrows=0, **options) if name not in text}
            frame = pd.read_csv(path, dtype=text, keep_default_na=False, na_values=empty, **options)
        if lacking := [name for name in _NEEDED if name not in frame]:
            raise ArgumentError(f"it lacks {', '.join(lacking)}")
        if younger := {name: "" if name in text else np.nan for name in COLUMNS if name not in frame}:
            others = [name for name in frame if name not in COLUMNS]
            frame = frame.assign(**younger)[[*COLUMNS, *others]]
        if not frame.empty:
            _check_values(frame)
    except (ValueError, pd.errors.ParserWarning) as error:
        raise ArgumentError(f"{path} is not a frame of runs: {error}") from error
    return frame


def _check_values(frame: pd.DataFrame) -> None:
    for name in (name for name, kind in _KINDS.items() if kind is float):
        if not pd.api.types.is_numeric_dtype(frame[name]) or np.isinf(frame[name]).any():
            raise ArgumentError(f"{name} must hold finite numbers")
    if frame["is_warmup"].dtype != bool:
        raise ArgumentError("is_warmup must hold True or False")
    if not (frame["images_per_s"] > 0).all():
        raise ArgumentError("images_per_s must hold numbers > 0")


def epoch_time(frame: pd.DataFrame, n_batches: int) -> pd.DataFrame:
    """Seconds of an epoch of `n_batches` batches, start and end of the workers included.

    Args:
        frame: Runs, as `compare` returns them.
        n_batches: Batches of the epoch: of your own data set, not of the run that was timed.

    Returns:
        One row per variant, in order of appearance, medians over its runs: `startup_s`, `first_batch_s`, `batches_s`
        (the wait for all the other batches), `shutdown_s`, `epoch_s` (their sum) with `epoch_s_low` and `epoch_s_high`
        (its quartiles), and `overhead`: the share of the epoch that is not spent at the steady rate.

    >>> lk.epoch_time(runs, n_batches=5005)  # an epoch of ImageNet in batches of 256  # doctest: +SKIP

    Raises:
        ValueError: `n_batches` is below 1, or the frame has no runs of `compare`.

    Taught in: notebooks/00_measure.ipynb
    """
    n_batches = require_int("n_batches", n_batches)
    runs = measured_runs(frame).dropna(subset=["startup_s", "first_batch_s", "steady_s", "shutdown_s"])
    if runs.empty:
        raise ArgumentError("no run of the frame has a start-up and an end: pass a frame from labkit.compare")
    n_more = n_batches - 1
    n_settling = runs["n_settle_batches"].clip(upper=n_more)
    settling_s = runs["settle_s"] * (n_settling / runs["n_settle_batches"].where(runs["n_settle_batches"] > 0, 1))
    # A run of one batch has no other to tell how long the next takes.
    batch_s = (runs["steady_s"] / runs["n_steady_batches"]).where(runs["n_steady_batches"] > 0, runs["first_batch_s"])
    parts = runs[["variant", "startup_s", "first_batch_s"]].assign(
        batches_s=settling_s + (n_more - n_settling) * batch_s, shutdown_s=runs["shutdown_s"]
    )
    parts["epoch_s"] = parts.drop(columns="variant").sum(axis=1)
    parts["overhead"] = 1 - n_batches * batch_s / parts["epoch_s"]
    table = parts.groupby("variant", sort=False)
    found = table.median()
    low, high = (table["epoch_s"].quantile(q) for q in (0.25, 0.75))
    return found.assign(epoch_s_low=low, epoch_s_high=high)[
        ["startup_s", "first_batch_s", "batches_s", "shutdown_s", "epoch_s", "epoch_s_low", "epoch_s_high", "overhead"]
    ]
