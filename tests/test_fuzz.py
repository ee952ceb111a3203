"""Every seed and every found case of the fuzzer, through its target; the search itself is tests/hardening/fuzz."""

import os

import pytest

from tests.hardening.fuzz.registry import TARGETS

FOUND = os.path.join(os.path.dirname(__file__), "hardening", "fuzz", "found")


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
    failed = {}
    for case, data in {**seeds, **cases(name)}.items():
        try:
            function(data)
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {error}"
    assert not failed


def test_no_found_case_is_of_a_target_that_is_gone():
    assert set(os.listdir(FOUND)) <= set(TARGETS)
