"""Training on two ranks, for real: each sample once an epoch, equal batches, pixels in memory once, a kill told."""

import pytest

from tests.hardening.ranks import check, make_set


@pytest.mark.exhaustive
def test_two_ranks(tmp_path):
    make_set(tmp_path)
    found = check(tmp_path, 2, "BatchLoader")
    assert found["each_once"]
    assert found["kill_named"]
    assert found["batches_of_a_rank"] == "80"
    assert found["pixels_pss_mb"] == pytest.approx(found["pixels_mb"], rel=0.05)
