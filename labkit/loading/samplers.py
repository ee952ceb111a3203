"""In which order samples come: a new order for each epoch, for one process or shared among ranks, for any loader."""

import copy
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from labkit.errors import ArgumentError, WrongTypeError
from labkit.loading.seeding import SeededIndices, derived_seed, number_of, permutation
from labkit.util.arguments import require_flag
from labkit.util.process import on_cpu
from labkit.util.ranks import rank_and_world_size


class LoaderWarning(UserWarning):
    """A setting was changed, because it would do harm or nothing here; or a loader may not do what is meant."""


class _OwnEpoch(int):
    """An epoch's number as an object of its own: when the training sets the same number, it sets another object."""


class CountsEpochs:
    """A sampler whose passes are numbered, and which torchdata's `StatefulDataLoader` can resume.

    Where nobody sets the epoch, each pass is an epoch further than the one before. Where somebody does, it stays until
    a pass has come to its end: whoever sets it may begin a pass twice, as torchdata's loader does when it resumes.

    Attributes:
        epoch: Of the next pass.
    """

    epoch = 0
    _is_set, _given, _resume_at = False, (0, 0), (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next pass."""
        self.epoch, self._is_set = epoch, True

    def state_dict(self) -> dict[str, int]:
        """Where the newest pass stands: its epoch, and what it has given."""
        return dict(zip(("epoch", "n_given"), self._given, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass go on where `state` was taken."""
        self.set_epoch(state["epoch"])
        self._resume_at = state["epoch"], state["n_given"]

    def _count(self, items_of: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        """A pass: what `items_of` gives for its epoch."""
        epoch = int(self.epoch)
        if not self._is_set:
            self.epoch = _OwnEpoch(epoch + 1)
        n_to_skip = self._resume_at[1] if self._resume_at[0] == epoch else 0
        self._resume_at, self._given = (0, 0), (epoch, 0)
        for number, item in enumerate(items_of(epoch), 1):
            if number > n_to_skip:
                self._given = epoch, number
                yield item
        if self._is_set and self.epoch == epoch:
            self.epoch = _OwnEpoch(epoch + 1)


class ShuffledSampler(CountsEpochs, RandomSampler):
    """All indices of a data set, in an order that depends only on (seed, epoch).

    Args:
        data_source: The data set; its length counts.
        seed: Of the order.
    """

    def __init__(self, data_source: Any, seed: int = 0):
        super().__init__(data_source)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        return self._count(lambda epoch: permutation(len(self.data_source), self.seed, epoch).tolist())


class SeededBatchSampler(CountsEpochs, BatchSampler):
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
        self._epochs = EpochsOfSamplers()

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next pass, also for the sampler."""
        super().set_epoch(epoch)
        self._epochs.set([self.sampler], epoch)

    def __iter__(self) -> Iterator[SeededIndices]:
        told = self._epochs.read([self.sampler], -1)
        if told >= 0:
            super().set_epoch(told)
        yield from self._count(self._batches)

    def _batches(self, epoch: int) -> Iterator[SeededIndices]:
        self._epochs.set([self.sampler], epoch)
        counted = Occurrences()
        for indices in BatchSampler(order_of(self.sampler, self.seed, epoch), self.batch_size, self.drop_last):
            yield SeededIndices(indices, self.seed, epoch, counted.add(indices), self.dataset)


_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_OF_SAMPLER = -3  # follows (seed, epoch), which alone is the order of `ShuffledSampler`
_63_BITS = (1 << 63) - 1


def _draws_unseeded(sampler: Any) -> bool:
    """Whether it is one of torch's that would draw from the global generator; others may draw in their own way."""
    return type(sampler) in _DRAWING and sampler.generator is None


def order_of(sampler: Any, seed: int, epoch: int) -> Any:
    """What to iterate over for an epoch: the sampler, or what it draws by (seed, epoch) if nothing else seeds it."""
    if not _draws_unseeded(sampler):
        return sampler
    drawing = copy.copy(sampler)  # the sampler itself is the user's, and two passes may run at a time
    if isinstance(weights := getattr(sampler, "weights", None), torch.Tensor):
        drawing.weights = weights.cpu()  # where the generator is
    drawing.generator = torch.Generator().manual_seed(derived_seed(seed, epoch, _OF_SAMPLER) & _63_BITS)
    return _drawn(iter(drawing))


def _drawn(indices: Iterator[Any]) -> Iterator[Any]:
    while True:
        with on_cpu():  # whatever torch's default device is
            some = list(islice(indices, 1024))
        if not some:
            return
        yield from some


def generator_of(batch_sampler: Any) -> torch.Generator | None:
    """The generator that the user gave a sampler: its state is what the order of an epoch depends on."""
    found = (getattr(sampler, "generator", None) for sampler in samplers_of(batch_sampler))
    return next((generator for generator in found if isinstance(generator, torch.Generator)), None)


class EpochsOfSamplers:
    """Which epoch samplers are in: a loader sets it, unless the training has set another since."""

    def __init__(self) -> None:
        self._left: dict[int, Any] = {}  # what a sampler's `epoch` was after we set it

    def copy(self) -> "EpochsOfSamplers":
        """One of its own that knows the same."""
        copied = EpochsOfSamplers()
        copied._left = dict(self._left)
        return copied

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
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(_OwnEpoch(epoch))
                self._left[id(sampler)] = getattr(sampler, "epoch", None)


class Occurrences:
    """How many times each index came before in an epoch."""

    def __init__(self) -> None:
        self._counts = array("I")
        self._others: Counter[int] = Counter()  # of indices that are no places in a data set

    def add(self, indices: Iterable[Any]) -> list[int]:
        """Count a batch; returns how many times each of its indices came before."""
        before = []
        for number in map(number_of, indices):
            if not 0 <= number < _MAX_COUNTED:
                before.append(self._others[number])
                self._others[number] += 1
                continue
            if number >= len(self._counts):
                self._counts.frombytes(bytes(self._counts.itemsize * (number + 1024)))  # about twice as many
            before.append(self._counts[number])
            self._counts[number] += 1
        return before


_MAX_COUNTED = 1 << 31


def choose_sampler(
    samples: Any, sampler: Sampler[int] | Iterable[int] | None, shuffle: bool | None, seed: int
) -> Sampler[int] | Iterable[int]:
    """The order of samples: the sampler's, or that of `samples`, which a seed may shuffle."""
    if sampler is None:
        is_shuffled = shuffle is not None and require_flag("shuffle", shuffle)
        return ShuffledSampler(samples, seed) if is_shuffled else SequentialSampler(samples)
    if shuffle:
        raise ArgumentError("got shuffle=True and a sampler: leave out one of them, the sampler decides the order")
    check_repeatable("sampler", sampler)
    if isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) != len(samples):
        raise ArgumentError(
            f"the WeightedRandomSampler has {len(sampler.weights)} weights for {len(samples)} samples: it takes one "
            "for each sample, such as np.asarray(class_weights)[dataset.labels], and not one for each class"
        )
    return sampler


def check_repeatable(name: str, sampler: Any) -> None:
    """Raise TypeError for a generator or another iterator, which is used up after one epoch."""
    if not isinstance(sampler, Iterable) or isinstance(sampler, str | bytes | type):
        what = f"the class {sampler.__name__}" if isinstance(sampler, type) else repr(sampler)
        raise WrongTypeError(f"{name} must be one of torch's samplers, or a list of what it gives, got {what:.200}")
    if isinstance(sampler, set | frozenset | Mapping):
        raise WrongTypeError(f"{name} is a {type(sampler).__name__}, which is no order of indices: give a list")
    if _is_mask(sampler):
        raise WrongTypeError(f"{name} is a mask of True and False: give the indices, such as np.flatnonzero(mask)")
    for each in samplers_of(sampler):
        if isinstance(each, Iterator) and not isinstance(each, Sampler):
            raise WrongTypeError(
                f"{name} is a {type(each).__name__}, which can be read once: the second epoch would have no batch. "
                "Give a list, or an object whose __iter__ starts from the beginning each time"
            )


def _is_mask(indices: Any) -> bool:
    if isinstance(indices, list | tuple):
        return bool(indices) and all(isinstance(index, bool) for index in indices)
    return str(getattr(indices, "dtype", "")) in ("bool", "torch.bool")


def samplers_of(batch_sampler: Any) -> list[Any]:
    """A batch sampler, and its sampler if it has one."""
    return [batch_sampler, *([batch_sampler.sampler] if hasattr(batch_sampler, "sampler") else [])]


def share_of(batch_sampler: Any) -> tuple[int, int]:
    """Rank and number of ranks among which a batch sampler's epoch is shared out.

    A sampler with `num_replicas` shares it out itself. One whose order is the same on every rank, since it is that of
    the samples or depends on the seed and the epoch alone, is shared out by the loader. Any other gives each rank what
    it gives.
    """
    for sampler in samplers_of(batch_sampler):
        if hasattr(sampler, "num_replicas"):
            return sampler.rank, sampler.num_replicas
    return rank_and_world_size() if _is_whole(batch_sampler) else (0, 1)


def _is_whole(batch_sampler: Any) -> bool:
    # Exact types: another class may choose or order the samples in its own way.
    if type(batch_sampler) not in (BatchSampler, SeededBatchSampler):
        return False
    sampler = batch_sampler.sampler
    return type(sampler) in (ShuffledSampler, SequentialSampler) or _draws_unseeded(sampler)


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


def batches_of_rank(batch_sampler: Any, seed: int, epoch: int, before: Sequence[Sequence[int]] = ()) -> Iterable[Any]:
    """This rank's batches of an epoch, or of what is left of it.

    Args:
        batch_sampler: Its epoch is set.
        seed, epoch: What torch's samplers without a generator of their own draw by.
        before: (batches that each rank had, number of ranks), for each number of ranks that the epoch has seen.
    """
    rank, world_size = share_of(batch_sampler)
    if before and hasattr(batch_sampler, "remaining_batches"):
        return batch_sampler.remaining_batches(before)
    sampler: Any = getattr(batch_sampler, "sampler", None)
    is_whole = _is_whole(batch_sampler)
    if not before and (world_size == 1 or not is_whole):
        if type(batch_sampler) is BatchSampler:
            return BatchSampler(order_of(sampler, seed, epoch), batch_sampler.batch_size, batch_sampler.drop_last)
        return batch_sampler
    if not is_whole:  # a `DistributedSampler`, made one for a single process: others are not shared out
        sampler = copy.copy(sampler)
        sampler.rank, sampler.num_replicas = 0, 1
        sampler.num_samples = sampler.total_size = len(sampler.dataset)
    order = list(order_of(sampler, seed, epoch))
    n_given = sum(n_batches * n_ranks for n_batches, n_ranks in before) * batch_sampler.batch_size
    rest = order[n_given:]
    n_over = len(rest) % world_size
    if n_over and getattr(sampler, "drop_last", False):
        rest = rest[:-n_over]
    elif n_over:
        rest += (order * world_size)[: world_size - n_over]  # as DistributedSampler fills up its last round
    own, settings = rest[rank::world_size], (batch_sampler.batch_size, batch_sampler.drop_last)
    if not _draws_unseeded(sampler):
        return BatchSampler(own, *settings)
    # An index that two ranks draw comes twice in the epoch, and each time with its own random draws.
    before_each = Occurrences().add(order[:n_given] + rest)[n_given:][rank::world_size]
    return (
        SeededIndices([own[place] for place in places], seed, epoch, [before_each[place] for place in places])
        for places in BatchSampler(range(len(own)), *settings)
    )
