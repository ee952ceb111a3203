"""Does memory grow? The slope over epochs with an interval that noise which lasts for some epochs does not narrow."""

from typing import NamedTuple

import numpy as np
from scipy.stats import theilslopes

WARM_UP = 100  # epochs left out: caches fill, allocators find their size, forked workers get copies of pages they write
LIMIT_KB = 4.096  # an epoch: one page. Less than one lost object (48 bytes and more) an image, of 128 images
_BLOCK = 10  # epochs whose median is one point: neighbours resemble each other, medians of blocks hardly do


class Slope(NamedTuple):
    """kB (1000 bytes) an epoch, with its 95 % interval.

    verdict: `flat` where all of the interval is within a page an epoch; `grows` where all of it is above 0 and it is
    not flat; `shrinks`, below; else `inconclusive`: noise that could hide a leak is no proof that there is none.
    """

    kb_per_epoch: float
    low: float
    high: float
    start_kb: float  # of the line, at epoch 0
    verdict: str

    def __str__(self) -> str:
        return f"{self.kb_per_epoch:+.2f} [{self.low:+.2f}, {self.high:+.2f}] {self.verdict}"


def slope_of(epochs: np.ndarray, kb: np.ndarray, *, warm_up: int = WARM_UP, block: int = _BLOCK) -> Slope:
    """Theil and Sen's slope (the median of all pairs') of block medians, with the interval of Kendall's rank test.

    One step, as an allocator takes when it maps its next arena, hardly moves a median of slopes.

    Raises:
        ValueError: fewer than five blocks after the warm-up.
    """
    kept = epochs >= warm_up
    n_blocks = int(kept.sum()) // block
    if n_blocks < 5:
        raise ValueError(f"{kept.sum()} epochs after {warm_up} of warm-up: at least {5 * block} are wanted")
    middles = _medians(epochs[kept], n_blocks, block)
    slope, intercept, low, high = theilslopes(_medians(kb[kept], n_blocks, block), middles, 0.95)
    return Slope(slope, low, high, intercept, _verdict(low, high))


def _medians(values: np.ndarray, n_blocks: int, block: int) -> np.ndarray:
    return np.median(values[: n_blocks * block].reshape(n_blocks, block), axis=1)


def _verdict(low: float, high: float) -> str:
    if low >= -LIMIT_KB and high <= LIMIT_KB:
        return "flat"
    if low > 0:
        return "grows"
    return "shrinks" if high < 0 else "inconclusive"
