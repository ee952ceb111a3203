"""Read shards, shuffled, shared out and resumable.

Which rank and worker a process is, and so what it reads.

The order in which a shuffle buffer gives samples, and reading in that order from any place in it.

Passes over all shards, one after another without end: what samples each stretch of them holds.

What is left of an epoch, and which part of it a reader gets when the ranks or workers have changed.

Which samples each rank and worker reads in an epoch, and in which order, read from any place in it on.

How far a data set of shards has come, and the clock that its workers share.

States of `read_shards`: found in what a loader saved, checked, and joined to what is left of an epoch.

The data set that `read_shards` returns: which samples a process reads, in which order, from any place on.

Read WebDataset shards: each sample once per epoch, for any number of ranks and workers.

Measure how well a shuffle buffer shuffles.
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
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, islice, product
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.utils import pytorch_worker_info

from labkit.data.dataset import SkipLog, Skipped
from labkit.data.decode import DECODERS, DecodeError, decode
from labkit.data.shard_cache import ShardCache, ShardList, count_samples, name_of, read_samples
from labkit.data.shards_write import find_image, parse_label, write_shards
from labkit.util.arguments import require_choice, require_int
from labkit.util.files import ScratchFolder


class Place(NamedTuple):
    """Which part of the shards this process reads."""

    rank: int
    world_size: int
    worker: int
    num_workers: int

    def part(self, shards: Sequence[Any]) -> Sequence[Any]:
        """A rank has every `world_size`-th shard, and each of its workers every `num_workers`-th of these."""
        return shards[self.rank :: self.world_size][self.worker :: self.num_workers]

    def share(self, count: int) -> int:
        """This worker's part of a rank's `count` samples."""
        return len(range(self.worker, count, self.num_workers))

    def offset(self, count: int) -> int:
        """Where that part begins among the `count` samples of every rank, one rank after another."""
        parts_before = sum(self._replace(worker=worker).share(count) for worker in range(self.worker))
        return self.rank * count + parts_before

    def __str__(self) -> str:
        return f"worker {self.worker} of {self.num_workers} on rank {self.rank} of {self.world_size}"


Item = TypeVar("Item")


def shuffled(items: Iterable[Item], size: int, initial: int, seed: str) -> Iterator[Item]:
    """Items through a buffer of `size`, from which random ones are given once `initial` are in it.

    As WebDataset's `shuffle`, two items come in for each that is given, until the buffer is full. The order depends on
    the seed and the number of items alone, so that it can be drawn without reading the items.
    """
    draw = random.Random(seed).random
    initial = min(initial, size)
    source, buffer = iter(items), []
    for item in source:
        buffer.append(item)
        if len(buffer) < size:
            buffer.extend(islice(source, 1))
        if len(buffer) >= initial:
            yield _take(buffer, int(draw() * len(buffer)))
    while buffer:
        yield _take(buffer, int(draw() * len(buffer)))


def _take(buffer: list[Item], position: int) -> Item:
    """Take an item out; the last one fills its place, as nothing has to move then."""
    buffer[position], buffer[-1] = buffer[-1], buffer[position]
    return buffer.pop()


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


Shard = TypeVar("Shard")


class Stretch(NamedTuple):
    """Samples `first` to `stop` (without it) of one shard, in their order there."""

    url: str
    first: int
    stop: int


def shard_order(shards: Sequence[Shard], shuffle: int, seed: str) -> list[Shard]:
    """The shards in an order that depends on the seed alone; in their own without `shuffle`."""
    shards = list(shards)
    if shuffle:
        random.Random(seed).shuffle(shards)
    return shards


class Passes:
    """All samples of all shards, then all again, and so on.

    Args:
        shards: Each shard's URL and number of samples.
        shuffle: Whether each pass has an order of shards of its own.
        seed: Of these orders.
    """

    def __init__(self, shards: Sequence[tuple[str, int]], shuffle: int, seed: int):
        self._shards, self._shuffle, self._seed = [Stretch(url, 0, count) for url, count in shards], shuffle, seed
        self._pass_length = sum(shard.stop for shard in self._shards)

    def stretches(self, start: int, length: int) -> Iterator[Stretch]:
        """The stretches that hold `length` samples from position `start` on; position 0 begins the first pass.

        Raises:
            ValueError: there is no sample in any shard.
        """
        if not self._pass_length:
            raise ValueError(f"all {len(self._shards)} shards are empty: there is no sample to read")
        while length > 0:
            number, position = divmod(start, self._pass_length)
            n_here = min(length, self._pass_length - position)
            yield from self._of_pass(number, position, position + n_here)
            start, length = start + n_here, length - n_here

    def _of_pass(self, number: int, start: int, stop: int) -> Iterator[Stretch]:
        return cut(shard_order(self._shards, self._shuffle, f"{self._seed} pass {number}"), start, stop)


def cut(stretches: Sequence[Stretch], start: int, stop: int | None = None) -> Iterator[Stretch]:
    """The parts of the stretches with samples `start` to `stop`, counted over all of them."""
    ends = accumulate(stretch.stop - stretch.first for stretch in stretches)
    for stretch, end in zip(stretches, ends, strict=True):
        begin = end - (stretch.stop - stretch.first)
        first = max(start - begin, 0)
        last = (end if stop is None else min(stop, end)) - begin
        if first < last:
            yield Stretch(stretch.url, stretch.first + first, stretch.first + last)


class Stream(NamedTuple):
    """Samples still to come, one after another, of the order that a worker had when the epoch began.

    Attributes:
        rank: The worker's rank then.
        worker: Its number there.
        first: Number of the next sample in that order. With `samples_per_rank`, the order's end is followed by its
            beginning, for what was skipped.
        n_left: How many are to come; None stands for all up to the order's end.
    """

    rank: int
    worker: int
    first: int
    n_left: int | None


def part_of(streams: Sequence[Stream], here: Place, *, is_equal: bool) -> list[Stream]:
    """The part of all that is left that `here` reads: each sample has one reader, and none has two more than another.

    The streams are laid end to end and cut there, so that each reader has its samples close together in the shards.

    Args:
        streams: Of all ranks, in the same order on each; the number of samples left is known.
        here: A reader.
        is_equal: Give all ranks, and their workers of the same number, equally many, as DistributedDataParallel needs
            it. Up to `world_size - 1` samples of this epoch come again for that.
    """
    streams = [stream for stream in streams if stream.n_left]
    total = sum(n_left for *_, n_left in streams if n_left)
    if streams and is_equal:
        n_more = -total % here.world_size
        rank, worker, first, n_left = streams[-1]
        streams[-1] = Stream(rank, worker, first, (n_left or 0) + n_more)
        total += n_more
    start = 0
    for rank, worker in product(range(here.world_size), range(here.num_workers)):
        count = here._replace(worker=worker).share(len(range(rank, total, here.world_size)))
        if (rank, worker) == (here.rank, here.worker):
            return list(_cut(streams, start, start + count))
        start += count
    raise ValueError(f"there is no {here}")


def _cut(streams: Sequence[Stream], start: int, stop: int) -> Iterator[Stream]:
    """The parts of the streams with samples `start` to `stop`, counted over all of them."""
    begin = 0
    for rank, worker, first, n_left in streams:
        length = n_left or 0
        skipped, end = max(start - begin, 0), min(stop - begin, length)
        if skipped < end:
            yield Stream(rank, worker, first + skipped, end - skipped)
        begin += length


@dataclass
class Orders:
    """The order of every place, in every epoch. Arguments are those of `read_shards`.

    Attributes:
        crc32: Of all that decides on the order of samples, but for the ranks and workers.
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
            sizes = [(url, self._counts[url]) for url in self.shards.urls]
            self._passes = Passes(sizes, self.shuffle, self.seed)

    def share(self, place: Place) -> int | None:
        """Samples that a place gives in an epoch; None without a limit."""
        return None if self.samples_per_rank is None else place.share(self.samples_per_rank)

    def whole(self, place: Place) -> list[Stream]:
        """All that a place gives in an epoch."""
        share = self.share(place)
        return [] if share == 0 else [Stream(place.rank, place.worker, 0, share)]

    def epoch_length(self, world_size: int) -> int:
        """Samples of an epoch over all ranks, if they are limited; else 0."""
        return world_size * (self.samples_per_rank or 0)

    def count(self, place: Place, epoch: int, start: int) -> int:
        """Samples in the order of a place."""
        return sum(stop - first for _, first, stop in self._bounded(self._stretches(place, epoch, start)))

    def samples(self, place: Place, epoch: int, start: int, n_read: int = 0) -> Iterator[dict[str, Any]]:
        """A place's samples of an epoch that begins at `start` in the row of passes, after the first `n_read`."""
        seed = f"{self.seed} {epoch} {tuple(place)}"
        stretches = self._stretches(place, epoch, start)
        if not n_read:
            return self._mixed(self._read(stretches), seed)
        stretches = self._bounded(stretches)
        numbers = range(sum(stop - first for _, first, stop in stretches))
        return resume(self._mixed(numbers, seed), n_read, lambda first: self._read(list(cut(stretches, first))))

    def _mixed(self, items: Any, seed: str) -> Iterator[Any]:
        return shuffled(items, self.shuffle, self.shuffle_initial, seed) if self.shuffle else iter(items)

    def _stretches(self, place: Place, epoch: int, start: int) -> list[Stretch]:
        """What a place reads in an epoch. Without `samples_per_rank`, shards to their end, wherever that is."""
        if self.samples_per_rank is not None:
            first = start + place.offset(self.samples_per_rank)
            return list(self._passes.stretches(first, place.share(self.samples_per_rank)))
        # The same on every rank, before they share.
        urls = shard_order(self.shards.urls, self.shuffle, f"{self.seed} {epoch}")
        return [Stretch(url, 0, sys.maxsize) for url in place.part(urls)]

    def _bounded(self, stretches: list[Stretch]) -> list[Stretch]:
        """The stretches, with the ends of whole shards filled in."""
        unknown = [url for url, _, stop in stretches if stop == sys.maxsize and url not in self._counts]
        self._counts |= count_samples(replace(self.shards, urls=unknown))
        return [Stretch(url, first, min(stop, self._counts[url])) for url, first, stop in stretches]

    def _read(self, stretches: Sequence[Stretch]) -> Iterator[dict[str, Any]]:
        files = self.shards.open_in_turn(stretch.url for stretch in stretches)
        for (url, first, stop), (_, file) in zip(stretches, files, strict=True):
            n_samples = 0
            with file:
                samples = read_samples(self.shards, url, file)
                for sample in islice(samples, first, stop):
                    n_samples += 1
                    # Before the last one, not after it: a reader that has all of its samples asks for no more.
                    if first + n_samples == self._counts.get(url) and next(samples, None):
                        raise ValueError(f"{name_of(url)} has more samples than its manifest says: copy it again")
                    yield sample
            if stop != sys.maxsize and n_samples < stop - first:
                raise ValueError(f"{name_of(url)} has fewer samples than the {stop} of its manifest: copy it again")


