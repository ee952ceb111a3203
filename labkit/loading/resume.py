"""Loaders that go on in the middle of an epoch: what they count, and the state they save."""

import zlib
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from labkit.data.labels import check_same_classes
from labkit.errors import ArgumentError, NothingLeft, OperationError, WrongTypeError
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
from labkit.util.ranks import rank_and_world_size
from labkit.util.strings import PackedStrings

_VERSION = 2  # of the state; raised when its meaning changes


class FailedBatch:
    """An error in place of a batch. The pass that meets it raises it, and goes on with the next batch.

    Attributes:
        is_empty: Whether nothing else is wrong than that all images of the batch were skipped.
        reason: What the error says, without the traceback of a worker.
    """

    def __init__(self, error: BaseException):
        worker = get_worker_info()
        where = f"in DataLoader worker process {worker.id}" if worker else ""
        self.error: ExceptionWrapper | BaseException = (
            ExceptionWrapper((type(error), error, error.__traceback__), where) if worker else error
        )
        self.is_empty, self.reason = isinstance(error, NothingLeft), str(error)

    def take_error(self) -> BaseException:
        """The error, to be raised; of a worker's, one that holds its traceback as text.

        No frame of its traceback refers to it. Such a circle would keep the pass, and its workers, until Python's
        collector finds it.
        """
        error: Any = self.error
        self.error = RuntimeError("it was taken")
        if isinstance(error, ExceptionWrapper):
            try:
                error.reraise()
            except Exception as raised:
                return raised.with_traceback(None)
        return error


