"""Time under Python's lock, against work whose parts are timed alone: a loop with the lock, a checksum without it."""

import shutil
import time
import zlib

import pytest

from labkit.errors import GilError
from labkit.measure import gil
from labkit.measure.gil import gil_us_per_image

DATA = bytes(1_000_000)


class Batches:
    """Each image takes `n_steps` of a loop under the lock, and a checksum of `n_bytes` without it."""

    def __init__(self, n_steps, n_bytes):
        self.n_steps, self.n_bytes = n_steps, n_bytes

    def __iter__(self):
        for _ in range(100):
            self.hold()
            zlib.crc32(memoryview(DATA)[: self.n_bytes])
            yield 1

    def hold(self):
        for _ in range(self.n_steps):
            pass

    def held_us(self):
        seconds = []
        for _ in range(50):
            begin = time.perf_counter()
            self.hold()
            seconds.append(time.perf_counter() - begin)
        return sorted(seconds)[25] * 1e6


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("py-spy"), reason="missing: python -m pip install py-spy")
def test_held_time_is_that_of_the_part_under_the_lock():
    mostly_free, mostly_held = Batches(1000, 800_000), Batches(20_000, 10_000)
    try:
        free_us, held_us = (
            gil_us_per_image(lambda one=batches: one, seconds=2) for batches in (mostly_free, mostly_held)
        )
    except GilError as error:
        pytest.skip(str(error))  # a container without the right to look into a process
    assert 0.3 < free_us / mostly_free.held_us() < 3
    assert 0.3 < held_us / mostly_held.held_us() < 3
    assert held_us > 5 * free_us


def test_a_missing_sampler_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(gil.shutil, "which", lambda *_, **__: None)
    with pytest.raises(GilError, match=r"py-spy is missing: python -m pip install.*peers"):
        gil_us_per_image(lambda: [1], seconds=0.01)


def test_a_sampler_that_may_not_look_is_told(monkeypatch, tmp_path):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Permission denied (os error 13)' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(gil.shutil, "which", lambda *_, **__: str(program))
    with pytest.raises(GilError, match=r"Permission denied.*SYS_PTRACE"):
        gil_us_per_image(lambda: [1], seconds=0.01)
