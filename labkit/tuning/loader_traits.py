"""What advice needs to know of a loader, noted so that the loader itself need not be kept alive."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.tuning.epochs import epoch_length

_WRAPPED = ("loader", "dataloader", "base_dataloader")  # where timm, Accelerate and labkit keep the loader they wrap
_MOST_WRAPPED = 20  # data sets: one may give itself for whatever attribute it is asked for


@dataclass(frozen=True)
class LoaderTraits:
    """A loader's settings.

    num_workers: Worker processes; None if it is no `torch.utils.data.DataLoader` and wraps none.
    starts_workers: Whether it starts them again for every epoch.
    prefetch_factor: Batches that each worker makes ahead.
    pin_memory: Whether batches are put into pinned memory.
    decoder: The data set's decoder, by name.
    tar_mode: How the data set's `TarStore` reads.
    decodes: Whether there is anything to decode: not in a `PixelStore`.
    n_batches: Batches of an epoch.
    """

    num_workers: int | None = None
    starts_workers: bool = False
    prefetch_factor: int | None = None
    pin_memory: bool = False
    decoder: str | None = None
    tar_mode: str | None = None
    decodes: bool = True
    n_batches: int | None = None

    @classmethod
    def of(cls, loader: Any) -> "LoaderTraits":
        """The traits of a loader, or of the one that it wraps."""
        workers, decoder = torch_loader(loader), of_data_set(loader, "decoder")
        return cls(
            num_workers=getattr(workers, "num_workers", None), starts_workers=starts_workers(workers),
            prefetch_factor=getattr(workers, "prefetch_factor", None),
            pin_memory=bool(getattr(workers, "pin_memory", False)),
            decoder=decoder if isinstance(decoder, str) else None,
            tar_mode=getattr(of_data_set(loader, "store"), "mode", None),
            decodes=not any(_holds_pixels(data) for data in _data_sets(loader)),
            n_batches=epoch_length(loader),
        )  # fmt: skip


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


def _holds_pixels(data: Any) -> bool:
    """Whether it is a `PixelStore`, which is not imported here: NumPy and Pillow would come with it."""
    return any(kind.__name__ == "PixelStore" and kind.__module__.startswith("labkit.") for kind in type(data).__mro__)


def torch_loader(loader: Any) -> Any:
    """The `torch.utils.data.DataLoader` that a loader is, or wraps like timm's and labkit's prefetchers; or None."""
    from torch.utils.data import DataLoader

    for _ in range(4):
        if loader is None or isinstance(loader, DataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        loader = next((attributes[name] for name in _WRAPPED if name in attributes), None)
    return None


def starts_workers(loader: Any) -> bool:
    """Whether torch's loader starts its workers again for every epoch."""
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers
