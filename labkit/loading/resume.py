"""Loaders that go on in the middle of an epoch: what they count, and the state they save."""

import zlib
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from labkit.data.labels import check_same_classes
from labkit.errors import ArgumentError, OperationError, WrongTypeError
from labkit.loading.samplers import (
    EpochsOfSamplers,
    Occurrences,
    batches_of_rank,
    generator_of,
    n_batches_of,
    samplers_of,
    share_of,
    warn_if_not_shared,
)
from labkit.loading.seeding import SeededIndices, number_of
from labkit.util.arguments import require_seed
from labkit.util.process import rank_and_world_size
from labkit.util.strings import PackedStrings

_VERSION = 2  # of the state; raised when its meaning changes


class Progress:
    """How far a pass has come. Batches count when they are handed out, not when they are drawn ahead.

    Attributes:
        epoch: Its number.
        n_batches: Batches that this rank handed out, since the number of ranks last changed.
        before: What was handed out until then: (batches of each rank, number of ranks), one pair for each such number.
        order_crc32: Of the indices in `n_batches`; None if it is another rank's.
        generator: State of the sampler's own generator when the epoch began, in Base64; "" if there is none.
        outer: The pass that was running when this one began.
        has_given: Whether a batch was handed out since the resume.
        is_over: Whether the last was handed out, and another asked for.
        is_running: Whether somebody may still ask for a batch.
    """

    def __init__(
        self,
        epoch: int,
        n_batches: int = 0,
        before: Sequence[Sequence[int]] = (),
        order_crc32: int | None = 0,
        generator: str = "",
    ):
        self.epoch, self.n_batches, self.before, self.order_crc32 = epoch, n_batches, before, order_crc32
        self.generator = generator
        self.outer: Progress | None = None
        self.has_given, self.is_over, self.is_running = False, False, True
        self._drawn: deque[int] = deque()  # checksums after each batch that is on its way

    def draw(self, batch_sampler: Any, seed: int) -> Iterator[SeededIndices]:
        """The batches of indices that are still missing.

        Raises:
            ValueError: the sampler begins with other indices than those of the state.
            RuntimeError: it gives nothing.
        """
        if self.generator and (own := generator_of(batch_sampler)) is not None:
            own.set_state(torch.frombuffer(bytearray(b64decode(self.generator)), dtype=torch.uint8))
        else:
            self.generator = _state_of_generator(batch_sampler)
        counted, crc32, n_to_skip = Occurrences(), 0, self.n_batches
        batches = (
            (indices, counted.add(indices) if type(given) is not SeededIndices else given.occurrences)
            for given in batches_of_rank(batch_sampler, seed, self.epoch, self.before)
            for indices in [_plain(given)]
        )
        for indices, _ in islice(batches, n_to_skip):
            crc32 = _add(crc32, indices)
        if n_to_skip and self.order_crc32 not in (None, crc32):
            raise ArgumentError(
                f"{_describe(batch_sampler)} does not begin epoch {self.epoch} with the {n_to_skip} batches that were "
                "handed out before: use a sampler whose order depends on a seed and the epoch alone, as shuffle=True "
                "gives, and torch's RandomSampler, SubsetRandomSampler and WeightedRandomSampler do in this loader"
            )
        is_empty = not n_to_skip and not self.before
        for indices, occurrences in batches:
            is_empty, crc32 = False, _add(crc32, indices)
            self._drawn.append(crc32)
            yield SeededIndices(indices, seed, self.epoch, occurrences)
        if is_empty:
            raise OperationError(_why_empty(batch_sampler, self.epoch))

    def count(self) -> None:
        """A batch is handed out."""
        self.n_batches, self.has_given = self.n_batches + 1, True
        if self._drawn:
            self.order_crc32 = self._drawn.popleft()


def _state_of_generator(batch_sampler: Any) -> str:
    """That of the sampler's own generator. With several ranks none: each may have a generator of its own."""
    own = generator_of(batch_sampler) if rank_and_world_size()[1] == 1 else None
    return "" if own is None else b64encode(own.get_state().numpy().tobytes()).decode()


def _why_empty(batch_sampler: Any, epoch: int) -> str:
    gave = f"{type(batch_sampler).__name__} gave no batch in epoch {epoch}"
    with suppress(TypeError, NotImplementedError):  # it may have no length
        if n_batches := n_batches_of(batch_sampler):
            return (
                f"{gave}, although its length is {n_batches}: its __iter__ must start from the beginning, and so must "
                "its sampler's"
            )
    if getattr(batch_sampler, "drop_last", False):
        return (
            f"{gave}: drop_last leaves out a batch that is not full, and batch_size={batch_sampler.batch_size} is more "
            "than there are samples (for each rank): pass a smaller batch_size, or drop_last=False"
        )
    return f"{gave}: give it at least one index"


