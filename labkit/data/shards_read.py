"""Read WebDataset shards: each sample once per epoch, for any number of ranks and workers, from any place on.

A reader is one worker of one rank. Its order of samples in an epoch depends on the seed and on the numbers of ranks and
workers alone (`EpochOrder`), so that little has to be saved to go on: which samples of which orders are still to come
(`Progress`). When the ranks or workers have changed, what is left of the old orders is shared out anew (`SavedEpoch`).
"""

import json
import os
import random
import sys
import tempfile
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from operator import index
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from labkit.data.dataset import SkipLog, Skipped
from labkit.data.decode import DECODERS, decode
from labkit.data.shard_cache import (
    ReadAhead,
    ShardCache,
    ShardList,
    count_samples,
    find_shards,
    name_of,
    read_samples,
    register,
)
from labkit.data.shards_write import write_shards
from labkit.errors import ArgumentError, DecodeError, OperationError
from labkit.util.arguments import require_choice, require_int
from labkit.util.files import IMAGE_SUFFIXES, ScratchFolder


class ReaderRank(NamedTuple):
    """A reader among all: one worker of one rank."""

    rank: int
    world_size: int
    worker: int
    num_workers: int

    def share(self, count: int) -> int:
        """This worker's part of a rank's `count` samples."""
        return len(range(self.worker, count, self.num_workers))

    def __str__(self) -> str:
        return f"worker {self.worker} of {self.num_workers} on rank {self.rank} of {self.world_size}"


class ShardSlice(NamedTuple):
    """`n_left` samples of one shard, from its sample `first` on, in their order there. None: all up to its end."""

    url: str
    first: int
    n_left: int | None


class RemainingSamples(NamedTuple):
    """`n_left` samples that are still to come, from number `first` on, of the order of a worker of a rank.

    The order is the one that this worker had when the epoch began. None: all up to the order's end. With
    `samples_per_rank`, the end is followed by the beginning, in place of what was skipped.
    """

    rank: int
    worker: int
    first: int
    n_left: int | None


Run = TypeVar("Run", ShardSlice, RemainingSamples)
Item = TypeVar("Item")


def cut(runs: Iterable[Run], start: int, stop: int = sys.maxsize) -> Iterator[Run]:
    """The parts of runs of known length that hold samples `start` to `stop`, counted over all of them."""
    begin = 0
    for run in runs:
        length = run.n_left or 0
        skipped, end = max(start - begin, 0), min(stop - begin, length)
        if skipped < end:
            yield run._replace(first=run.first + skipped, n_left=end - skipped)
        begin += length


def shuffled(items: Iterable[Item], size: int, initial: int, seed: str) -> Iterator[Item]:
    """Items through a buffer of `size`, from which random ones are given once `initial` are in it; 0 keeps their order.

    As WebDataset's `shuffle`, two items come in for each that is given, until the buffer is full. The order depends on
    the seed and the number of items alone, so that it can be drawn without reading the items.
    """
    draw = random.Random(seed).random
    initial = min(initial, size)
    source = iter(items)
    buffer: list[Item] = []

    def take() -> Item:
        position = int(draw() * len(buffer))
        buffer[position], buffer[-1] = buffer[-1], buffer[position]  # nothing has to move then
        return buffer.pop()

    for item in source:
        buffer.append(item)
        if len(buffer) < size:
            buffer.extend(islice(source, 1))
        if len(buffer) >= initial:
            yield take()
    while buffer:
        yield take()


