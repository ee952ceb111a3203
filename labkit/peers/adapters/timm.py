"""timm's loader, made by its factories of data sets, transforms and loaders.

Source: https://huggingface.co/docs/timm/reference/data (`create_loader`), with the settings of timm's `train.py`.
"""

from collections.abc import Iterable
from functools import lru_cache

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
    return prefetcher if work.is_float else prefetcher.loader  # normalised on the device, or the workers' bytes


PEERS_HERE = (
    pip_peer(
        "timm",
        loader=_loader,
        note="PIL, whose filter antialiases; the main process normalises floats, as timm does on the device",
        drops_last=True,
    ),
)