def _plain(indices: Any) -> list[Any]:
    """Indices as a data set takes them: integers of any kind as Python's, others as they are."""
    if isinstance(indices, str | bytes) or not isinstance(indices, Iterable):
        raise WrongTypeError(f"a batch_sampler must give lists of indices, such as [0, 1, 2], got {indices!r:.200}")
    plain = indices.plain() if isinstance(indices, SeededIndices) else indices
    return [number_of(index) if hasattr(index, "__index__") else index for index in plain]


def _add(crc32: int, indices: list[Any]) -> int:
    return zlib.crc32(repr(indices).encode(), crc32)


class Pass(Iterator[Any]):
    """One pass over a loader: an iterator that counts the batches it gives, and tells the loader when it is left."""

    def __init__(self, loader: "Resumable", batches: Iterator[Any], progress: Progress):
        self._loader, self._batches, self._progress = loader, batches, progress

    def __next__(self) -> Any:
        if not self._progress.is_running:
            raise StopIteration
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._progress.is_over = isinstance(error, StopIteration)
            self._end(error)
            raise
        self._progress.count()
        self._loader._given(self._progress)
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """Leave the pass: it gives no more batches."""
        self._end(None)

    __del__ = close

    def _end(self, error: BaseException | None) -> None:
        if self._progress.is_running:
            self._progress.is_running = False
            self._batches = iter(())
            self._loader._end_pass(self._progress)