class Progress:
    """How far a pass has come. Batches count when they are handed out, not when they are drawn ahead.

    A batch that could not be made counts as well, and so does one of which all images were skipped.

    Attributes:
        epoch: Its number.
        n_batches: Batches that this rank handed out, since the number of ranks last changed.
        before: What was handed out until then: (batches of each rank, number of ranks), one pair for each such number.
        order_crc32: Of the indices in `n_batches`; None if it is another rank's.
        generator: State of the sampler's own generator when the epoch began, in Base64; "" if there is none.
        next_epoch: The number that a pass gets which begins while the loader stands at this one.
        outer, epoch_before: The pass at which the loader stood when this one began, and its number for the next one.
        n_loads, n_sets: How many states the loader had loaded then, and how often its place had been set at all.
        n_looks: How many passes began and were left since this one gave a batch.
        has_given: Whether a batch was handed out since the resume.
        is_over: Whether the last was handed out, and another asked for.
        is_running: Whether somebody may still ask for a batch.
        error: Of the sampler; it is raised after the batches that were drawn before.
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
        self.next_epoch, self.epoch_before = epoch + 1, epoch
        self.n_looks = self.n_loads = self.n_sets = 0
        self.outer: Progress | None = None
        self.has_given, self.is_over, self.is_running = False, False, True
        self.error: Exception | None = None
        self._drawn: deque[int] = deque()  # checksums after each batch that is on its way
        self._is_drawn = False  # whether the sampler has given its last
        self._n_missing: int | None = None  # batches, where the sampler has a length

    @property
    def is_done(self) -> bool:
        """Whether its last batch was handed out, so that the next epoch is what follows."""
        return self.is_over or (self.has_given and self._is_drawn and not self._drawn and self.error is None)

    def draw(self, batch_sampler: Any, seed: int, check: Callable[[SeededIndices], None]) -> Iterator[SeededIndices]:
        """The batches of indices that are still missing.

        An error ends them, and is kept in `error`: ValueError where the sampler begins with other indices than those of
        the state, RuntimeError where it gives nothing, what `check` raises of a batch, and what the sampler raises.
        """
        batches = self._missing(batch_sampler, seed, check)

        def following() -> tuple[SeededIndices, int] | None:
            try:
                return next(batches, None)
            except Exception as error:
                self.error = error
                return None

        n_drawn, drawn = 0, following()
        while drawn is not None:
            n_drawn += 1
            # That a batch is the last is known when it is given: by the sampler's length, and where it may have come to
            # its end, or has no length, by drawing one batch more.
            may_be_last = self._n_missing is None or n_drawn >= self._n_missing
            after = following() if may_be_last else drawn
            self._is_drawn = after is None
            self._drawn.append(drawn[1])
            yield drawn[0]
            drawn = after if may_be_last else following()
        self._is_drawn = True

    def _missing(
        self, batch_sampler: Any, seed: int, check: Callable[[SeededIndices], None]
    ) -> Iterator[tuple[SeededIndices, int]]:
        """Each batch of indices that is missing, and the checksum up to it."""
        if self.generator and (own := generator_of(batch_sampler)) is not None:
            own.set_state(_state_from(self.generator))
        else:
            self.generator = _state_of_generator(batch_sampler)
        counted, crc32, n_to_skip = Occurrences(), 0, self.n_batches
        source = batches_of_rank(batch_sampler, seed, self.epoch, self.before)
        with suppress(Exception):  # it may have no length, or one that raises whatever it likes
            self._n_missing = len(source) - n_to_skip  # type: ignore[arg-type]
        batches = (
            (indices, counted.add(indices) if type(given) is not SeededIndices else given.occurrences)
            for given in source
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
            seeded = SeededIndices(indices, seed, self.epoch, occurrences)
            check(seeded)
            is_empty, crc32 = False, _add(crc32, indices)
            yield seeded, crc32
        if is_empty:
            raise OperationError(_why_empty(batch_sampler, self.epoch))

    def count(self) -> None:
        """A batch is handed out."""
        self.n_batches, self.has_given = self.n_batches + 1, True
        if self._drawn:
            self.order_crc32 = self._drawn.popleft()


def _state_from(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)


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


class Pass(Iterator[Any], ABC):
    """One pass over a loader, with a place of its own: an iterator over the batches of an epoch.

    An error of one batch is raised when that batch is asked for, and the pass goes on behind it, as torch's does.
    Ctrl-C, a worker that died, and an error of the sampler end it. A pass that has given nothing yet begins anew where
    the loader's epoch is set or a state is loaded.
    """

    _progress = Progress(0)
    _progress.is_running = False  # until it has begun

    def __init__(self, loader: "Resumable"):
        self._loader = loader
        self._begin()

    def _begin(self) -> None:
        self._n_empty, self._first_empty = 0, ""  # batches of which all images were skipped
        self._progress = self._loader._begin_epoch()
        try:
            self._start(self._progress)
        except BaseException as error:
            self._end(error)
            raise

    @abstractmethod
    def _start(self, progress: Progress) -> None:
        """Begin to load an epoch."""

    @abstractmethod
    def _next_batch(self) -> Any:
        """The next batch, or a `FailedBatch` in the place of one that could not be made; StopIteration at the end."""

    def __next__(self) -> Any:
        if not self._progress.is_running:
            raise StopIteration
        if self._is_late():
            self._end(None)
            self._begin()
        look = self._loader._newest
        if look is not None and look.outer is self._progress and look.generator:
            self._loader._restore_generator(look)  # to where it was before the look, which is kept, drew from it
        while True:
            batch = self._take()
            self._progress.count()
            self._loader._given(self._progress)
            if not isinstance(batch, FailedBatch):
                return batch
            if not batch.is_empty or rank_and_world_size()[1] > 1:  # ranks must have equally many batches
                raise batch.take_error()
            self._n_empty, self._first_empty = self._n_empty + 1, self._first_empty or batch.reason

    def _is_late(self) -> bool:
        """Whether the loader's place was set since this pass began, and it has given nothing: it begins there."""
        return not self._progress.has_given and self._progress.n_sets != self._loader._sets

    def _take(self) -> Any:
        try:
            return self._next_batch()
        except StopIteration as end:
            failed, self._progress.error = self._progress.error, None
            self._progress.is_over = failed is None
            self._end(end)
            if failed is not None:
                try:
                    raise failed from None
                finally:
                    del failed  # whose traceback holds this frame
            if self._n_empty and self._n_empty == self._progress.n_batches and not self._progress.before:
                raise NothingLeft(f"no batch of the epoch is left: {self._first_empty}") from None
            raise
        except BaseException as error:
            self._end(error)
            raise

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, as the loader's `state_dict` says where the loader stands."""
        progress = self._progress
        if progress.is_running and self._is_late():
            return self._loader.state_dict()
        return self._loader._state_of(Progress(progress.epoch + 1) if progress.is_done else progress)

    def close(self) -> None:
        """Leave the pass: it gives no more batches."""
        self._end(None)

    __del__ = close

    def _end(self, error: BaseException | None) -> None:
        if self._progress.is_running:
            self._progress.is_running = False
            self._loader._end_pass(self._progress)