_NO_WORKER = -1  # beside the seeds of loaders' passes, which are not negative


class _Kind(IntEnum):
    SET = 0  # an epoch was set
    RESUMED = 1  # a state was loaded
    BEGUN = 2  # a worker began a pass


class _Entry(NamedTuple):
    """What happened to the clock: eight numbers, so that none is written across two pages of memory."""

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


class Clock:
    """The number of the epoch, and where its samples begin in the endless row of passes. Workers share it.

    If `set_epoch` was called, it decides. Else passes are counted, of each rank by itself: worker by worker it is noted
    in a file without a name who began which, since workers share nothing else, and a loader tells its data set of no
    pass. Short appends are atomic, so all workers see the passes in one order.

    An epoch of `n_samples` over all ranks begins where the one before it ended. After a resume with another number
    of ranks, epochs have another length from there on.
    """

    def __init__(self, content: bytes = b"") -> None:
        self._open(_open_file())
        os.write(self._file, content)

    def _open(self, file: int) -> None:
        self._file, self._n_read = file, 0
        weakref.finalize(self, os.close, file)
        self._epoch, self._is_set = 0, False
        self._known = 0, 0  # an epoch, and where that one begins
        self._resumed: dict[int, tuple[int, int]] = {}  # by rank, the pass that went on from the newest state
        self._n_begun: Counter[tuple[int, int, int]] = Counter()  # by each reader: rank, seed, worker
        self._own: dict[tuple[int, int, int, int], Pass] = {}  # the newest of each reader and process
        self._passes: dict[tuple[int, tuple[int, int]], Pass] = {}  # by rank, and by seed and number
        self._last: dict[int, int] = {}  # epoch of each rank
        self._n_counted: Counter[int] = Counter()  # passes of each rank

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a copy has a clock of its own, which goes on from here
            return {"content": os.pread(self._file, os.fstat(self._file).st_size, 0)}
        return {"file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._open(state["file"].detach())
        else:
            Clock.__init__(self, state["content"])

    def epoch(self, rank: int) -> int:
        """That was set, else that of the rank's next pass."""
        self._read()
        return self._epoch if self._is_set or rank not in self._last else self._last[rank] + 1

    @property
    def is_set(self) -> bool:
        """Whether `set_epoch` decides on the epoch."""
        self._read()
        return self._is_set

    def set_epoch(self, epoch: int) -> None:
        self._write(_Entry(_Kind.SET, epoch))

    def start(self, epoch: int, n_samples: int) -> int:
        """Where an epoch begins, if each has `n_samples`."""
        self._read()
        known_epoch, known_start = self._known
        return known_start + (epoch - known_epoch) * n_samples

    def resume(self, epoch: int, next_start: int, *, is_set: bool) -> None:
        """Go on with `epoch`; the next one begins at `next_start`."""
        self._write(_Entry(_Kind.RESUMED, epoch, next_start, is_set))

    def begin(self, place: Place, resumed_epoch: int | None) -> Pass:
        """A pass of this process.

        Args:
            place: Of this process.
            resumed_epoch: That of the state it holds, if any. All workers of the first pass over a loader may go on
                from a state, no later one: workers of that are copies of the same parent, which knows nothing of the
                first.
        """
        worker = get_worker_info()
        seed = worker.seed - worker.id if worker else _NO_WORKER
        epoch = -1 if resumed_epoch is None else resumed_epoch
        reader = place.rank, seed, place.worker, os.getpid()
        self._write(_Entry(_Kind.BEGUN, epoch, 0, 0, *reader))
        self._read()
        return self._own[reader]

    def _write(self, entry: _Entry) -> None:
        os.write(self._file, np.array(entry, np.int64).tobytes())

    def _read(self) -> None:
        """Learn of what happened since the last time, here and in other processes."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size - self._n_read, self._n_read)
        self._n_read = size
        for values in np.frombuffer(data, np.int64).reshape(-1, len(_Entry._fields)).tolist():
            entry = _Entry(*values)
            if entry.kind == _Kind.BEGUN:
                self._note_pass(entry)
                continue
            self._epoch, self._is_set = entry.epoch, entry.kind == _Kind.SET or bool(entry.is_set) or self._is_set
            if entry.kind == _Kind.RESUMED:
                self._known, self._resumed = (entry.epoch + 1, entry.next_start), {}

    def _note_pass(self, entry: _Entry) -> None:
        rank, reader = entry.rank, (entry.rank, entry.seed, entry.worker)
        key = entry.seed, self._n_begun[reader]  # persistent workers begin the next pass with the same seed
        self._n_begun[reader] += 1
        resumes = entry.epoch >= 0 and self._resumed.setdefault(rank, key) == key
        resumes = resumes and (not self._is_set or entry.epoch == self._epoch)
        if (rank, key) not in self._passes:
            counted = self._last.get(rank, self._epoch - 1) + 1
            self._last[rank] = self._epoch if self._is_set else entry.epoch if resumes else counted
            self._n_counted[rank] += not self._is_set
            n_counted = 0 if self._is_set else self._n_counted[rank]
            self._passes[rank, key] = Pass(self._last[rank], resumes, n_counted)
        self._own[*reader, entry.process] = self._passes[rank, key]._replace(resumes=resumes)


def _open_file() -> int:
    """A file without a name, to whose end all writing goes; open in this process and in its forks."""
    import fcntl  # here: Windows has none

    if hasattr(os, "memfd_create"):
        file = os.memfd_create("labkit-clock")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


@dataclass
class Progress:
    """What is left to the newest iterator of a data set.

    Attributes:
        epoch: The epoch that it reads.
        start: Where that epoch begins in the row of passes.
        world_size: Number of ranks when it began.
        num_workers: Number of workers then.
        streams: What is still to come, the current one first; none when it is over.
    """

    epoch: int
    start: int
    world_size: int
    num_workers: int
    streams: list[Stream]

    def place_of(self, stream: Stream) -> Place:
        """The place whose order a stream is part of."""
        return Place(stream.rank, self.world_size, stream.worker, self.num_workers)

    def advance(self, *, counts: bool) -> None:
        """The next sample is done. One that does not count was skipped, and is made up for."""
        stream = self.streams[0]
        n_left = None if stream.n_left is None else stream.n_left - counts
        self.streams[:1] = [] if n_left == 0 else [stream._replace(first=stream.first + 1, n_left=n_left)]


VERSION = 2  # of the state; raised when its meaning changes
_NUMBERS = ("version", "epoch", "start", "order_crc32")
_LISTS = ("place", "began_with", "streams")
_REMEDY = (
    "give load_state_dict() what StatefulDataLoader.state_dict() returned, or a list of the states of all workers; "
    "after a change of ranks, a list of those of all ranks"
)


def state_of(progress: Progress, place: Place, order_crc32: int, *, is_set: bool) -> dict[str, Any]:
    """Plain data for a checkpoint; `is_set` says whether `set_epoch` decides on the epoch."""
    return {
        "version": VERSION,
        "epoch": progress.epoch,
        "start": progress.start,
        "place": list(place),
        "began_with": [progress.world_size, progress.num_workers],
        "streams": [list(stream) for stream in progress.streams],
        "order_crc32": order_crc32,
        "is_set": is_set,
    }


@dataclass(frozen=True)
class Saved:
    """What the states of some readers say: how far each had come in the same epoch, and whether that was set."""

    readers: dict[Place, Progress]
    is_set: bool

    @property
    def epoch(self) -> int:
        return self._any.epoch

    @property
    def _any(self) -> Progress:
        return next(iter(self.readers.values()))

    def resume(self, here: Place, orders: Orders) -> Progress:
        """What a reader has to do now: the rest of its own, or its part of what others have left.

        Raises:
            ValueError: the states of some ranks or workers are missing; names them.
        """
        begun = self._any
        if here in self.readers:
            return self._with(self.readers[here].streams)
        if not any(progress.streams for progress in self.readers.values()):  # the epoch is over
            return self._with([])
        if all(self._is_untouched(place, orders.whole(place)) for place in self.readers):
            self._require({place.rank for place in self.readers}, here)
            return Progress(begun.epoch, begun.start, here.world_size, here.num_workers, orders.whole(here))
        return self._with(self._share_of(here, orders))

    def _share_of(self, here: Place, orders: Orders) -> list[Stream]:
        world_size = next(iter(self.readers)).world_size
        has_same_ranks = world_size == here.world_size
        ranks = {here.rank} if has_same_ranks else set(range(world_size))
        self._require(ranks, here)
        places = [place for place in sorted(self.readers) if place.rank in ranks]
        left = [self._bounded(stream, orders) for place in places for stream in self.readers[place].streams]
        here = here._replace(rank=0, world_size=1) if has_same_ranks else here  # each goes on with its own
        return part_of(left, here, is_equal=orders.samples_per_rank is not None)

    def _bounded(self, stream: Stream, orders: Orders) -> Stream:
        """The stream, with how many are left if it goes to the order's end."""
        begun = self._any
        if stream.n_left is not None:
            return stream
        return stream._replace(n_left=orders.count(begun.place_of(stream), begun.epoch, begun.start) - stream.first)

    def _with(self, streams: list[Stream]) -> Progress:
        begun = self._any
        return Progress(begun.epoch, begun.start, begun.world_size, begun.num_workers, list(streams))

    def _is_untouched(self, place: Place, whole: list[Stream]) -> bool:
        progress = self.readers[place]
        began_with = progress.world_size, progress.num_workers
        return began_with == (place.world_size, place.num_workers) and progress.streams == whole

    def _require(self, ranks: Iterable[int], here: Place) -> None:
        """Refuse states that lack a worker of these ranks."""
        _, world_size, _, num_workers = next(iter(self.readers))
        readers = product(sorted(ranks), range(num_workers))
        needed = [Place(rank, world_size, worker, num_workers) for rank, worker in readers]
        if missing := [str(place) for place in needed if place not in self.readers]:
            whose = "all workers of its rank" if here.world_size == world_size else "all ranks and workers"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"the state was taken in the middle of an epoch by {next(iter(self.readers))}, and this is {here}: it "
                f"goes on with the states of {whose}, and there is none of {missing[0]}{more}; {_REMEDY}"
            )


