"""labkit's rows of the comparison, the naive baseline, and the limits: described as peers are."""

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

from labkit.data.stores import FolderStore
from labkit.peers.adapters.torchvision import pil_transform, tensor_transform
from labkit.peers.peer import JPEG_FILES, RAW_PIXELS, Peer, Work, prepare_once

BASELINE = "naive PIL"
DECODE_LIMIT, MEMCPY_LIMIT = "decode limit", "memcpy limit"

_Own = partial(Peer, install="", modules=())


def _prepare_pixels(work: Work) -> Path:
    from labkit.data.pixels import PixelStore

    def build(folder: Path) -> None:
        store = FolderStore(work.root)
        PixelStore.build(
            store, folder / "photos.pixels", short_side=work.short_side, engine="threads", progress=False
        )  # fmt: skip

    return prepare_once(work, "labkit", build) / "photos.pixels"


@lru_cache(maxsize=1)
def _files(antialias: bool, work: Work) -> Iterable:
    from labkit.pipeline.batch_loader import BatchLoader

    return _batches(BatchLoader, FolderStore(work.root), antialias, work)


@lru_cache(maxsize=1)
def _pixels(antialias: bool, work: Work) -> Iterable:
    from labkit.data.pixels import PixelStore
    from labkit.pipeline.batch_loader import BatchLoader

    return _batches(BatchLoader, PixelStore(_prepare_pixels(work)), antialias, work)


def _batches(loader: type, source: object, antialias: bool, work: Work) -> Iterable:
    return loader(
        source, size=work.size, batch_size=work.batch_size, num_threads=work.num_workers, antialias=antialias,
        seed=work.seed,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _naive(work: Work) -> Iterable:
    from torch.utils.data import DataLoader

    from labkit.data import PILDataset

    dataset = PILDataset(FolderStore(work.root), transform=pil_transform(work))
    return DataLoader(dataset, batch_size=work.batch_size, shuffle=True)


@lru_cache(maxsize=1)
def _best_dataloader(work: Work) -> Iterable:
    from labkit.data import ImageDataset
    from labkit.pipeline.loader import LoaderConfig, make_loader

    config = LoaderConfig(batch_size=work.batch_size, num_workers=work.num_workers, seed=work.seed)
    return make_loader(
        ImageDataset(FolderStore(work.root), transform=tensor_transform(work)), config, shuffle=True
    )  # fmt: skip


@lru_cache(maxsize=1)
def _decode_limit(work: Work) -> Iterable:
    from labkit.pipeline import decode_limit

    return decode_limit(FolderStore(work.root), num_threads=work.num_workers)


@lru_cache(maxsize=1)
def _memcpy_limit(work: Work) -> Iterable:
    from labkit.pipeline import memcpy_limit

    return memcpy_limit(len(FolderStore(work.root)), size=work.size, num_threads=work.num_workers)


NAIVE = _Own(BASELINE, JPEG_FILES, True, loader=_naive, note="the loader of the first tutorial, in one process")

OWN = (
    _Own(
        "best DataLoader", JPEG_FILES, True, loader=_best_dataloader, note="make_loader, ImageDataset, torchvision v2"
    ),
    _Own("labkit BatchLoader, antialias", JPEG_FILES, True, loader=partial(_files, True)),
    _Own("labkit BatchLoader", JPEG_FILES, False, loader=partial(_files, False)),
    _Own("labkit PixelStore, antialias", RAW_PIXELS, True, loader=partial(_pixels, True), prepare=_prepare_pixels),
    _Own("labkit PixelStore", RAW_PIXELS, False, loader=partial(_pixels, False), prepare=_prepare_pixels),
)

LIMITS = (
    _Own(DECODE_LIMIT, JPEG_FILES, None, loader=_decode_limit, note="whole images decoded from memory, and dropped"),
    _Own(MEMCPY_LIMIT, RAW_PIXELS, None, loader=_memcpy_limit, note="batches copied from memory to memory"),
)
