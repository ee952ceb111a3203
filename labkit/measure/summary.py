"""What may be concluded from runs: speed-ups, their intervals, verdicts."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.core import usable_cores
from labkit.measure.frames import measured_runs
from labkit.measure.intervals import side_of_one, speedup_interval, speedup_of, verdict_of

_UNSTABLE_SPREAD = 0.25  # interquartile range / median
_MAX_STOLEN, _MAX_OTHERS = 0.05, 0.25  # of the time of all cores
_MIN_TIMED_S = 0.5  # the kernel counts CPU time in ticks of 10 ms: in less, a few ticks would look like a disturbance


class InstabilityWarning(UserWarning):
    """The runs of a variant scatter or drift so much that they may tell more about the machine than about the code."""


def summarize(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """What can be said of each variant.

    Args:
        frame: Runs, as `compare` returns them.
        baseline: The variant that speed-ups refer to; default: the frame's own.

    Returns:
        One row per variant, in order of appearance: `n_runs`, `images_per_s` (median), `spread` (interquartile range /
        median), `cpu_s_per_1000`, `peak_mem_mb`, `speedup` (trimmed geometric mean of the ratios within rounds),
        `ci_low`, `ci_high` (95 %), `verdict` (`baseline`, `faster`, `slower`, `inconclusive`; empty for variants that
        `compare` was told to leave without one) and `note`.

        A verdict needs a 99 % interval that excludes 1. If only the 95 % interval does, the verdict is
        `inconclusive`, and the note tells which way it leans. Both intervals count how often `compare` looked at the
        runs before it stopped (`speedup_interval`), and cover the rounds of one session only: another day, or another
        machine, may differ by more.

    Raises:
        ValueError: no runs, an unknown baseline, or runs of more than one environment.

    Warns:
        InstabilityWarning: runs scatter or drift; names the variant.

    Taught in: notebooks/00_measure.ipynb
    """
    runs = measured_runs(frame)
    baseline = _find_baseline(runs, baseline)
    base = runs[runs["variant"] == baseline]
    peak_mem_mb = frame.groupby("variant")["peak_mem_mb"].max()  # taken in warm-ups
    rows = [_summarize_variant(own, base, peak_mem_mb[name]) for name, own in runs.groupby("variant", sort=False)]
    summary = pd.DataFrame(rows).set_index("variant")
    for variant, note in summary["note"].items():
        if "unstable" in note:
            warnings.warn(f"{variant}: {note}", InstabilityWarning, stacklevel=2)
    return summary


def quiet_summary(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """`summarize` without its warning, for callers that use the column `note` or the interval."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstabilityWarning)
        return summarize(frame, baseline)


