"""The global generators are given back."""

import random

import numpy as np
import pytest
import torch

from labkit.util.process import preserve_rng_state


def test_all_generators_are_restored_after_an_error():
    own = torch.Generator()
    drawn = []

    def draw() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(1).item(), torch.rand(1, generator=own).item()

    @preserve_rng_state(own)
    def fail():
        drawn.append(draw())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert draw() == drawn[0]
