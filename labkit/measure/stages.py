"""Where the time of a hand-written loop goes, stage by stage."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pandas as pd


class StageClock:
    """Adds up the wall time of named stages::

        watch = StageClock()
        with watch("decode"):
            ...

    Args:
        clock: Seconds; for tests.

    Taught in: notebooks/01_naive_pil.ipynb
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock() - start

    def frame(self, variant: str) -> pd.DataFrame:
        """One row per stage: variant, stage, seconds; for `plot_stalls`."""
        seconds = list(self.seconds.values())
        return pd.DataFrame({"variant": variant, "stage": list(self.seconds), "seconds": seconds})
