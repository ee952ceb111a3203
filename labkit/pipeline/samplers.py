"""The order of samples."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch.utils.data import Sampler

from labkit.pipeline.seeding import TORCH_SEEDS, derived_seed


@runtime_checkable
class HasEpochs(Protocol):
    """A sampler with another order each epoch, such as torch's `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None: ...


class Shuffled(Sampler[int]):
    """All indices, in an order that depends only on (seed, epoch)."""

    def __init__(self, n_samples: int, seed: int):
        self._n_samples, self._seed, self._epoch = n_samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._n_samples

    def __iter__(self) -> Iterator[int]:
        seed = derived_seed(self._seed, self._epoch) & TORCH_SEEDS
        yield from torch.randperm(self._n_samples, generator=torch.Generator().manual_seed(seed)).tolist()
