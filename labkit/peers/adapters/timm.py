"""timm's loader, made by its factories of data sets, transforms and loaders.

Source: https://huggingface.co/docs/timm/reference/data (`create_loader`), with the settings of timm's `train.py`.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from labkit.peers.adapters.torchvision import fast_settings
from labkit.peers.peer import Work, pip_peer


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    from timm.data import create_dataset, create_loader

    prefetcher = create_loader(
        create_dataset("", root=str(work.root)),
        input_size=(3, work.size, work.size),
        is_training=True,
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        device=torch.device("cpu"),
        **fast_settings(work),
    )
    return _Normalised(prefetcher) if work.is_float else prefetcher.loader


class _Normalised:
    """timm's own arithmetic on the workers' bytes. Its prefetcher, made for a GPU, holds each batch for the next."""

    def __init__(self, prefetcher: Any):
        self._prefetcher = prefetcher

    def __iter__(self) -> Iterator[tuple]:
        mean, std = self._prefetcher.mean, self._prefetcher.std
        for images, labels in self._prefetcher.loader:
            yield images.to(torch.float32).sub_(mean).div_(std), labels


PEERS_HERE = (
    pip_peer(
        "timm",
        loader=_loader,
        decoder="PIL",
        note="PIL, whose filter antialiases; the main process normalizes floats, as timm does on a GPU",
        drops_last=True,
    ),
)
