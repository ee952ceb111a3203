"""A loader's batches epoch after epoch, and what it costs to begin one anew."""

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any


class CannotDiagnose(ValueError):
    """What was handed over is no loader with a step; the text says what is wanted."""


class Epochs:
    """Batches without an end.

    Args:
        loader: Any iterable of batches.
        anew: An epoch begins as the first one did; so that is known before a second one begins.

    Attributes:
        gaps_s: Seconds from asking for more at an epoch's end to the next epoch's first batch, of each such place.
        first_s: Seconds to the very first batch.
        length: Batches of an epoch; None while none has ended and the loader does not say.

    Raises:
        CannotDiagnose: the loader gives no batch, or cannot be gone through again.
    """

    def __init__(self, loader: Iterable[Any], *, anew: bool = False):
        if not hasattr(loader, "__iter__"):
            raise CannotDiagnose(f"the loader is a {type(loader).__name__}: an iterable of batches is wanted")
        self._loader, self._anew = loader, anew
        self.gaps_s: list[float] = []
        self.first_s = 0.0
        self.length = _length(loader)

    def __iter__(self) -> Iterator[Any]:
        asked, n_epochs = time.perf_counter(), 0
        while True:
            n_batches = 0
            for batch in self._loader:
                if not n_batches:
                    self._note(n_epochs, time.perf_counter() - asked)
                n_batches += 1
                yield batch
                asked = time.perf_counter()
            if not n_batches:
                what = "can be gone through only once: hand over what gives it anew" if n_epochs else "gives no batch"
                raise CannotDiagnose(f"the loader, a {type(self._loader).__name__}, {what}")
            n_epochs, self.length = n_epochs + 1, n_batches

    def starting_s(self, waiting_s: float) -> float:
        """What beginning an epoch costs each of its batches.

        Args:
            waiting_s: Seconds that training waits for any batch.
        """
        gaps_s = self.gaps_s or ([self.first_s] if self._anew else [])
        return max(0.0, statistics.median(gaps_s) - waiting_s) / self.length if gaps_s and self.length else 0.0

    def _note(self, n_epochs: int, seconds: float) -> None:
        if n_epochs:
            self.gaps_s.append(seconds)
        else:
            self.first_s = seconds


def _length(loader: Any) -> int | None:
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # torch holds who asks for it to the answer, and warns when more batches come
    try:
        return len(loader)
    except TypeError:
        return None
