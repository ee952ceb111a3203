"""`BucketBatchSampler`: batches of images that share a bucket, and so a shape, shared evenly among ranks."""

import warnings
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler, Subset

from labkit.data.buckets import Buckets, upright_sizes
from labkit.errors import ArgumentError
from labkit.loading.seeding import permutation
from labkit.util.arguments import require_choice, require_int
from labkit.util.files import check_same_job
from labkit.util.strings import PackedStrings


def cut_batches(numbers: np.ndarray, order: np.ndarray, batch_size: int, remainder: str) -> list[np.ndarray]:
    """Batches bucket by bucket.

    Args:
        numbers: Of each image's bucket, int64 (N,).
        order: In which images of a bucket follow each other, int64 (N,).
        batch_size, remainder: As for `BucketBatchSampler`.
    """
    order = order[np.argsort(numbers[order], kind="stable")]
    groups = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
    return [batch for group in groups for batch in _cut(group, batch_size, remainder)]


def _cut(group: np.ndarray, batch_size: int, remainder: str) -> list[np.ndarray]:
    if remainder == "drop":
        group = group[: len(group) // batch_size * batch_size]
    elif remainder == "fill":
        group = np.resize(group, -(-len(group) // batch_size) * batch_size)  # NumPy repeats them from the first on
    return [group[at : at + batch_size] for at in range(0, len(group), batch_size)]


def balance_over_ranks(batches: list[np.ndarray], world_size: int, remainder: str) -> list[np.ndarray]:
    """A multiple of `world_size` batches: the last are dropped, the first repeated, or the largest halved.

    Raises:
        ValueError: with `"keep"`, there are fewer images than batches are needed.
    """
    if remainder == "drop":
        return batches[: len(batches) // world_size * world_size]
    n_missing = -len(batches) % world_size
    if remainder == "fill":
        return batches + list(islice(cycle(batches), n_missing))
    batches, lengths = list(batches), np.array([len(batch) for batch in batches])
    check_halving(int(lengths.sum()), len(batches), world_size)
    for _ in range(n_missing):
        place = int(lengths.argmax())
        whole, half = batches[place], -(-int(lengths[place]) // 2)
        batches[place : place + 1] = [whole[:half], whole[half:]]
        lengths = np.insert(lengths, place + 1, lengths[place] - half)
        lengths[place] = half
    return batches


def check_halving(n_images: int, n_batches: int, world_size: int) -> None:
    """Raise ValueError where halving cannot give each rank as many batches: there are too few images."""
    if n_images < n_batches + -n_batches % world_size:
        raise ArgumentError(
            f'remainder="keep" cannot give {world_size} ranks equally many batches: {n_images} images make {n_batches} '
            'batches, and too few can be halved. Use another number of ranks, or remainder="drop" or "fill"'
        )


if TYPE_CHECKING:
    import pandas as pd

_VERSION = 1  # of what `state_dict` returns
_REMAINDERS = ("keep", "drop", "fill")
_OF_BATCHES = 1  # numbers the order of batches beside that of images, which has (seed, epoch) alone


class BucketBatchSampler(Sampler[list[int]]):
    """Indices of batches, each from one bucket: the images of a batch can be cropped to one shape.

    Args:
        sizes: From `collect_sizes`. An image's index in the data set is the label of its row (`sizes.index`), so rows
            may be left out; `make_loader` checks that paths and keys match. All ranks need the same frame.
        batch_size: Largest number of images in a batch.
        buckets: The same as the data set's. Default: `Buckets.fit(sizes)`, which `buckets` then holds.
        remainder: What becomes of a bucket's last images if they are fewer than `batch_size`, and of batches that
            the ranks cannot share evenly.
            `"keep"`: a smaller batch. If the ranks cannot share the batches evenly, some of the largest are halved
            until they can, so each image comes exactly once an epoch, over all ranks.
            `"drop"`: they are left out of the epoch, `n % batch_size` images of each bucket of n; and so are as many
            whole batches as remain beyond a multiple of the ranks. All batches are full. Which images are left out
            changes with the epoch if it shuffles.
            `"fill"`: the batch is filled with images of the same bucket that are in this epoch already; and batches
            from the epoch's beginning are repeated until the ranks can share them evenly. All batches are full, and
            each image comes at least once.
        shuffle: A new order of images and of batches each epoch. False: bucket by bucket, in the order of the rows.
        seed: The order depends only on (seed, epoch). Each pass is the next epoch, unless `set_epoch` is called.
        rank, world_size: Of this process. Default: those of `torchrun`'s environment, or of `torch.distributed`, when
            an epoch begins. Each rank gets every `world_size`-th batch. All get equally many batches, but in one step
            two ranks may have different shapes.

    Attributes:
        buckets: The `Buckets` in use, for the data set.
        epoch: The one that was set last.

    Raises:
        ValueError: a wrong argument or frame; no batch for some rank; or, with `"keep"`, too few images for equally
            many batches.

    Taught in: notebooks/10_image_sizes.ipynb
    """

    def __init__(
        self,
        sizes: "pd.DataFrame",
        batch_size: int,
        *,
        buckets: Buckets | None = None,
        remainder: str = "keep",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        self.batch_size = require_int("batch_size", batch_size)
        self.remainder = require_choice("remainder", remainder, _REMAINDERS)
        self.shuffle, self.seed = bool(shuffle), require_int("seed", seed, -(1 << 63))
        self._place = _check_place(rank, world_size)
        self.buckets = Buckets.fit(sizes) if buckets is None else buckets
        self._numbers = self.buckets.select(*upright_sizes(sizes))
        self._indices, self._paths = _indices_of(sizes), PackedStrings(sizes["path"])
        self.epoch = self._epoch = self._n_given = self._first = 0
        self._counts, self._has_begun = True, False  # passes, as `set_epoch` was not called; the one of this epoch
        self._has_warned = False
        self._newest: Any = None  # the pass whose batches `state_dict` counts
        len(self)  # refuses what cannot be shared out, now and not in the first epoch

    def __repr__(self) -> str:
        content = f"{len(self._numbers)} images in {len(np.unique(self._numbers))} buckets"
        return f"BucketBatchSampler({content}, {len(self)} batches for each rank)"

    def __len__(self) -> int:
        """Batches of an epoch for each rank."""
        world_size, counts = self._find_place()[1], np.bincount(self._numbers)
        whole = counts // self.batch_size if self.remainder == "drop" else -(-counts // self.batch_size)
        n_batches = int(whole.sum())
        n_each = n_batches // world_size if self.remainder == "drop" else -(-n_batches // world_size)
        self._check_share(n_batches, n_each, world_size)
        return n_each

    def _check_share(self, n_batches: int, n_each: int, world_size: int) -> None:
        if not n_each:
            raise ArgumentError(
                f'remainder="drop" leaves {n_batches} full batches of {self.batch_size} for {world_size} ranks: use '
                'fewer buckets (a larger step), a smaller batch_size, or remainder="fill"'
            )
        if self.remainder == "keep":
            check_halving(len(self._indices), n_batches, world_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order: from now on this decides, and passes are no longer counted.

        Call it before each epoch, on every rank; the loaders of `make_loader` and accelerate do.
        """
        self._counts, self.epoch = False, epoch
        if epoch != self._epoch:
            self._epoch, self._n_given, self._first, self._newest = epoch, 0, 0, None

    def __iter__(self) -> Iterator[list[int]]:
        # An epoch that was set counts as it is now. A pass that is counted, or goes on from a place, is that when a
        # batch is asked for, and not here: torch calls this twice when workers start.
        return self._give(None if self._counts else self._epoch)

    def _give(self, epoch: int | None) -> Iterator[list[int]]:
        newest = self._newest = object()
        if epoch is None:
            epoch = self._count_pass()
        first, self._first = (self._first, 0) if epoch == self._epoch else (0, self._first)
        batches = self._batches(epoch)
        for number in range(first, len(batches)):
            if self._newest is newest and epoch == self._epoch:  # another pass may have begun meanwhile
                self._n_given = number + 1
            yield self._indices[batches[number]].tolist()

    def _count_pass(self) -> int:
        """The epoch of a pass that begins, if `set_epoch` has not been called."""
        if self._has_begun:
            self._epoch, self._n_given = self._epoch + 1, 0
            n_ranks = self.num_replicas
            if self.shuffle and n_ranks > 1 and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"BucketBatchSampler: each of {n_ranks} ranks counts its own passes, and after one pass more than "
                    "the others it would get their images: call set_epoch(epoch) before each epoch, on every rank",
                    stacklevel=3,
                )
        self._has_begun = True
        return self._epoch

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._find_place()[0]

    @property
    def num_replicas(self) -> int:
        """Ranks that share each epoch, by the name that torch's `DistributedSampler` has for it."""
        return self._find_place()[1]

    def rest(self, before: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """This rank's batches of what is left of the epoch.

        Args:
            before: (batches that each rank had, number of ranks), for each number of ranks that the epoch has seen.

        Raises:
            ValueError: with `"keep"`, fewer images are left than the ranks need for one batch each.
        """
        return (self._indices[batch].tolist() for batch in self._batches(self._epoch, before))

    def _batches(self, epoch: int, before: Sequence[Sequence[int]] = ()) -> list[np.ndarray]:
        """Rows of each batch of this rank."""
        (rank, world_size), n_rows = self._find_place(), len(self._numbers)
        order = permutation(n_rows, self.seed, epoch).numpy() if self.shuffle else np.arange(n_rows)
        batches = cut_batches(self._numbers, order, self.batch_size, self.remainder)
        if self.shuffle:
            batches = [batches[place] for place in permutation(len(batches), self.seed, epoch, _OF_BATCHES).tolist()]
        for n_batches, n_ranks in before:
            batches = balance_over_ranks(batches, n_ranks, self.remainder)[n_batches * n_ranks :]
        return balance_over_ranks(batches, world_size, self.remainder)[rank::world_size]

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch is: plain numbers and texts, the same on every rank.

        It counts the batches that were asked for. A loader with workers asks ahead of what it hands out; there use
        the loader's own state, or set `batch` to the number of batches that the training had.
        """
        return {**self._settings(), "epoch": self._epoch, "batch": self._n_given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken: the next pass, if it is of the state's epoch, begins after its batches.

        Raises:
            ValueError: the state is of a sampler of other images, buckets or settings, which it names, or none at all.
        """
        if not isinstance(state, dict):
            raise ArgumentError(f"state must be what state_dict returned, got {type(state).__name__}")
        own = self._settings()
        remedy = "make the sampler as it was when the state was taken, or begin the epoch anew"
        check_same_job("the state", {name: state.get(name) for name in own}, own, what="batches", remedy=remedy)
        epoch, batch = (require_int(f"the state's {name}", state.get(name), 0) for name in ("epoch", "batch"))
        if batch > len(self):
            raise ArgumentError(f"the state's batch must be at most {len(self)}, as an epoch has no more, got {batch}")
        self._epoch, self._n_given, self._first = epoch, batch, batch
        self._has_begun, self._newest = False, None

    def _settings(self) -> dict[str, Any]:
        """What decides on the batches, except for the epoch and the rank."""
        return {
            "version": _VERSION, "batch_size": self.batch_size, "remainder": self.remainder, "shuffle": self.shuffle,
            "seed": self.seed, "world_size": self._find_place()[1], "sizes_crc32": self.sizes_crc32,
        }  # fmt: skip

    @cached_property
    def sizes_crc32(self) -> int:
        """Of the images' numbers, buckets and paths."""
        names, offsets = self._paths.arrays()
        numbers = np.concatenate([self._indices, self._numbers, np.ravel(self.buckets.shapes), offsets])
        return zlib.crc32(names.tobytes(), zlib.crc32(numbers.astype("<i8").tobytes()))

    def _find_place(self) -> tuple[int, int]:
        """(rank, world_size)."""
        if self._place is not None:
            return self._place
        from webdataset.utils import pytorch_worker_info  # here: its import takes a while

        return pytorch_worker_info()[:2]

    def check_dataset(self, dataset: Any) -> None:
        """Raise ValueError where keys of the data set, if it has any, are not the paths of these rows."""
        remedy = 'sizes = sizes.set_index("path").loc[list(dataset.keys)].reset_index() puts the rows in their order'
        if (last := int(self._indices.max())) >= len(dataset):
            raise ArgumentError(f"sizes has a row {last}, and the data set only {len(dataset)} images: {remedy}")
        if (keys := _keys_of(dataset)) is None:
            return
        for index, path in zip(self._indices.tolist(), self._paths, strict=True):
            if keys[index] != path:
                raise ArgumentError(f"row {index} of sizes is {path!r}, but image {index} is {keys[index]!r}: {remedy}")


def check_batch_sampler(batch_sampler: Any, dataset: Any, **others: Any) -> None:
    """Refuse a batch sampler beside arguments that it replaces, and a `BucketBatchSampler` of other images."""
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        raise ArgumentError(
            f"got a batch_sampler and {', '.join(given)}: leave out one, a batch sampler decides on these"
        )
    if isinstance(batch_sampler, BucketBatchSampler):
        batch_sampler.check_dataset(dataset)


def _check_place(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None or world_size is None:
        if rank is world_size:
            return None
        raise ArgumentError(f"rank and world_size must be given together, got {rank} and {world_size}")
    if require_int("rank", rank, 0) >= require_int("world_size", world_size):
        raise ArgumentError(f"rank must be below world_size, got {rank} of {world_size}")
    return rank, world_size


def _indices_of(sizes: "pd.DataFrame") -> np.ndarray:
    labels = sizes.index.to_numpy()
    if labels.dtype.kind not in "iu" or labels.min() < 0 or not sizes.index.is_unique:
        raise ArgumentError(
            "sizes must have the images' numbers in the data set as labels of its rows, each once, as from "
            f"collect_sizes; got {labels[:3].tolist()}, ...: sizes.reset_index(drop=True) numbers them from 0"
        )
    return labels.astype(np.int64)


def _keys_of(dataset: Any) -> Sequence[str] | None:
    """A data set's keys, also those of a subset; None if it has none."""
    if isinstance(dataset, Subset):
        keys = _keys_of(dataset.dataset)
        return None if keys is None else [keys[index] for index in dataset.indices]
    keys = getattr(dataset, "keys", None)
    return keys if isinstance(keys, Sequence) else None
