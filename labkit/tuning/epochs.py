"""A loader's batches, epoch after epoch, and what it costs to start an epoch."""

import statistics
import time
from collections.abc import Generator, Iterable
from typing import Any


class CannotDiagnose(ValueError):
    """The arguments are not a loader and a step; the message tells what is needed."""


class Epochs:
    """Endless batches: one epoch after the other.

    Args:
        loader: Any iterable of batches.
        anew: Every epoch starts like the first, so the first one's cost counts before there is a second.

    Attributes:
        gaps_s: Seconds from the end of each epoch to the first batch of the next.
        first_s: Seconds to the very first batch.
        length: Batches of an epoch; None if unknown so far.

    Raises:
        CannotDiagnose: the loader gives no batch, or cannot be iterated again.
    """

    def __init__(self, loader: Iterable[Any], *, anew: bool = False):
        if not hasattr(loader, "__iter__"):
            raise CannotDiagnose(f"the loader must be an iterable of batches, got a {type(loader).__name__}")
        self._loader, self._anew = loader, anew
        self.gaps_s: list[float] = []
        self.first_s = 0.0
        self.length = epoch_length(loader)

    def __iter__(self) -> Generator[Any, None, None]:
        asked, n_epochs = time.perf_counter(), 0
        while True:
            n_batches = 0
            for batch in self._loader:
                if not n_batches and n_epochs:
                    self.gaps_s.append(time.perf_counter() - asked)
                elif not n_batches:
                    self.first_s = time.perf_counter() - asked
                n_batches += 1
                yield batch
                asked = time.perf_counter()
            if not n_batches:
                what = "can be iterated only once: pass an iterable that starts again" if n_epochs else "gives no batch"
                raise CannotDiagnose(f"the loader, a {type(self._loader).__name__}, {what}")
            n_epochs, self.length = n_epochs + 1, n_batches

    def starting_s(self, waiting_s: float) -> float:
        """Seconds per batch that starting an epoch costs.

        Args:
            waiting_s: Seconds that training waits for any batch.
        """
        gaps_s = self.gaps_s or ([self.first_s] if self._anew else [])
        return max(0.0, statistics.median(gaps_s) - waiting_s) / self.length if gaps_s and self.length else 0.0


def epoch_length(loader: Any) -> int | None:
    """Batches of an epoch, where the loader says so without harm."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # once asked for it, torch warns if more batches come
    try:
        return len(loader)
    except TypeError:
        return None
