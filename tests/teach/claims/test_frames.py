"""Ratios read from recorded frames, with their intervals."""

import numpy as np
import pytest

from labkit.course.claim_trials import Frames, reckoned, separate

BURST = [100.0, 101, 99, 100, 102, 98, 100, 101, 99, 1]  # the last run was disturbed


@pytest.fixture
def frames(frame_of):
    runs = [
        frame_of({"a": BURST, "b": np.linspace(49, 51, 10)}, "b", experiment=name, scale="laptop", device="cpu")
        for name in ("one", "two")
    ]
    return Frames([runs[0].assign(n_looks=3), runs[1]])


@pytest.mark.parametrize(
    "read", [separate(("one", "a"), ("two", "b")), reckoned("one", "a", lambda rates: rates / 50, "reckoned")]
)
def test_a_ratio_lies_in_its_interval_whatever_a_single_run_says(frames, read):
    found = read(frames)
    assert found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(2, rel=0.02)


def test_an_interval_counts_the_looks_at_both_frames(frames):
    looked, once = (separate((name, "a"), ("two", "b"))(frames) for name in ("one", "two"))
    assert looked.ratio == once.ratio
    assert looked.high / looked.low > once.high / once.low