def resume(order: Iterator[int], n_read: int, read_from: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """Items in the rest of an order, after its first `n_read`.

    Args:
        order: Positions in the source, in the order to give them.
        n_read: How many were given before. Their items are read only where they stand behind one that is missing.
        read_from: Gives the source's items from a position on.
    """
    positions = np.fromiter(islice(order, n_read), np.int64)
    is_given = np.zeros(positions.max(initial=-1) + 2, bool)
    is_given[positions] = True
    first = int(is_given.argmin())
    source = enumerate(read_from(first), first)
    held: dict[int, Any] = {}
    for position in order:
        while position not in held:
            number, item = next(source)
            if number >= len(is_given) or not is_given[number]:
                held[number] = item
        yield held.pop(position)


@dataclass
class EpochOrder:
    """Which samples each reader gives in an epoch, and in which order. Arguments are those of `read_shards`.

    Without `samples_per_rank`, the shards of an epoch are shared out, and each is read to its end. With it, all shards
    are passed through again and again, without end, and an epoch is the next part of this row of samples.

    Attributes:
        crc32: Of all that decides on the order, but for the ranks and workers.
    """

    shards: ShardList
    shuffle: int
    shuffle_initial: int
    seed: int
    samples_per_rank: int | None

    def __post_init__(self) -> None:
        require_int("shuffle", self.shuffle, minimum=0)
        require_int("shuffle_initial", self.shuffle_initial)
        names = [url.rpartition("/")[2] for url in self.shards.urls]
        settings = [self.shuffle, self.shuffle_initial, self.seed, self.samples_per_rank]
        self.crc32 = zlib.crc32(json.dumps([names, list(self.shards.n_samples.values()), settings]).encode())
        self._counts: dict[str, int] = {}  # samples of shards, as far as they are known
        if self.samples_per_rank is not None:
            require_int("samples_per_rank", self.samples_per_rank)
            self._counts = count_samples(self.shards)

    def share(self, reader: ReaderRank) -> int | None:
        """Samples that a reader gives in an epoch; None without a limit."""
        return None if self.samples_per_rank is None else reader.share(self.samples_per_rank)

    def whole(self, reader: ReaderRank) -> list[RemainingSamples]:
        """All that a reader gives in an epoch."""
        share = self.share(reader)
        return [] if share == 0 else [RemainingSamples(reader.rank, reader.worker, 0, share)]

    def epoch_length(self, world_size: int) -> int:
        """Samples of an epoch over all ranks, if they are limited; else 0."""
        return world_size * (self.samples_per_rank or 0)

    def count(self, reader: ReaderRank, epoch: int, start: int) -> int:
        """Samples in the order of a reader."""
        return sum(part.n_left or 0 for part in self._bounded(self._slices(reader, epoch, start)))

    def samples(self, reader: ReaderRank, epoch: int, start: int, n_read: int = 0) -> Iterator[dict[str, Any]]:
        """A reader's samples of an epoch that begins at `start` in the row of passes, after the first `n_read`."""
        seed = f"{self.seed} {epoch} {tuple(reader)}"
        slices = self._slices(reader, epoch, start)
        if not n_read:
            return shuffled(self._read(slices), self.shuffle, self.shuffle_initial, seed)
        slices = self._bounded(slices)
        numbers = range(sum(part.n_left or 0 for part in slices))
        order = shuffled(numbers, self.shuffle, self.shuffle_initial, seed)
        return resume(order, n_read, lambda first: self._read(list(cut(slices, first))))

    def _slices(self, reader: ReaderRank, epoch: int, start: int) -> list[ShardSlice]:
        """What a reader reads in an epoch, before the buffer mixes it."""
        if self.samples_per_rank is None:
            urls = self._shard_order(f"{self.seed} {epoch}")  # the same on every rank, before they share
            own = urls[reader.rank :: reader.world_size][reader.worker :: reader.num_workers]
            return [ShardSlice(url, 0, None) for url in own]
        pass_length = sum(self._counts[url] for url in self.shards.urls)
        if not pass_length:
            raise ArgumentError(f"all {len(self.shards.urls)} shards are empty: there is no sample to read")
        workers_before = (reader._replace(worker=worker) for worker in range(reader.worker))
        start += reader.rank * self.samples_per_rank
        start += sum(other.share(self.samples_per_rank) for other in workers_before)
        stop = start + reader.share(self.samples_per_rank)
        slices: list[ShardSlice] = []
        for number in range(start // pass_length, -(-stop // pass_length)):
            urls, begin = self._shard_order(f"{self.seed} pass {number}"), number * pass_length
            whole = [ShardSlice(url, 0, self._counts[url]) for url in urls]
            slices += cut(whole, start - begin, stop - begin)
        return slices

    def _shard_order(self, seed: str) -> list[str]:
        urls = list(self.shards.urls)
        if self.shuffle:
            random.Random(seed).shuffle(urls)
        return urls

    def _bounded(self, slices: list[ShardSlice]) -> list[ShardSlice]:
        """The slices, with the lengths of whole shards filled in."""
        unknown = [part.url for part in slices if part.n_left is None and part.url not in self._counts]
        self._counts |= count_samples(replace(self.shards, urls=unknown))
        return [part._replace(n_left=self._counts[part.url]) if part.n_left is None else part for part in slices]

    def _read(self, slices: Sequence[ShardSlice]) -> Iterator[dict[str, Any]]:
        ahead = ReadAhead(self.shards.reads_in_flight, self.shards.storage_options, self.shards.cache)
        files = ahead.files(part.url for part in slices)
        for (url, first, n_left), file in zip(slices, files, strict=True):
            stop = sys.maxsize if n_left is None else first + n_left
            samples, n_read = read_samples(self.shards, url, file), first
            for sample in islice(samples, first, stop):
                n_read += 1
                # Before the last one, not after it: a reader that has all of its samples asks for no more.
                if n_read == self._counts.get(url) and next(samples, None):
                    raise ArgumentError(f"{name_of(url)} has more samples than its manifest says: copy it again")
                yield sample
            if n_left is not None and n_read < stop:
                raise ArgumentError(f"{name_of(url)} has fewer samples than the {stop} of its manifest: copy it again")


_SET, _RESUMED, _BEGUN = range(3)  # what happened: an epoch was set, a state was loaded, a worker began a pass
_NO_WORKER = -1  # beside the seeds of loaders' passes, which are not negative


class _Event(NamedTuple):
    """What happened to the epoch: eight numbers, so that none is written across two pages of memory."""

    kind: int
    epoch: int = -1  # that was set; of a state that was loaded, or that a worker holds
    next_start: int = 0  # of a state: where the epoch after its own begins
    is_set: int = 0  # of a state: whether `set_epoch` decides
    rank: int = 0
    seed: int = 0  # of the loader's pass that the worker belongs to
    worker: int = 0
    process: int = 0


class Pass(NamedTuple):
    """One pass over the data set, as each of its workers learns of it.

    Attributes:
        epoch: Its number.
        resumes: Whether it goes on from the state that its worker holds.
        n_counted: How many passes of its rank were counted so far; 0 if `set_epoch` decides.
    """

    epoch: int
    resumes: bool
    n_counted: int


class EpochCounter:
    """The number of the epoch, and where its samples begin in the endless row of passes. Workers share it.

    If `set_epoch` was called, it decides. Else passes are counted, of each rank by itself: worker by worker it is noted
    in a file without a name who began which, since workers share nothing else, and a loader tells its data set of no
    pass. Short appends are atomic, so all workers see the passes in one order.

    An epoch of `n_samples` over all ranks begins where the one before it ended. After a resume with another number
    of ranks, epochs have another length from there on.
    """

    def __init__(self, content: bytes = b"") -> None:
        import fcntl  # here: Windows has none

        if hasattr(os, "memfd_create"):
            file = os.memfd_create("labkit-epochs")
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        os.write(file, content)
        self._use(file)

    def _use(self, file: int) -> None:
        self._file, self._n_read = file, 0
        weakref.finalize(self, os.close, file)
        self._epoch, self._is_set = 0, False
        self._known = 0, 0  # an epoch, and where that one begins
        self._resumed: dict[int, tuple] = {}  # by rank, the pass that went on from the newest state
        self._n_begun: Counter[tuple] = Counter()  # by each reader: rank, seed, worker
        self._passes: dict[tuple, Pass] = {}  # by rank, seed and number among those of the seed
        self._newest: dict[int, Pass] = {}  # of each rank
        self._own: dict[tuple, Pass] = {}  # the newest of each reader and process

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a copy has a counter of its own, which goes on from here
            return {"content": os.pread(self._file, os.fstat(self._file).st_size, 0)}
        return {"file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._use(state["file"].detach())
        else:
            EpochCounter.__init__(self, state["content"])

    @property
    def is_set(self) -> bool:
        """Whether `set_epoch` decides on the epoch."""
        self._read()
        return self._is_set

    def epoch(self, rank: int) -> int:
        """That was set, else that of the rank's next pass."""
        self._read()
        return self._epoch if self._is_set or rank not in self._newest else self._newest[rank].epoch + 1

    def start(self, epoch: int, n_samples: int) -> int:
        """Where an epoch begins, if each has `n_samples`."""
        self._read()
        known_epoch, known_start = self._known
        return known_start + (epoch - known_epoch) * n_samples

    def set_epoch(self, epoch: int) -> None:
        self._write(_Event(_SET, epoch))

    def resume(self, epoch: int, next_start: int, *, is_set: bool) -> None:
        """Go on with `epoch`; the next one begins at `next_start`."""
        self._write(_Event(_RESUMED, epoch, next_start, is_set))

    def begin(self, reader: ReaderRank, resumed_epoch: int | None) -> Pass:
        """A pass of this process.

        Args:
            reader: This process.
            resumed_epoch: That of the state it holds, if any. All workers of the first pass over a loader may go on
                from a state, no later one: workers of that are copies of the same parent, which knows nothing of the
                first.
        """
        worker = get_worker_info()
        seed = worker.seed - worker.id if worker else _NO_WORKER
        epoch = -1 if resumed_epoch is None else resumed_epoch
        event = _Event(_BEGUN, epoch, 0, 0, reader.rank, seed, reader.worker, os.getpid())
        self._write(event)
        self._read()
        return self._own[event[4:]]

    def _write(self, event: _Event) -> None:
        os.write(self._file, np.array(event, np.int64).tobytes())

    def _read(self) -> None:
        """Learn of what happened since the last time, here and in other processes."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size - self._n_read, self._n_read)
        self._n_read = size
        for values in np.frombuffer(data, np.int64).reshape(-1, len(_Event._fields)).tolist():
            event = _Event(*values)
            if event.kind == _BEGUN:
                self._note_pass(event)
                continue
            self._epoch, self._is_set = event.epoch, event.kind == _SET or bool(event.is_set) or self._is_set
            if event.kind == _RESUMED:
                self._known, self._resumed = (event.epoch + 1, event.next_start), {}

    def _note_pass(self, event: _Event) -> None:
        rank, reader = event.rank, event[4:7]
        key = rank, event.seed, self._n_begun[reader]  # persistent workers begin the next pass with the same seed
        self._n_begun[reader] += 1
        resumes = event.epoch >= 0 and self._resumed.setdefault(rank, key) == key
        resumes = resumes and (not self._is_set or event.epoch == self._epoch)
        if key not in self._passes:
            before = self._newest.get(rank, Pass(self._epoch - 1, False, 0))
            counted = Pass(event.epoch if resumes else before.epoch + 1, resumes, before.n_counted + 1)
            self._newest[rank] = self._passes[key] = Pass(self._epoch, resumes, 0) if self._is_set else counted
        self._own[event[4:]] = self._passes[key]._replace(resumes=resumes)


@dataclass
class Progress:
    """What is left to the newest iterator of a data set.

    Attributes:
        epoch: The epoch that it reads.
        start: Where that epoch begins in the row of passes.
        world_size: Number of ranks when it began.
        num_workers: Number of workers then.
        remaining: What is still to come, the current run first; none when it is over.
    """

    epoch: int
    start: int
    world_size: int
    num_workers: int
    remaining: list[RemainingSamples]

    def reader_of(self, run: RemainingSamples) -> ReaderRank:
        """The reader whose order a run is part of."""
        return ReaderRank(run.rank, self.world_size, run.worker, self.num_workers)


def part_of(runs: Iterable[RemainingSamples], here: ReaderRank, *, is_equal: bool) -> list[RemainingSamples]:
    """The part of all that is left that `here` reads: each sample has one reader, and none has two more than another.

    The runs are laid end to end and cut there, so that each reader has its samples close together in the shards.

    Args:
        runs: Of all ranks, in the same order on each; the number of samples left is known.
        here: A reader.
        is_equal: Give all ranks, and their workers of the same number, equally many, as DistributedDataParallel needs
            it. Up to `world_size - 1` samples of this epoch come again for that.
    """
    runs = [run for run in runs if run.n_left]
    total = sum(run.n_left or 0 for run in runs)
    if runs and is_equal:
        n_more = -total % here.world_size
        runs[-1] = runs[-1]._replace(n_left=(runs[-1].n_left or 0) + n_more)
        total += n_more
    counts = [
        here._replace(worker=worker).share(len(range(rank, total, here.world_size)))
        for rank, worker in product(range(here.world_size), range(here.num_workers))
    ]
    number = here.rank * here.num_workers + here.worker
    start = sum(counts[:number])
    return list(cut(runs, start, start + counts[number]))


STATE_VERSION = 2  # raised when the meaning of a state changes
_REMEDY = (
    "give load_state_dict() what StatefulDataLoader.state_dict() returned, or a list of the states of all workers; "
    "after a change of ranks, a list of those of all ranks"
)


@dataclass(frozen=True)
class SavedEpoch:
    """What the states of some readers say: how far each had come in the same epoch, and whether that was set."""

    readers: dict[ReaderRank, Progress]
    is_set: bool

    @property
    def epoch(self) -> int:
        return next(iter(self.readers.values())).epoch

    @classmethod
    def from_states(cls, state: Any, order_crc32: int) -> "SavedEpoch":
        """The states in what a caller gives, checked.

        Args:
            state: A state of `ShardDataset`, one of torchdata's `StatefulDataLoader`, or a list of such.
            order_crc32: That of the data set that goes on.

        Raises:
            ValueError: there is none in it, or one of other shards or settings, or they are not of one moment; says
                what differs.
        """
        readers: dict[ReaderRank, Progress] = {}
        is_set = False
        for found in _find_states(state):
            reader, progress = _read_state(found, order_crc32)
            is_set |= bool(found.get("is_set"))  # which older states do not say
            if reader in readers:
                raise ArgumentError(f"two states are of {reader}: {_REMEDY}")
            readers[reader] = progress
        if not readers:
            raise ArgumentError(f"there is no state in {state!r}: {_REMEDY}")
        all_progress = readers.values()
        alike: dict[str, set[Any]] = {
            "epochs": {progress.epoch for progress in all_progress},
            "beginnings of an epoch": {progress.start for progress in all_progress},
            "numbers of ranks and workers": {(reader.world_size, reader.num_workers) for reader in readers},
            "ranks and workers at the epoch's beginning": {
                (each.world_size, each.num_workers) for each in all_progress
            },
        }
        for what, values in alike.items():
            if len(values) > 1:
                listed = " and ".join(map(str, sorted(values)))
                raise ArgumentError(f"the states are not of one moment: they have other {what}, {listed}; {_REMEDY}")
        return cls(readers, is_set)

    def resume(self, here: ReaderRank, order: EpochOrder) -> Progress:
        """What a reader has to do now: the rest of its own, or its part of what others have left.

        Raises:
            ValueError: the states of some ranks or workers are missing; names them.
        """
        if here in self.readers:
            return replace(self.readers[here], remaining=list(self.readers[here].remaining))
        begun = next(iter(self.readers.values()))
        if not any(progress.remaining for progress in self.readers.values()):  # the epoch is over
            return replace(begun, remaining=[])

        _, world_size, _, num_workers = next(iter(self.readers))
        has_same_ranks = world_size == here.world_size
        is_untouched = all(
            (progress.world_size, progress.num_workers) == (world_size, num_workers)
            and progress.remaining == order.whole(reader)
            for reader, progress in self.readers.items()
        )
        if is_untouched:
            ranks = {reader.rank for reader in self.readers}
        else:
            ranks = {here.rank} if has_same_ranks else set(range(world_size))
        needed = [
            ReaderRank(rank, world_size, worker, num_workers)
            for rank, worker in product(sorted(ranks), range(num_workers))
        ]
        if missing := [reader for reader in needed if reader not in self.readers]:
            whose = "all workers of its rank" if has_same_ranks else "all ranks and workers"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ArgumentError(
                f"the state was taken in the middle of an epoch by {next(iter(self.readers))}, and this is {here}: it "
                f"goes on with the states of {whose}, and there is none of {missing[0]}{more}; {_REMEDY}"
            )
        if is_untouched:
            return Progress(begun.epoch, begun.start, here.world_size, here.num_workers, order.whole(here))

        runs = [run for reader in needed for run in self.readers[reader].remaining]
        for number, run in enumerate(runs):
            if run.n_left is None:
                n_samples = order.count(begun.reader_of(run), begun.epoch, begun.start)
                runs[number] = run._replace(n_left=n_samples - run.first)
        if has_same_ranks:  # each goes on with its own
            here = here._replace(rank=0, world_size=1)
        return replace(begun, remaining=part_of(runs, here, is_equal=order.samples_per_rank is not None))


def _find_states(state: Any) -> list[Any]:
    """The states of a data set, in one of torchdata's loader, or in a list."""
    if isinstance(state, list | tuple):
        return [found for part in state for found in _find_states(part)]
    if not isinstance(state, Mapping):
        return [state]
    if "_snapshot" in state:  # of a StatefulDataLoader with workers
        if n_batches := state.get("_steps_since_snapshot"):
            raise ArgumentError(
                f"the StatefulDataLoader took its snapshot {n_batches} batches ago, and they would come again: make "
                "the loader with snapshot_every_n_steps=1, or load the state into a loader with as many workers"
            )
        return [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
    return [state["dataset_state"]] if "dataset_state" in state else [state]  # without workers


def _read_state(state: Any, order_crc32: int) -> tuple[ReaderRank, Progress]:
    remedy = "give the one that state_dict() of the same data set returned"
    if isinstance(state, Mapping) and isinstance(state.get("version"), int) and state["version"] != STATE_VERSION:
        version = state["version"]
        raise ArgumentError(f"the state has version {version}, this labkit reads {STATE_VERSION}: begin the epoch anew")
    try:
        # `index` takes integers alone: `int` would read "1" and 1.5.
        _, epoch, start, crc32 = (index(state[name]) for name in ("version", "epoch", "start", "order_crc32"))
        world_size, num_workers = map(index, state["began_with"])
        remaining = []
        for rank, worker, first, n_left in state["streams"]:
            is_limited = n_left is not None
            run = RemainingSamples(index(rank), index(worker), index(first), index(n_left) if is_limited else None)
            remaining.append(run)
        place = list(state["place"])
    except (KeyError, TypeError, ValueError) as error:
        names = "version, epoch, start, order_crc32, place, began_with, streams"
        raise ArgumentError(f"this is not a state of read_shards, which holds {names}: {remedy}") from error
    if len(place) != 4 or not all(isinstance(number, int) for number in place):
        raise ArgumentError(f"the place of a state is rank, world size, worker and number of workers, not {place!r}")
    if crc32 != order_crc32:
        raise ArgumentError(
            "the state is of another order of samples: shards, shuffle, shuffle_initial, seed or samples_per_rank "
            f"differ; {remedy}"
        )
    return ReaderRank(*place), Progress(epoch, start, world_size, num_workers, remaining)


class ShardWarning(UserWarning):
    """Some workers or ranks have nothing to read, or ranks may read different epochs."""


@dataclass(eq=False, repr=False)
class ShardDataset(IterableDataset):
    """What `read_shards` returns.

    Attributes:
        urls: The shards.
        classes: Names that labels index into; None without a manifest.

    Nothing of a sample is unpickled or executed: an image is decoded, a label is a number.

    Raises, while iterating:
        TarError: a shard is cut or damaged, or goes on after its end mark; names it and its last whole member. Or a
            member of a sample is a link or a device, or larger than 1024 MB (`LABKIT_MAX_FILE_MB`).
        DecodeError: an image cannot be decoded; names key and shard.
        ValueError: a sample has no image, several, or no label, or a shard is not what its manifest says.

    Warns (once, on stderr, in the first worker):
        ShardWarning: there are fewer shards than workers of all ranks; or each of several ranks counts its own epochs.
    """

    order: EpochOrder
    decoder: str
    transform: Callable[[Tensor], Any] | None
    on_error: str

    def __post_init__(self) -> None:
        require_choice("decoder", self.decoder, DECODERS)
        require_choice("on_error", self.on_error, ("raise", "skip"))
        self.urls, self.classes = self.order.shards.urls, self.order.shards.classes
        self._counter = EpochCounter()
        self._progress: Progress | None = None
        self._saved: SavedEpoch | None = None
        self._parent: ReaderRank | None = None
        self._skips = SkipLog() if self.on_error == "skip" else None
        self._has_warned = False

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, in this process and in every worker."""
        return self._skips.read() if self._skips else []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of shuffled samples, in persistent workers too.

        From then on this decides: call it before each epoch, on every rank. Without it each pass over the data set, or
        over a loader of it, is the next epoch. With several ranks it is needed, as each counts its own passes.

        Raises:
            RuntimeError: accelerate calls it, with several processes: it would share out what is shared out already.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("accelerate.") and (world_size := self._find_reader().world_size) > 1:
            raise OperationError(
                f"accelerate would give each of {world_size} processes a part of what this one reads, and read_shards "
                "has shared out the samples already: the rest would be lost. Leave this loader out of "
                "accelerator.prepare(), and move its batches by .to(accelerator.device)"
            )
        self._counter.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator of this process stands, as plain data of some 200 bytes.

        Take it between two samples, or let torchdata's `StatefulDataLoader` do so in its workers.
        """
        reader, progress, is_set = self._find_reader(), self._progress, self._counter.is_set
        epoch = self._counter.epoch(reader.rank)
        if progress is None or (is_set and progress.epoch != epoch):
            progress = self._new_progress(reader, epoch)
        return {
            "version": STATE_VERSION,
            "epoch": progress.epoch,
            "start": progress.start,
            "place": list(reader),
            "began_with": [progress.world_size, progress.num_workers],
            "streams": [list(run) for run in progress.remaining],
            "order_crc32": self.order.crc32,
            "is_set": is_set,
        }

    def load_state_dict(self, state: Any) -> None:
        """Let the next iterator go on where `state` was taken. What was given before is not decoded again.

        With the ranks and workers of the state, the rest is that of the undisturbed epoch, in its order. With others,
        they share it out: each sample that is left comes once, and no reader has two more than another. With
        `samples_per_rank`, other ranks get equally many: up to `world_size - 1` samples of the epoch come again.

        torchdata's loader itself goes on with as many workers only. For another number of them, the data set gets the
        loader's state, before the new loader is made::

            dataset = read_shards(urls, shuffle=1000)
            dataset.load_state_dict(state)  # what StatefulDataLoader.state_dict() returned, or a list of such
            loader = StatefulDataLoader(dataset, batch_size=64, num_workers=3)

        Args:
            state: What `state_dict` returned, here or of the `StatefulDataLoader` over this data set, or a list of
                such states. For other workers, that of the loader; for other ranks, those of all ranks, on each rank;
                at an epoch's end, that of any.

        Raises:
            ValueError: the state is of other shards or settings; or in mid-epoch, states are missing, of two moments,
                or older than the last batch (`snapshot_every_n_steps`). Says what differs and what to give.
        """
        saved = SavedEpoch.from_states(state, self.order.crc32)
        self._progress = progress = saved.resume(self._find_reader(), self.order)
        next_start = progress.start + self.order.epoch_length(progress.world_size)
        self._counter.resume(progress.epoch, next_start, is_set=saved.is_set)
        self._saved = saved

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        reader = self._find_reader()
        saved, self._saved = self._saved, None
        begun = self._counter.begin(reader, saved.epoch if saved else None)
        if saved and begun.resumes:
            self._progress = saved.resume(reader, self.order)
        else:
            self._warn_if_idle(reader)
            self._progress = self._new_progress(reader, begun.epoch)
        has_epochs = self.order.shuffle or self.order.samples_per_rank
        if begun.n_counted == 2 and has_epochs and reader.world_size > 1 and reader.rank == 0 and reader.worker == 0:
            warnings.warn(
                f"each of {reader.world_size} ranks counts its own passes, and after one pass more than the others it "
                "would get their samples: call set_epoch(epoch) of the data set before each epoch, on every rank",
                ShardWarning,
                stacklevel=2,
            )
        return self._items(self._progress)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix.

        It is that of the epoch that was set, or of the next pass, and does not count as one.
        """
        reader = self._find_reader()
        self._warn_if_idle(reader)
        progress = self._new_progress(reader, self._counter.epoch(reader.rank))
        return self.order.samples(reader, progress.epoch, progress.start)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit the rank that torch.distributed has.
        return {**self.__dict__, "_parent": self._find_reader()}

    def _find_reader(self) -> ReaderRank:
        from webdataset.utils import pytorch_worker_info  # here: its import takes a while

        reader = ReaderRank(*pytorch_worker_info())
        if reader.world_size == 1 and self._parent is not None:
            return reader._replace(rank=self._parent.rank, world_size=self._parent.world_size)
        return reader

    def _new_progress(self, reader: ReaderRank, epoch: int) -> Progress:
        start = self._counter.start(epoch, self.order.epoch_length(reader.world_size))
        return Progress(epoch, start, reader.world_size, reader.num_workers, self.order.whole(reader))

    def _warn_if_idle(self, reader: ReaderRank) -> None:
        n_readers, n_shards = reader.world_size * reader.num_workers, len(self.urls)
        is_first = reader.rank == 0 and reader.worker == 0 and not self._has_warned
        if is_first and n_shards < n_readers and self.order.samples_per_rank is None:
            self._has_warned = True
            warnings.warn(
                f"{n_shards} shards for {reader.world_size} ranks x {reader.num_workers} workers: "
                f"{n_readers - n_shards} of them have nothing to read. Write smaller shards "
                "(write_shards(..., max_count=...)), or use fewer workers",
                ShardWarning,
                stacklevel=3,
            )

    def _items(self, progress: Progress) -> Iterator[tuple[Any, int]]:
        while progress.remaining:
            run = progress.remaining[0]
            reader = progress.reader_of(run)
            share = self.order.share(reader)
            # In a second round, samples of this epoch come again, in place of those that were skipped.
            n_read, n_given = run.first % (share or sys.maxsize), 0
            for sample in self.order.samples(reader, progress.epoch, progress.start, n_read):
                item = self._decode(sample)
                n_left = run.n_left
                if n_left is not None and (item is not None or share is None):  # else what is skipped is made up for
                    n_left -= 1
                run = run._replace(first=run.first + 1, n_left=n_left)
                progress.remaining[:1] = [] if n_left == 0 else [run]
                if item is not None:
                    n_given += 1
                    yield item
                if n_left == 0:
                    break
            else:
                if share is None:
                    del progress.remaining[0]
                elif not n_read and not n_given:
                    raise ArgumentError(f"only 0 of {share} samples could be read: all of them were skipped")

    def _decode(self, sample: dict[str, Any]) -> tuple[Any, int] | None:
        """The sample's image and label; None if it is skipped."""
        suffixes = [suffix for suffix in sample if f".{suffix}" in IMAGE_SUFFIXES]
        name = f"{sample['__key__']}.{suffixes[0] if suffixes else '*'} in {sample['__url__']}"
        if len(suffixes) != 1 or "cls" not in sample:
            found = ", ".join(part for part in sample if not part.startswith("__"))
            raise ArgumentError(f"{name}: a sample must have one image and a .cls with its label; it has {found}")
        label = None
        with suppress(ValueError):
            label = int(sample["cls"])
        if label is None or not -(1 << 63) <= label < 1 << 63:  # a tensor of labels is int64
            raise ArgumentError(f"{name}: its label must be a 64-bit integer, got {sample['cls'][:20]!r}")
        try:
            image = decode(sample[suffixes[0]], self.decoder, key=name)
        except DecodeError as error:
            if self._skips is None:
                raise
            self._skips.add(name, str(error))
            return None
        return (self.transform(image) if self.transform else image), label


def read_shards(
    urls: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    decoder: str = "turbojpeg",
    transform: Callable[[Tensor], Any] | None = None,
    shuffle: int = 0,
    shuffle_initial: int = 100,
    seed: int = 0,
    samples_per_rank: int | None = None,
    on_error: str = "raise",
    verify: bool = False,
    storage_options: dict[str, Any] | None = None,
    reads_in_flight: int = 1,
    cache: ShardCache | None = None,
) -> ShardDataset:
    """Images and labels of WebDataset shards, as a data set for torch's `DataLoader`.

    Ranks (`torchrun`'s, or `torch.distributed`'s) and their workers share the shards: every sample comes exactly once
    per epoch. Ranks may have unequally many, and with DistributedDataParallel one would wait for another for ever: set
    `samples_per_rank`, or wrap the loop in `torch.distributed.algorithms.join.Join`::

        dataset = lk.read_shards("shards", shuffle=1000, transform=transform)
        loader = DataLoader(dataset, batch_size=64, num_workers=2)

    Args:
        urls: A folder that `write_shards` filled, or its URL; or one shard, or a list; braces stand for several
            (`http://host/shard-{000000..000015}.tar`). Paths, `http(s)://`, `s3://`, others by fsspec.
        decoder: One of `labkit.DECODERS`.
        transform: Called with the uint8 (3, H, W) tensor. Generators other than torch's need a `worker_init_fn`.
        shuffle: Above 0, each epoch has an order of shards of its own, and a buffer of so many samples mixes them.
        shuffle_initial: Samples in that buffer before it gives its first. The default is WebDataset's.
        seed: The same (seed, epoch) gives the same order, for as many ranks and workers. Each pass is the next epoch,
            unless `set_epoch` is called. With several ranks, it must be.
        samples_per_rank: Of each epoch; the next goes on where it ended. Without a manifest, samples are counted first.
        on_error: `"raise"` or `"skip"`, as in `ImageDataset`.
        verify: Compare each shard's SHA-256 with the manifest's, when its end is reached.
        storage_options: Passed to fsspec, for object storage; its configuration and the environment fill in.
        reads_in_flight: Requests at a time per process, each for 4 MiB, of which `reads_in_flight + 1` are in memory.
        cache: Keeps remote shards in a local folder.

    Returns: A `ShardDataset` of `(image, label)`: image uint8 (3, H, W) RGB, label an int. It can resume in mid-epoch,
        with other ranks and workers, too: `dataset.load_state_dict(loader_state)`, then make the new loader over it.

    Raises:
        FileNotFoundError: no such shard or folder, or `write_shards` has not finished it.
        ValueError: no shard, a command (`pipe:`), an unknown option, or `verify` without a manifest.

    Taught in: notebooks/08b_shard_order.ipynb
    """
    register()
    require_int("reads_in_flight", reads_in_flight)
    shards = find_shards(urls, verify=verify, storage_options=storage_options or {})
    shards = replace(shards, reads_in_flight=reads_in_flight, cache=cache)
    order = EpochOrder(shards, shuffle, shuffle_initial, seed, samples_per_rank)
    return ShardDataset(order, decoder, transform, on_error)


def shuffle_quality(n_samples: int, shuffle: int, *, initial: int = 100, n_shards: int = 1, seed: int = 0) -> float:
    """How much of the input's order is left in the output of `read_shards(..., shuffle=shuffle)`.

    Shards of `n_samples` numbered samples are written to a temporary folder and read.

    Args:
        n_samples: Samples in all.
        shuffle: Size of the buffer.
        initial: Samples in it before it gives its first.
        n_shards: One shows the buffer alone; with more, the order of shards is shuffled too.
        seed: Seed of the order.

    Returns:
        Spearman's rank correlation of input and output positions: 1 is the order itself, random access is near 0.

    Taught in: notebooks/08b_shard_order.ipynb
    """
    from scipy.stats import spearmanr

    numbers = {f"all/{number:09d}.png": str(number).encode() for number in range(n_samples)}
    store = SimpleNamespace(keys=lambda: list(numbers), read=numbers.__getitem__)
    with ScratchFolder(gettempdir()) as folder:
        max_count = -(-n_samples // n_shards)
        root = write_shards(store, folder, max_count=max_count, engine="threads", progress=False)
        dataset = read_shards(root, shuffle=shuffle, shuffle_initial=initial, seed=seed)
        order = [int(sample["png"]) for sample in dataset.samples()]
    return float(spearmanr(np.arange(n_samples), order).statistic)
