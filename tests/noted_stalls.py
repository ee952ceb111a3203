"""Training loops whose stalls are known: naps and busy loops of a known length, that also note how long they were.

On a busy machine a nap of 20 ms takes longer, and in the next second less long again. So what `diagnose` should say is
reckoned from notes, of the time in which it ran loader and step together.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.watching.diagnose import Diagnosis, LoopParts, diagnose
from tests.stalling import BATCH, Stalls

_CAUSES = ("step", "fetch", "prepare", "copy", "hand_over")
_NOT_TRAINING = -1


class Notes:
    """Seconds by cause and round while training, of all processes: forked workers write into the same memory."""

    def __init__(self, rounds: int = 1):
        self._rounds = rounds
        self._seconds, self._times = (multiprocessing.Array(kind, rounds * len(_CAUSES)) for kind in "dq")
        self._round = multiprocessing.Value("q", _NOT_TRAINING)

    @contextmanager
    def while_training(self) -> Iterator[None]:
        train, rounds = LoopParts.train, iter(range(self._rounds))

        def noted(parts: LoopParts, n: int) -> float:
            self._round.value = next(rounds)
            try:
                return train(parts, n)
            finally:
                self._round.value = _NOT_TRAINING

        with mock.patch.object(LoopParts, "train", noted):
            yield

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if (number := self._round.value) == _NOT_TRAINING:
            return
        position = number * len(_CAUSES) + _CAUSES.index(cause)
        with self._seconds.get_lock():
            self._seconds[position] += time.perf_counter() - start
            self._times[position] += 1

    def medians(self) -> dict[str, float]:
        """Seconds a time: the median of the rounds, as `diagnose` takes it."""
        noted: dict[str, list[float]] = {}
        for cause, seconds, times in zip(_CAUSES * self._rounds, self._seconds, self._times, strict=True):
            noted.setdefault(cause, []).extend([seconds / times] if times else [])
        return {cause: statistics.median(seconds) for cause, seconds in noted.items() if seconds}


@dataclass(frozen=True)
class NotedStalls(Stalls):
    """Stalls in real time, with real workers."""

    def diagnosed(self, *, rounds: int, **options) -> tuple[Diagnosis, dict[str, float]]:
        """What `diagnose` says, and what it should say."""
        notes, options = Notes(rounds), {"rounds": rounds, "device": "fake", **options}
        with notes.while_training():
            found = diagnose(self.loader(notes), lambda batch: self.train(batch, notes), **options)
        return found, replace(self, **notes.medians()).shares()

    def loader(self, notes: Notes) -> DataLoader:
        options = {"persistent_workers": True, "multiprocessing_context": "fork"} if self.num_workers else {}
        collate = _Collate(self.hand_over, notes)
        _makers[id(collate)] = collate
        return DataLoader(_Slow(self, notes), BATCH, num_workers=self.num_workers, collate_fn=collate, **options)

    def train(self, batch: "Batch", notes: Notes) -> None:
        with notes("step"):
            time.sleep(self.step)
        if self.copy and batch.on_host:
            with notes("copy"):
                time.sleep(self.copy)


@dataclass(frozen=True)
class _Slow(Dataset):
    """A batch at a time, so that a note is one of a batch."""

    stalls: Stalls
    notes: Notes

    def __len__(self) -> int:
        return 400

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if self.stalls.fetch:
            with self.notes("fetch"):
                time.sleep(self.stalls.fetch)
        if self.stalls.prepare:
            with self.notes("prepare"):
                _burn(self.stalls.prepare)
        return [torch.full((3, 8, 8), index % 255, dtype=torch.uint8) for index in indices]


def _burn(seconds: float) -> None:
    """Use the processor for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@dataclass(frozen=True)
class _Collate:
    hand_over: float
    notes: Notes

    def __call__(self, samples: list[torch.Tensor]) -> "Batch":
        return Batch(torch.stack(samples), self)


@dataclass
class Batch:
    """Arrives after a nap, where it comes from a worker; `to` takes it off the host."""

    images: torch.Tensor
    made_by: _Collate
    on_host: bool = True
    shape: tuple = field(init=False)

    def __post_init__(self):
        self.shape = tuple(self.images.shape)

    def to(self, device) -> "Batch":
        return Batch(self.images, self.made_by, on_host=False)

    def __reduce__(self):
        return _arrive, (self.images, id(self.made_by))


_makers: dict[int, _Collate] = {}  # notes cannot be pickled; forked workers know the same objects


def _arrive(images: torch.Tensor, maker: int) -> Batch:
    made_by = _makers[maker]
    if made_by.hand_over:
        with made_by.notes("hand_over"):
            time.sleep(made_by.hand_over)
    return Batch(images, made_by)
