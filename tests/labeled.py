"""Every way from a source of images to a batch with labels: data sets, loaders, pixels and shards."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor

import labkit as lk
from labkit.data.remote import as_store
from tests.shards import write


class Batch(NamedTuple):
    """All images, in the order in which they came."""

    made: Any  # what has classes; and labels, but of shards
    keys: list[str]
    images: torch.Tensor
    labels: torch.Tensor

    @property
    def by_key(self) -> dict[str, int]:
        return dict(zip(self.keys, self.labels.tolist(), strict=True))


def of_data_set(source, scratch: Path, kind=lk.ImageDataset, **options) -> Batch:
    dataset = kind(source, **options)
    [(images, labels)] = lk.make_loader(dataset, lk.LoaderConfig(99, num_workers=0))
    assert len(images) == len(dataset)
    return Batch(dataset, list(dataset.keys), images, labels)


def of_pil_data_set(source, scratch: Path, **options) -> Batch:
    return of_data_set(as_store(source), scratch, partial(lk.PILDataset, transform=pil_to_tensor), **options)


def of_batches(source, scratch: Path, **options) -> Batch:
    loader = lk.BatchLoader(source, size=8, batch_size=2, train=False, num_threads=1, **options)
    images, labels = map(torch.cat, zip(*loader, strict=True))
    return Batch(loader, list(loader.keys), images, labels)


def of_pixels(source, scratch: Path, **options) -> Batch:
    path = scratch / "x.pixels"
    made = lk.PixelStore.build(source, path, engine="threads", num_workers=1, progress=False, **options)
    again = lk.PixelStore(path)
    assert (again.classes, repr(again.labels), list(again.keys)) == (made.classes, repr(made.labels), list(made.keys))
    images, labels = lk.collate(list(again))
    return Batch(again, list(again.keys), images, labels)


def of_pixels_in_batches(source, scratch: Path, **options) -> Batch:
    return of_batches(of_pixels(source, scratch, **options).made, scratch)


def of_shards(source, scratch: Path, **options) -> Batch:
    """A shard has names of its own for its samples; these are in the order of the images."""
    store = as_store(source)
    shards = lk.read_shards(write(store, scratch / "shards", **options))
    [(images, labels)] = DataLoader(shards, batch_size=99, collate_fn=lk.collate)
    return Batch(shards, list(options.get("keys", store.keys())), images, labels)


WAYS = [of_data_set, of_pil_data_set, of_batches, of_pixels, of_pixels_in_batches, of_shards]
every_way = pytest.mark.parametrize("labeled", WAYS)
