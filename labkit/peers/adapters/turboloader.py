"""turboloader: a C++ pass that decodes, crops, flips and normalizes, from a tar or from its own raw format.

Source: https://github.com/ALJainProjects/TurboLoader (README, "Quick Start" and "Which loader do I use?").
"""

import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.peers.peer import (
    FLOAT32,
    JPEG_PACKED,
    RAW_PIXELS,
    SCALED,
    Peer,
    Work,
    labeled_photos,
    pip_peer,
    prepare_once,
)  # fmt: skip


def _prepare_tar(work: Work) -> Path:
    return prepare_once(work, "turboloader-tar", partial(_write_tar, work)) / "photos.tar"


def _write_tar(work: Work, folder: Path) -> None:
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for number, (path, _) in enumerate(labeled_photos(work)):
            tar.add(path, f"{number:08d}.jpg")


def _prepare_tbl(work: Work) -> Path:
    return prepare_once(work, "turboloader-tbl", partial(_write_tbl, work)) / "photos.tbl"


def _write_tbl(work: Work, folder: Path) -> None:
    import turboloader

    size = (work.short_side, round(work.short_side * 4 / 3))
    turboloader.preprocess_to_tbl(str(_prepare_tar(work)), str(folder / "photos.tbl"), image_size=size)


class _Epochs:
    def __init__(self, work: Work, path: Path, **options: Any):
        import turboloader

        self._labels = np.array([label for _, label in labeled_photos(work)])
        self._epoch = 0
        self._loader = turboloader.DataLoader(
            str(path), batch_size=work.batch_size, image_size=work.size, output_format="pytorch", shuffle=True,
            transform=turboloader.ImageNetNormalize(), train_aug=True, seed=work.seed, **options,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple]:
        self._loader.set_epoch(self._epoch)
        self._epoch += 1
        for images, meta in self._loader:
            yield torch.from_numpy(images), torch.from_numpy(self._labels[meta["indices"]])


@lru_cache(maxsize=1)
def _load_tar(work: Work, antialias: bool) -> Iterable:
    return _Epochs(work, _prepare_tar(work), antialias=antialias)


@lru_cache(maxsize=1)
def _load_tbl(work: Work) -> Iterable:
    return _Epochs(work, _prepare_tbl(work))


def _make_peer(name: str, source: str, **details: Any) -> Peer:
    published = (
        "32,000 images/s from a tar and 87,000 from its raw format with crop and flip, its README: an M4 Max laptop, "
        "whose cores are many and fast, and images of 160 or 192 pixels"
    )
    options: dict[str, Any] = {
        "decoder": "libjpeg-turbo",
        "decodes": SCALED,
        "dtypes": (FLOAT32,),
        "published": published,
    }
    return pip_peer(name, "turboloader", source=source, **options, **details)


# "Crop-window decode (what train_aug uses)": at "the DCT scale picked for the target", as 2.39's own help says.
_TAR_NOTE = "a tar with the files' own bytes; decodes only the crop's part of a JPEG, scaled; gives floats only"
PEERS_HERE = (
    _make_peer(
        "turboloader tar", JPEG_PACKED, antialias=False, loader=partial(_load_tar, antialias=False),
        prepare=_prepare_tar, note=_TAR_NOTE,
    ),
    _make_peer(
        "turboloader tar antialiased", JPEG_PACKED, antialias=True, note=_TAR_NOTE,
        loader=partial(_load_tar, antialias=True), prepare=_prepare_tar,
    ),
    _make_peer(
        "turboloader raw", RAW_PIXELS, antialias=False, loader=_load_tbl, prepare=_prepare_tbl,
        note="its own format holds all photos at one size, here 256 x 341: others are squeezed; gives floats only",
    ),
)  # fmt: skip