class Resumable(ABC):
    """A loader that numbers its epochs, and can save where it stands.

    Each `iter()` begins a pass, which takes `epoch` and adds one to it. The loader stands where the pass stands that
    gave a batch last: `epoch` and `state_dict()` are that pass's, whichever other passes there are. A look at some
    batches while another pass is running, such as `next(iter(loader))`, gives the place back when it is left, and if it
    is kept, when the other pass gives its next batch. So the epochs after it are as without the look. A pass of which
    no batch was taken leaves no trace.

    Subclasses call `_start_counting()` when they are made, return a `Pass` from `__iter__`, and load the indices that
    `_batches_of` draws.

    Attributes:
        epoch: Number of the next epoch.
    """

    batch_sampler: Any
    _epoch = 0
    _newest: Progress | None = None  # the pass at which the loader stands; None: at the beginning of an epoch
    _resumed: tuple[Any, ...] | None = None  # where a state stands whose pass has given nothing yet
    _loads = 0  # how many states were loaded: a pass that began before does not move the loader
    _sets = 0  # how often the epoch was set or a state loaded: a pass that has given nothing begins anew
    _keys_crc32: int | None = None

    @property
    def epoch(self) -> int:
        """Number of the next epoch."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._newest, self._sets = epoch, None, self._sets + 1

    def __len__(self) -> int:
        return n_batches_of(self.batch_sampler)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, such as for another process, goes on with the next epoch, or where a state was loaded."""
        return {**vars(self), "_newest": None}

    def set_epoch(self, epoch: int) -> None:
        """Make this the number of the next epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain data: at the pass that gave a batch last, or where a state was loaded.

        It takes some 400 bytes, and the names of the classes; 7 KB more where the sampler draws from a generator that
        it was given, whose state then goes along. Batches that workers or threads have made ahead do not count, so they
        come after the resume. Once a pass has given its last batch, the loader stands at the beginning of the next
        epoch. One rank's state serves all. Take it from the wrapper, if there is one (`CUDAPrefetcher`). Of two passes
        at a time, each has a `state_dict()` of its own.
        """
        progress = self._newest
        if self._resumed is not None and self._resumed[0] == self.epoch:
            progress = Progress(*self._resumed)
        elif progress is None or progress.is_done:
            progress = Progress(self.epoch)
        return self._state_of(progress)

    def _state_of(self, progress: Progress) -> dict[str, Any]:
        rank, world_size = share_of(self.batch_sampler)
        return {
            "version": _VERSION, "epoch": progress.epoch, "n_batches": progress.n_batches,
            "before": list(progress.before), "world_size": world_size, "rank": rank,
            "order_crc32": progress.order_crc32, **self._identity(), "classes": self._class_names(),
            "generator": progress.generator or _state_of_generator(self.batch_sampler),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch go on where `state` was taken: its batches are those still missing, bit for bit.

        The next epoch is that of the next `iter()`, or of an iterator that has given nothing yet. One that has given
        batches goes on by itself. The number of workers or threads may have changed. If the number of ranks has, they
        share out what all ranks together had left: by themselves, or as torch's `DistributedSampler` and
        `BucketBatchSampler` do. Nothing that was handed out is read again.

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
        self.epoch, self._loads = state["epoch"], self._loads + 1
        self._resumed = self.epoch, n_batches, before, order_crc32, state.get("generator", "")

    def _start_counting(self) -> None:
        self._epochs = EpochsOfSamplers()
        self.epoch = self._epochs.read(samplers_of(self.batch_sampler), 0)
        self._epochs.set(samplers_of(self.batch_sampler), self.epoch)

    def _begin_epoch(self) -> Progress:
        """The progress of a new epoch: that of a state, if it is of this epoch."""
        warn_if_not_shared(self.batch_sampler)
        told = require_seed(self._epochs.read(samplers_of(self.batch_sampler), self.epoch), "epoch")
        is_told, self._epoch, outer = told != self.epoch, told, self._newest
        if outer is not None:
            outer.next_epoch = told
            if outer.is_running and not is_told:
                told += outer.n_looks  # one that gives no more, but is kept, must not make all others the same epoch
        is_resumed = self._resumed is not None and self._resumed[0] == told
        progress = Progress(*self._resumed) if self._resumed and is_resumed else Progress(told)
        progress.outer, progress.epoch_before = outer, self.epoch
        progress.n_loads, progress.n_sets = self._loads, self._sets
        self._epoch, self._newest = progress.next_epoch, progress
        return progress

    def _given(self, progress: Progress) -> None:
        """A pass has given a batch."""
        if progress.n_loads == self._loads:
            self._resumed, progress.n_looks = None, 0
            self._stand_at(progress)

    def _stand_at(self, progress: Progress | None) -> None:
        if self._newest is not None and progress is not None and self._newest is not progress:
            self._newest.next_epoch, self._epoch = self._epoch, progress.next_epoch
        self._newest = progress

    def _end_pass(self, progress: Progress) -> None:
        """A pass is over or was left; one that was left during another, or gave nothing, leaves no trace."""
        outer, progress.outer = progress.outer, None
        if progress.n_loads != self._loads:
            return
        if progress.is_over:
            self._resumed = None
            self._stand_at(progress)
        elif not progress.has_given:
            if self._newest is progress:
                self._restore_generator(progress)  # workers' batches may have been drawn
                self._epoch, self._newest = progress.epoch_before, outer
            inner = self._newest
            while inner is not None and inner.outer is not progress:
                inner = inner.outer
            if inner is not None:
                inner.outer, inner.epoch_before = outer, progress.epoch_before
        elif self._newest is progress and outer is not None and outer.is_running:
            outer.n_looks += 1
            self._restore_generator(progress)
            self._stand_at(outer)

    def _restore_generator(self, progress: Progress) -> None:
        """Put the sampler's own generator back to where it was before a pass drew from it."""
        if progress.generator and (own := generator_of(self.batch_sampler)) is not None:
            own.set_state(_state_from(progress.generator))

    def _batches_of(self, progress: Progress) -> Iterator[SeededIndices]:
        """Indices of each batch; the samplers learn of the epoch when the first is asked for."""
        return _draw(self._epochs, self.batch_sampler, progress, self._source()[2], self._index_check())

    def _index_check(self) -> Callable[[SeededIndices], None]:
        """What raises an error for indices that make no batch; it must not hold the loader."""
        return _accept

    def _place(self) -> tuple[Any, ...]:
        """Where the loader and its samplers stand, for `_return_to`."""
        own, samplers = generator_of(self.batch_sampler), samplers_of(self.batch_sampler)
        n_looks = self._newest.n_looks if self._newest else 0
        return (
            (self._epoch, self._newest, self._resumed, self._loads), n_looks, self._epochs.copy(),
            [(sampler, dict(getattr(sampler, "__dict__", {}))) for sampler in samplers], own and own.get_state(),
        )  # fmt: skip

    def _return_to(self, place: tuple[Any, ...]) -> None:
        """Stand again where `_place` was called, as if nothing had been loaded since."""
        (self._epoch, self._newest, self._resumed, self._loads), n_looks, self._epochs, samplers, generator = place
        if self._newest is not None:
            self._newest.n_looks = n_looks
        for sampler, attributes in samplers:
            getattr(sampler, "__dict__", {}).update(attributes)
        if generator is not None:
            generator_of(self.batch_sampler).set_state(generator)  # type: ignore[union-attr]

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


def _accept(indices: SeededIndices) -> None:
    pass


def _draw(
    epochs: EpochsOfSamplers, batch_sampler: Any, progress: Progress, seed: int, check: Callable[[SeededIndices], None]
) -> Iterator[SeededIndices]:
    # No method: workers' iterators keep this generator, and must not keep the loader, which keeps them.
    epochs.set(samplers_of(batch_sampler), progress.epoch)
    yield from progress.draw(batch_sampler, seed, check)


def _crc32_of(keys: Any) -> int:
    """A checksum of all keys in their order; 0 if there are none."""
    if not isinstance(keys, Sequence):
        return 0
    block, offsets = PackedStrings(map(str, keys) if not isinstance(keys, PackedStrings) else keys).arrays()
    return zlib.crc32(offsets.tobytes(), zlib.crc32(block.tobytes()))


def _describe(batch_sampler: Any) -> str:
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    names = ("shuffle", "seed", "drop_last", "sizes_crc32")
    settings = {name: getattr(sampler, name) for name in names if hasattr(sampler, name)}
    if isinstance(weights := getattr(sampler, "weights", None), torch.Tensor):
        settings |= {
            "num_samples": sampler.num_samples,
            "replacement": sampler.replacement,
            "weights_crc32": zlib.crc32(weights.cpu().numpy().tobytes()),
        }
    return f"{type(sampler).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"
