"""Every loader of labkit, over the same tiny photos, and what each of its epochs must hold."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import RandomHorizontalFlip

import labkit as lk
from labkit.data.depth.presets import PRESETS
from tests.hardening.soak.pictures import HEIGHT, WIDTH

BATCH, WORKERS, CROP = 32, 2, 16
_FLIP = RandomHorizontalFlip()


@dataclass(frozen=True)
class Places:
    """The photos, in every form that a loader reads."""

    root: Path
    url: str = ""
    s3: dict[str, Any] | None = None

    photos = property(lambda self: self.root / "photos")
    tar = property(lambda self: self.root / "photos.tar")
    shards = property(lambda self: self.root / "shards")
    pixels = property(lambda self: self.root / "photos.pixels")
    depth = property(lambda self: self.root / "depth")


@dataclass(frozen=True)
class Subject:
    """A loader under test.

    make: Builds the loader; its `set_epoch`, if any, is called before each epoch.
    shows: What its images are: `"whole"`, maybe mirrored; `"crops"`; `"mixed"`; or `"depth"` pairs.
    left_after: Before each epoch, another one is started and abandoned after so many batches.
    order_of: Subjects with the same name here yield the same bytes in the same order in every epoch.
    repeats: Every epoch is the same as the first.
    """

    make: Callable[[Places], Iterable[Any]]
    shows: str = "whole"
    left_after: int = 0
    order_of: str = ""
    repeats: bool = False


class Leak:
    """A transform that leaks memory for every image, which the soak must detect."""

    def __init__(self, bytes_per_image: int):
        self._size, self._kept = bytes_per_image, []

    def __call__(self, image: Tensor) -> Tensor:
        self._kept.append(os.urandom(self._size))
        return _FLIP(image)


def _loader(dataset: Any, start_method: str | None, num_workers: int = WORKERS, **options: Any) -> lk.Loader:
    config = lk.LoaderConfig(BATCH, num_workers, start_method=start_method, oversubscribe=True, **options)
    return lk.make_loader(dataset, config, shuffle=True)


def _over(
    store: Callable[[Places], Any],
    start_method: str | None = None,
    *,
    transform: Any = _FLIP,
    on_error: str = "raise",
    **options: Any,
) -> Callable[[Places], lk.Loader]:
    """`make_loader` over an ImageDataset; the options are those of a LoaderConfig."""

    def make(places: Places) -> lk.Loader:
        dataset = lk.ImageDataset(store(places), transform=transform, on_error=on_error)
        return _loader(dataset, start_method, **options)

    return make


def _folder(places: Places) -> Any:
    return lk.FolderStore(places.photos)


def _with_broken(places: Places) -> Any:
    return lk.FolderStore(places.root / "with-broken")


def _pixel_dataset(places: Places) -> lk.Loader:
    return _loader(lk.PixelStore(places.pixels, transform=_FLIP), "fork")


def _crops(source: Callable[[Places], Any], num_threads: int = WORKERS) -> Callable[[Places], lk.BatchLoader]:
    return lambda places: lk.BatchLoader(source(places), size=CROP, batch_size=BATCH, num_threads=num_threads)


def _shards(places: Places, start_method: str) -> DataLoader:
    loader = DataLoader(
        lk.read_shards(places.shards, transform=_FLIP, shuffle=32), BATCH, num_workers=WORKERS,
        persistent_workers=True, multiprocessing_context=start_method, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    loader.set_epoch = loader.dataset.set_epoch
    return loader


def _depth(places: Places, start_method: str) -> lk.Loader:
    preset = replace(PRESETS["hypersim"], train_size=(HEIGHT, WIDTH))
    pairs = lk.DepthPairs(lk.FolderStore(places.depth), places.depth / "list.txt", preset=preset, fast=True)
    return _loader(pairs, start_method)


class Mixed:
    """MixUp and CutMix of each batch of another loader: `(images, labels, draws, blended, pasted)`."""

    def __init__(self, loader: lk.Loader):
        self._loader, self._epoch = loader, 0

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        torch.manual_seed(self._epoch)
        for number, (images, labels) in enumerate(self._loader):
            x = images.float()
            # Every other batch uses given draws, so that NumPy can compute the right result.
            draws = {} if number % 2 else {"lam": torch.rand(1), "partner": torch.randperm(len(x))}
            center = {} if number % 2 else {"center": torch.tensor([[HEIGHT // 2, WIDTH // 2]])}
            blended = lk.mixup(x, labels, num_classes=4, **draws)
            pasted = lk.cutmix(images, labels, num_classes=4, **draws, **center)
            yield images, labels, draws, blended, pasted


SUBJECTS = {
    "make_loader, folder, fork": Subject(_over(_folder, "fork"), order_of="make_loader"),
    "make_loader, folder, spawn": Subject(_over(_folder, "spawn"), order_of="make_loader"),
    "make_loader, folder, forkserver": Subject(_over(_folder, "forkserver"), order_of="make_loader"),
    "make_loader, tar, fork": Subject(_over(lambda p: lk.TarStore(p.tar), "fork"), order_of="make_loader"),
    "make_loader, HTTP, forkserver": Subject(
        _over(lambda p: lk.HttpStore(p.url), "forkserver"), order_of="make_loader"
    ),
    "make_loader, S3, forkserver": Subject(
        _over(lambda p: lk.ObjectStore("s3://photos", **p.s3), "forkserver"), order_of="make_loader"
    ),
    "make_loader, pixels, fork": Subject(_pixel_dataset, order_of="make_loader"),
    "make_loader, no workers": Subject(_over(_folder, num_workers=0), order_of="make_loader"),
    "make_loader, new workers": Subject(_over(_folder, "fork", persistent_workers=False), order_of="make_loader"),
    "make_loader, left early": Subject(_over(_folder, "fork"), left_after=2, order_of="make_loader"),
    "make_loader, broken files": Subject(_over(_with_broken, "fork", on_error="skip")),
    "CUDAPrefetcher": Subject(lambda p: lk.CUDAPrefetcher(_over(_folder, "fork")(p), "cpu"), order_of="make_loader"),
    "ReplayLoader": Subject(lambda p: lk.ReplayLoader(_over(_folder, "fork")(p), 4), repeats=True),
    "mixup and cutmix": Subject(lambda p: Mixed(_over(_folder, "fork")(p)), shows="mixed"),
    "BatchLoader, folder": Subject(_crops(_folder), shows="crops", order_of="BatchLoader"),
    "BatchLoader, folder, 1 thread": Subject(_crops(_folder, 1), shows="crops", order_of="BatchLoader"),
    "BatchLoader, HTTP": Subject(_crops(lambda p: lk.HttpStore(p.url)), shows="crops", order_of="BatchLoader"),
    "BatchLoader, pixels": Subject(_crops(lambda p: lk.PixelStore(p.pixels)), shows="crops", order_of="BatchLoader"),
    "read_shards, fork": Subject(partial(_shards, start_method="fork"), order_of="read_shards"),
    "read_shards, forkserver": Subject(partial(_shards, start_method="forkserver"), order_of="read_shards"),
    "DepthPairs, fork": Subject(partial(_depth, start_method="fork"), shows="depth", order_of="DepthPairs"),
    "DepthPairs, spawn": Subject(partial(_depth, start_method="spawn"), shows="depth", order_of="DepthPairs"),
    "planted leak": Subject(_over(_folder, "fork", transform=Leak(160))),
}
PLANTED = "planted leak"  # 128 images x (160 bytes, 33 of the object around them, 8 in the list): 26 kB an epoch
