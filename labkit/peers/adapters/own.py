"""labkit's own rows of the comparison, the naive baseline and the limits, described as peers are."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from labkit.data.dataset import ImageDataset, PILDataset
from labkit.data.pixels import PixelStore
from labkit.data.stores import FolderStore
from labkit.peers.adapters.torchvision import pil_transform, tensor_transform
from labkit.peers.peer import FLOAT32, JPEG_FILES, MEAN, PART, RAW_PIXELS, SCALED, STD, UINT8, Peer, Work, prepare_once

BASELINE, BEST_DATALOADER = "naive PIL", "labkit make_loader"
DECODE_LIMIT, MEMCPY_LIMIT, WRITE_LIMIT = "decode limit", "memcpy limit", "write limit"

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
def _batch_loader(open_source: Callable[[Work], Any], antialias: bool, scaled: bool, work: Work) -> Iterable:
    from labkit.loading.batch_loader import BatchLoader

    floats: dict[str, Any] = {"dtype": torch.float32, "mean": MEAN, "std": STD} if work.is_float else {}
    return BatchLoader(
        open_source(work), antialias=antialias, scaled_decoding=scaled, size=work.size, batch_size=work.batch_size,
        num_threads=work.num_workers, seed=work.seed, **floats,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _load_naively(work: Work) -> Iterable:
    photos = PILDataset(_open_photos(work), transform=pil_transform(work))
    return DataLoader(photos, batch_size=work.batch_size, shuffle=True)


@lru_cache(maxsize=1)
def _best_dataloader(work: Work) -> Iterable:
    from labkit.loading.torch_loader import LoaderConfig, make_loader

    photos = ImageDataset(_open_photos(work), transform=tensor_transform(work))
    config = LoaderConfig(batch_size=work.batch_size, num_workers=work.num_workers, seed=work.seed)
    return make_loader(photos, config, shuffle=True)


@lru_cache(maxsize=1)
def _decode_limit(work: Work) -> Iterable:
    from labkit.loading.limits import decode_limit

    return decode_limit(_open_photos(work), num_threads=work.num_workers)


@lru_cache(maxsize=1)
def _memory_limit(name: str, work: Work) -> Iterable:
    from labkit.loading import limits

    n_images = len(_open_photos(work))
    return getattr(limits, name)(n_images, size=work.size, num_threads=work.num_workers)


def _from_photos(name: str, antialias: bool, *, scaled: bool = True) -> Peer:
    loader = partial(_batch_loader, _open_photos, antialias, scaled)
    smaller = ", at 1/2, 1/4 or 1/8 where the crop is as many times as large as the output" * scaled
    note = f"decodes only what a crop needs{smaller}"
    return _OwnRow(name, JPEG_FILES, antialias, loader=loader, decodes=SCALED if scaled else PART, note=note)


def _from_pixels(name: str, antialias: bool) -> Peer:
    loader = partial(_batch_loader, _open_pixels, antialias, True)
    note = "reads photos that were resized once and stored as pixels"
    return _OwnRow(name, RAW_PIXELS, antialias, loader=loader, prepare=_prepare_pixels, note=note)


NAIVE = _OwnRow(BASELINE, JPEG_FILES, True, loader=_load_naively, note="the first tutorial's loader, in one process")

DATALOADER = _OwnRow(
    BEST_DATALOADER, JPEG_FILES, True, loader=_best_dataloader,
    note="torch's DataLoader, as make_loader sets it, over an ImageDataset with torchvision v2",
)  # fmt: skip

OWN = (
    _from_photos("labkit BatchLoader, full size", True, scaled=False),
    _from_photos("labkit BatchLoader, antialias", True),
    _from_photos("labkit BatchLoader", False),
    _from_pixels("labkit PixelStore, antialias", True),
    _from_pixels("labkit PixelStore", False),
)

LIMITS = (
    _OwnRow(
        DECODE_LIMIT, JPEG_FILES, None, loader=_decode_limit, note="decodes whole images from memory, drops them"
    ),
    _OwnRow(
        MEMCPY_LIMIT, RAW_PIXELS, None, loader=partial(_memory_limit, "memcpy_limit"), dtypes=(UINT8,),
        note="copies batches from memory to memory",
    ),
    _OwnRow(
        WRITE_LIMIT, RAW_PIXELS, None, loader=partial(_memory_limit, "write_limit"), dtypes=(FLOAT32,),
        note="writes batches of float32 to memory",
    ),
)  # fmt: skip
