"""Read WebDataset shards: each sample once per epoch, for any number of ranks and workers."""

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import webdataset as wds
from torch import Tensor
from torch.utils.data import IterableDataset
from webdataset.tariterators import group_by_keys
from webdataset.utils import pytorch_worker_info

from labkit.core import IMAGE_SUFFIXES, require_choice, require_int
from labkit.data.datasets import SkipLog, Skipped
from labkit.data.decoders import DECODERS, DecodeError, decode
from labkit.data.shards.cache import ShardCache
from labkit.data.shards.listing import ShardList, name_of, read_shard


class ShardWarning(UserWarning):
    """Some workers or ranks have nothing to read."""


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
) -> "ShardDataset":
    """Images and labels of WebDataset shards, as a data set for torch's `DataLoader`.

    Ranks (of `torchrun`'s environment, or `torch.distributed`) share the shards, and so do the workers of each rank:
    every sample comes exactly once per epoch. Ranks may have unequal numbers of samples; for DistributedDataParallel,
    use torch's `Join`, stop every rank after the batches of the shortest, or set `samples_per_rank`.

    Args:
        urls: A folder that `write_shards` filled, or its URL; or one shard, braces for several
            (`http://host/shard-{000000..000015}.tar`), or a list. Paths, `http(s)://`, `s3://`, others by fsspec.
        decoder: One of `labkit.DECODERS`.
        transform: Called with the uint8 (3, H, W) tensor. `DataLoader` seeds torch's generator in each worker; other
            generators (Albumentations') need `worker_init_fn`, else all workers repeat the same draws.
        shuffle: 0 keeps the order. Above 0, each epoch draws an order of shards, and a buffer of so many encoded
            samples in each worker mixes neighbours.
        shuffle_initial: Samples in that buffer before it gives its first: as many as `shuffle` for the best mixing.
        seed: The same (seed, epoch) gives the same order, for the same number of ranks and workers.
        samples_per_rank: Samples of each rank per epoch, from shards drawn with replacement; no longer each once.
        on_error: For an image that cannot be decoded: `"raise"`, or `"skip"`, as in `ImageDataset`.
        verify: Compare each shard's SHA-256 with the manifest's, when its end is reached.
        storage_options: Passed to fsspec, for object storage; its configuration and the environment fill in.
        reads_in_flight: Requests at a time per process, each for 4 MiB, of which `reads_in_flight + 1` are in memory.
        cache: Keeps remote shards in a local folder.

    Returns:
        A `ShardDataset` of `(image, label)`: image uint8 (3, H, W) RGB, label an int.

    Raises:
        FileNotFoundError: no such shard or folder, or `write_shards` has not finished it.
        ValueError: no shard, a command (`pipe:`), an unknown option, or `verify` without a manifest.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    shards = ShardList.find(urls, verify=verify, storage_options=storage_options or {})
    shards = replace(shards, reads_in_flight=reads_in_flight, cache=cache)
    return ShardDataset(shards, decoder, transform, shuffle, shuffle_initial, seed, samples_per_rank, on_error)


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
        self.urls, self.classes = self.shards.urls, self.shards.classes
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # the only state that workers share
        self._parent_place: Place | None = None
        self._skips = SkipLog() if self.on_error == "skip" else None
        self._has_warned = False

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, in this process and in every worker."""
        return self._skips.read() if self._skips else []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of shuffled samples, in persistent workers too. Call on every rank."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        place, samples = self._find_place(), self.samples()
        decoded = (item for sample in samples if (item := self._decode(sample)) is not None)
        return decoded if self.samples_per_rank is None else _take(place.share(self.samples_per_rank), decoded)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix."""
        place, epoch = self._find_place(), int(self._epoch)
        self._warn_if_idle(place)
        samples = self._read(self._order_shards(place, epoch))
        if self.shuffle:
            generator = random.Random(f"{self.seed} {epoch} {place}")
            samples = wds.shuffle(self.shuffle, initial=self.shuffle_initial, rng=generator)(samples)
        return samples

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit the rank that torch.distributed has.
        return {**self.__dict__, "_parent_place": self._find_place()}

    def _find_place(self) -> Place:
        place = Place(*pytorch_worker_info())
        if place.world_size == 1 and self._parent_place is not None:
            return place._replace(rank=self._parent_place.rank, world_size=self._parent_place.world_size)
        return place

    def _order_shards(self, place: Place, epoch: int) -> Iterable[str]:
        if self.samples_per_rank is not None:
            generator = random.Random(f"{self.seed} {epoch} {place} shards")
            return (generator.choice(self.urls) for _ in range(self.samples_per_rank))  # enough: no shard is empty
        urls = list(self.urls)
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(urls)  # the same on every rank, before they share
        return place.part(urls)

    def _read(self, urls: Iterable[str]) -> Iterator[dict[str, Any]]:
        for url, file in self.shards.open_in_turn(urls):
            yield from group_by_keys(read_shard(self.shards, url, file), handler=partial(_raise_group_error, url))

    def _decode(self, sample: dict[str, Any]) -> tuple[Any, int] | None:
        """The sample's image and label; None if it is skipped."""
        name, data = _find_image(sample)
        label = _parse_label(sample["cls"], name)
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


def _take(count: int, items: Iterator[Any]) -> Iterator[Any]:
    """The first `count` items. Raises ValueError if there are fewer."""
    n_taken = 0
    for item in islice(items, count):
        n_taken += 1
        yield item
    if n_taken < count:
        raise ValueError(f"only {n_taken} of {count} samples could be read: too many were skipped, or shards are empty")


def _raise_group_error(url: str, error: Exception) -> None:
    raise ValueError(f"{name_of(url)}: {error.args[0]}") from error


def _find_image(sample: dict[str, Any]) -> tuple[str, bytes]:
    """Name and data of a sample's image. Raises ValueError if there is none, or no label."""
    suffix = next((suffix for suffix in sample if f".{suffix}" in IMAGE_SUFFIXES), None)
    name = f"{sample['__key__']}.{suffix or '*'} in {sample['__url__']}"
    if suffix is None or "cls" not in sample:
        found = ", ".join(part for part in sample if not part.startswith("__"))
        raise ValueError(f"{name}: a sample must have an image and a .cls with its label; it has {found}")
    return name, sample[suffix]


def _parse_label(data: bytes, name: str) -> int:
    with suppress(ValueError):
        label = int(data)
        if -(1 << 63) <= label < 1 << 63:  # a tensor of labels is int64
            return label
    raise ValueError(f"{name}: its label must be a 64-bit integer, got {data[:20]!r}")
