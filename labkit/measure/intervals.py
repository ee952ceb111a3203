"""Speed-ups with their intervals, of plain numbers: only the standard library is imported, as a watched training needs.

Sources: Welch 1947; Tukey and McLaughlin 1963 and Yuen 1974 (trimmed t).
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

CONFIDENCE = 0.95  # of the interval that is shown, from which a reader can tell the verdict

_TRIM = 0.2  # of the rounds at either end: bursts of other programs reach a few rounds only
_MIN_TRIMMED = 8  # rounds; with fewer, a trimmed interval costs more degrees of freedom than it gains


def speedup_of(ratios: Iterable[float], others: Iterable[float] | None = None) -> float:
    """The speed-up that `speedup_interval` is about; arguments as there."""
    samples = _logs(ratios, others)
    trim = _trim_of(samples)
    first, *rest = (_estimate(sample, trim).center for sample in samples)
    return _exp(first - sum(rest))


def speedup_interval(
    ratios: Iterable[float],
    others: Iterable[float] | None = None,
    *,
    confidence: float = CONFIDENCE,
    n_looks: int = 1,
) -> tuple[float, float]:
    """Interval of a speed-up from the ratios of paired rounds, or from two unpaired samples of rates.

    Student's t of the logarithms, from 8 rounds on trimmed by a fifth at either end: bursts slow down single rounds,
    and would widen a plain interval for all the others. One round gives no interval: (nan, nan).

    Args:
        n_looks: How often the data may be looked at before more are taken. Each look gets an equal part of the error
            that `confidence` allows, so that whoever stops at a look that pleases errs no more often than that.

    Source: Jennison and Turnbull 1989 (repeated intervals), with Bonferroni's bound, which holds however the looks
    depend on each other.
    """
    samples = _logs(ratios, others)
    low, high = interval_of_means(*samples, confidence=1 - (1 - confidence) / n_looks, trim=_trim_of(samples))
    return _exp(low), _exp(high)


def interval_of_means(*samples: Sequence[float], confidence: float, trim: float = 0.0) -> tuple[float, float]:
    """Student's interval of the mean of a sample, or Welch's of the difference of two; (nan, nan): one value is none.

    Args:
        trim: Share of the values at either end that is cut off.
    """
    if min(map(len, samples)) < 2:
        return math.nan, math.nan
    first, *rest = (_estimate(sample, trim) for sample in samples)
    center, variance = first.center - sum(each.center for each in rest), sum(each.variance for each in (first, *rest))
    if variance == 0:
        return center, center
    degrees = variance**2 / sum(each.variance**2 / each.degrees for each in (first, *rest))
    reach = math.sqrt(variance) * t_quantile((1 + confidence) / 2, degrees)
    return center - reach, center + reach


_N_STEPS, _N_HALVINGS = 400, 50


@cache
def t_quantile(probability: float, degrees: float) -> float:
    """The value that Student's t stays below with a probability of 0.5 or more.

    For t = sqrt(degrees) tan(angle), the density of the angle is a power of its cosine: its integral by Simpson's rule
    is compared with the probability, and the angle halved in on.
    """
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2)) / 2
    low, high = 0.0, min(math.pi / 2, 40 / math.sqrt(degrees))  # beyond it, many degrees leave nothing to see
    for _ in range(_N_HALVINGS):
        angle = (low + high) / 2
        heights = [math.cos(angle * number / _N_STEPS) ** (degrees - 1) for number in range(_N_STEPS + 1)]
        inner = 4 * math.fsum(heights[1:-1:2]) + 2 * math.fsum(heights[2:-1:2])
        below = 0.5 + (heights[0] + inner + heights[-1]) * angle / (3 * _N_STEPS) / (2 * whole)
        low, high = (angle, high) if below < probability else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def side_of_one(interval: tuple[float, float]) -> str:
    """On which side of 1 an interval lies."""
    low, high = interval
    return "faster" if low > 1 else "slower" if high < 1 else "inconclusive"


def format_ratio(ratio: float) -> str:
    """A ratio with two decimals, or as many as keep it from being rounded to 1 or to 0: 1.58, 12.3, 288, 1.003."""
    if ratio != 1 and f"{ratio:.2f}" == "1.00":
        return f"{ratio:.4f}"
    return f"{ratio:.2g}" if ratio < 0.095 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.{int(ratio < 100)}f}"


class _Estimate(NamedTuple):
    """A trimmed mean, the variance of that mean, and its degrees of freedom."""

    center: float
    variance: float
    degrees: int


def _estimate(sample: Sequence[float], trim: float) -> _Estimate:
    ordered, n_cut = sorted(sample), int(trim * len(sample))
    kept = ordered[n_cut : len(ordered) - n_cut]
    clipped = [kept[0]] * n_cut + kept + [kept[-1]] * n_cut
    if kept[0] == kept[-1]:
        return _Estimate(kept[0], 0.0, len(kept) - 1)
    mean = fmean(clipped)
    squares = math.fsum((value - mean) ** 2 for value in clipped)
    return _Estimate(fmean(kept), squares / (len(kept) * (len(kept) - 1)), len(kept) - 1)


def _logs(ratios: Iterable[float], others: Iterable[float] | None) -> list[list[float]]:
    return [[math.log(value) for value in each] for each in (ratios, others) if each is not None]


def _trim_of(samples: Sequence[Sequence[float]]) -> float:
    return _TRIM if min(map(len, samples)) >= _MIN_TRIMMED else 0.0


def _exp(value: float) -> float:
    """Two wild runs may give an interval up to infinity."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
