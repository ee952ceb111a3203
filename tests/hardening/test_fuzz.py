"""Every seed and every found case of the fuzzer, through its target; tests/hardening/fuzz has the search itself."""

from collections.abc import Callable

import pytest

from tests.hardening.fuzz import __main__ as driver
from tests.hardening.fuzz.child import bounded_memory
from tests.hardening.fuzz.registry import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_found_cases(name):
    function, seeds = TARGETS[name].load()
    failed = failures(function, seeds)
    found = {path.name: path.read_bytes() for path in (driver.FOUND / name).glob("*")}
    with bounded_memory():  # after the seeds, on which libraries are loaded
        failed |= failures(function, found)
    assert not failed


def failures(function: Callable[[bytes], None], inputs: dict[str, bytes]) -> dict[str, str]:
    failed = {}
    for case, data in inputs.items():
        try:
            function(data)
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {error}"
    return failed


def test_every_found_case_has_a_target():
    assert {path.name for path in driver.FOUND.iterdir()} <= set(TARGETS)


def test_counts_of_all_runs_of_a_child_add_up():
    row = {"executions": 0, "edges": 0, "features": 0, "peak_rss_mb": 0}
    first = ["INFO: seed corpus", "#7\tINITED cov: 20 ft: 30 corp: 2/9b", "#900\tNEW cov: 25 ft: 31 corp: 3/9b lim: 4"]
    second = ["#100\tDONE   cov: 22 ft: 40 corp: 2/9b", "stat::peak_rss_mb:              512"]
    for lines in (first, second, []):
        driver._add_counts(row, lines)
    assert row == {"executions": 1000, "edges": 25, "features": 40, "peak_rss_mb": 512}


def test_a_repeated_finding_ends_a_run():
    assert driver._has_repeats(["a", "b", "a", "a"])
    assert not driver._has_repeats(["a", "b", "a", "b"])
