"""From what a test found to a verdict on a claim: the same few rules for every row of the ledger."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan

HOLDS = "holds"
CONDITION = "holds under a condition"
FAILS = "does not hold"
NEEDS_GPU = "needs a GPU"
MISSING = "not measured yet"
OPEN = "inconclusive"
VERDICTS = (HOLDS, CONDITION, FAILS, OPEN, NEEDS_GPU, MISSING)

SAME_WITHIN = 1.05  # what is claimed to change nothing, or to cost nothing, may change a twentieth


@dataclass(frozen=True)
class Reading:
    """What one test of a claim found.

    Args:
        ratio: How many times as fast, or as large; nan for a trial.
        low, high: Its 95 % interval; nan where there is none.
        n_runs: Runs of each variant that count (or photos).
        experiment: Whose frame was read, or what was tried.
        scale: Of the runs; "" where it does not matter.
        device: "cpu" or "cuda".
        passed: Of a trial, which has no ratio: did it turn out as claimed?
        note: What was seen, in words.
        doubt: Why nothing may be concluded from it, if so.
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
        ratio = "" if isnan(self.ratio) else f"{shown(self.ratio)}x"
        interval = "" if isnan(self.low) else f"[{shown(self.low)}, {shown(self.high)}]"
        return " ".join(
            part for part in (ratio, interval, self.note and f"({self.note})" if ratio else self.note) if part
        )


def shown(ratio: float) -> str:
    """A ratio with as many digits as mean something: 1.19, 12.3, 328."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


Rule = Callable[[Reading, float | None], str]


def faster(reading: Reading, claimed: float | None = None) -> str:
    """A claim without a figure: the interval lies above 1, below it, or across."""
    return HOLDS if reading.low > 1 else FAILS if reading.high < 1 else OPEN


def reaches(reading: Reading, claimed: float) -> str:
    """A claim of a ratio: held where the runs reach it, or cannot be told from it but can from 1."""
    if reading.high < claimed:
        return FAILS
    return HOLDS if reading.low >= claimed or reading.low > 1 else OPEN


def unchanged(reading: Reading, claimed: float | None = None) -> str:
    """A claim of no change: the interval lies within `SAME_WITHIN` of 1, outside, or on the edge."""
    if reading.low > SAME_WITHIN or reading.high < 1 / SAME_WITHIN:
        return FAILS
    return HOLDS if reading.low >= 1 / SAME_WITHIN and reading.high <= SAME_WITHIN else OPEN


def tried(reading: Reading, claimed: float | None = None) -> str:
    """A claim of what happens: it did, or did not."""
    return HOLDS if reading.passed else FAILS


def outcome(reading: Reading | None, rule: Rule, claimed: float | None, *, needs_gpu: bool = False) -> str:
    """The verdict of a single test."""
    if reading is None:
        return NEEDS_GPU if needs_gpu else MISSING
    return OPEN if reading.doubt else rule(reading, claimed)


def together(outcomes: Sequence[str]) -> str:
    """The verdict on a claim from its tests: it holds where all do, and under a condition where only some do.

    A test that is open, not measured or out of reach never counts as held. One refuting test is enough against a claim
    that nothing supports.
    """
    found = set(outcomes)
    if found == {HOLDS}:
        return HOLDS
    return next(verdict for verdict, kind in _FIRST_OF if kind in found)


_FIRST_OF = ((CONDITION, HOLDS), (FAILS, FAILS), (OPEN, OPEN), (NEEDS_GPU, NEEDS_GPU), (MISSING, MISSING))
