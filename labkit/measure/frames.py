"""The tidy frame of runs, and what may be concluded from it."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.core import env_id, redact, scale, write_atomic

# One row a run. Units are in the names; any further column is a factor.
COLUMNS = (
    "experiment", "variant", "baseline", "round", "order", "is_warmup", "n_images", "startup_s", "first_batch_s",
    "steady_s", "images_per_s", "cpu_s", "peak_mem_mb", "batch_size", "num_workers", "storage", "page_cache",
    "device", "seed", "env_id",
)  # fmt: skip

_TEXT = ("experiment", "variant", "baseline", "storage", "page_cache", "device", "env_id")
_MEASURED = (
    "round", "order", "n_images", "startup_s", "first_batch_s", "steady_s", "images_per_s", "cpu_s", "peak_mem_mb",
)  # fmt: skip

# Of the interval that a verdict rests on. With 95 %, as is shown, one in 20 equal variants would be called different on
# a quiet machine, and more where neighbours come and go; and a notebook draws a dozen verdicts.
_VERDICT_CONFIDENCE = 0.99

_UNSTABLE = 0.25  # spread (interquartile range / median) from which a variant counts as unstable


class InstabilityWarning(UserWarning):
    """The runs of a variant scatter or drift so much that the machine, not the code, may be what was measured."""


def make_frame(rows: Iterable[dict[str, Any]], **factors: Any) -> pd.DataFrame:
    """The tidy frame of `rows`: `COLUMNS` first, then every other key; `factors` fill what a row leaves open.

    Frames are kept and shown: addresses in labels and factors lose users, passwords and queries.
    """
    frame = pd.DataFrame(list(rows))
    for name, value in {
        "env_id": env_id(),
        "device": _device(),
        "scale": scale().name,
        "rung": True,
        **factors,
    }.items():
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

    A run is IPython's mean over `result.loops` loops; warm-ups and start-up are not told, and runs of different
    `%timeit` calls are not interleaved, so `order` is empty and `summarize` says so.
    """
    return _from_seconds([run / result.loops for run in result.all_runs], label, n_images, "timeit")


def from_timer(measurement: Any, label: str, n_images: int) -> pd.DataFrame:
    """Runs of `torch.utils.benchmark.Timer` (a `Measurement`) as a frame; arguments as in `from_timeit`."""
    return _from_seconds(measurement.times, label, n_images, "timer")


