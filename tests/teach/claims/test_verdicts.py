"""Rules of outcomes and verdicts."""

import pytest

from labkit.course.claim_trials import (
    Reading,
    agreeing_range,
    faster,
    outcome,
    reaches,
    together,
    tried,
    unchanged,
)

NAN = float("nan")
TWICE = (1.5, 3.0)  # what agrees with a claim of 2x


@pytest.mark.parametrize(
    ("rule", "low", "high", "agrees", "expected"),
    [
        (faster, 1.1, 1.4, None, "holds"),
        (faster, 0.5, 0.9, None, "does not hold"),
        (faster, 0.9, 1.1, None, "inconclusive"),
        (faster, NAN, NAN, None, "inconclusive"),
        (reaches, 2.1, 2.5, TWICE, "holds"),
        (reaches, 1.5, 3.0, TWICE, "holds"),
        (reaches, 3.1, 338.0, TWICE, "larger here"),
        (reaches, 1.1, 1.4, TWICE, "smaller here"),
        (reaches, 0.4, 0.6, TWICE, "does not hold"),
        (reaches, 0.9, 1.4, TWICE, "does not hold"),
        (reaches, 1.2, 1.6, TWICE, "inconclusive"),
        (reaches, 2.0, 3.5, TWICE, "inconclusive"),
        (reaches, 0.9, 2.2, TWICE, "inconclusive"),
        (reaches, NAN, NAN, TWICE, "inconclusive"),
        (unchanged, 0.98, 1.02, None, "holds"),
        (unchanged, 1.06, 1.2, None, "does not hold"),
        (unchanged, 0.6, 0.9, None, "does not hold"),
        (unchanged, 0.97, 1.2, None, "inconclusive"),
        (unchanged, NAN, NAN, None, "inconclusive"),
    ],
)
def test_rules(rule, low, high, agrees, expected):
    assert rule(Reading(2.0, low, high), agrees) == expected


def test_half_to_twice_the_claimed_gain_agrees():
    assert agreeing_range(2.0) == TWICE
    assert agreeing_range(1.3, up_to=2.0) == (1.15, 3.0)


def test_trials_doubts_and_nothing_read():
    assert tried(Reading(passed=True)) == "holds"
    assert tried(Reading(passed=False)) == "does not hold"
    assert outcome(Reading(3.0, 2.5, 3.5, doubt="not cold"), faster, None) == "inconclusive"
    assert outcome(None, faster, None) == "not measured yet"
    assert outcome(None, faster, None, needs_gpu=True) == "needs a GPU"
    assert outcome(Reading(3.0, 2.5, 3.5), None, TWICE) == "not judged"
    assert outcome(None, None, TWICE) == "not measured yet"


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "does not hold"], "holds under a condition"),
        (["holds", "inconclusive"], "holds under a condition"),
        (["not measured yet", "holds"], "holds under a condition"),
        (["does not hold", "inconclusive"], "does not hold"),
        (["not measured yet", "does not hold"], "does not hold"),
        (["inconclusive", "not measured yet"], "inconclusive"),
        (["needs a GPU", "needs a GPU"], "needs a GPU"),
        (["not measured yet"], "not measured yet"),
        (["larger here", "larger here"], "larger here"),
        (["smaller here", "inconclusive"], "smaller here"),
        (["larger here", "smaller here"], "larger and smaller here"),
        (["larger here", "smaller here", "not measured yet"], "larger and smaller here"),
        (["larger here", "holds"], "holds under a condition"),
        (["larger here", "smaller here", "holds"], "holds under a condition"),
        (["smaller here", "does not hold"], "does not hold"),
        (["larger here", "smaller here", "does not hold"], "does not hold"),
    ],
)
def test_a_claim_is_judged_by_all_its_tests(outcomes, verdict):
    assert together(outcomes) == verdict
    assert together(outcomes[::-1]) == verdict
