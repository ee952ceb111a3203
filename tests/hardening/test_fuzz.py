"""Every seed and every found case of the fuzzer, through its target; the search itself is tests/hardening/fuzz."""

import os
from collections.abc import Callable

import pytest

from tests.hardening.fuzz import __main__ as driver
from tests.hardening.fuzz.child import bounded_memory
from tests.hardening.fuzz.registry import TARGETS
from tests.paths import REPO

FOUND = REPO / "tests" / "hardening" / "fuzz" / "found"


def cases(name: str) -> dict[str, bytes]:
    """What was found, by file name."""
    folder = os.path.join(FOUND, name)
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    files = {}
    for each in found:
        with open(os.path.join(folder, each), "rb") as file:
            files[each] = file.read()
    return files


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_found_cases(name):
    function, seeds = TARGETS[name].load()
    failed = failures(function, seeds)
    with bounded_memory():  # after the seeds, on which libraries are loaded
        failed |= failures(function, cases(name))
    assert not failed


def failures(function: Callable[[bytes], None], inputs: dict[str, bytes]) -> dict[str, str]:
    failed = {}
    for case, data in inputs.items():
        try:
            function(data)
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {error}"
    return failed


def test_no_found_case_is_of_a_target_that_is_gone():
    assert set(os.listdir(FOUND)) <= set(TARGETS)


def test_the_record_counts_all_lives_of_a_child():
    row = {"executions": 0, "edges": 0, "features": 0, "corpus": 0, "peak_rss_mb": 0}
    first = [
        "INFO: seed corpus",
        "#7\tINITED cov: 20 ft: 30 corp: 2/9b",
        "#900\tNEW    cov: 25 ft: 31 corp: 3/9b lim: 4",
    ]
    second = ["#100\tDONE   cov: 22 ft: 40 corp: 2/9b", "stat::peak_rss_mb:              512"]
    for lines in (first, second, []):
        driver._add(row, lines)
    assert row == {"executions": 1000, "edges": 25, "features": 40, "corpus": 3, "peak_rss_mb": 512}


def test_what_is_found_again_and_again_ends_a_run():
    assert driver._repeats(["a", "b", "a", "a"])
    assert not driver._repeats(["a", "b", "a", "b"])