def summarize(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """What the runs allow to be said of each variant.

    Args:
        frame: Runs, as `compare` gives them.
        baseline: The variant that speed-ups refer to; default: the frame's own.

    Returns:
        One row a variant, in order of appearance: `n_runs`, `images_per_s` (median), `spread` (interquartile range /
        median), `cpu_s_per_1000`, `peak_mem_mb`, `speedup` (geometric mean of the ratios within rounds), `ci_low`,
        `ci_high` (95 %), `verdict` (`baseline`, `faster`, `slower`, `inconclusive`) and `note`.

        A verdict takes a 99 % interval that leaves out 1. Where only the 95 % interval does, the verdict is
        `inconclusive`, and the note says which way it leans.

        The interval is a percentile bootstrap over rounds, never narrower than Student's interval of the paired log
        ratios: resampling 5 rounds cannot leave their own range, and alone would call equal variants different in 1
        of 16 comparisons.

    Raises:
        ValueError: no runs, an unknown baseline, or runs of more than one environment.

    Warns:
        InstabilityWarning: runs scatter or drift; names the variant.

    Taught in: notebooks/00_measure.ipynb
    """
    runs = frame[~frame["is_warmup"].astype(bool)]
    baseline = _checked_baseline(runs, baseline)
    rows = [_summary_of(runs, variant, baseline) for variant in runs["variant"].unique()]
    summary = pd.DataFrame(rows).set_index("variant")
    for variant, note in summary["note"].items():
        if "unstable" in note:
            warnings.warn(f"{variant}: {note}", InstabilityWarning, stacklevel=2)
    return summary


def quiet_summary(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """`summarize` without its warning, for callers that show or heed the column `note` or the interval."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstabilityWarning)
        return summarize(frame, baseline)


def speedup_interval(
    ratios: np.ndarray, others: np.ndarray | None = None, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a speed-up from the ratios of paired rounds (or from two unpaired samples of rates).

    One round gives no interval: (nan, nan).
    """
    logs = np.log(ratios)
    if others is None:
        boot, student = _bootstrap(_means(logs, confidence), confidence, len(logs)), _student(logs, confidence)
    else:
        other_logs = np.log(others)
        sizes = min(len(logs), len(other_logs))
        boot = _bootstrap(_means(logs, confidence) - _means(other_logs, confidence, seed=1), confidence, sizes)
        student = _welch(logs, other_logs, confidence)
    low, high = min(boot[0], student[0]), max(boot[1], student[1])
    with np.errstate(over="ignore"):  # of two wild runs an interval may reach to infinity
        return float(np.exp(low)), float(np.exp(high))


def verdict_of(ratios: np.ndarray, others: np.ndarray | None = None) -> str:
    """`faster`, `slower` or `inconclusive`; arguments as in `speedup_interval`. Wrong for one in 100 equal variants."""
    return _side(speedup_interval(ratios, others, confidence=_VERDICT_CONFIDENCE))


def _side(interval: tuple[float, float]) -> str:
    low, high = interval
    return "faster" if low > 1 else "slower" if high < 1 else "inconclusive"


def save_frame(frame: pd.DataFrame, path: str | os.PathLike) -> Path:
    """Write a frame as CSV, whole or not at all."""
    text = frame.to_csv(index=False)
    if "\r" in text:  # in a label: it is quoted only where lines end with it too
        text = frame.to_csv(index=False, lineterminator="\r\n")
    write_atomic(Path(path), text.encode("utf-8", "surrogateescape"))  # labels may be file names
    return Path(path)


def load_frame(path: str | os.PathLike) -> pd.DataFrame:
    """Read a frame back; labels come as they were, "1" and "None" too.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no frame of runs, or a column holds what cannot be measured; names the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of a row that is longer than the header
            frame = _read_csv(path)
    except (ValueError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} is not a frame of runs: {error}") from error
    if fault := _fault(frame):
        raise ValueError(f"{path} is not a frame of runs: {fault}")
    return frame


def _read_csv(path: str | os.PathLike) -> pd.DataFrame:
    """Text columns as they are: pandas would make a number of the label "1", and nothing of "None"."""
    options = {"index_col": False, "encoding_errors": "surrogateescape"}
    others = [name for name in pd.read_csv(path, nrows=0, **options) if name not in _TEXT]
    empty = {name: ["", "nan", "NaN"] for name in others}
    return pd.read_csv(path, dtype=dict.fromkeys(_TEXT, object), keep_default_na=False, na_values=empty, **options)


def _fault(frame: pd.DataFrame) -> str:
    """What keeps a table from being a frame of runs."""
    if missing := [name for name in COLUMNS if name not in frame]:
        return f"it lacks {', '.join(missing)}"
    for name in _MEASURED if len(frame) else ():
        if not pd.api.types.is_numeric_dtype(frame[name]) or np.isinf(frame[name]).any():
            return f"{name} holds what is no number"
    if len(frame) and frame["is_warmup"].dtype != bool:
        return "is_warmup holds what is neither True nor False"
    return "" if (frame["images_per_s"] > 0).all() else "images_per_s holds what is no rate"


def _from_seconds(seconds: Iterable[float], label: str, n_images: int, clock: str) -> pd.DataFrame:
    rows = [
        {
            "variant": label, "round": number, "is_warmup": False, "n_images": n_images,
            "steady_s": run, "images_per_s": n_images / run,
        }
        for number, run in enumerate(seconds)
    ]  # fmt: skip
    return make_frame(rows, experiment=clock)


def _checked_baseline(runs: pd.DataFrame, baseline: str | None) -> str:
    if runs.empty:
        raise ValueError("the frame holds no run besides warm-ups")
    environments = runs["env_id"].unique()
    if len(environments) > 1:
        raise ValueError(f"runs of different machines cannot be compared: {', '.join(map(str, environments))}")
    if baseline is None:
        named = [name for name in runs["baseline"].dropna().unique() if name]
        if len(named) != 1:
            raise ValueError("the frame names no single baseline: pass baseline=")
        baseline = named[0]
    if baseline not in set(runs["variant"]):
        raise ValueError(f"baseline {baseline!r} is not in the frame: {', '.join(runs['variant'].unique())}")
    return baseline


def _summary_of(runs: pd.DataFrame, variant: str, baseline: str) -> dict[str, Any]:
    own, base = runs[runs["variant"] == variant], runs[runs["variant"] == baseline]
    paired = bool(own["order"].notna().all() and base["order"].notna().all())
    if variant == baseline:
        speedup, low, high, verdict, leaning = 1.0, 1.0, 1.0, "baseline", ""
    else:
        samples = _samples(own, base, paired)
        speedup, (low, high), verdict = _mean_ratio(*samples), speedup_interval(*samples), verdict_of(*samples)
        leaning = _side((low, high)) if verdict == "inconclusive" else ""
    rates = own["images_per_s"]
    spread = float(rates.quantile(0.75) - rates.quantile(0.25)) / rates.median()
    return {
        "variant": variant,
        "n_runs": len(own),
        "images_per_s": rates.median(),
        "spread": spread,
        "cpu_s_per_1000": float((own["cpu_s"] / own["n_images"]).median() * 1000),
        "peak_mem_mb": own["peak_mem_mb"].max(),
        "speedup": speedup,
        "ci_low": low,
        "ci_high": high,
        "verdict": verdict,
        "note": _note(rates.to_numpy(), spread, paired, leaning),
    }


def _samples(own: pd.DataFrame, base: pd.DataFrame, paired: bool) -> tuple[np.ndarray, ...]:
    """What an interval is made of: ratios within rounds, or the rates of both."""
    if paired:
        return (paired_ratios(own, base)["speedup"].to_numpy(),)
    return own["images_per_s"].to_numpy(), base["images_per_s"].to_numpy()


def _mean_ratio(ratios: np.ndarray, others: np.ndarray | None = None) -> float:
    return float(np.exp(np.log(ratios).mean() - (0 if others is None else np.log(others).mean())))


def paired_ratios(own: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Speed-up of each run over the baseline's run of the same experiment and round: columns `round`, `speedup`.

    Raises:
        ValueError: an experiment has a variant twice in a round, as two unnamed frames put together have.
    """
    keys = ["experiment", "round"]
    if own.duplicated(keys).any() or base.duplicated(keys).any():
        raise ValueError("runs of two comparisons cannot be told apart: give each compare an experiment= of its own")
    both = own.merge(base, on=keys, suffixes=("", "_base"))
    return pd.DataFrame({"round": both["round"], "speedup": both["images_per_s"] / both["images_per_s_base"]})


def _note(rates: np.ndarray, spread: float, paired: bool, leaning: str) -> str:
    notes = [] if paired else ["not interleaved"]
    if leaning in ("faster", "slower"):
        notes.append(f"leans to {leaning}: more rounds would tell")
    if len(rates) == 1:
        notes.append("one run")
    if spread > _UNSTABLE:
        notes.append(f"unstable: spread {spread:.0%}")
    elif _drifts(rates):
        notes.append("unstable: drifts over the rounds")
    return "; ".join(notes)


def _drifts(rates: np.ndarray) -> bool:
    """A trend over the rounds that is both certain (rank correlation) and large (over 20 %)."""
    if len(rates) < 5 or np.ptp(rates) == 0:
        return False
    correlation = stats.spearmanr(np.arange(len(rates)), rates)
    return bool(correlation.pvalue < 0.01 and abs(np.log(rates[-1] / rates[0])) > 0.2)


def _means(logs: np.ndarray, confidence: float, seed: int = 0) -> np.ndarray:
    """Bootstrap distribution of the mean: rounds resampled with replacement."""
    if len(logs) < 2:
        return np.full(1, np.nan)
    if np.ptp(logs) == 0:
        return np.full(9999, logs[0])
    boot = stats.bootstrap(
        (logs,), np.mean, n_resamples=9999, method="percentile", confidence_level=confidence,
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return boot.bootstrap_distribution


def _bootstrap(means: np.ndarray, confidence: float, n: int) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    return tuple(np.quantile(means, [tail, 1 - tail])) if n > 1 else (np.nan, np.nan)


def _student(logs: np.ndarray, confidence: float) -> tuple[float, float]:
    if len(logs) < 2:
        return np.nan, np.nan
    reach = stats.t.ppf((1 + confidence) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    return logs.mean() - reach, logs.mean() + reach


def _welch(logs: np.ndarray, others: np.ndarray, confidence: float) -> tuple[float, float]:
    if min(len(logs), len(others)) < 2:
        return np.nan, np.nan
    if np.ptp(logs) == 0 and np.ptp(others) == 0:
        return (logs[0] - others[0],) * 2
    interval = stats.ttest_ind(logs, others, equal_var=False).confidence_interval(confidence)
    return float(interval.low), float(interval.high)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
