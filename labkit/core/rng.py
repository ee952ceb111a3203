"""Save and restore the global random generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng_state(*generators: torch.Generator) -> Iterator[None]:
    """Restore the global generators at the end: loading in the main process must not reseed the model's dropout.

    Args:
        generators: Further generators to restore.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
