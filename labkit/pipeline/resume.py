"""Loaders that go on in the middle of an epoch: what they count, and the state they save."""

import copy
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import BatchSampler

from labkit.core import PackedStrings
from labkit.data import check_same_classes

_VERSION = 1  # of the state; raised when its meaning changes
_POSITION = ("epoch", "n_batches", "before", "world_size", "rank", "order_crc32")

Batch = TypeVar("Batch")
Pair = Sequence[int]  # batches of each rank, number of ranks


class Progress:
    """How far an epoch has come. Batches count when they are handed out, not when they are drawn ahead.

    Attributes:
        epoch: Its number.
        n_batches: Batches that this rank handed out, since the number of ranks last changed.
        before: What was handed out until then: (batches of each rank, number of ranks), one pair for each such number.
        order_crc32: Of the indices in `n_batches`.
        is_over: Whether the last was handed out, and another asked for.
    """

    def __init__(self, epoch: int, n_batches: int = 0, before: Sequence[Pair] = (), order_crc32: int | None = 0):
        self.epoch, self.n_batches, self.before = epoch, n_batches, before
        self.order_crc32, self.is_over = order_crc32, False
        self._n_to_skip = n_batches
        self._drawn: deque[int] = deque()  # checksums after each batch that is on its way

    def draw(self, batch_sampler: Any) -> Iterator[Any]:
        """The batches of indices that are still missing.

        Raises:
            ValueError: the sampler begins with other indices than those of the state.
        """
        batches = iter(_rest_of(batch_sampler, self.before))
        order_crc32 = 0
        for indices in islice(batches, self._n_to_skip):
            order_crc32 = _add(indices, order_crc32)
        if self._n_to_skip and self.order_crc32 not in (None, order_crc32):
            raise ValueError(
                f"the sampler does not begin epoch {self.epoch} with the {self.n_batches} batches that were handed out "
                "before: use one whose order depends on a seed and the epoch alone, such as shuffle=True gives"
            )
        self._n_to_skip = 0  # `compare` may ask for another pass
        for indices in batches:
            order_crc32 = _add(indices, order_crc32)
            self._drawn.append(order_crc32)
            yield indices

    def give(self, batch: Batch) -> Batch:
        """Count a batch on its way to the caller."""
        self.n_batches += 1
        if self._drawn:
            self.order_crc32 = self._drawn.popleft()
        return batch


def _add(indices: Any, crc32: int) -> int:
    return zlib.crc32(repr(indices).encode(), crc32)


