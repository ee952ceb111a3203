"""The global random generators, as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng_state(*generators: torch.Generator) -> Iterator[None]:
    """Give the global generators back as they were: loading in the main process must not reseed the model's dropout.

    Args:
        generators: More that shall be given back.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if on_devices is not None:
            torch.cuda.set_rng_state_all(on_devices)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
