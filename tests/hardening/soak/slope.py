"""Does memory grow? The slope over epochs with an interval that noise which lasts for some epochs does not narrow."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import theilslopes

_WARM_UP = 100  # epochs at least: caches fill, allocators find their size, forks copy the pages they write
LIMIT_KB = 4.096  # an epoch: one page. Less than one lost object (48 bytes and more) an image, of 128 images
_BLOCK = 10  # epochs whose median is one point: neighbours resemble each other, medians of blocks hardly do


class Slope(NamedTuple):
    """kB (1000 bytes) an epoch, with its 95 % interval.

    verdict: `flat` where all of the interval is within the limit, and `zero` where it also holds 0; `grows` where all
    of it is above 0 and it is not flat; `shrinks`, below; else `inconclusive`: noise that could hide a leak is no proof
    that there is none.
    """

    kb_per_epoch: float
    low: float
    high: float
    start_kb: float  # of the line, at epoch 0
    verdict: str

    def __str__(self) -> str:
        return f"{self.kb_per_epoch:+z.2f} [{self.low:+z.2f}, {self.high:+z.2f}] {self.verdict}"


def warm_up(epochs: np.ndarray) -> int:
    """Epochs that are left out: the first half."""
    return max(_WARM_UP, int(epochs.max() + 1) // 2)


def slope_of(epochs: np.ndarray, kb: np.ndarray, limit_kb: float = LIMIT_KB) -> Slope:
    """Theil and Sen's slope (the median of all pairs') of block medians, with the interval of Kendall's rank test.

    One step, as an allocator takes when it maps its next arena, hardly moves a median of slopes.

    Raises:
        ValueError: fewer than five blocks after the warm-up.
    """
    kept = epochs >= warm_up(epochs)
    if kept.sum() < 5 * _BLOCK:
        raise ValueError(f"{kept.sum()} epochs after {warm_up(epochs)} of warm-up: at least {5 * _BLOCK} are wanted")
    slope, intercept, low, high = theilslopes(_medians(kb[kept]), _medians(epochs[kept]), 0.95)
    return Slope(slope, low, high, intercept, _verdict(low, high, limit_kb))


def _medians(values: np.ndarray) -> np.ndarray:
    n_blocks = len(values) // _BLOCK
    return np.median(values[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK), axis=1)


def _verdict(low: float, high: float, limit_kb: float) -> str:
    if low >= -limit_kb and high <= limit_kb:
        return "zero" if low <= 0 <= high else "flat"
    if low > 0:
        return "grows"
    return "shrinks" if high < 0 else "inconclusive"


def slopes_of(runs: pd.DataFrame) -> tuple[Slope, Slope]:
    """Of a loader's PSS and of what its processes have written.

    A leak raises both. PSS also rises while forked workers get their own copies of pages that they shared: it may by a
    page an epoch and process, which a leak of 20 kB does not pass either; what is written, by a page in all.
    """
    epochs = runs["epoch"].to_numpy()
    pss = slope_of(epochs, runs["own_kb"].to_numpy(), LIMIT_KB * runs["n_processes"].max())
    return pss, slope_of(epochs, runs["written_kb"].to_numpy())
