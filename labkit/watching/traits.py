"""What a loader and its data set say of themselves: settings, and the names of samples. Nothing of a sample is read."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labkit.measure.unchanged import WRAPPED

_MOST_WRAPPED = 20  # data sets: one may give itself for whatever attribute it is asked for


@dataclass(frozen=True)
class LoaderTraits:
    """A loader's settings.

    num_workers: Worker processes; None if it is no `torch.utils.data.DataLoader` and wraps none.
    starts_workers: Whether it starts them again for every epoch.
    prefetch_factor: Batches that each worker makes ahead.
    pin_memory: Whether batches are put into pinned memory.
    decoder: The data set's decoder, by name.
    decodes: Whether there is anything to decode: not in a `PixelStore`.
    is_batch_loader: Whether it is `lk.BatchLoader`, which decodes only what a crop needs.
    reads_far: Whether that one reads objects or files over a network, in the threads that decode.
    is_fast: Whether it gives `lk.DepthPairs` that are made without detours already.
    makes_slow_pairs: Whether it gives others.
    n_batches: Batches of an epoch.
    in_order: Whether its batches come in the order in which they were asked for.
    batch_size: Samples of a batch; None if unknown, or if a batch sampler decides.
    """

    num_workers: int | None = None
    starts_workers: bool = False
    prefetch_factor: int | None = None
    pin_memory: bool = False
    decoder: str | None = None
    decodes: bool = True
    is_batch_loader: bool = False
    reads_far: bool = False
    is_fast: bool = False
    makes_slow_pairs: bool = False
    n_batches: int | None = None
    in_order: bool = True
    batch_size: int | None = None

    @classmethod
    def of(cls, loader: Any) -> "LoaderTraits":
        """The traits of a loader, or of the one that it wraps."""
        workers, decoder = torch_loader(loader), of_data_set(loader, "decoder")
        return cls(
            num_workers=getattr(workers, "num_workers", None), starts_workers=starts_workers(workers),
            prefetch_factor=getattr(workers, "prefetch_factor", None),
            pin_memory=bool(getattr(workers, "pin_memory", False)),
            decoder=decoder if isinstance(decoder, str) else None,
            decodes=not any(_is_labkits(data, "PixelStore") for data in [*_data_sets(loader), source_of(loader)]),
            is_batch_loader=_is_labkits(loader, "BatchLoader"),
            reads_far=any(_is_labkits(source_of(loader), name) for name in ("HttpStore", "ObjectStore")),
            is_fast=any(_is_labkits(data, "DepthPairs") and data.fast for data in _data_sets(loader)),
            makes_slow_pairs=any(_is_labkits(data, "DepthPairs") and not data.fast for data in _data_sets(loader)),
            n_batches=_epoch_length(loader), batch_size=_batch_size(loader, workers),
            in_order=bool(getattr(workers, "in_order", True)),
        )  # fmt: skip


def _batch_size(*loaders: Any) -> int | None:
    return next((size for each in loaders if isinstance(size := getattr(each, "batch_size", None), int)), None)


def of_data_set(loader: Any, name: str) -> Any:
    """An attribute of the loader's data set, or of one that it wraps; None if none has it."""
    found = (getattr(data, name, None) for data in _data_sets(loader))
    return next((value for value in found if value is not None), None)


def _data_sets(loader: Any) -> Iterator[Any]:
    """The loader's data set, and those that it wraps."""
    data = getattr(loader, "dataset", None)
    for _ in range(_MOST_WRAPPED):
        if data is None:
            return
        yield data
        data = getattr(data, "dataset", None)


def source_of(loader: Any) -> Any:
    """What a `BatchLoader` reads; None for other loaders."""
    return getattr(getattr(loader, "_filler", None), "_store", None)


def _is_labkits(value: Any, name: str) -> bool:
    """Whether it is of that class of labkit's, which is not imported here: NumPy and Pillow would come with it."""
    return any(kind.__name__ == name and kind.__module__.startswith("labkit.") for kind in type(value).__mro__)


def torch_loader(loader: Any) -> Any:
    """The `torch.utils.data.DataLoader` that a loader is, or wraps like timm's and labkit's prefetchers; or None."""
    from torch.utils.data import DataLoader

    for _ in range(4):
        if loader is None or isinstance(loader, DataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        loader = next((attributes[name] for name in WRAPPED if name in attributes), None)
    return None


def _epoch_length(loader: Any) -> int | None:
    """Batches of an epoch, where the loader says so without harm."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # once asked for it, torch warns if more batches come
    try:
        return len(loader)
    except TypeError:
        return None


def starts_workers(loader: Any) -> bool:
    """Whether torch's loader starts its workers again for every epoch."""
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


def names_of(data: Any) -> Callable[[Any], str]:
    """The file or key of a sample by its index, if its data set has a list of them, else `sample 17`.

    Nothing of a sample is read, and of the data set its lists and columns alone are kept.
    """
    name = lambda index: ""  # noqa: E731
    with suppress(Exception):  # a data set of the script need not answer
        name = _named(data)

    def told(index: Any) -> str:
        with suppress(Exception):
            index = int(index)
            return name(index) or f"sample {index}"
        return f"sample {index}"

    return told


def _named(data: Any) -> Callable[[Any], str]:
    is_torchs = type(data).__module__ == "torch.utils.data.dataset"
    if is_torchs and hasattr(data, "indices"):  # Subset
        indices, inner = data.indices, _named(data.dataset)
        return lambda index: inner(indices[index])
    if is_torchs and hasattr(data, "cumulative_sizes"):  # ConcatDataset
        ends, parts = data.cumulative_sizes, [*map(_named, data.datasets)]

        def of_part(index: int) -> str:
            part = bisect_right(ends, index)
            return parts[part](index - (ends[part - 1] if part else 0))

        return of_part
    with suppress(TypeError):  # without a length: a wrapper
        n_samples, root = len(data), getattr(getattr(data, "store", None), "root", "")
        for values in map(_list_in, vars(data).values()):
            if values is not None and len(values) == n_samples > 0 and _text_of(values[0]):
                return lambda index: os.path.join(root, _text_of(values[index]))
    return _named(data.dataset) if hasattr(data, "dataset") else lambda index: ""


def _list_in(values: Any) -> Any:
    """What may be the list of names: a list, or of a table of pandas the first column whose texts differ."""
    if type(values).__module__.partition(".")[0] == "pandas":
        columns = [values[name] for name in values.columns] if hasattr(values, "columns") else [values]
        return next((one.array for one in columns if len(one) and _text_of(one.iloc[0]) and one.is_unique), None)
    return values if _has_its_items(values) else None


def _has_its_items(values: Any) -> bool:
    """Whether it is a list or a tuple whose items are there: a subclass may read a file for each."""
    return isinstance(values, list | tuple) and type(values).__getitem__ in (list.__getitem__, tuple.__getitem__)


def _text_of(value: Any) -> str:
    """A name in a list: itself, or the first of several, as in torchvision's (path, class)."""
    value = value[0] if _has_its_items(value) and value else value
    return os.fspath(value) if isinstance(value, str | os.PathLike) else ""
