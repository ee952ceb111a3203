"""`BucketBatchSampler`: batches of images that share a bucket, and so a shape, shared evenly among ranks."""

import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler, Subset

from labkit.data.buckets import Buckets, upright_sizes
from labkit.errors import ArgumentError
from labkit.loading.samplers import CountsEpochs
from labkit.loading.seeding import permutation
from labkit.util.arguments import require_a, require_int, require_seed
from labkit.util.ranks import rank_and_world_size
from labkit.util.strings import PackedStrings

if TYPE_CHECKING:
    import pandas as pd

_OF_BATCHES = 1  # seeds the order of batches; that of images has (seed, epoch) alone


def cut_batches(numbers: np.ndarray, order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Batches bucket by bucket.

    Args:
        numbers: Of each image's bucket, int64 (N,).
        order: In which images of a bucket follow each other, int64 (N,).
        batch_size: The last batch of a bucket may be smaller.
    """
    order = order[np.argsort(numbers[order], kind="stable")]
    batches: list[np.ndarray] = []
    for group in np.split(order, np.cumsum(np.bincount(numbers))[:-1]):
        batches += [group[at : at + batch_size] for at in range(0, len(group), batch_size)]
    return batches


def balance_over_ranks(batches: list[np.ndarray], world_size: int) -> list[np.ndarray]:
    """A multiple of `world_size` batches: as many of the largest as it takes are halved.

    Raises:
        ValueError: there are fewer images than batches are needed.
    """
    batches, lengths = list(batches), np.array([len(batch) for batch in batches])
    check_halving(int(lengths.sum()), len(batches), world_size)
    for _ in range(-len(batches) % world_size):
        place = int(lengths.argmax())
        whole, half = batches[place], -(-int(lengths[place]) // 2)
        batches[place : place + 1] = [whole[:half], whole[half:]]
        lengths = np.insert(lengths, place + 1, lengths[place] - half)
        lengths[place] = half
    return batches


def check_halving(n_images: int, n_batches: int, world_size: int) -> None:
    """Raise ValueError where halving cannot give each rank as many batches: there are too few images."""
    if n_images < n_batches + -n_batches % world_size:
        or_larger = ", or a larger batch_size" if n_images >= world_size else ""
        raise ArgumentError(
            f"BucketBatchSampler cannot give {world_size} ranks equally many batches: {n_images} images make "
            f"{n_batches} batches, and too few can be halved. Use another number of ranks{or_larger}"
        )


class BucketBatchSampler(CountsEpochs, Sampler[list[int]]):
    """Indices of batches, each from one bucket: the images of a batch can be cropped to one shape.

    Args:
        sizes: From `collect_sizes`. An image's index in the data set is the label of its row (`sizes.index`), so rows
            may be left out; `make_loader` checks that paths and keys match. All ranks need the same frame.
        batch_size: Largest number of images in a batch.
        buckets: The same as the data set's. Default: `Buckets.fit(sizes)`, which `buckets` then holds.
        shuffle: A new order of images and of batches each epoch. False: bucket by bucket, in the order of the rows.
        seed: The order depends only on (seed, epoch). Each pass is the next epoch, unless `set_epoch` is called: with
            several ranks, call it before each epoch. The loaders of `make_loader` and accelerate do.
        rank, world_size: Of this process. Default: those that `torch.distributed` or the launcher tells when an epoch
            begins. Each rank gets every `world_size`-th batch. All get equally many batches, but in one step
            two ranks may have different shapes.

    Each image comes exactly once an epoch, over all ranks: a bucket's last images make a smaller batch, and where the
    ranks cannot share the batches evenly, some of the largest are halved until they can.

    Attributes:
        buckets: The `Buckets` in use, for the data set.
        epoch: Of the next pass.

    >>> sizes = lk.collect_sizes("photos", progress=False)
    >>> buckets = lk.Buckets(((128, 192), (192, 128), (192, 192)))
    >>> sampler = lk.BucketBatchSampler(sizes, 4, buckets=buckets)
    >>> dataset = lk.ImageDataset("photos", buckets=buckets)
    >>> images, labels = next(iter(lk.make_loader(dataset, batch_sampler=sampler)))

    Raises:
        ValueError: a wrong argument or frame, or too few images for equally many batches.

    Taught in: notebooks/10_image_sizes.ipynb
    """

    def __init__(
        self,
        sizes: "pd.DataFrame",
        batch_size: int,
        *,
        buckets: Buckets | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        self.batch_size = require_int("batch_size", batch_size)
        self.shuffle, self.seed = bool(shuffle), require_seed(seed)
        if (rank is None) != (world_size is None):
            raise ArgumentError(f"rank and world_size must be given together, got {rank} and {world_size}")
        if rank is not None and require_int("rank", rank, 0) >= require_int("world_size", world_size):
            raise ArgumentError(f"rank must be below world_size, got {rank} of {world_size}")
        self._rank, self._world_size = rank, world_size
        buckets = Buckets.fit(sizes) if buckets is None else buckets
        self.buckets = require_a(Buckets, "buckets", buckets, "an lk.Buckets")
        self._numbers = self.buckets.select(*upright_sizes(sizes))
        self._indices, self._paths = _indices_of(sizes), PackedStrings(sizes["path"])
        len(self)  # refuses what cannot be shared out, now and not in the first epoch

    def __len__(self) -> int:
        """Batches of an epoch for each rank."""
        n_batches = int((-(-np.bincount(self._numbers) // self.batch_size)).sum())
        check_halving(len(self._indices), n_batches, self.num_replicas)
        return -(-n_batches // self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        return self._count(self._batches)

    @property
    def rank(self) -> int:
        """The rank of the current process."""
        return rank_and_world_size()[0] if self._rank is None else self._rank

    @property
    def num_replicas(self) -> int:
        """Ranks that share each epoch, by the name that torch's `DistributedSampler` has for it."""
        return rank_and_world_size()[1] if self._world_size is None else self._world_size

    def remaining_batches(self, before: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """This rank's batches of what is left of the epoch.

        Args:
            before: (batches that each rank had, number of ranks), for each number of ranks that the epoch has seen.

        Raises:
            ValueError: fewer images are left than the ranks need for one batch each.
        """
        return self._batches(int(self.epoch), before)

    def _batches(self, epoch: int, before: Sequence[Sequence[int]] = ()) -> Iterator[list[int]]:
        n_rows = len(self._numbers)
        order = permutation(n_rows, self.seed, epoch).numpy() if self.shuffle else np.arange(n_rows)
        batches = cut_batches(self._numbers, order, self.batch_size)
        if self.shuffle:
            batches = [batches[place] for place in permutation(len(batches), self.seed, epoch, _OF_BATCHES).tolist()]
        for n_batches, n_ranks in before:
            batches = balance_over_ranks(batches, n_ranks)[n_batches * n_ranks :]
        batches = balance_over_ranks(batches, self.num_replicas)[self.rank :: self.num_replicas]
        return (self._indices[batch].tolist() for batch in batches)

    @cached_property
    def sizes_crc32(self) -> int:
        """A checksum of the images' numbers, buckets and paths."""
        names, offsets = self._paths.arrays()
        numbers = np.concatenate([self._indices, self._numbers, np.ravel(self.buckets.shapes), offsets])
        return zlib.crc32(names.tobytes(), zlib.crc32(numbers.astype("<i8").tobytes()))

    def check_dataset(self, dataset: Any) -> None:
        """Raise ValueError where keys of the data set, if it has any, are not the paths of these rows."""
        keys = keys_of(dataset)
        remedy = "leave out the rows of other images, and label the rest by their numbers in the data set (sizes.index)"
        if (last := int(self._indices.max())) >= len(dataset):
            raise ArgumentError(f"sizes has a row {last}, and the data set only {len(dataset)} images: {remedy}")
        if keys is None:
            return
        for index, path in zip(self._indices.tolist(), self._paths, strict=True):
            if keys[index] != path:
                raise ArgumentError(f"row {index} of sizes is {path!r}, but image {index} is {keys[index]!r}: {remedy}")


def check_batch_sampler(batch_sampler: Any, dataset: Any, **others: Any) -> None:
    """Refuse a batch sampler together with arguments that it replaces, and a `BucketBatchSampler` of other images."""
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise ArgumentError(
            f"got a batch_sampler and {', '.join(given)}: leave out one, a batch sampler decides on these"
        )
    if isinstance(batch_sampler, BucketBatchSampler):
        batch_sampler.check_dataset(dataset)


def _indices_of(sizes: "pd.DataFrame") -> np.ndarray:
    labels = sizes.index.to_numpy()
    if labels.dtype.kind not in "iu" or labels.min() < 0 or not sizes.index.is_unique:
        raise ArgumentError(
            "sizes must have the images' numbers in the data set as labels of its rows, each once, as from "
            f"collect_sizes; got {labels[:3].tolist()}, ...: sizes.reset_index(drop=True) numbers them from 0"
        )
    return labels.astype(np.int64)


def keys_of(dataset: Any) -> Sequence[str] | None:
    """A data set's keys, also those of a subset; None if it has none."""
    if isinstance(dataset, Subset):
        keys = keys_of(dataset.dataset)
        return None if keys is None else [keys[index] for index in dataset.indices]
    keys = getattr(dataset, "keys", None)
    return keys if isinstance(keys, Sequence) else None
