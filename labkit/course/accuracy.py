"""Whether a faster rung costs accuracy: the same training on each rung's pixels, judged by the same validation photos.

Some rungs of the ladder change what a model sees: small photos hold less detail, and sampled crops alias. Rates do not
show what that costs. This does, on a GPU in minutes an epoch, on a CPU for a few photos, to see that it works.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from labkit.course import ladder
from labkit.course.training import ResNetStep
from labkit.data.pixels import PixelStore
from labkit.data.stores import FolderStore
from labkit.data.tiles import tile_jpegs
from labkit.errors import ArgumentError
from labkit.loading.batch_loader import BatchLoader
from labkit.util.arguments import require_int
from labkit.util.machine import usable_cores


def accuracy_of_rungs(
    data: str | os.PathLike, epochs: int, seeds: int, *, batch_size: int = 64, size: int = 224
) -> Iterator[str]:
    """Train a ResNet-50 from scratch on each kind of pixels that the ladder gives, and yield a line about each.

    Args:
        data: A folder with `train` and `val`, each with a folder of photos for each class, as
            `data_scripts/download.py` makes them: `--size full`, since photos of 160 pixels do not get smaller. Small
            copies of its training photos are kept in `DATA.prepared`, for the next run.
        epochs: Of each training.
        seeds: Trainings of each kind, which begin with other weights and orders. What differs less than they do is no
            difference.
        batch_size, size: In photos, and pixels of a side.

    Raises:
        ValueError: there are no `train` and `val`, or the classes of the two differ.
    """
    require_int("epochs", epochs)
    require_int("seeds", seeds)
    data = Path(data)
    if not all((data / part).is_dir() for part in ("train", "val")):
        raise ArgumentError(f"{data} has no folders train and val: fetch one with data_scripts/download.py --size full")
    photos, prepared = FolderStore(data / "train"), Path(f"{data}.prepared")
    tile_jpegs(photos, prepared / "small", short_side=256)
    pixels = PixelStore.build(photos, prepared / "pixels", short_side=256)
    sources = {
        ladder.NAIVE: None,
        ladder.THREADS: (photos, True),
        ladder.SMALL: (FolderStore(prepared / "small"), True),
        ladder.PIXELS: (pixels, True),
        ladder.QUICK: (pixels, False),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, source in sources.items():
        found = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            if source is None:
                loader, classes = _by_pil(data / "train", batch_size, size)
            else:
                own = BatchLoader(source[0], size=size, batch_size=batch_size, antialias=source[1], seed=seed)
                loader, classes = own, own.classes
            val = BatchLoader(data / "val", size=size, batch_size=batch_size, train=False, classes=classes)
            step = ResNetStep(len(classes), device, n_steps=epochs * len(loader))
            for _ in range(epochs):
                for images, labels in loader:
                    step(images, labels)
            found.append(step.accuracy(val))
        yield f"{name}: {fmean(found):.1%} ({', '.join(f'{share:.1%}' for share in found)})"


def _by_pil(folder: Path, batch_size: int, size: int) -> tuple[DataLoader | BatchLoader, list[str]]:
    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    dataset = datasets.ImageFolder(folder, transforms.Compose(steps))
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=usable_cores(), persistent_workers=True)
    return loader, dataset.classes