def paired_ratios(own: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Speed-up of each run over the baseline's run of the same experiment and round: columns `round`, `speedup`.

    Raises:
        ValueError: an experiment has a variant twice in a round, as when two unnamed frames are concatenated.
    """
    keys = ["experiment", "round"]
    if own.duplicated(keys).any() or base.duplicated(keys).any():
        raise ValueError("runs of two comparisons cannot be told apart: give each compare an experiment= of its own")
    both = own.merge(base, on=keys, suffixes=("", "_base"))
    return pd.DataFrame({"round": both["round"], "speedup": both["images_per_s"] / both["images_per_s_base"]})


def are_interleaved(*variants: pd.DataFrame) -> bool:
    """Whether the runs of all variants have an order within their rounds, so that they can be paired."""
    return all(runs["order"].notna().all() for runs in variants)


def _find_baseline(runs: pd.DataFrame, baseline: str | None) -> str:
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


def _summarize_variant(own: pd.DataFrame, base: pd.DataFrame, peak_mem_mb: float) -> dict[str, Any]:
    variant, rates, paired = own["variant"].iloc[0], own["images_per_s"], are_interleaved(own, base)
    if variant == base["variant"].iloc[0]:
        found: dict[str, Any] = {"speedup": 1.0, "ci_low": 1.0, "ci_high": 1.0, "verdict": "baseline"}
    else:
        found = _compare_rates(own, base, paired)
    spread = float(rates.quantile(0.75) - rates.quantile(0.25)) / rates.median()
    return {
        "variant": variant,
        "n_runs": len(own),
        "images_per_s": rates.median(),
        "spread": spread,
        "cpu_s_per_1000": _cpu_s_per_1000(own),
        "peak_mem_mb": peak_mem_mb,
        **found,
        "note": "; ".join(_notes(own, spread, paired, found)),
    }


def _compare_rates(own: pd.DataFrame, base: pd.DataFrame, paired: bool) -> dict[str, Any]:
    samples = [paired_ratios(own, base)["speedup"]] if paired else [own["images_per_s"], base["images_per_s"]]
    samples = [sample.to_numpy(float) for sample in samples]
    n_looks = int(_column(own, "n_looks", 1).max())
    low, high = speedup_interval(*samples, n_looks=n_looks)
    verdict = verdict_of(*samples, n_looks=n_looks) if _column(own, "has_verdict", True).all() else ""
    return {"speedup": speedup_of(*samples), "ci_low": low, "ci_high": high, "verdict": verdict}


def _cpu_s_per_1000(own: pd.DataFrame) -> float:
    """CPU seconds and images of one and the same stretch: the steady state, or the whole of a run that has none."""
    n_images = own["n_images"].where(~_column(own, "is_steady", False), _column(own, "n_steady_images", np.nan))
    return float((own["cpu_s"] / n_images).median() * 1000)


def _column(runs: pd.DataFrame, name: str, default: Any) -> pd.Series:
    """A column that only `compare` fills: frames of other timers have none."""
    filled = runs[name] if name in runs else pd.Series(default, runs.index)
    return filled.astype(object).where(filled.notna(), default).astype(type(default))


def _notes(own: pd.DataFrame, spread: float, paired: bool, found: dict[str, Any]) -> list[str]:
    rates, notes = own["images_per_s"].to_numpy(), [] if paired else ["not interleaved"]
    leaning = side_of_one((found["ci_low"], found["ci_high"]))
    if found["verdict"] == "inconclusive" and leaning != "inconclusive":
        notes.append(f"leans to {leaning}: more rounds would tell")
    if len(rates) == 1:
        notes.append("one run")
    if "is_steady" in own and not _column(own, "is_steady", True).all():
        is_whole = not _column(own, "n_steady_batches", 0).any()  # one batch per run, as `whole_pass` gives
        notes.append("whole runs" if is_whole else "too short for a steady rate: the first batch is counted")
    if spread > _UNSTABLE_SPREAD:
        notes.append(f"unstable: spread {spread:.0%}")
    elif _drifts_over_rounds(rates):
        notes.append("unstable: drifts over the rounds")
    return notes + disturbances(own)


def disturbances(own: pd.DataFrame) -> list[str]:
    """Who else had the cores while these runs were timed, if it was much: a sentence for each."""
    if "others_cpu_s" not in own or own["others_cpu_s"].isna().all():
        return []
    timed_s = (own["steady_s"] + own["first_batch_s"].where(~_column(own, "is_steady", False), 0.0)).sum()
    if timed_s < _MIN_TIMED_S:
        return []
    stolen, others = (
        _column(own, name, 0.0).sum() / (timed_s * usable_cores()) for name in ("steal_s", "others_cpu_s")
    )
    notes = []
    if stolen > _MAX_STOLEN:
        notes.append(f"disturbed: {stolen:.0%} of CPU time was stolen")
    if others > _MAX_OTHERS:
        notes.append(f"disturbed: other programs used {others:.0%} of the cores")
    return notes


def _drifts_over_rounds(rates: np.ndarray) -> bool:
    """Whether there is a trend over the rounds that is both certain (rank correlation) and large (over 20 %)."""
    if len(rates) < 5 or np.ptp(rates) == 0:
        return False
    correlation = stats.spearmanr(np.arange(len(rates)), rates)
    return bool(correlation.pvalue < 0.01 and abs(np.log(rates[-1] / rates[0])) > 0.2)
