"""The global generators are given back."""

import random

import pytest
import torch

from labkit.core.rng import preserve_rng_state


def test_global_state_stays_after_an_error():
    before = random.getstate(), torch.get_rng_state()

    @preserve_rng_state()
    def fail():
        random.seed(1), torch.manual_seed(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
