"""The rules that turn readings into outcomes of tests, and outcomes into the verdict on a claim."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

HOLDS = "holds"
LARGER = "larger here"
SMALLER = "smaller here"
MIXED = "larger and smaller here"
CONDITION = "holds under a condition"
FAILS = "does not hold"
NEEDS_GPU = "needs a GPU"
MISSING = "not measured yet"
OPEN = "inconclusive"
VERDICTS = (HOLDS, LARGER, SMALLER, MIXED, CONDITION, FAILS, OPEN, NEEDS_GPU, MISSING)
NOT_JUDGED = "not judged"

# What a test shows. Verdicts rest on the first kind alone; the others are shown beside it.
MEASURED = "measured"
SIMULATED = "simulated"
UNEQUAL = "unequal work"
BESIDE = "beside the claim"
KINDS = (MEASURED, SIMULATED, UNEQUAL, BESIDE)

SAME_WITHIN = 1.05  # a claim of "no change" or "no cost" allows a change of a twentieth
GAIN_WITHIN = 2.0  # a claimed ratio of 3x is a gain of 2: half to twice that gain agrees with it, 2x to 5x


@dataclass(frozen=True)
class Reading:
    """What one test of a claim found.

    Args:
        ratio: How many times as fast, or as large; nan for a trial.
        low, high: Its 95 % interval; nan if there is none.
        n_runs: Number of counted runs of each variant (or of photos).
        experiment: Experiment of the frame, or the kind of trial.
        scale: Scale of the runs; "" if it does not matter.
        device: "cpu" or "cuda".
        passed: Whether a trial, which has no ratio, ended as claimed.
        note: What was seen, in words.
        doubt: Why it allows no conclusion; "" if it does.
    """

    ratio: float = nan
    low: float = nan
    high: float = nan
    n_runs: int = 0
    experiment: str = ""
    scale: str = ""
    device: str = ""
    passed: bool | None = None
    note: str = ""
    doubt: str = ""

    def __str__(self) -> str:
        if isnan(self.ratio):
            return self.note
        note = f" ({self.note})" if self.note else ""
        return f"{format_ratio(self.ratio)}x{format_interval(self.low, self.high)}{note}"


def format_interval(low: float, high: float) -> str:
    """An interval with a space before it, or "" for nan."""
    return "" if isnan(low) else f" [{format_ratio(low)}, {format_ratio(high)}]"


def format_ratio(ratio: float) -> str:
    """A ratio with its significant digits only: 1.19, 12.3, 328."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


Range = tuple[float, float]
Rule = Callable[[Reading, Any], str]
"""From a reading and the ratios that agree with the claimed one, which only `reaches` needs, to an outcome."""


def agreeing_range(claimed: float, up_to: float | None = None) -> Range:
    """Lowest and highest ratio that agree with a claimed one: their gain is half to twice the claimed gain.

    Args:
        claimed: The claimed ratio, above 1.
        up_to: Its upper end, where a range is claimed.
    """
    return 1 + (claimed - 1) / GAIN_WITHIN, 1 + ((up_to or claimed) - 1) * GAIN_WITHIN


def faster(reading: Reading, agrees: Range | None = None) -> str:
    """Rule for a claim without a figure: the interval must lie above 1."""
    return HOLDS if reading.low > 1 else FAILS if reading.high < 1 else OPEN


def reaches(reading: Reading, agrees: Range) -> str:
    """Rule for a claimed ratio: the interval must lie within the ratios that agree with it."""
    lowest, highest = agrees
    if reading.low > highest:
        return LARGER
    if reading.high < lowest:
        return SMALLER if reading.low > 1 else FAILS
    return HOLDS if reading.low >= lowest and reading.high <= highest else OPEN


def unchanged(reading: Reading, agrees: Range | None = None) -> str:
    """Rule for a claim of no change: the interval must lie within `SAME_WITHIN` of 1."""
    if reading.low > SAME_WITHIN or reading.high < 1 / SAME_WITHIN:
        return FAILS
    return HOLDS if reading.low >= 1 / SAME_WITHIN and reading.high <= SAME_WITHIN else OPEN


def tried(reading: Reading, agrees: Range | None = None) -> str:
    """Rule for a trial."""
    return HOLDS if reading.passed else FAILS


def outcome(reading: Reading | None, rule: Rule | None, agrees: Range | None, *, needs_gpu: bool = False) -> str:
    """The outcome of a single test; without a rule it is not judged."""
    if reading is None:
        return NEEDS_GPU if needs_gpu else MISSING
    if rule is None:
        return NOT_JUDGED
    return OPEN if reading.doubt else rule(reading, agrees)


def together(outcomes: Sequence[str]) -> str:
    """The verdict on a claim: it holds if all of its tests do, and under a condition if only some do.

    Where no test holds, one that fails is enough against the claim; where none fails, the claim is right in direction,
    and its figure is another here. A test that is inconclusive, not measured or needs a GPU never counts as held.
    """
    found = set(outcomes)
    if found >= {LARGER, SMALLER} and not found & {HOLDS, FAILS}:
        return MIXED
    strongest = next(one for one in (HOLDS, FAILS, LARGER, SMALLER, OPEN, NEEDS_GPU, MISSING) if one in found)
    return CONDITION if strongest == HOLDS and found != {HOLDS} else strongest
