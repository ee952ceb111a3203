"""The data set that `read_shards` returns: which samples a process reads, in which order, from any place on."""

import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset
from webdataset.utils import pytorch_worker_info

from labkit.core import require_choice, require_int
from labkit.data.datasets import SkipLog, Skipped
from labkit.data.decoders import DECODERS, DecodeError, decode
from labkit.data.shards.listing import ShardList, count_samples, name_of, read_samples
from labkit.data.shards.passes import Passes, Stretch, cut, shard_order
from labkit.data.shards.place import Place
from labkit.data.shards.progress import VERSION, Clock, Progress, read_state
from labkit.data.shards.sample import find_image, parse_label
from labkit.data.shards.sequence import resume, shuffled


class ShardWarning(UserWarning):
    """Some workers or ranks have nothing to read."""


@dataclass(eq=False, repr=False)
class ShardDataset(IterableDataset):
    """What `read_shards` returns.

    Attributes:
        urls: The shards.
        classes: Names that labels index into; None without a manifest.

    Nothing of a sample is unpickled or executed: an image is decoded, a label is a number.

    Raises, while iterating:
        TarError: a shard is cut or damaged; names it and its last whole member. Or a member is larger than 1024 MB
            (`LABKIT_MAX_FILE_MB`).
        DecodeError: an image cannot be decoded; names key and shard.
        ValueError: a sample has no image or no label, or a shard is not what its manifest says.

    Warns (once, on stderr, in the first worker):
        ShardWarning: there are fewer shards than workers of all ranks.
    """

    shards: ShardList
    decoder: str
    transform: Callable[[Tensor], Any] | None
    shuffle: int
    shuffle_initial: int
    seed: int
    samples_per_rank: int | None
    on_error: str

    def __post_init__(self) -> None:
        require_choice("decoder", self.decoder, DECODERS)
        require_choice("on_error", self.on_error, ("raise", "skip"))
        require_int("shuffle", self.shuffle, minimum=0)
        require_int("shuffle_initial", self.shuffle_initial)
        if self.samples_per_rank is not None:
            require_int("samples_per_rank", self.samples_per_rank)
            counts = count_samples(self.shards)
            self._passes = Passes([(url, counts[url]) for url in self.shards.urls], self.shuffle, self.seed)
        self.urls, self.classes = self.shards.urls, self.shards.classes
        self._clock = Clock()
        self._progress: Progress | None = None
        self._resumed: tuple[Progress, Place] | None = None
        self._parent_place: Place | None = None
        self._skips = SkipLog() if self.on_error == "skip" else None
        self._has_warned = False

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, in this process and in every worker."""
        return self._skips.read() if self._skips else []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of shuffled samples, in persistent workers too. Call on every rank."""
        self._clock.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator of this process stands, as plain data of some 200 bytes.

        Take it between two samples, or let torchdata's `StatefulDataLoader` do so in its workers.
        """
        place, progress = self._find_place(), self._progress
        if progress is None or progress.epoch != self._clock.epoch:
            progress = Progress(self._clock.epoch)
        return {
            "version": VERSION,
            "epoch": progress.epoch,
            "start": self._clock.start(self._epoch_length(place)),
            "n_read": progress.n_read,
            "n_given": progress.n_given,
            "is_over": progress.is_over or progress.n_given == self._share(place),
            "place": list(place),
            "order_crc32": self._order_crc32(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on where `state` was taken. What was given before is not decoded again.

        In the middle of an epoch, rank and worker must be those of the state, as must their numbers; after an epoch's
        end, go on with `set_epoch(epoch + 1)` on any.

        Raises:
            ValueError: the state is of other shards or settings, or of another rank in mid-epoch; says what differs.
        """
        checked = read_state(state, self._order_crc32())
        there, here = Place(*checked["place"]), self._find_place()
        epoch, start, is_over = checked["epoch"], checked["start"], checked["is_over"]
        progress = Progress(epoch, checked["n_read"], checked["n_given"], is_over)
        if progress.n_read and not is_over:
            there.require(here._replace(worker=there.worker, num_workers=there.num_workers))
        self._clock.resume(epoch, epoch + is_over, start + is_over * self._epoch_length(there))
        self._resumed, self._progress = (progress, there), progress

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        place = self._find_place()
        self._progress = progress = self._begin(place)
        return self._items(place, progress)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix."""
        return self._samples(self._find_place(), self._clock.epoch, 0)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit the rank that torch.distributed has.
        return {**self.__dict__, "_parent_place": self._find_place()}

    def _find_place(self) -> Place:
        place = Place(*pytorch_worker_info())
        if place.world_size == 1 and self._parent_place is not None:
            return place._replace(rank=self._parent_place.rank, world_size=self._parent_place.world_size)
        return place

    def _begin(self, place: Place) -> Progress:
        """The progress of a new iterator: that of a state, once, if it is of this epoch."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed[0].epoch != self._clock.epoch:
            return Progress(self._clock.epoch)
        progress, there = resumed
        if progress.n_read and not progress.is_over:
            there.require(place)
        return progress

    def _items(self, place: Place, progress: Progress) -> Iterator[tuple[Any, int]]:
        share = self._share(place)
        while not progress.is_over and progress.n_given != share:
            # In a second round, samples of this epoch come again, in place of those that were skipped.
            for sample in self._samples(place, progress.epoch, progress.n_read % (share or sys.maxsize)):
                progress.n_read += 1
                if (item := self._decode(sample)) is not None:
                    progress.n_given += 1
                    yield item
                    if progress.n_given == share:
                        return
            progress.is_over = share is None
            if share and not progress.n_given:
                raise ValueError(f"only 0 of {share} samples could be read: all of them were skipped")

    def _samples(self, place: Place, epoch: int, n_read: int) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, after the first `n_read`."""
        self._warn_if_idle(place)
        seed = f"{self.seed} {epoch} {tuple(place)}"
        if not n_read:
            samples = self._read(self._stretches(place, epoch))
            return shuffled(samples, self.shuffle, self.shuffle_initial, seed) if self.shuffle else samples
        stretches = self._count(self._stretches(place, epoch))
        numbers = range(sum(stretch.stop - stretch.first for stretch in stretches))
        order = shuffled(numbers, self.shuffle, self.shuffle_initial, seed) if self.shuffle else iter(numbers)
        return resume(order, n_read, lambda first: self._read(list(cut(stretches, first))))

    def _stretches(self, place: Place, epoch: int) -> list[Stretch]:
        """What this process reads in an epoch. Without `samples_per_rank`, shards to their end, wherever that is."""
        if self.samples_per_rank is not None:
            start = self._clock.start(self._epoch_length(place)) + place.offset(self.samples_per_rank)
            return list(self._passes.stretches(start, place.share(self.samples_per_rank)))
        urls = shard_order(self.urls, self.shuffle, f"{self.seed} {epoch}")  # the same on every rank, before they share
        return [Stretch(url, 0, sys.maxsize) for url in place.part(urls)]

    def _count(self, stretches: list[Stretch]) -> list[Stretch]:
        """The stretches, with the ends of whole shards filled in."""
        if self.samples_per_rank is not None:
            return stretches
        counts = count_samples(replace(self.shards, urls=[stretch.url for stretch in stretches]))
        return [stretch._replace(stop=counts[stretch.url]) for stretch in stretches]

    def _read(self, stretches: Sequence[Stretch]) -> Iterator[dict[str, Any]]:
        files = self.shards.open_in_turn(stretch.url for stretch in stretches)
        for (url, first, stop), (_, file) in zip(stretches, files, strict=True):
            n_samples = 0
            with file:
                for sample in islice(read_samples(self.shards, url, file), first, stop):
                    n_samples += 1
                    yield sample
            if stop != sys.maxsize and n_samples < stop - first:
                raise ValueError(f"{name_of(url)} has fewer samples than the {stop} of its manifest: copy it again")

    def _share(self, place: Place) -> int | None:
        return None if self.samples_per_rank is None else place.share(self.samples_per_rank)

    def _epoch_length(self, place: Place) -> int:
        """Samples of an epoch over all ranks, if they are limited."""
        return place.world_size * (self.samples_per_rank or 0)

    def _order_crc32(self) -> int:
        """Of all that decides on the order of samples, but for the ranks and workers."""
        names = [url.rpartition("/")[2] for url in self.urls]
        settings = [self.shuffle, self.shuffle_initial, self.seed, self.samples_per_rank]
        return zlib.crc32(json.dumps([names, list(self.shards.n_samples.values()), settings]).encode())

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
        if is_first and n_shards < n_readers and self.samples_per_rank is None:
            self._has_warned = True
            warnings.warn(
                f"{n_shards} shards for {place.world_size} ranks x {place.num_workers} workers: "
                f"{n_readers - n_shards} of them have nothing to read. Write smaller shards "
                "(write_shards(..., max_count=...)), or use fewer workers",
                ShardWarning,
                stacklevel=4,
            )
