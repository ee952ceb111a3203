"""Shared by the tests of the loader."""

import gc
import multiprocessing

import pytest

from tests.loading import eventually


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    """Whatever a test did: when its loader is gone, so are the workers."""
    yield
    if multiprocessing.active_children():
        gc.collect()  # a second, in a process that has imported everything
    assert eventually(lambda: multiprocessing.active_children() == [])
