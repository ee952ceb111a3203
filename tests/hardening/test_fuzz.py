"""Every seed and every found case of the fuzzer, through its target; tests/hardening/fuzz has the search itself."""

import pytest

from tests.hardening.fuzz.oracle import FOUND, TARGETS, bounded_memory, load


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_found_cases(name):
    target = load(name)
    failed = failures(target, target.seeds())
    with bounded_memory():  # after the seeds, on which libraries are loaded
        failed |= failures(target, {path.name: path.read_bytes() for path in (FOUND / name).glob("*")})
    assert not failed


def failures(target, inputs: dict[str, bytes]) -> dict[str, str]:
    failed = {}
    for case, data in inputs.items():
        try:
            target(data)
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {error}"
    return failed


def test_every_found_case_has_a_target():
    assert {path.name for path in FOUND.iterdir()} <= set(TARGETS)
