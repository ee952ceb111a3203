"""The checks of the exercises in notebook 14: claims."""

from itertools import combinations_with_replacement
from typing import Any

from labkit.teach.claims import FAILS, HOLDS, MISSING, NEEDS_GPU, OPEN, Reading, reaches, together
from labkit.teach.exercises import exercise, frame_exercise, number_exercise

_INTERVALS = ((2.2, 2.4), (1.8, 2.3), (1.3, 1.6), (0.8, 1.2), (0.9, 2.5), (0.5, 0.8), (1.01, 5.0))

number_exercise("14.1", "A number: how many times as fast.", 4.6 / 3.9)
frame_exercise(
    "14.4", "A frame from lk.compare that settles a claim which you have read somewhere.", rounds=5, widest=0.5
)


@exercise("14.2")
def check_ratio_verdict(answer: Any) -> str | None:
    """A function of (low, high, claimed) that returns "holds", "does not hold" or "inconclusive"."""
    for claimed in (2.0, 1.1):
        for low, high in _INTERVALS:
            expected, found = reaches(Reading(low=low, high=high), claimed), answer(low, high, claimed)
            if found != expected:
                return f"[{low}, {high}] against {claimed}x should give {expected!r}; it gave {found!r}"
    return None


@exercise("14.3")
def check_claim_verdict(answer: Any) -> str | None:
    """A function of a list of outcomes that returns the verdict on the claim."""
    for size in (1, 2, 3):
        for outcomes in combinations_with_replacement((HOLDS, FAILS, OPEN, NEEDS_GPU, MISSING), size):
            expected, found = together(outcomes), answer(list(outcomes))
            if found != expected:
                return f"the outcomes {list(outcomes)} should give {expected!r}; it gave {found!r}"
    return None