class Resumable(ABC):
    """A loader that numbers its epochs, and can save where it stands.

    Subclasses take `_begin_epoch()` in `__iter__`, draw from its `draw`, and hand batches out through its `give`.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one.
    """

    epoch = 0
    batch_sampler: Any
    _progress: Progress | None = None
    _resumed: Progress | None = None
    _keys_crc32: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Make this the number of the next epoch."""
        self.epoch, self._progress = epoch, None

    def state_dict(self) -> dict[str, Any]:
        """Where the newest epoch stands: the batches handed out so far, as plain data.

        It takes some 400 bytes, and the names of the classes. Batches that workers or threads have made ahead do not
        count, so they come after the resume. One rank's state serves all. Take it from the wrapper, if there is one
        (`CUDAPrefetcher`).
        """
        is_resumed = self._resumed is not None and self._resumed.epoch == self.epoch
        progress = self._resumed if is_resumed else self._progress
        if progress is None or progress.is_over:
            progress = Progress(self.epoch)
        rank, world_size = _place_of(self._sampler())
        position = [
            progress.epoch, progress.n_batches, list(progress.before), world_size, rank, progress.order_crc32,
        ]  # fmt: skip
        named = dict(zip(_POSITION, position, strict=True))
        return {"version": _VERSION, **named, **self._identity(), "classes": self._class_names()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch go on where `state` was taken: its batches are those still missing, bit for bit.

        The number of workers or threads may have changed. If the number of ranks has, torch's `DistributedSampler` and
        `BucketBatchSampler` share out what all ranks together had left. Nothing that was handed out is read again.

        Raises:
            ValueError: the state is of other data, settings or classes; names the first that differs.
        """
        position = self._check(state)
        n_batches, before, order_crc32 = position["n_batches"], position["before"], position["order_crc32"]
        rank, world_size = _place_of(self._sampler())
        if world_size != position["world_size"]:
            before = [*before, [n_batches, position["world_size"]]] if n_batches else before
            n_batches = 0
        known_crc32 = order_crc32 if rank == position["rank"] else None
        self.epoch = position["epoch"]
        self._resumed = Progress(self.epoch, n_batches, before, known_crc32 if n_batches else 0)

    def _begin_epoch(self) -> Progress:
        """The progress of a new epoch: that of a state, if it is of this epoch."""
        resumed, self._resumed = self._resumed, None
        self._progress = resumed if resumed and resumed.epoch == self.epoch else Progress(self.epoch)
        self.epoch += 1
        return self._progress

    def _sampler(self) -> Any:
        """What the batches of indices come from."""
        return self.batch_sampler

    @abstractmethod
    def _source(self) -> tuple[Any, int, int]:
        """Keys or None, the number of samples, and the seed: what the batches depend on."""

    def _identity(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        keys, n_samples, seed = self._source()
        if self._keys_crc32 is None:
            self._keys_crc32 = _crc32_of(keys)
        batch_size = getattr(self._sampler(), "batch_size", None)
        identity = {"n_samples": n_samples, "keys_crc32": self._keys_crc32, "seed": seed, "batch_size": batch_size}
        return {**identity, "sampler": _describe(self._sampler())}

    def _class_names(self) -> list[str]:
        """The classes of the loader, or of its data set; empty if neither has names for them."""
        holder = self if hasattr(self, "classes") else getattr(self, "dataset", None)
        classes = getattr(holder, "classes", None)
        if isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes):
            return list(classes)
        return []

    def _check(self, state: Any) -> Mapping[str, Any]:
        identity = self._identity()
        if not isinstance(state, Mapping) or not state.keys() >= {"version", *_POSITION, *identity}:
            raise ValueError(
                f"this is not a state of {type(self).__name__}: give the one that its state_dict() returned"
            )
        if state["version"] != _VERSION:
            raise ValueError(
                f"the state has version {state['version']}, this labkit reads {_VERSION}: begin the epoch anew"
            )
        for name, value in identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the state was taken with {name}={state[name]!r}, this loader has {value!r}: make the loader as "
                    "it was, or begin the epoch anew"
                )
        if "classes" in state:  # states of earlier versions have none
            remedy = "pass the classes= that it was made with, or begin the epoch anew"
            check_same_classes("the state", state["classes"], self._class_names(), remedy)
        return state


def _crc32_of(keys: Any) -> int:
    """Of all keys in their order; 0 if there are none."""
    if not isinstance(keys, Sequence):
        return 0
    block, offsets = PackedStrings(map(str, keys) if not isinstance(keys, PackedStrings) else keys).arrays()
    return zlib.crc32(offsets.tobytes(), zlib.crc32(block.tobytes()))


def _place_of(batch_sampler: Any) -> tuple[int, int]:
    """Rank and number of ranks among which a sampler shares out an epoch."""
    sampler: Any
    for sampler in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        if hasattr(sampler, "num_replicas"):
            return sampler.rank, sampler.num_replicas
    return 0, 1


def _describe(batch_sampler: Any) -> str:
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    names = ("shuffle", "seed", "drop_last", "remainder", "sizes_crc32")
    settings = {name: getattr(sampler, name) for name in names if hasattr(sampler, name)}
    return f"{type(sampler).__name__.lstrip('_')}({', '.join(f'{name}={value}' for name, value in settings.items())})"


def _rest_of(batch_sampler: Any, before: Sequence[Pair]) -> Any:
    """This rank's batches of what is left of the epoch after `before`."""
    if not before:
        return batch_sampler
    if hasattr(batch_sampler, "rest"):
        return batch_sampler.rest(before)
    sampler: Any = batch_sampler.sampler  # a DistributedSampler: others are not shared out
    whole = copy.copy(sampler)
    whole.rank, whole.num_replicas = 0, 1
    whole.num_samples = whole.total_size = len(whole.dataset)
    order = list(whole)
    rest = order[sum(n_batches * world_size for n_batches, world_size in before) * batch_sampler.batch_size :]
    n_over = len(rest) % sampler.num_replicas
    if n_over and sampler.drop_last:
        rest = rest[:-n_over]
    elif n_over:
        rest += order[: sampler.num_replicas - n_over]  # as the sampler itself fills up its last round
    return BatchSampler(rest[sampler.rank :: sampler.num_replicas], batch_sampler.batch_size, batch_sampler.drop_last)
