"""Which samples each rank and worker reads in an epoch, and in which order, read from any place in it on."""

import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from labkit.core import require_int
from labkit.data.shards.listing import ShardList, count_samples, name_of, read_samples
from labkit.data.shards.passes import Passes, Stretch, cut, shard_order
from labkit.data.shards.place import Place
from labkit.data.shards.sequence import resume, shuffled
from labkit.data.shards.streams import Stream


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
