"""What advice needs to know of a loader, noted so that the loader itself need not be kept alive."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.data.pixels import PixelStore
from labkit.tuning.epochs import epoch_length
from labkit.tuning.training_loop import starts_workers, torch_loader


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
            decodes=not any(isinstance(data, PixelStore) for data in _data_sets(loader)),
            n_batches=epoch_length(loader),
        )  # fmt: skip


def of_data_set(loader: Any, name: str) -> Any:
    """An attribute of the loader's data set, or of one that it wraps; None if none has it."""
    found = (getattr(data, name, None) for data in _data_sets(loader))
    return next((value for value in found if value is not None), None)


def _data_sets(loader: Any) -> Iterator[Any]:
    """The loader's data set, and those that it wraps."""
    data = getattr(loader, "dataset", None)
    while data is not None:
        yield data
        data = getattr(data, "dataset", None)
