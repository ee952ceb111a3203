"""Read WebDataset shards, each sample once an epoch, whatever the number of ranks and workers."""

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import webdataset as wds
from torch import Tensor
from torch.utils.data import IterableDataset
from webdataset.tariterators import group_by_keys
from webdataset.utils import pytorch_worker_info

from labkit.core import IMAGE_SUFFIXES
from labkit.data.datasets import SkipLog, Skipped
from labkit.data.decoders import DECODERS, DecodeError, decode
from labkit.data.shards.listing import ShardList, name_of, read_shard


class ShardWarning(UserWarning):
    """Workers or ranks that have nothing to read."""


class Place(NamedTuple):
    """Which part of the shards this process reads."""

    rank: int
    world_size: int
    worker: int
    num_workers: int

    def part(self, shards: Sequence[Any]) -> Sequence[Any]:
        """Every `world_size`-th shard is a rank's, and of these every `num_workers`-th a worker's."""
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
) -> "ShardDataset":
    """Images and labels of WebDataset shards, as a data set for torch's `DataLoader`.

    Shards are dealt out to ranks (`torchrun`'s environment, or `torch.distributed`), and each rank's to its workers:
    every sample comes exactly once an epoch. Ranks may then have unequal numbers of samples. Where a step is a
    collective one (DistributedDataParallel), the longer ones would wait for ever: wrap the loop in
    `torch.distributed.algorithms.join.Join`, stop every rank after the batches of the shortest, or set
    `samples_per_rank`.

    Args:
        urls: A folder that `write_shards` filled (or its URL): its manifest lists the shards. Or the shards: one name,
            with braces for many (`http://host/shard-{000000..000015}.tar`), or a list of them. Paths, `http(s)://`,
            `s3://` and whatever else fsspec reads.
        decoder: One of `labkit.DECODERS`.
        transform: Called with the uint8 (3, H, W) tensor; its result takes the image's place. `DataLoader` seeds
            torch's generator in each worker; a library that draws from one of its own (Albumentations) has to be
            seeded in `worker_init_fn`, else all workers repeat the same draws.
        shuffle: 0 keeps the order. Above, the order of shards is drawn anew each epoch, and a buffer of so many
            encoded samples in each worker mixes neighbours.
        shuffle_initial: Samples in that buffer before it gives its first: few for an early first batch, as many as
            `shuffle` for the best mixing. The default is WebDataset's.
        seed: The same (seed, epoch) gives the same order, for the same number of ranks and workers.
        samples_per_rank: Every rank gives exactly so many samples an epoch, from shards drawn with replacement
            (WebDataset's `resampled`); no longer each exactly once.
        on_error: What becomes of an image that cannot be decoded: `"raise"`, or `"skip"`, as in `ImageDataset`.
        verify: Compare each shard's SHA-256 with the manifest's, when its end is reached.
        storage_options: To fsspec, for object storage; else its configuration and the environment count.

    Returns:
        A `ShardDataset`; its items are `(image, label)`, image uint8 (3, H, W) RGB, label an int.

    Raises:
        FileNotFoundError: no such shard or folder, or `write_shards` has not finished it.
        ValueError: no shard, a command (WebDataset's `pipe:`), unknown decoder or policy, or `verify` without a
            manifest.

    While iterating: TarError where a shard is cut, naming it and its last whole member, or where a member is larger
    than 1024 MB (the variable `LABKIT_MAX_FILE_MB`); DecodeError, naming key and
    shard; ValueError where a sample has no image or no label, or a shard is not what its manifest says.

    Warns (once, on stderr, in the first worker):
        ShardWarning: fewer shards than workers of all ranks.

    Taught in: notebooks/08_shard_formats.ipynb
    """
    return ShardDataset(
        ShardList.find(urls, verify=verify, storage_options=storage_options or {}), decoder, transform,
        shuffle, shuffle_initial, seed, samples_per_rank, on_error,
    )  # fmt: skip


