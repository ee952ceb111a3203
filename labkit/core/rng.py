"""Save and restore the global random generators."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng_state(*generators: torch.Generator) -> Iterator[None]:
    """Restore the global generators at the end: loading in the main process must not reseed the model's dropout.

    Args:
        generators: Further generators to restore.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as restorers, torch.random.fork_rng(devices):
        restorers.callback(random.setstate, random.getstate())
        restorers.callback(np.random.set_state, np.random.get_state())
        for generator in generators:
            restorers.callback(generator.set_state, generator.get_state())
        yield
