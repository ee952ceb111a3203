"""Intervals of speed-ups that bear bursts of noise and that may be looked at more than once."""

import numpy as np
from scipy import stats

# With 95 %, the interval that is shown, one in 20 equal variants would be called different on a quiet machine, and more
# on a busy one; and a notebook reaches a dozen verdicts.
CONFIDENCE, VERDICT_CONFIDENCE = 0.95, 0.99

_TRIM = 0.2  # of the rounds at either end: bursts of other programs reach a few rounds only
_MIN_TRIMMED = 8  # rounds; with fewer, a trimmed interval costs more degrees of freedom than it gains


def speedup_of(ratios: np.ndarray, others: np.ndarray | None = None) -> float:
    """The speed-up that `speedup_interval` is about; arguments as there."""
    samples = [np.log(ratios)] if others is None else [np.log(ratios), np.log(others)]
    trim = _trim_of(samples)
    first, *rest = (stats.trim_mean(sample, trim) for sample in samples)
    return float(np.exp(first - sum(rest)))


def speedup_interval(
    ratios: np.ndarray, others: np.ndarray | None = None, *, confidence: float = CONFIDENCE, n_looks: int = 1
) -> tuple[float, float]:
    """Interval of a speed-up from the ratios of paired rounds, or from two unpaired samples of rates.

    Student's t of the logarithms, from 8 rounds on trimmed by a fifth at either end: bursts slow down single rounds,
    and would widen a plain interval for all the others. One round gives no interval: (nan, nan).

    Args:
        n_looks: How often the data may be looked at before more are taken. Each look gets an equal part of the error
            that `confidence` allows, so that whoever stops at a look that pleases errs no more often than that.

    Sources: Tukey and McLaughlin 1963 and Yuen 1974 (trimmed t); Jennison and Turnbull 1989 (repeated intervals), with
    Bonferroni's bound, which holds however the looks depend on each other.
    """
    samples = [np.log(ratios)] if others is None else [np.log(ratios), np.log(others)]
    if min(map(len, samples)) < 2:
        return float("nan"), float("nan")
    confidence = 1 - (1 - confidence) / n_looks
    if all(np.ptp(sample) == 0 for sample in samples):
        low = high = samples[0][0] - sum(sample[0] for sample in samples[1:])
    elif others is None:
        low, high = _paired_interval(samples[0], confidence)
    else:
        tested = stats.ttest_ind(*samples, equal_var=False, trim=_trim_of(samples))
        low, high = tested.confidence_interval(confidence)
    with np.errstate(over="ignore"):  # two wild runs may give an interval up to infinity
        return float(np.exp(low)), float(np.exp(high))


def verdict_of(ratios: np.ndarray, others: np.ndarray | None = None, *, n_looks: int = 1) -> str:
    """`faster`, `slower` or `inconclusive`; arguments as in `speedup_interval`. Wrong for 1 in 100 equal variants."""
    return side_of_one(speedup_interval(ratios, others, confidence=VERDICT_CONFIDENCE, n_looks=n_looks))


def side_of_one(interval: tuple[float, float]) -> str:
    """On which side of 1 an interval lies."""
    low, high = interval
    return "faster" if low > 1 else "slower" if high < 1 else "inconclusive"


def _paired_interval(logs: np.ndarray, confidence: float) -> tuple[float, float]:
    n, n_cut = len(logs), int(_trim_of([logs]) * len(logs))
    kept = n - 2 * n_cut
    clipped = np.sort(logs)
    center = clipped[n_cut : n - n_cut].mean()
    clipped[:n_cut], clipped[n - n_cut :] = clipped[n_cut], clipped[n - n_cut - 1]
    error = clipped.std(ddof=1) * np.sqrt((n - 1) / (kept * (kept - 1)))
    reach = error * stats.t.ppf((1 + confidence) / 2, kept - 1)
    return center - reach, center + reach


def _trim_of(samples: list[np.ndarray]) -> float:
    return _TRIM if min(map(len, samples)) >= _MIN_TRIMMED else 0.0