class Resumable(ABC):
    """A loader that numbers its epochs, and can save where it stands.

    Subclasses call `_start_counting()` when they are made, return a `Pass` over `_begin_epoch()` from `__iter__`, and
    load the indices that `_batches_of` draws.

    Attributes:
        epoch: Number of the next epoch. Each `iter()` takes it and adds one. A look at some batches during an epoch,
            such as `next(iter(loader))`, gives its number back, and so does a pass of which no batch was taken.
    """

    epoch = 0
    batch_sampler: Any
    _newest: Progress | None = None  # the pass that gave a batch last, or began since
    _resumed: tuple[Any, ...] | None = None  # where a state stands whose pass has given nothing yet
    _keys_crc32: int | None = None

    def __len__(self) -> int:
        return n_batches_of(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Make this the number of the next epoch."""
        self.epoch, self._newest = epoch, None

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands that gave a batch last: batches handed out so far, as plain data.

        It takes some 400 bytes, and the names of the classes; 7 KB more where the sampler draws from a generator that
        it was given, whose state then goes along. Batches that workers or threads have made ahead do not
        count, so they come after the resume. One rank's state serves all. Take it from the wrapper, if there is one
        (`CUDAPrefetcher`).
        """
        progress = self._newest
        if self._resumed is not None and self._resumed[0] == self.epoch:
            progress = Progress(*self._resumed)
        elif progress is None or progress.is_over:
            progress = Progress(self.epoch)
        rank, world_size = share_of(self.batch_sampler)
        return {
            "version": _VERSION, "epoch": progress.epoch, "n_batches": progress.n_batches,
            "before": list(progress.before), "world_size": world_size, "rank": rank,
            "order_crc32": progress.order_crc32, **self._identity(), "classes": self._class_names(),
            "generator": progress.generator or _state_of_generator(self.batch_sampler),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch go on where `state` was taken: its batches are those still missing, bit for bit.

        The number of workers or threads may have changed. If the number of ranks has, they share out what all ranks
        together had left: by themselves, or as torch's `DistributedSampler` and `BucketBatchSampler` do. Nothing that
        was handed out is read again.

        Raises:
            ValueError: the state is of other data, settings or classes; names the first that differs.
        """
        identity = self._identity()
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ArgumentError(
                f"this is not a state of {type(self).__name__}: give the one that its state_dict() returned with this "
                "version of labkit, or start the epoch from the beginning"
            )
        for name, value in identity.items():
            if state.get(name) != value:
                raise ArgumentError(
                    f"the state was taken with {name}={state.get(name)!r}, this loader has {value!r}: make the loader "
                    "as it was, or start the epoch from the beginning"
                )
        remedy = "pass the classes= that it was made with, or start the epoch from the beginning"
        check_same_classes("the state", state.get("classes", ()), self._class_names(), remedy)
        n_batches, before, order_crc32 = state["n_batches"], state["before"], state["order_crc32"]
        rank, world_size = share_of(self.batch_sampler)
        if world_size != state["world_size"]:
            before = [*before, [n_batches, state["world_size"]]] if n_batches else before
            n_batches = 0
        if not n_batches:
            order_crc32 = 0
        elif rank != state["rank"]:
            order_crc32 = None
        self.epoch = state["epoch"]
        self._resumed = self.epoch, n_batches, before, order_crc32, state.get("generator", "")

    def _place(self) -> Any:
        """Where it stands, for `_return_to`."""
        told = dict(self._epochs._left)
        return self.epoch, self._newest, self._resumed, told, [getattr(s, "epoch", None) for s in self._samplers()]

    def _return_to(self, place: Any) -> None:
        """Stand there again, whatever passes were begun since."""
        self.epoch, self._newest, self._resumed, self._epochs._left, epochs = place
        for sampler, epoch in zip(self._samplers(), epochs, strict=True):
            if hasattr(sampler, "set_epoch") and sampler.epoch is not epoch:
                sampler.epoch = epoch

    def _samplers(self) -> list[Any]:
        return samplers_of(self.batch_sampler)

    def _start_counting(self) -> None:
        self._epochs = EpochsOfSamplers()
        self.epoch = self._epochs.read(samplers_of(self.batch_sampler), 0)
        self._epochs.set(samplers_of(self.batch_sampler), self.epoch)

    def _begin_epoch(self) -> Progress:
        """The progress of a new epoch: that of a state, if it is of this epoch."""
        warn_if_not_shared(self.batch_sampler)
        self.epoch = require_seed(self._epochs.read(samplers_of(self.batch_sampler), self.epoch), "epoch")
        is_resumed = self._resumed is not None and self._resumed[0] == self.epoch
        progress = Progress(*self._resumed) if self._resumed and is_resumed else Progress(self.epoch)
        progress.outer, self._newest = self._newest, progress
        self.epoch += 1
        return progress

    def _given(self, progress: Progress) -> None:
        """A pass has given a batch."""
        self._newest, self._resumed = progress, None

    def _end_pass(self, progress: Progress) -> None:
        """A pass is over or was left; one that was left during another, or gave nothing, leaves no trace."""
        outer, progress.outer = progress.outer, None
        if progress.is_over:
            self._resumed = None
        elif not progress.has_given or (outer is not None and outer.is_running):
            if self._newest is progress:
                self._newest = outer
            if self.epoch == progress.epoch + 1:
                self.epoch = progress.epoch

    def _batches_of(self, progress: Progress) -> Iterator[SeededIndices]:
        """Indices of each batch; the samplers learn of the epoch when the first is asked for."""
        return _draw(self._epochs, self.batch_sampler, progress, self._source()[2])

    @abstractmethod
    def _source(self) -> tuple[Any, int, int]:
        """Keys or None, the number of samples, and the seed: what the batches depend on."""

    def _identity(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        keys, n_samples, seed = self._source()
        if self._keys_crc32 is None:
            of_rows = getattr(getattr(getattr(self, "dataset", None), "store", None), "sizes_crc32", 0)
            self._keys_crc32 = _crc32_of(keys) ^ of_rows  # rows of a table have the same keys in any order
        return {
            "n_samples": n_samples, "keys_crc32": self._keys_crc32, "seed": seed,
            "batch_size": getattr(self.batch_sampler, "batch_size", None), "sampler": _describe(self.batch_sampler),
        }  # fmt: skip

    def _class_names(self) -> list[str]:
        """The classes of the loader, or of its data set; empty if neither has names for them."""
        holder = self if hasattr(self, "classes") else getattr(self, "dataset", None)
        classes = getattr(holder, "classes", None)
        is_named = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
        return list(classes or ()) if is_named else []


def _draw(epochs: EpochsOfSamplers, batch_sampler: Any, progress: Progress, seed: int) -> Iterator[SeededIndices]:
    # No method: workers' iterators keep this generator, and must not keep the loader, which keeps them.
    epochs.set(samplers_of(batch_sampler), progress.epoch)
    yield from progress.draw(batch_sampler, seed)


def _crc32_of(keys: Any) -> int:
    """A checksum of all keys in their order; 0 if there are none."""
    if not isinstance(keys, Sequence):
        return 0
    block, offsets = PackedStrings(map(str, keys) if not isinstance(keys, PackedStrings) else keys).arrays()
    return zlib.crc32(offsets.tobytes(), zlib.crc32(block.tobytes()))


def _describe(batch_sampler: Any) -> str:
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    names = ("shuffle", "seed", "drop_last", "remainder", "sizes_crc32")
    settings = {name: getattr(sampler, name) for name in names if hasattr(sampler, name)}
    if isinstance(weights := getattr(sampler, "weights", None), torch.Tensor):
        settings |= {
            "num_samples": sampler.num_samples,
            "replacement": sampler.replacement,
            "weights_crc32": zlib.crc32(weights.cpu().numpy().tobytes()),
        }
    return f"{type(sampler).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"
