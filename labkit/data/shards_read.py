"""Read WebDataset shards: each sample once per epoch, for any number of ranks and workers, from any place on.

A reader is one worker of one rank. Its order of samples in an epoch depends on the seed and on the numbers of ranks and
workers alone (`EpochOrder`). So little has to be saved to go on: the epoch, and how many samples of it were read.
"""

import fcntl
import json
import os
import random
import secrets
import sys
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from labkit.data.dataset import SkipLog, Skipped, sample_of, transformed
from labkit.data.decode import DECODERS, PixelLimit, decode
from labkit.data.image_formats import IMAGE_SUFFIXES
from labkit.data.labels import typed_labels
from labkit.data.shards_fetch import ShardList, count_samples, find_shards, name_of, read_samples
from labkit.data.shards_write import LABEL_SUFFIXES
from labkit.errors import ArgumentError, DecodeError, OperationError, WrongTypeError
from labkit.util.arguments import require_callable, require_choice, require_int, require_seed
from labkit.util.process import warn_caller
from labkit.util.ranks import number_in_environment, rank_and_world_size

Item = TypeVar("Item")


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
    """Samples `first` to `stop` of one shard, in their order there. None: up to its end."""

    url: str
    first: int
    stop: int | None


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
    shuffle: bool
    shuffle_buffer: int
    shuffle_initial: int
    seed: int
    samples_per_rank: int | None

    def __post_init__(self) -> None:
        self.seed = require_seed(self.seed)
        if not isinstance(self.shuffle, bool):
            raise WrongTypeError(
                f"shuffle must be True or False, got {self.shuffle!r:.100}: how many samples its buffer holds is "
                "shuffle_buffer, as read_shards(..., shuffle=True, shuffle_buffer=1000)"
            )
        self.shuffle_buffer = require_int("shuffle_buffer", self.shuffle_buffer, minimum=0)
        self.shuffle_initial = require_int("shuffle_initial", self.shuffle_initial)
        if not self.shuffle:
            self.shuffle_buffer = 0
        if self.samples_per_rank is not None:
            self.samples_per_rank = require_int("samples_per_rank", self.samples_per_rank)
        names = [url.rpartition("/")[2] for url in self.shards.urls]
        settings = [self.shuffle, self.shuffle_buffer, self.shuffle_initial, self.seed, self.samples_per_rank]
        self.crc32 = zlib.crc32(json.dumps([names, list(self.shards.n_samples.values()), settings]).encode())
        self._counts: dict[str, int] = {}  # samples of shards, as far as they had to be known

    def samples(self, reader: ReaderRank, epoch: int, n_read: int = 0) -> Iterator[dict[str, Any]]:
        """A reader's samples of an epoch, after the first `n_read`."""
        seed = f"{self.seed} {epoch} {tuple(reader)}"
        slices = self._slices(reader, epoch)
        if not n_read:
            return shuffled(self._read(slices), self.shuffle_buffer, self.shuffle_initial, seed)
        slices = [part._replace(stop=self._count(part.url) if part.stop is None else part.stop) for part in slices]
        lengths = [(part.stop or 0) - part.first for part in slices]
        order = shuffled(range(sum(lengths)), self.shuffle_buffer, self.shuffle_initial, seed)

        def read_from(first: int) -> Iterator[dict[str, Any]]:
            rest = []
            for part, length in zip(slices, lengths, strict=True):
                rest += [part._replace(first=part.first + max(first, 0))] if first < length else []
                first -= length
            return self._read(rest)

        return resume(order, n_read, read_from)

    def _slices(self, reader: ReaderRank, epoch: int) -> list[ShardSlice]:
        """What a reader reads in an epoch, before the buffer mixes it."""
        if self.samples_per_rank is None:
            urls = self._shard_order(f"{self.seed} {epoch}")  # the same on every rank, before they share
            own = urls[reader.rank :: reader.world_size][reader.worker :: reader.num_workers]
            return [ShardSlice(url, 0, None) for url in own]
        pass_length = sum(map(self._count, self.shards.urls))
        if not pass_length:
            raise ArgumentError(f"all {len(self.shards.urls)} shards are empty: there is no sample to read")
        start = (epoch * reader.world_size + reader.rank) * self.samples_per_rank
        start += sum(reader._replace(worker=worker).share(self.samples_per_rank) for worker in range(reader.worker))
        stop = start + reader.share(self.samples_per_rank)
        slices = []
        for number in range(start // pass_length, -(-stop // pass_length)):
            begin = number * pass_length
            for url in self._shard_order(f"{self.seed} pass {number}"):
                first, last = max(start - begin, 0), min(stop - begin, self._count(url))
                slices += [ShardSlice(url, first, last)] if first < last else []
                begin += self._count(url)
        return slices

    def _shard_order(self, seed: str) -> list[str]:
        urls = list(self.shards.urls)
        if self.shuffle:
            random.Random(seed).shuffle(urls)
        return urls

    def _count(self, url: str) -> int:
        if url not in self._counts:
            self._counts[url] = count_samples(self.shards, url)
        return self._counts[url]

    def _read(self, slices: Sequence[ShardSlice]) -> Iterator[dict[str, Any]]:
        is_empty, files = True, self.shards.open([part.url for part in slices])
        for (url, first, stop), file in zip(slices, files, strict=True):
            samples, n_read = read_samples(self.shards, url, file), first
            count = self._counts.get(url, self.shards.n_samples.get(url))
            for sample in islice(samples, first, stop):
                n_read, is_empty = n_read + 1, False
                # Before the last one, not after it: a reader that has all of its samples asks for no more.
                if n_read == count and next(samples, None):
                    raise ArgumentError(f"{name_of(url)} has more samples than its manifest says: copy it again")
                yield sample
            if n_read < (stop or count or 0):
                raise ArgumentError(f"{name_of(url)} has fewer samples than the {count} of its manifest: copy it again")
        if slices and is_empty:
            names = ", ".join(name_of(part.url) for part in slices)
            raise ArgumentError(f"no sample is in {names}: write the shards again, or leave out those that are empty")


_SET, _LOADED, _STANDS = -1, -2, -3  # in place of a worker: an epoch was set, a state was loaded, a look is over
_ALL_RANKS = -1


class Pass(NamedTuple):
    """One pass over a data set.

    Attributes:
        epoch: Its number.
        is_counted: Whether passes are counted, as `set_epoch` was not called.
        is_first: Whether it is the first one since a state was loaded.
    """

    epoch: int
    is_counted: bool
    is_first: bool = False


class EpochCounter:
    """The number of the epoch, which all processes that read a data set share.

    If `set_epoch` was called, it decides. Else passes are counted, of each rank by itself. A loader tells its data set
    of no pass, and workers share nothing: so each notes in a file without a name that it begins one. Workers whose
    loader has the same seed, and that begin for the n-th time, belong to one pass (persistent ones begin often). Short
    appends are atomic, so that all processes see the same notes in the same order.
    """

    def __init__(self, notes: bytes = b"") -> None:
        self._use(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        self._file.write(notes)

    def _use(self, file: Any) -> None:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        self._file = file
        weakref.finalize(self, file.close)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:  # a copy goes on by itself
            return {"notes": self._notes()}
        return {"file": reduction.DupFd(self._file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._use(open(state["file"].detach(), "r+b", buffering=0))  # noqa: SIM115
        else:
            EpochCounter.__init__(self, state["notes"])

    def set_epoch(self, epoch: int) -> None:
        self._note(_ALL_RANKS, 0, _SET, epoch)

    def load(self, rank: int, epoch: int) -> None:
        """Go on with `epoch`, of which a state was loaded."""
        self._note(rank, 0, _LOADED, epoch)

    def stand(self, rank: int, epoch: int) -> None:
        """Let the next pass be `epoch`, if passes are counted, whichever have begun since."""
        self._note(rank, 0, _STANDS, epoch)

    def begin(self, rank: int) -> Pass:
        """The current process's pass."""
        worker, token = get_worker_info(), secrets.randbits(60)
        seed, number = (worker.seed - worker.id, worker.id) if worker else (-token, 0)
        self._note(rank, seed, number, token)
        return self.next(rank, token)

    def next(self, rank: int, token: int | None = None) -> Pass:
        """The pass that began with a token; without one, that which the rank would begin now."""
        epoch, is_counted, first = 0, True, None
        passes: dict[tuple[int, int], int] = {}  # seed, and number among the passes of that seed: epoch
        n_begun: Counter[tuple[int, int]] = Counter()  # by seed and worker
        for of_rank, seed, worker, value in np.frombuffer(self._notes(), np.int64).reshape(-1, 4).tolist():
            if of_rank not in (rank, _ALL_RANKS):
                continue
            if worker >= 0:
                key = seed, n_begun[seed, worker]
                n_begun[seed, worker] += 1
                first = first or key
                passes.setdefault(key, epoch)
                if value == token:
                    return Pass(passes[key], is_counted, key == first)
                epoch = max(epoch, passes[key] + 1) if is_counted else epoch
            elif worker == _STANDS:
                epoch = value if is_counted else epoch
            else:
                epoch, is_counted = value, is_counted and worker == _LOADED
                first = None if worker == _LOADED else first
        return Pass(epoch, is_counted)

    def _note(self, rank: int, seed: int, worker: int, value: int) -> None:
        values = (rank, seed, worker, value)  # 32 bytes: none is written across two pages of memory
        if not self._file.closed:  # as where a pass is collected together with its data set
            self._file.write(np.array(values, np.int64).tobytes())

    def _notes(self) -> bytes:
        return os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)


@dataclass
class Progress:
    """How far a reader has come in an epoch: samples read of its order, and given, which leaves out those skipped."""

    epoch: int
    n_read: int = 0
    n_given: int = 0


class _Standing:
    """Where a pass stands, for the data set, which must not hold the pass itself.

    Attributes:
        progress: How far it has come.
        outer: The pass at which the data set stood when it began.
        before: What the data set then had as its progress, and as a loaded state.
        n_looks: How many passes began and were left since it gave a sample.
    """

    def __init__(self, progress: Progress, outer: "_Standing | None", n_loads: int, n_sets: int):
        self.progress, self.outer, self.n_loads, self.n_sets, self.n_looks = progress, outer, n_loads, n_sets, 0
        self.before: tuple[Progress | None, tuple[ReaderRank, Progress] | None] = None, None
        self.has_given, self.is_running = False, True


class ShardWarning(UserWarning):
    """Some workers or ranks have nothing to read, or ranks may read different epochs."""


@dataclass(eq=False, repr=False)
class ShardDataset(IterableDataset):
    """What `read_shards` returns.

    Attributes:
        urls: The shards.
        classes: Names that labels index into; None without a manifest.

    Nothing of a sample is unpickled or executed: an image is decoded, a label is a number, text or JSON.

    Each `iter()` begins a pass. An error of one sample is raised when it is asked for, and whoever catches it gets the
    sample after it by the next `next`; the one that failed counts as given. An error of a shard ends the pass. In one
    process, a look at some samples while another pass is running is not counted, once it is left or the other pass goes
    on; in the workers of another loader, it is the next epoch.

    Raises, while iterating:
        TarError: a shard is cut or damaged, or goes on after its end mark; names it and its last whole member. Or a
            member of a sample is a link or a device, or larger than 1024 MB (`LABKIT_MAX_FILE_MB`).
        DecodeError: an image cannot be decoded; names key and shard.
        ValueError: a sample has no image, several, or no label, or not one of the same kind as those before it, or a
            shard is not what its manifest says.

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
        self._progress: Progress | None = None  # of the pass that gave a sample last
        self._newest: _Standing | None = None  # that pass
        self._n_loads = self._n_sets = 0  # how many states were loaded, and how often the place was set at all
        self._saved: tuple[ReaderRank, Progress] | None = None
        self._parent: ReaderRank | None = None
        self._skips = SkipLog() if self.on_error == "skip" else None
        self._label_suffix = LABEL_SUFFIXES.get(self.order.shards.labels or "")  # else that of the first sample
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
        self._newest, self._n_sets = None, self._n_sets + 1
        if self._saved is None or self._saved[1].epoch != epoch:
            self._progress = None

    def state_dict(self) -> dict[str, Any]:
        """Where the current process's pass stands that gave a sample last, as plain data of some 200 bytes.

        Take it between two samples, or let torchdata's `StatefulDataLoader` do so in its workers. Behind the last
        sample of an epoch, nothing is left of it, and the pass that goes on there is empty. Of two passes at a time,
        each iterator has a `state_dict()` of its own.
        """
        return self._state_of(self._progress or Progress(self._counter.next(self._find_reader().rank).epoch))

    def _state_of(self, progress: Progress) -> dict[str, Any]:
        return {**asdict(progress), "reader": list(self._find_reader()), "order_crc32": self.order.crc32}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where `state` was taken: its samples are those left of the undisturbed epoch.

        The next pass is that of the next `iter()`, or of an iterator that has given nothing yet. What was given before
        is not decoded again. It takes as many ranks and workers as the state was taken with; with others, begin an
        epoch by `set_epoch`, without the state.

        Args:
            state: What `state_dict` returned on this rank and worker. That of a `StatefulDataLoader` is for the loader.

        Raises:
            ValueError: it is none, or of other shards or settings; or, when the iterator is made, of another rank or
                worker. Says what to give.
        """
        remedy = "give what state_dict() of the same data set returned; a loader's state goes to the loader"
        try:
            progress = Progress(*(index(state[name]) for name in ("epoch", "n_read", "n_given")))
            reader, crc32 = ReaderRank(*map(index, state["reader"])), state["order_crc32"]
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"this is not a state of read_shards ({error!r}): {remedy}") from error
        if crc32 != self.order.crc32:
            raise ArgumentError(
                "the state is of another order of samples: shards, shuffle, shuffle_buffer, shuffle_initial, seed or "
                f"samples_per_rank differ; {remedy}"
            )
        self._saved, self._progress = (reader, progress), progress
        self._newest, self._n_loads, self._n_sets = None, self._n_loads + 1, self._n_sets + 1
        self._counter.load(self._find_reader().rank, progress.epoch)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return _ShardPass(self)

    def _begin(self) -> tuple[ReaderRank, _Standing]:
        here, outer = self._find_reader(), self._newest
        if outer is not None and outer.is_running and outer.n_looks:
            # A pass that gives no more, but is kept, must not make all others the same epoch.
            self._counter.stand(here.rank, outer.progress.epoch + 1 + outer.n_looks)
        begun = self._counter.begin(here.rank)
        progress, saved, self._saved = Progress(begun.epoch), self._saved, None
        if saved and begun.is_first and saved[1].epoch == begun.epoch:
            reader, progress = saved[0], replace(saved[1])
            if reader != here:
                raise ArgumentError(
                    f"the state was taken by {reader}, and this is {here}: go on with as many ranks and workers, each "
                    "with its own state; or begin an epoch by set_epoch(), without the state"
                )
        self._warn(here, begun)
        standing = _Standing(progress, outer, self._n_loads, self._n_sets)
        standing.before = self._progress, saved
        self._newest, self._progress = standing, progress
        return here, standing

    def _stand_at(self, standing: _Standing) -> None:
        """Stand at a pass: where another stood there last, the next one is what follows this."""
        if standing.n_loads != self._n_loads:
            return
        if self._newest is not None and self._newest is not standing:
            self._counter.stand(self._find_reader().rank, standing.progress.epoch + 1)
        self._newest, self._progress = standing, standing.progress

    def _leave(self, standing: _Standing) -> None:
        """A pass is left before its end: as a look into another, or if it gave nothing, it leaves no trace."""
        outer, standing.outer = standing.outer, None
        if self._newest is not standing or standing.n_loads != self._n_loads or get_worker_info() is not None:
            return  # in a worker, others have their parts of the pass
        if standing.has_given and outer is not None and outer.is_running:
            outer.n_looks += 1
            self._stand_at(outer)
        elif not standing.has_given:
            self._newest, (self._progress, self._saved) = outer, standing.before
            self._set_next(standing.progress.epoch)

    def _set_next(self, epoch: int) -> None:
        rank = self._find_reader().rank
        self._counter.stand(rank, epoch) if self._saved is None else self._counter.load(rank, epoch)

    def _place(self) -> tuple[Any, ...]:
        """Where the data set stands, for `_return_to`."""
        epoch = self._counter.next(self._find_reader().rank).epoch
        return epoch, self._newest, self._progress, self._saved, self._n_loads

    def _return_to(self, place: tuple[Any, ...]) -> None:
        """Stand again where `_place` was called, as if nothing had been read since."""
        epoch, self._newest, self._progress, self._saved, self._n_loads = place
        self._set_next(epoch)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix.

        It is that of the epoch that was set, or of the next pass, and does not count as one.
        """
        reader = self._find_reader()
        return self.order.samples(reader, self._counter.next(reader.rank).epoch)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit the rank that torch.distributed has.
        here = {"_parent": self._find_reader(), "_newest": None, "_pixel_limit": PixelLimit()}
        return {**self.__dict__, **here}

    def _find_reader(self) -> ReaderRank:
        worker, num_workers = number_in_environment("WORKER", -1), number_in_environment("NUM_WORKERS", 0)
        if not 0 <= worker < num_workers:  # WebDataset's variables, else torch
            info = get_worker_info()
            worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        reader = ReaderRank(*rank_and_world_size(), worker, num_workers)
        if reader.world_size == 1 and self._parent is not None:
            return reader._replace(rank=self._parent.rank, world_size=self._parent.world_size)
        return reader

    def _warn(self, reader: ReaderRank, begun: Pass) -> None:
        """Warn, in the first worker and once, of workers without a shard and of ranks that may read other epochs."""
        n_readers, n_shards, limit = reader.world_size * reader.num_workers, len(self.urls), self.order.samples_per_rank
        said = ""
        if n_shards < n_readers and limit is None:
            said = (
                f"{n_shards} shard{'s' * (n_shards != 1)} for {reader.world_size} ranks x {reader.num_workers} "
                f"workers: {n_readers - n_shards} of them have nothing to read. Write smaller shards "
                "(write_shards(..., max_count=...)), or use fewer workers"
            )
        elif begun.is_counted and begun.epoch == 1 and (self.order.shuffle or limit) and reader.world_size > 1:
            said = (
                f"each of {reader.world_size} ranks counts its own passes, and after one pass more than the others it "
                "would get their samples: call set_epoch(epoch) of the data set before each epoch, on every rank"
            )
        if said and reader.rank == 0 and reader.worker == 0 and not self._has_warned:
            self._has_warned = True
            warn_caller(said, ShardWarning)

    def _decode(self, sample: dict[str, Any]) -> tuple[Any, ...] | None:
        """The sample's image and label; None if it is skipped."""
        suffixes = [suffix for suffix in sample if f".{suffix}" in IMAGE_SUFFIXES]
        name = f"{sample['__key__']}.{suffixes[0] if suffixes else '*'} in {sample['__url__']}"
        known = [self._label_suffix] if self._label_suffix else ["cls", "txt", "json"]
        label_suffix = next((suffix for suffix in known if suffix in sample), None)
        if len(suffixes) != 1 or label_suffix is None:
            found = ", ".join(part for part in sample if not part.startswith("__"))
            files = f"a .{self._label_suffix}" if self._label_suffix else "a .cls (or .txt, or .json)"
            raise ArgumentError(
                f"{name}: a sample must have one image and {files} with its label; it has {found}. Write the shard "
                "again with that; or read the images alone, as lk.ImageDataset(folder_of_the_shards, classes=[])"
            )
        self._label_suffix = label_suffix
        label = _label_of(sample[label_suffix], self.order.shards.labels or label_suffix, name)
        try:
            image = decode(sample[suffixes[0]], self.decoder, key=name)
        except DecodeError as error:
            if self._skips is None:
                raise
            self._skips.add(name, str(error))
            return None
        return sample_of(transformed(self.transform, image, name), label, 0)


class _ShardPass(Iterator[tuple[Any, ...]]):
    """One pass over shards, of one worker of one rank."""

    _standing = _Standing(Progress(0), None, 0, 0)
    _standing.is_running = False  # until it has begun

    def __init__(self, dataset: ShardDataset):
        self._dataset = dataset
        self._begin()

    def _begin(self) -> None:
        self._reader, self._standing = self._dataset._begin()
        self._progress, limit = self._standing.progress, self._dataset.order.samples_per_rank
        self._share = None if limit is None else self._reader.share(limit)
        self._samples: Iterator[dict[str, Any]] | None = None

    def __next__(self) -> tuple[Any, ...]:
        if not self._standing.is_running:
            raise StopIteration
        if self._is_late():
            self._begin()
        while True:
            sample = self._next_sample()
            self._progress.n_read += 1
            try:
                item = self._dataset._decode(sample)
            except Exception:
                self._count()  # the next sample is what follows
                raise
            except BaseException:  # such as Ctrl-C: this sample was not given
                self._progress.n_read -= 1
                self.close()
                raise
            if item is not None:
                self._count()
                return item

    def _is_late(self) -> bool:
        """Whether the place was set since this pass began, which has given nothing: it begins there."""
        return not self._standing.has_given and self._standing.n_sets != self._dataset._n_sets

    def _next_sample(self) -> dict[str, Any]:
        order, progress, share = self._dataset.order, self._progress, self._share
        try:
            while share is None or progress.n_given < share:
                if self._samples is None:
                    # In a second round, samples of this epoch come again, in place of those that were skipped.
                    n_read = progress.n_read % share if share else progress.n_read
                    self._samples = order.samples(self._reader, progress.epoch, n_read)
                sample = next(self._samples, None)
                if sample is not None:
                    return sample
                if share is None:
                    break
                if not progress.n_given:
                    raise ArgumentError(f"only 0 of {share} samples could be read: all of them were skipped")
                self._samples = None
        except BaseException:
            self.close()  # the shards cannot be read on
            raise
        self._dataset._stand_at(self._standing)
        self._standing.is_running, self._standing.outer = False, None
        raise StopIteration

    def _count(self) -> None:
        self._progress.n_given += 1
        self._standing.has_given, self._standing.n_looks = True, 0
        self._dataset._stand_at(self._standing)

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, as the data set's `state_dict` says where the data set stands."""
        if self._standing.is_running and self._is_late():
            return self._dataset.state_dict()
        return self._dataset._state_of(self._progress)

    def close(self) -> None:
        """Leave the pass: it gives no more samples."""
        if self._standing.is_running:
            self._standing.is_running, self._samples = False, None
            self._dataset._leave(self._standing)

    def __del__(self) -> None:
        if sys and not sys.is_finalizing():  # else the names of modules are gone
            self.close()


def _label_of(data: bytes, kind: str, name: str) -> Any:
    """The label in a file, as labels of a set of one. `kind`: what the manifest says it is, or the file's suffix."""
    with suppress(ValueError, OverflowError, RecursionError):
        match kind:
            case "classes" | "cls":
                return np.array([int(data)], np.int64)
            case "txt":
                return (data.decode(),)
            case "numbers":
                return typed_labels(np.array([json.loads(data)]))
            case _:
                return typed_labels([json.loads(data)])
    suffix = LABEL_SUFFIXES.get(kind, kind)
    what = {"cls": "a 64-bit integer", "txt": "UTF-8"}.get(suffix, "JSON, with integers of 64 bits")
    raise ArgumentError(f"{name}: its label must be {what}, got {data[:20]!r}")


def read_shards(
    urls: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    decoder: str = "turbojpeg",
    transform: Callable[[Tensor], Any] | None = None,
    shuffle: bool = False,
    shuffle_buffer: int = 1000,
    shuffle_initial: int = 100,
    seed: int = 0,
    samples_per_rank: int | None = None,
    on_error: str = "raise",
    verify: bool = False,
    storage_options: dict[str, Any] | None = None,
    reads_in_flight: int = 1,
) -> ShardDataset:
    """Images and labels of WebDataset shards, as a data set for torch's `DataLoader`.

    A label is what `write_shards` was given. In shards of other tools it is the number in a sample's `.cls`; or if it
    has none, the text in its `.txt`, as img2dataset writes them; or else what its `.json` holds, where a list of
    numbers is a vector. Texts and what else are no numbers need `collate_fn=lk.collate`: torch's own takes it apart.

    The ranks of a training, whatever launched them, and their workers share the shards: every sample comes exactly once
    per epoch. Ranks may have different numbers of them, and with DistributedDataParallel one would wait for another
    forever: set `samples_per_rank`, or wrap the loop in `torch.distributed.algorithms.join.Join`::

        dataset = lk.read_shards("shards", shuffle=True, transform=transform)
        loader = DataLoader(dataset, batch_size=64, num_workers=2)

    Args:
        urls: A folder that `write_shards` filled, or its URL; or one shard, or a list; braces stand for several
            (`http://host/shard-{000000..000015}.tar`). Paths, `http(s)://`, `s3://`, others by fsspec.
        decoder: One of `labkit.DECODERS`.
        transform: Called with the uint8 (3, H, W) tensor. Generators other than torch's need a `worker_init_fn`.
        shuffle: Each epoch has an order of shards of its own, and a buffer mixes their samples.
        shuffle_buffer: Samples in that buffer, in each worker. 0 shuffles the shards alone.
        shuffle_initial: Samples in it before it gives its first. The default is WebDataset's.
        seed: The same (seed, epoch) gives the same order, for as many ranks and workers. Each pass is the next epoch,
            unless `set_epoch` is called. With several ranks, it must be.
        samples_per_rank: Of each epoch; the next goes on where it ended. Without a manifest, samples are counted first.
        on_error: `"raise"` or `"skip"`, as in `ImageDataset`.
        verify: Compare each shard's SHA-256 with the manifest's, when its end is reached.
        storage_options: Passed to fsspec, for object storage; its configuration and the environment fill in.
        reads_in_flight: Requests at a time per process, each for 4 MiB, of which `reads_in_flight + 1` are in memory.

    Returns: A `ShardDataset` of `(image, label)`: image uint8 (3, H, W) RGB; label as in `ImageDataset`: an int; for
        floats a float32 tensor (), for vectors a tensor (C,), for texts a string, or what the JSON holds. It can
        resume in mid-epoch, by its `state_dict` and `load_state_dict`, or those of torchdata's `StatefulDataLoader`
        around it.

    Raises:
        FileNotFoundError: no such shard or folder, or `write_shards` has not finished it.
        ValueError: no shard, a command (`pipe:`), an unknown option, or `verify` without a manifest.

    Taught in: notebooks/08b_shard_order.ipynb
    """
    reads_in_flight = require_int("reads_in_flight", reads_in_flight)
    require_callable("transform", transform)
    shards = find_shards(urls, verify=verify, storage_options=storage_options or {})
    shards = replace(shards, reads_in_flight=reads_in_flight)
    order = EpochOrder(shards, shuffle, shuffle_buffer, shuffle_initial, seed, samples_per_rank)
    return ShardDataset(order, decoder, transform, on_error)
