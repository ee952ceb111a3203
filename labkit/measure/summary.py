"""What may be concluded from runs: speed-ups, their intervals, verdicts."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.measure.frames import measured_runs

# With 95 %, the interval that is shown, one in 20 equal variants would be called different on a quiet machine, and more
# on a busy one; and a notebook reaches a dozen verdicts.
_VERDICT_CONFIDENCE = 0.99

_UNSTABLE_SPREAD = 0.25  # interquartile range / median
_N_RESAMPLES = 9999


class InstabilityWarning(UserWarning):
    """The runs of a variant scatter or drift so much that they may tell more about the machine than about the code."""


def summarize(frame: pd.DataFrame, baseline: str | None = None) -> pd.DataFrame:
    """What can be said of each variant.

    Args:
        frame: Runs, as `compare` returns them.
        baseline: The variant that speed-ups refer to; default: the frame's own.

    Returns:
        One row per variant, in order of appearance: `n_runs`, `images_per_s` (median), `spread` (interquartile range /
        median), `cpu_s_per_1000`, `peak_mem_mb`, `speedup` (geometric mean of the ratios within rounds), `ci_low`,
        `ci_high` (95 %), `verdict` (`baseline`, `faster`, `slower`, `inconclusive`) and `note`.

        A verdict needs a 99 % interval that excludes 1. If only the 95 % interval does, the verdict is
        `inconclusive`, and the note tells which way it leans.

        The interval is a percentile bootstrap over rounds, but never narrower than Student's interval of the paired
        log ratios: resampling 5 rounds cannot leave their range, and alone would call 1 in 16 equal variants different.

    Raises:
        ValueError: no runs, an unknown baseline, or runs of more than one environment.

    Warns:
        InstabilityWarning: runs scatter or drift; names the variant.

    Taught in: notebooks/00_measure.ipynb
    """
    runs = measured_runs(frame)
    baseline = _find_baseline(runs, baseline)
    base = runs[runs["variant"] == baseline]
    rows = [_summarize_variant(own, base) for _, own in runs.groupby("variant", sort=False)]
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


def speedup_interval(
    ratios: np.ndarray, others: np.ndarray | None = None, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a speed-up from the ratios of paired rounds, or from two unpaired samples of rates.

    One round gives no interval: (nan, nan).
    """
    samples = [np.log(ratios)] if others is None else [np.log(ratios), np.log(others)]
    if min(map(len, samples)) < 2:
        return float("nan"), float("nan")
    if all(np.ptp(sample) == 0 for sample in samples):
        low = high = _first_less_second([sample[0] for sample in samples])
    else:
        means = _first_less_second([_resampled_means(sample, seed) for seed, sample in enumerate(samples)])
        tail = (1 - confidence) / 2
        bootstrap, student = np.quantile(means, [tail, 1 - tail]), _student_interval(samples, confidence)
        low, high = min(bootstrap[0], student[0]), max(bootstrap[1], student[1])
    with np.errstate(over="ignore"):  # two wild runs may give an interval up to infinity
        return float(np.exp(low)), float(np.exp(high))


def verdict_of(ratios: np.ndarray, others: np.ndarray | None = None) -> str:
    """`faster`, `slower` or `inconclusive`; arguments as in `speedup_interval`. Wrong for 1 in 100 equal variants."""
    return _side_of_one(speedup_interval(ratios, others, confidence=_VERDICT_CONFIDENCE))


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


def _summarize_variant(own: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    variant, rates, paired = own["variant"].iloc[0], own["images_per_s"], are_interleaved(own, base)
    if variant == base["variant"].iloc[0]:
        speedup, low, high, verdict, leaning = 1.0, 1.0, 1.0, "baseline", ""
    else:
        samples = [paired_ratios(own, base)["speedup"]] if paired else [rates, base["images_per_s"]]
        samples = [sample.to_numpy() for sample in samples]
        speedup = float(np.exp(_first_less_second([np.log(sample).mean() for sample in samples])))
        (low, high), verdict = speedup_interval(*samples), verdict_of(*samples)
        leaning = _side_of_one((low, high)) if verdict == "inconclusive" else ""
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
        "note": _make_note(rates.to_numpy(), spread, paired, leaning),
    }


def _make_note(rates: np.ndarray, spread: float, paired: bool, leaning: str) -> str:
    notes = [] if paired else ["not interleaved"]
    if leaning in ("faster", "slower"):
        notes.append(f"leans to {leaning}: more rounds would tell")
    if len(rates) == 1:
        notes.append("one run")
    if spread > _UNSTABLE_SPREAD:
        notes.append(f"unstable: spread {spread:.0%}")
    elif _drifts_over_rounds(rates):
        notes.append("unstable: drifts over the rounds")
    return "; ".join(notes)


def _drifts_over_rounds(rates: np.ndarray) -> bool:
    """Whether there is a trend over the rounds that is both certain (rank correlation) and large (over 20 %)."""
    if len(rates) < 5 or np.ptp(rates) == 0:
        return False
    correlation = stats.spearmanr(np.arange(len(rates)), rates)
    return bool(correlation.pvalue < 0.01 and abs(np.log(rates[-1] / rates[0])) > 0.2)


def _first_less_second(values: list[Any]) -> Any:
    """The first of one or two values, less the second."""
    return values[0] - sum(values[1:])


def _side_of_one(interval: tuple[float, float]) -> str:
    low, high = interval
    return "faster" if low > 1 else "slower" if high < 1 else "inconclusive"


def _resampled_means(sample: np.ndarray, seed: int) -> np.ndarray:
    """Bootstrap distribution of the mean: rounds drawn with replacement."""
    if np.ptp(sample) == 0:
        return sample[:1]
    return sample[np.random.default_rng(seed).integers(0, len(sample), (_N_RESAMPLES, len(sample)))].mean(axis=1)


def _student_interval(samples: list[np.ndarray], confidence: float) -> tuple[float, float]:
    """Student's interval of one sample's mean, or Welch's of the difference of two."""
    if len(samples) == 2:
        return stats.ttest_ind(*samples, equal_var=False).confidence_interval(confidence)
    [sample] = samples
    return stats.t.interval(confidence, len(sample) - 1, sample.mean(), stats.sem(sample))
