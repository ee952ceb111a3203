"""Which loaders `tune` measures: a model of their speed excludes most of the grid."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Subset

from labkit.core import usable_cores
from labkit.data import ImageDataset, collate
from labkit.pipeline.batch_loader import BatchLoader
from labkit.pipeline.loader import LoaderConfig, cores_per_rank, make_loader
from labkit.tuning.contention import expected_s
from labkit.tuning.io_wait import Making

DEFAULT = "default"

WORTH_MEASURING = 1.25  # times the smallest prediction: the model is not more accurate
_MAX_COUNTS = 4
_MAX_WORKERS = 32
_WAITING_SHARE = 0.2  # with more waiting, more workers than cores may help


@dataclass(frozen=True)
class Candidate:
    """A way to load: processes as in `config`, or `BatchLoader`'s threads; decoder None is the data set's own."""

    config: LoaderConfig
    decoder: str | None = None
    threads: bool = False

    @property
    def label(self) -> str:
        """Its name in frames and plots."""
        if self.threads:
            return "BatchLoader"
        config = self.config.resolved()
        words = [f"{config.num_workers} worker{'s' * (config.num_workers != 1)}"]
        words += [f"{config.prefetch_factor} ahead"] * bool(config.num_workers)
        return ", ".join([*words, *([] if self.decoder is None else [self.decoder])])


@dataclass(frozen=True)
class Source:
    """What is loaded, and `make_loader`'s further arguments."""

    dataset: Any
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] = collate
    batch_transform: Callable[[Any], Any] | None = None

    def loader(self, candidate: Candidate, indices: list[int] | None = None) -> Iterable[Any]:
        """A loader of all samples, or of those at `indices`, which may repeat."""
        if candidate.threads:
            return _batch_loader(self.dataset, candidate.config, self.shuffle, self.drop_last, indices)
        dataset = self.dataset if candidate.decoder is None else with_decoder(self.dataset, candidate.decoder)
        return make_loader(
            dataset if indices is None else Subset(dataset, indices), candidate.config, shuffle=self.shuffle,
            drop_last=self.drop_last, collate_fn=self.collate_fn, batch_transform=self.batch_transform,
        )  # fmt: skip

    def has_threads(self) -> bool:
        """Whether `BatchLoader` does the same work."""
        plain = self.collate_fn is collate and self.batch_transform is None
        return plain and _crop_and_flip(self.dataset) is not None


def candidates(
    config: LoaderConfig, making: Making, step_s: float, step_cpu_s: float, *, decoder: str | None, threads: bool
) -> dict[str, Candidate]:
    """By label: the default, worker counts that the model finds worth measuring, a longer queue, and threads.

    Args:
        config: The default.
        making: What making a batch costs one process, with the decoder that was chosen.
        step_s, step_cpu_s: Wall and processor seconds of a step.
        decoder: The decoder to use; None keeps the data set's own.
        threads: Whether `BatchLoader` does the same work.
    """
    counts = worth_measuring(making, step_s, step_cpu_s)
    found = [Candidate(with_workers(config, count), decoder) for count in counts]
    first = next((candidate.config for candidate in found if candidate.config.num_workers), None)
    if first:
        found.append(Candidate(replace(first, prefetch_factor=2 * (first.resolved().prefetch_factor or 2)), decoder))
    if threads:
        found.append(Candidate(with_workers(config, 0), threads=True))
    own = Candidate(config)
    return {DEFAULT: own, **{each.label: each for each in found if each.label != own.label}}


def with_workers(config: LoaderConfig, count: int) -> LoaderConfig:
    """`config` with another number of workers; without workers, settings that only workers use are reset."""
    idle: dict[str, Any] = {} if count else {"prefetch_factor": None, "persistent_workers": None, "start_method": None}
    return replace(config, num_workers=count, oversubscribe=count > usable_cores(), **idle)


def worth_measuring(making: Making, step_s: float, step_cpu_s: float) -> list[int]:
    """Numbers of workers, the most promising first, and the smaller first among equals."""
    cores = cores_per_rank()
    counts = {0, 1, cores // 2, cores - 1, cores}
    if making.waiting > _WAITING_SHARE:
        counts |= {min(_MAX_WORKERS, factor * cores) for factor in (2, 4, 8)}
    expected = {count: expected_s(count, making, step_s, step_cpu_s, cores) for count in counts}
    limit = WORTH_MEASURING * min(expected.values())
    worth = [count for count in counts if expected[count] <= limit]
    return sorted(worth, key=lambda count: (round(expected[count] / limit, 2), count))[:_MAX_COUNTS]


def with_decoder(dataset: ImageDataset, decoder: str) -> ImageDataset:
    """The same data set with another decoder."""
    other = copy.copy(dataset)
    other.decoder = decoder
    return other


def _batch_loader(
    dataset: ImageDataset, config: LoaderConfig, shuffle: bool, drop_last: bool, indices: list[int] | None
) -> BatchLoader:
    found = _crop_and_flip(dataset)
    if found is None:
        raise TypeError("BatchLoader crops and flips, and nothing else: use it only if `Source.has_threads()`")
    crop, flip = found
    order: dict[str, Any] = {"shuffle": shuffle} if indices is None else {"sampler": indices}
    return BatchLoader(
        dataset.store, size=crop.size[0], batch_size=config.batch_size, seed=config.seed, scale=tuple(crop.scale),
        ratio=tuple(crop.ratio), flip=flip.p, drop_last=drop_last, pin_memory=config.pin_memory,
        on_error="raise" if dataset._skips is None else "skip", **order,
    )  # fmt: skip


def _crop_and_flip(dataset: Any) -> tuple[Any, Any] | None:
    """Crop and flip of a data set that does what `BatchLoader` does and nothing else; else None."""
    from torchvision.transforms import v2

    if type(dataset) is not ImageDataset or not isinstance(dataset.transform, v2.Compose):
        return None
    steps = dataset.transform.transforms
    if [type(step) for step in steps] != [v2.RandomResizedCrop, v2.RandomHorizontalFlip]:
        return None
    crop, flip = steps
    bilinear = str(getattr(crop.interpolation, "value", crop.interpolation)) == "bilinear"  # an enum, or its name
    return (crop, flip) if bilinear and crop.antialias and crop.size[0] == crop.size[1] else None
