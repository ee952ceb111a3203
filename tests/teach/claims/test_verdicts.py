"""Rules of outcomes and verdicts."""

import pytest

from labkit.teach.claims.verdicts import Reading, faster, format_ratio, outcome, reaches, together, tried, unchanged

NAN = float("nan")


@pytest.mark.parametrize(
    ("rule", "low", "high", "claimed", "expected"),
    [
        (faster, 1.1, 1.4, None, "holds"),
        (faster, 0.5, 0.9, None, "does not hold"),
        (faster, 0.9, 1.1, None, "inconclusive"),
        (faster, NAN, NAN, None, "inconclusive"),
        (reaches, 2.1, 2.5, 2.0, "holds"),
        (reaches, 1.8, 2.2, 2.0, "holds"),
        (reaches, 1.3, 1.6, 2.0, "does not hold"),
        (reaches, 0.4, 0.6, 2.0, "does not hold"),
        (reaches, 0.9, 2.2, 2.0, "inconclusive"),
        (reaches, NAN, NAN, 2.0, "inconclusive"),
        (unchanged, 0.98, 1.02, None, "holds"),
        (unchanged, 1.06, 1.2, None, "does not hold"),
        (unchanged, 0.6, 0.9, None, "does not hold"),
        (unchanged, 0.97, 1.2, None, "inconclusive"),
        (unchanged, NAN, NAN, None, "inconclusive"),
    ],
)
def test_rules(rule, low, high, claimed, expected):
    assert rule(Reading(2.0, low, high), claimed) == expected


def test_trials_doubts_and_nothing_read():
    assert tried(Reading(passed=True)) == "holds"
    assert tried(Reading(passed=False)) == "does not hold"
    assert outcome(Reading(3.0, 2.5, 3.5, doubt="not cold"), faster, None) == "inconclusive"
    assert outcome(None, faster, None) == "not measured yet"
    assert outcome(None, faster, None, needs_gpu=True) == "needs a GPU"


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
    ],
)
def test_a_claim_is_judged_by_all_its_tests(outcomes, verdict):
    assert together(outcomes) == verdict
    assert together(outcomes[::-1]) == verdict


def test_numbers_are_shown_as_precisely_as_they_mean_something():
    assert [format_ratio(number) for number in (1.186, 12.34, 328.4, 1253)] == ["1.19", "12.3", "328", "1,253"]