def read_states(state: Any, order_crc32: int) -> Saved:
    """The states in what a caller gives, checked.

    Args:
        state: A state of `ShardDataset`, one of torchdata's `StatefulDataLoader`, or a list of such.
        order_crc32: That of the data set that goes on.

    Raises:
        ValueError: there is none in it, or one of other shards or settings, or they are not of one moment; says what
            differs.
    """
    readers: dict[Place, Progress] = {}
    is_set = False
    for found in _find_states(state):
        place, progress = _read_state(found, order_crc32)
        is_set |= bool(found.get("is_set"))  # which older states do not say
        if place in readers:
            raise ValueError(f"two states are of {place}: {_REMEDY}")
        readers[place] = progress
    if not readers:
        raise ValueError(f"there is no state in {state!r}: {_REMEDY}")
    alike: dict[str, set[Any]] = {
        "epochs": {progress.epoch for progress in readers.values()},
        "beginnings of an epoch": {progress.start for progress in readers.values()},
        "numbers of ranks and workers": {(place.world_size, place.num_workers) for place in readers},
        "ranks and workers at the epoch's beginning": {
            (progress.world_size, progress.num_workers) for progress in readers.values()
        },
    }
    for what, values in alike.items():
        if len(values) > 1:
            found_values = " and ".join(map(str, sorted(values)))
            raise ValueError(f"the states are not of one moment: they have other {what}, {found_values}; {_REMEDY}")
    return Saved(readers, is_set)


