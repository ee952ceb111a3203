"""Training on two ranks, for real: each sample once an epoch, equally many batches, pixels counted once, a kill told."""

import pytest

from tests.hardening.ranks import check, make_set


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["BatchLoader", "read_shards"])
def test_two_ranks(tmp_path, kind):
    make_set(tmp_path)
    found = check(tmp_path, 2, kind)
    assert found["each_once"]
    assert found["kill_named"]
    assert found["batches_of_a_rank"] == "80"
    if kind == "BatchLoader":
        assert found["pixels_pss_mb"] == pytest.approx(found["pixels_mb"], rel=0.05)
