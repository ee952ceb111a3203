"""The checks of the exercises in notebook 14: claims."""

from itertools import combinations_with_replacement
from typing import Any

from labkit.teach.claims import FAILS, HOLDS, MISSING, NEEDS_GPU, OPEN, Reading, reaches, together
from labkit.teach.exercises import exercise, judge, near

_INTERVALS = ((2.2, 2.4), (1.8, 2.3), (1.3, 1.6), (0.8, 1.2), (0.9, 2.5), (0.5, 0.8), (1.01, 5.0))


@exercise("14.1")
def ratio_in_a_claim(answer: Any) -> str | None:
    """A number: how many times as fast."""
    return near(answer, 4.6 / 3.9)


@exercise("14.2")
def verdict_on_a_ratio(answer: Any) -> str | None:
    """A function of (low, high, claimed) that returns "holds", "does not hold" or "inconclusive"."""
    for claimed in (2.0, 1.1):
        for low, high in _INTERVALS:
            expected, found = reaches(Reading(low=low, high=high), claimed), answer(low, high, claimed)
            if found != expected:
                return f"[{low}, {high}] against {claimed}x {expected}; it says {found!r}"
    return None


@exercise("14.3")
def verdict_on_a_claim(answer: Any) -> str | None:
    """A function of a list of outcomes that returns the verdict on the claim."""
    for size in (1, 2, 3):
        for outcomes in combinations_with_replacement((HOLDS, FAILS, OPEN, NEEDS_GPU, MISSING), size):
            expected, found = together(outcomes), answer(list(outcomes))
            if found != expected:
                return f"tests that say {list(outcomes)} give {expected!r}; it says {found!r}"
    return None


@exercise("14.4")
def a_claim_of_your_own(answer: Any) -> str | None:
    """A frame from lk.compare that settles a claim which you have read somewhere."""
    return judge(answer, rounds=5, widest=0.5)