def _find_states(state: Any) -> list[Any]:
    """The states of a data set, in one of torchdata's loader, or in a list."""
    if isinstance(state, list | tuple):
        return [found for part in state for found in _find_states(part)]
    if not isinstance(state, Mapping):
        return [state]
    if "_snapshot" in state:  # of a StatefulDataLoader with workers
        if n_batches := state.get("_steps_since_snapshot"):
            raise ValueError(
                f"the StatefulDataLoader took its snapshot {n_batches} batches ago, and they would come again: make "
                "the loader with snapshot_every_n_steps=1, or load the state into a loader with as many workers"
            )
        return [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
    return [state["dataset_state"]] if "dataset_state" in state else [state]  # without workers


def _read_state(state: Any, order_crc32: int) -> tuple[Place, Progress]:
    remedy = "give the one that state_dict() of the same data set returned"
    if isinstance(state, Mapping) and isinstance(state.get("version"), int) and state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']}, this labkit reads {VERSION}: begin the epoch anew")
    if not _has_layout(state):
        raise ValueError(f"this is not a state of read_shards, which holds {', '.join(_NUMBERS + _LISTS)}: {remedy}")
    if not _are_numbers(state["place"], 4):
        place = state["place"]
        raise ValueError(f"the place of a state is rank, world size, worker and number of workers, not {place!r}")
    if state["order_crc32"] != order_crc32:
        raise ValueError(
            "the state is of another order of samples: shards, shuffle, shuffle_initial, seed or samples_per_rank "
            f"differ; {remedy}"
        )
    streams = [Stream(*stream) for stream in state["streams"]]
    world_size, num_workers = state["began_with"]
    return Place(*state["place"]), Progress(state["epoch"], state["start"], world_size, num_workers, streams)


def _has_layout(state: Any) -> bool:
    if not isinstance(state, Mapping) or not all(isinstance(state.get(name), int) for name in _NUMBERS):
        return False
    if not all(isinstance(state.get(name), list | tuple) for name in _LISTS):
        return False
    return _are_numbers(state["began_with"], 2) and all(map(_is_stream, state["streams"]))


def _is_stream(values: Any) -> bool:
    if not isinstance(values, list | tuple) or len(values) != 4:
        return False
    return _are_numbers(values if values[3] is not None else [*values[:3], 0], 4)


def _are_numbers(values: Any, count: int) -> bool:
    return len(values) == count and all(isinstance(value, int) for value in values)


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

    orders: Orders
    decoder: str
    transform: Callable[[Tensor], Any] | None
    on_error: str

    def __post_init__(self) -> None:
        require_choice("decoder", self.decoder, DECODERS)
        require_choice("on_error", self.on_error, ("raise", "skip"))
        self.urls, self.classes = self.orders.shards.urls, self.orders.shards.classes
        self._clock = Clock()
        self._progress: Progress | None = None
        self._saved: Saved | None = None
        self._parent_place: Place | None = None
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
        if caller.startswith("accelerate.") and (world_size := self._find_place().world_size) > 1:
            raise RuntimeError(
                f"accelerate would give each of {world_size} processes a part of what this one reads, and read_shards "
                "has shared out the samples already: the rest would be lost. Leave this loader out of "
                "accelerator.prepare(), and move its batches by .to(accelerator.device)"
            )
        self._clock.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator of this process stands, as plain data of some 200 bytes.

        Take it between two samples, or let torchdata's `StatefulDataLoader` do so in its workers.
        """
        place, progress, is_set = self._find_place(), self._progress, self._clock.is_set
        epoch = self._clock.epoch(place.rank)
        if progress is None or (is_set and progress.epoch != epoch):
            progress = self._new_progress(place, epoch)
        return state_of(progress, place, self.orders.crc32, is_set=is_set)

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
        saved = read_states(state, self.orders.crc32)
        self._progress = progress = saved.resume(self._find_place(), self.orders)
        next_start = progress.start + self.orders.epoch_length(progress.world_size)
        self._clock.resume(progress.epoch, next_start, is_set=saved.is_set)
        self._saved = saved

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        place = self._find_place()
        saved, self._saved = self._saved, None
        begun = self._clock.begin(place, saved.epoch if saved else None)
        if saved and begun.resumes:
            self._progress = saved.resume(place, self.orders)
        else:
            self._warn_if_idle(place)
            self._progress = self._new_progress(place, begun.epoch)
        if begun.n_counted == 2:
            self._warn_of_ranks(place)
        return self._items(self._progress)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix.

        It is that of the epoch that was set, or of the next pass, and does not count as one.
        """
        place = self._find_place()
        self._warn_if_idle(place)
        epoch = self._clock.epoch(place.rank)
        return self.orders.samples(place, epoch, self._start(place, epoch))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit the rank that torch.distributed has.
        return {**self.__dict__, "_parent_place": self._find_place()}

    def _find_place(self) -> Place:
        place = Place(*pytorch_worker_info())
        if place.world_size == 1 and self._parent_place is not None:
            return place._replace(rank=self._parent_place.rank, world_size=self._parent_place.world_size)
        return place

    def _start(self, place: Place, epoch: int) -> int:
        return self._clock.start(epoch, self.orders.epoch_length(place.world_size))

    def _new_progress(self, place: Place, epoch: int) -> Progress:
        start = self._start(place, epoch)
        return Progress(epoch, start, place.world_size, place.num_workers, self.orders.whole(place))

    def _items(self, progress: Progress) -> Iterator[tuple[Any, int]]:
        while progress.streams:
            n_streams, stream = len(progress.streams), progress.streams[0]
            place = progress.place_of(stream)
            share = self.orders.share(place)
            # In a second round, samples of this epoch come again, in place of those that were skipped.
            n_read, n_given = stream.first % (share or sys.maxsize), 0
            for sample in self.orders.samples(place, progress.epoch, progress.start, n_read):
                item = self._decode(sample)
                progress.advance(counts=item is not None or share is None)
                if item is not None:
                    n_given += 1
                    yield item
                if len(progress.streams) < n_streams:
                    break
            else:
                if share is None:
                    del progress.streams[0]
                elif not n_read and not n_given:
                    raise ValueError(f"only 0 of {share} samples could be read: all of them were skipped")

    def _decode(self, sample: dict[str, Any]) -> tuple[Any, int] | None:
        """The sample's image and label; None if it is skipped."""
        name, data = find_image(sample)
        label = parse_label(sample["cls"], name)
        try:
            image = decode(data, self.decoder, key=name)
        except DecodeError as error:
            if self._skips is None:
                raise
            self._skips.add(name, str(error))
            return None
        return (self.transform(image) if self.transform else image), label

    def _warn_if_idle(self, place: Place) -> None:
        n_readers, n_shards = place.world_size * place.num_workers, len(self.urls)
        is_first = place.rank == 0 and place.worker == 0 and not self._has_warned
        if is_first and n_shards < n_readers and self.orders.samples_per_rank is None:
            self._has_warned = True
            warnings.warn(
                f"{n_shards} shards for {place.world_size} ranks x {place.num_workers} workers: "
                f"{n_readers - n_shards} of them have nothing to read. Write smaller shards "
                "(write_shards(..., max_count=...)), or use fewer workers",
                ShardWarning,
                stacklevel=3,
            )

    def _warn_of_ranks(self, place: Place) -> None:
        has_epochs = self.orders.shuffle or self.orders.samples_per_rank
        if has_epochs and place.world_size > 1 and place.rank == 0 and place.worker == 0:
            warnings.warn(
                f"each of {place.world_size} ranks counts its own passes, and after one pass more than the others it "
                "would get their samples: call set_epoch(epoch) of the data set before each epoch, on every rank",
                ShardWarning,
                stacklevel=3,
            )


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
    reads_in_flight: int | None = None,
    cache: ShardCache | None = None,
) -> ShardDataset:
    """Images and labels of WebDataset shards, as a data set for torch's `DataLoader`.

    Ranks (`torchrun`'s, or `torch.distributed`'s) and their workers share the shards: every sample comes exactly once
    per epoch. Ranks may have unequally many, and with DistributedDataParallel one would wait for another for ever: set
    `samples_per_rank`, or wrap the loop in `torch.distributed.algorithms.join.Join`.

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
    shards = ShardList.find(urls, verify=verify, storage_options=storage_options or {})
    shards = replace(shards, reads_in_flight=reads_in_flight, cache=cache)
    orders = Orders(shards, shuffle, shuffle_initial, seed, samples_per_rank)
    return ShardDataset(orders, decoder, transform, on_error)


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
