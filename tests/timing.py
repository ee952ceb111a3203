"""A clock that only work advances, and `compare` without its sampler of memory and its garbage collections.

A process that has run hundreds of tests is large: the kernel takes a good part of a second to add up its pages, and a
collection of its garbage takes as long.
"""

import gc
from unittest.mock import MagicMock

from labkit.measure import compare as timing


def leave_collections_out(patch) -> None:
    patch.setattr(timing, "gc", MagicMock(spec=gc))


def leave_memory_out(patch) -> None:
    memory = MagicMock(spec=timing.PeakMemory)
    memory.__enter__.return_value = memory
    memory.end.return_value = float("nan")
    patch.setattr(timing, "PeakMemory", lambda: memory)
    leave_collections_out(patch)


class Clock:
    """Seconds that pass only where a test says so."""

    now = 100.0

    def __call__(self):
        return self.now

    def batches(self, *seconds, n_images=2):
        """Batches of `n_images`, each after its seconds."""
        for each in seconds:
            self.now += each
            yield n_images
