"""A number with its uncertainty and its source, and random draws of it."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from labkit.core import require_choice

KINDS = ("measured here", "entered", "published", "theory", "assumed")
N_DRAWS = 4001  # odd: one of them is the median
QUANTILE = 1.959964  # of the normal distribution: 95 % lie within so many standard deviations


@dataclass(frozen=True)
class Estimate:
    """A number and what is known of it.

    Args:
        value: The median.
        low, high: The limits of its 95 % interval. Default: it is exact.
        source: A run, an address, or who said so.
        kind: One of `measured here`, `entered`, `published`, `theory` and `assumed`.

    Raises:
        ValueError: not finite numbers with 0 < low <= value <= high, or all of them 0; or an unknown kind.
    """

    value: float
    low: float | None = None
    high: float | None = None
    source: str = "entered"
    kind: str = "entered"

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        interval = self.interval
        is_ordered = all(map(_is_finite, interval)) and interval[0] <= self.value <= interval[1]
        if not is_ordered or min(interval) < 0 or (interval[0] == 0 and interval[1] > 0):
            raise ValueError(
                "an estimate must be one number >= 0, or numbers 0 < low <= value <= high, "
                f"got low={self.low!r}, value={self.value!r}, high={self.high!r}"
            )

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def times(self, factor: float, source: str) -> "Estimate":
        """The same in another unit, or by another rule, which `source` tells."""
        low, high = self.interval
        return Estimate(self.value * factor, low * factor, high * factor, source, self.kind)

    def draw(self, name: str) -> np.ndarray:
        """Values, log-normal on either side of the median: `N_DRAWS` evenly spread ones, in an order drawn by `name`.

        So two plans that differ in one input share the draws of all others.

        Source: M. D. McKay and others, Technometrics 21, 1979 (Latin hypercube sampling),
        https://doi.org/10.1080/00401706.1979.10489755
        """
        if self.interval == (self.value, self.value):
            return np.full(N_DRAWS, float(self.value))
        drawn = np.random.default_rng(zlib.crc32(name.encode())).permutation(deviates())
        below, above = (abs(math.log(end / self.value)) / QUANTILE for end in self.interval)
        return self.value * np.exp(drawn * np.where(drawn < 0, below, above))


@cache
def deviates() -> np.ndarray:
    """`N_DRAWS` values of the normal distribution, in steps of equal probability, the smallest first."""
    return np.array([NormalDist().inv_cdf((step + 0.5) / N_DRAWS) for step in range(N_DRAWS)])


def as_estimate(name: str, given: Any) -> Estimate:
    """What a reader gave: an `Estimate`, a number, (low, high) or (low, value, high).

    Raises:
        ValueError: it is none of them; names the argument.
    """
    if isinstance(given, Estimate):
        return given
    numbers = [given] if _is_finite(given) else given
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str) and 1 <= len(numbers) <= 3
    if not is_list or not all(map(_is_finite, numbers)):
        raise ValueError(f"{name} must be a number, (low, high) or (low, value, high), got {given!r}")
    low, high = float(numbers[0]), float(numbers[-1])
    try:
        value = float(numbers[1]) if len(numbers) == 3 else math.sqrt(low * high) if len(numbers) == 2 else low
        return Estimate(value, low, high)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def of_draws(values: np.ndarray) -> tuple[float, float, float]:
    """Median and 95 % interval of draws."""
    low, value, high = np.quantile(values, (0.025, 0.5, 0.975))
    return float(value), float(low), float(high)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def format_number(value: float) -> str:
    """With three digits that count, as 57,200 and 0.123."""
    return f"{float(f'{value:.3g}'):,.10g}"
