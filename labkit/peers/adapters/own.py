"""labkit's own rows of the comparison, the naive baseline and the limits, described as peers are."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from labkit.data import ImageDataset, PILDataset
from labkit.data.pixels import PixelStore
from labkit.data.stores import FolderStore
from labkit.peers.adapters.torchvision import pil_transform, tensor_transform
from labkit.peers.peer import JPEG_FILES, RAW_PIXELS, Peer, Work, prepare_once

BASELINE = "naive PIL"
DECODE_LIMIT, MEMCPY_LIMIT = "decode limit", "memcpy limit"

_OwnRow = partial(Peer, install="", modules=())


def _open_photos(work: Work) -> FolderStore:
    return FolderStore(work.root)


def _open_pixels(work: Work) -> PixelStore:
    return PixelStore(_prepare_pixels(work))


def _prepare_pixels(work: Work) -> Path:
    return prepare_once(work, "labkit", partial(_build_pixels, work)) / "photos.pixels"


def _build_pixels(work: Work, folder: Path) -> None:
    path = folder / "photos.pixels"
    PixelStore.build(_open_photos(work), path, short_side=work.short_side, engine="threads", progress=False)


@lru_cache(maxsize=1)
def _batch_loader(open_source: Callable[[Work], Any], antialias: bool, work: Work) -> Iterable:
    from labkit.pipeline.batch_loader import BatchLoader

    return BatchLoader(
        open_source(work), antialias=antialias, size=work.size, batch_size=work.batch_size,
        num_threads=work.num_workers, seed=work.seed,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _load_naively(work: Work) -> Iterable:
    photos = PILDataset(_open_photos(work), transform=pil_transform(work))
    return DataLoader(photos, batch_size=work.batch_size, shuffle=True)


@lru_cache(maxsize=1)
def _best_dataloader(work: Work) -> Iterable:
    from labkit.pipeline.loader import LoaderConfig, make_loader

    photos = ImageDataset(_open_photos(work), transform=tensor_transform(work))
    config = LoaderConfig(batch_size=work.batch_size, num_workers=work.num_workers, seed=work.seed)
    return make_loader(photos, config, shuffle=True)


@lru_cache(maxsize=1)
def _decode_limit(work: Work) -> Iterable:
    from labkit.pipeline import decode_limit

    return decode_limit(_open_photos(work), num_threads=work.num_workers)


@lru_cache(maxsize=1)
def _memcpy_limit(work: Work) -> Iterable:
    from labkit.pipeline import memcpy_limit

    return memcpy_limit(len(_open_photos(work)), size=work.size, num_threads=work.num_workers)


def _from_pixels(name: str, antialias: bool) -> Peer:
    loader = partial(_batch_loader, _open_pixels, antialias)
    return _OwnRow(name, RAW_PIXELS, antialias, loader=loader, prepare=_prepare_pixels)


NAIVE = _OwnRow(BASELINE, JPEG_FILES, True, loader=_load_naively, note="the first tutorial's loader, in one process")

OWN = (
    _OwnRow(
        "best DataLoader", JPEG_FILES, True, loader=_best_dataloader, note="make_loader, ImageDataset, torchvision v2"
    ),
    _OwnRow("labkit BatchLoader, antialias", JPEG_FILES, True, loader=partial(_batch_loader, _open_photos, True)),
    _OwnRow("labkit BatchLoader", JPEG_FILES, False, loader=partial(_batch_loader, _open_photos, False)),
    _from_pixels("labkit PixelStore, antialias", True),
    _from_pixels("labkit PixelStore", False),
)

LIMITS = (
    _OwnRow(DECODE_LIMIT, JPEG_FILES, None, loader=_decode_limit, note="decodes whole images from memory, drops them"),
    _OwnRow(MEMCPY_LIMIT, RAW_PIXELS, None, loader=_memcpy_limit, note="copies batches from memory to memory"),
)
