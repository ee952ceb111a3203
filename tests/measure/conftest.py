"""Shared by the tests of `compare` and of what it times."""

import pytest

from tests.timing import leave_memory_out


@pytest.fixture
def unsampled(monkeypatch):
    """Without the sampler of memory, which the test is not about."""
    leave_memory_out(monkeypatch)
