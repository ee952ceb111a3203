"""In which order samples come: a new order for each epoch, for one process or shared among ranks, for any loader."""

import copy
import os
import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from labkit.errors import ArgumentError, WrongTypeError
from labkit.loading.seeding import SeededIndices, number_of, permutation


class LoaderWarning(UserWarning):
    """A setting was changed, because it would do harm or nothing here; or a loader may not do what is meant."""


@runtime_checkable
class HasEpochs(Protocol):
    """A sampler with another order each epoch, such as torch's `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None: ...


class _OwnEpoch(int):
    """An epoch's number as an object of its own: when the training sets the same number, it sets another object."""


class _CountsEpochs:
    """Where nobody sets the epoch, each pass is an epoch further than the one before.

    Where somebody does, it stays until a pass has come to its end: whoever sets it may begin a pass twice, as
    torchdata's loader does when it resumes.

    Attributes:
        epoch: Of the next pass.
    """

    epoch = 0
    _is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next pass."""
        self.epoch, self._is_set = epoch, True

    def _begin_pass(self) -> int:
        epoch = int(self.epoch)
        if not self._is_set:
            self.epoch = _OwnEpoch(epoch + 1)
        return epoch

    def _end_pass(self, epoch: int) -> None:
        if self._is_set and self.epoch == epoch:
            self.epoch = _OwnEpoch(epoch + 1)


class ShuffledSampler(_CountsEpochs, RandomSampler):
    """All indices of a data set, in an order that depends only on (seed, epoch).

    Args:
        data_source: The data set; its length counts.
        seed: Of the order.
    """

    def __init__(self, data_source: Any, seed: int = 0):
        super().__init__(data_source)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        epoch = self._begin_pass()
        yield from permutation(len(self.data_source), self.seed, epoch).tolist()
        self._end_pass(epoch)


class SeededBatchSampler(_CountsEpochs, BatchSampler):
    """torch's BatchSampler, whose batches also carry what their samples' random draws depend on.

    So a loader of another library that takes this one's parts (accelerate does) makes the same batches.

    Args:
        sampler: Gives the indices. It may be replaced later.
        batch_size: Indices in a batch.
        drop_last: Drop a last batch that is not full.
        seed: Of the draws.
        dataset: What the indices are of: its generators are seeded where a loader has no workers.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, seed: int = 0, dataset: Any = None):
        super().__init__(sampler, batch_size, drop_last)
        self.seed, self.dataset = seed, dataset
        self._epochs, self._given, self._n_to_skip = EpochsOfSamplers(), (0, 0), 0

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next pass, also for the sampler."""
        super().set_epoch(epoch)
        self._epochs.set([self.sampler], epoch)

    def __iter__(self) -> Iterator[list[int]]:
        told = self._epochs.read([self.sampler], -1)
        if told >= 0:
            super().set_epoch(told)
        epoch, counted = self._begin_pass(), Occurrences()
        self._epochs.set([self.sampler], epoch)
        n_to_skip, self._n_to_skip, self._given = self._n_to_skip, 0, (epoch, 0)
        for number, indices in enumerate(super().__iter__(), 1):
            occurrences = counted.add(indices)
            if number > n_to_skip:
                self._given = epoch, number
                yield SeededIndices(indices, self.seed, epoch, occurrences, self.dataset)
        self._end_pass(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the newest pass stands, for torchdata's `StatefulDataLoader`."""
        return dict(zip(("epoch", "n_batches"), self._given, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass go on where `state` was taken."""
        self.set_epoch(state["epoch"])
        self._n_to_skip = state["n_batches"]


class EpochsOfSamplers:
    """Which epoch samplers are in: a loader sets it, unless the training has set another since."""

    def __init__(self) -> None:
        self._left: dict[int, Any] = {}  # what a sampler's `epoch` was after we set it

    def read(self, samplers: Iterable[Any], epoch: int) -> int:
        """`epoch`, or what the training has set on one of the samplers since `set`; of a new sampler, what is not 0."""
        for sampler in samplers:
            now = getattr(sampler, "epoch", None)
            if isinstance(now, int) and not isinstance(now, _OwnEpoch) and now is not self._left.get(id(sampler), 0):
                epoch = int(now)
        return epoch

    def set(self, samplers: Iterable[Any], epoch: int) -> None:
        """Tell all samplers that have epochs."""
        for sampler in samplers:
            if isinstance(sampler, HasEpochs):
                sampler.set_epoch(_OwnEpoch(epoch))
                self._left[id(sampler)] = getattr(sampler, "epoch", None)


class Occurrences:
    """How many times each index came before in an epoch."""

    def __init__(self) -> None:
        self._of_small = array("I")
        self._of_others: dict[int, int] = {}

    def add(self, indices: Iterable[Any]) -> list[int]:
        """Count a batch; returns how many times each of its indices came before."""
        return [self._add(number_of(index)) for index in indices]

    def _add(self, number: int) -> int:
        if not 0 <= number < 1 << 28:
            before = self._of_others.get(number, 0)
            self._of_others[number] = before + 1
            return before
        if number >= len(self._of_small):
            self._of_small.frombytes(bytes(self._of_small.itemsize * (number + 1024)))  # about twice as many
        before = self._of_small[number]
        self._of_small[number] = before + 1
        return before


def choose_sampler(
    samples: Any, sampler: Sampler[int] | Iterable[int] | None, shuffle: bool | None, seed: int
) -> Sampler[int] | Iterable[int]:
    """The order of samples: the sampler's, or that of `samples`, which a seed may shuffle."""
    if sampler is None:
        return ShuffledSampler(samples, seed) if shuffle else SequentialSampler(samples)
    if shuffle:
        raise ArgumentError("got shuffle=True and a sampler: leave out one of them, the sampler decides the order")
    check_repeatable("sampler", sampler)
    return sampler


def check_repeatable(name: str, sampler: Any) -> None:
    """Raise TypeError for a generator or another iterator, which is used up after one epoch."""
    inner = getattr(sampler, "sampler", None)
    if not isinstance(sampler, Iterable):
        raise WrongTypeError(
            f"{name} must be iterable, such as torch's samplers or a list, got {type(sampler).__name__}"
        )
    for each in (sampler, inner):
        if isinstance(each, Iterator) and not isinstance(each, Sampler):
            raise WrongTypeError(
                f"{name} is a {type(each).__name__}, which can be read once: the second epoch would have no batch. "
                "Give a list, or an object whose __iter__ begins anew each time"
            )


def rank_and_world_size() -> tuple[int, int]:
    """Of this process: as `torch.distributed` has them, else as torchrun's environment says; else (0, 1)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):  # none, or left empty
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)


def share_of(batch_sampler: Any) -> tuple[int, int]:
    """Rank and number of ranks among which a batch sampler's epoch is shared out.

    A sampler with `num_replicas` shares it out itself. That of all samples in a fixed order is shared out by the
    loader. Any other gives each rank what it gives.
    """
    for sampler in _chain(batch_sampler):
        if hasattr(sampler, "num_replicas"):
            return sampler.rank, sampler.num_replicas
    return rank_and_world_size() if _is_whole(batch_sampler) else (0, 1)


def _is_whole(batch_sampler: Any) -> bool:
    # Exact types: another class may choose or order the samples in its own way.
    is_plain = type(batch_sampler) in (BatchSampler, SeededBatchSampler)
    return is_plain and type(batch_sampler.sampler) in (ShuffledSampler, SequentialSampler)


def _chain(batch_sampler: Any) -> tuple[Any, Any]:
    return batch_sampler, getattr(batch_sampler, "sampler", None)


def samplers_of(batch_sampler: Any) -> list[Any]:
    """A batch sampler and its sampler: those of them that exist."""
    return [sampler for sampler in _chain(batch_sampler) if sampler is not None]


def warn_if_not_shared(batch_sampler: Any) -> None:
    """Warn where several ranks each read all that a sampler gives, for nothing says that they share it."""
    rank, world_size = rank_and_world_size()
    if world_size > 1 and share_of(batch_sampler)[1] == 1:
        name = type(getattr(batch_sampler, "sampler", batch_sampler)).__name__
        warnings.warn(
            f"this is rank {rank} of {world_size}, and each rank loads all that {name} gives: use one that shares the "
            "samples out, such as torch's DistributedSampler, or leave the sampler out, then labkit does. If it gives "
            "each rank its own part already, say so by attributes `rank` and `num_replicas`",
            LoaderWarning,
            stacklevel=4,
        )


def n_batches_of(batch_sampler: Any) -> int:
    """Batches of an epoch for this rank."""
    world_size = share_of(batch_sampler)[1]
    if world_size == 1 or not _is_whole(batch_sampler):
        return len(batch_sampler)
    n_samples = -(-len(batch_sampler.sampler) // world_size)
    size = batch_sampler.batch_size
    return n_samples // size if batch_sampler.drop_last else -(-n_samples // size)


def batches_of_rank(batch_sampler: Any, before: Sequence[Sequence[int]] = ()) -> Iterable[Any]:
    """This rank's batches of an epoch, or of what is left of it.

    Args:
        batch_sampler: Its epoch is set.
        before: (batches that each rank had, number of ranks), for each number of ranks that the epoch has seen.
    """
    rank, world_size = share_of(batch_sampler)
    if before and hasattr(batch_sampler, "rest"):
        return batch_sampler.rest(before)
    is_whole = _is_whole(batch_sampler)
    if not before and (world_size == 1 or not is_whole):
        return batch_sampler
    sampler = batch_sampler.sampler
    order = list(sampler if is_whole else _of_all_ranks(sampler))
    rest = order[sum(n_batches * n_ranks for n_batches, n_ranks in before) * batch_sampler.batch_size :]
    n_over = len(rest) % world_size
    if n_over and getattr(sampler, "drop_last", False):
        rest = rest[:-n_over]
    elif n_over:
        rest += (order * world_size)[: world_size - n_over]  # as DistributedSampler fills up its last round
    return BatchSampler(rest[rank::world_size], batch_sampler.batch_size, batch_sampler.drop_last)


def _of_all_ranks(sampler: Any) -> Any:
    """A `DistributedSampler` for a single process: others are not shared out."""
    whole = copy.copy(sampler)
    whole.rank, whole.num_replicas = 0, 1
    whole.num_samples = whole.total_size = len(whole.dataset)
    return whole