class ShardDataset(IterableDataset):
    """What `read_shards` returns.

    Attributes:
        urls: The shards.
        classes: Names that labels index into, or None where no manifest tells them.

    Nothing of a sample is unpickled or executed: an image is decoded, a label is a number.
    """

    def __init__(
        self,
        shards: ShardList,
        decoder: str,
        transform: Callable[[Tensor], Any] | None,
        shuffle: int,
        shuffle_initial: int,
        seed: int,
        samples_per_rank: int | None,
        on_error: str,
    ):
        if decoder not in DECODERS:
            raise ValueError(f"unknown decoder {decoder!r}: choose one of {', '.join(DECODERS)}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: choose 'raise' or 'skip'")
        if shuffle < 0 or shuffle_initial < 1 or (samples_per_rank is not None and samples_per_rank < 1):
            raise ValueError(f"{shuffle=}, {shuffle_initial=}, {samples_per_rank=}: counts are wanted")
        self.shards, self.decoder, self.transform = shards, decoder, transform
        self.shuffle, self.shuffle_initial, self.seed = shuffle, shuffle_initial, seed
        self.samples_per_rank = samples_per_rank
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # of all else workers have a copy
        self._parent_place: Place | None = None
        self._skips = SkipLog() if on_error == "skip" else None
        self._has_warned = False

    @property
    def urls(self) -> list[str]:
        return self.shards.urls

    @property
    def classes(self) -> list[str] | None:
        return self.shards.classes

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, in this process and in every worker."""
        return self._skips.read() if self._skips else []

    def set_epoch(self, epoch: int) -> None:
        """Order of the epochs that begin from now on, in persistent workers too. Call it on every rank."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        place, samples = self._place(), self.samples()
        decoded = (item for sample in samples if (item := self._decoded(sample)) is not None)
        return decoded if self.samples_per_rank is None else _exactly(place.share(self.samples_per_rank), decoded)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix."""
        place, epoch = self._place(), int(self._epoch)
        self._warn_of_idle(place)
        samples = self._read(self._order(place, epoch))
        if self.shuffle:
            draw = random.Random(f"{self.seed} {epoch} {place}")
            samples = wds.shuffle(self.shuffle, initial=self.shuffle_initial, rng=draw)(samples)
        return samples

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit what torch.distributed knows.
        return {**self.__dict__, "_parent_place": self._place()}

    def _place(self) -> Place:
        place = Place(*pytorch_worker_info())
        if place.world_size == 1 and self._parent_place is not None:
            return place._replace(rank=self._parent_place.rank, world_size=self._parent_place.world_size)
        return place

    def _order(self, place: Place, epoch: int) -> Iterable[str]:
        if self.samples_per_rank is not None:
            draw = random.Random(f"{self.seed} {epoch} {place} shards")
            return (draw.choice(self.urls) for _ in range(self.samples_per_rank))  # enough: no shard is empty
        urls = list(self.urls)
        if self.shuffle:
            random.Random(f"{self.seed} {epoch}").shuffle(urls)  # the same on every rank, before they share
        return place.part(urls)

    def _read(self, urls: Iterable[str]) -> Iterator[dict[str, Any]]:
        for url in urls:
            yield from group_by_keys(read_shard(self.shards, url), handler=partial(_refuse, url))

    def _decoded(self, sample: dict[str, Any]) -> tuple[Any, int] | None:
        suffix = next((suffix for suffix in sample if f".{suffix}" in IMAGE_SUFFIXES), None)
        name = f"{sample['__key__']}.{suffix or '*'} in {sample['__url__']}"
        if suffix is None or "cls" not in sample:
            has = ", ".join(part for part in sample if not part.startswith("__"))
            raise ValueError(f"{name}: an image and a .cls with its label are wanted; it has {has}")
        label = _label(sample["cls"], name)
        try:
            image = decode(sample[suffix], self.decoder, key=name)
        except DecodeError as error:
            if self._skips is None:
                raise
            self._skips.add(name, str(error))
            return None
        return (self.transform(image) if self.transform else image), label

    def _warn_of_idle(self, place: Place) -> None:
        n_readers, n_shards = place.world_size * place.num_workers, len(self.urls)
        first = place.rank == 0 and place.worker == 0 and not self._has_warned
        if first and n_shards < n_readers and self.samples_per_rank is None:
            self._has_warned = True
            warnings.warn(
                f"{n_shards} shards for {place.world_size} ranks x {place.num_workers} workers: "
                f"{n_readers - n_shards} of them have nothing to read. Write smaller shards "
                "(write_shards(..., max_count=...)), or use fewer workers",
                ShardWarning,
                stacklevel=4,
            )


def _exactly(count: int, items: Iterator[Any]) -> Iterator[Any]:
    came = 0
    for item in islice(items, count):
        came += 1
        yield item
    if came < count:
        raise ValueError(f"only {came} of {count} samples could be read: too many were skipped, or shards are empty")


def _refuse(url: str, error: Exception) -> None:
    raise ValueError(f"{name_of(url)}: {error.args[0]}") from error


def _label(data: bytes, name: str) -> int:
    with suppress(ValueError):
        label = int(data)
        if -(1 << 63) <= label < 1 << 63:  # what a tensor of labels holds
            return label
    raise ValueError(f"{name}: its label is {data[:20]!r}, where a number is wanted")
