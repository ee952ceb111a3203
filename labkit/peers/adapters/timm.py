"""timm's loader: its factories of data sets, transforms and loaders."""

from collections.abc import Iterable
from functools import lru_cache

from labkit.peers.peer import JPEG_FILES, Peer, Work


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    import torch
    from timm.data import create_dataset, create_loader

    prefetcher = create_loader(
        create_dataset("", root=str(work.root)),
        input_size=(3, work.size, work.size),
        batch_size=work.batch_size,
        is_training=True,
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=work.num_workers,
        persistent_workers=work.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        device=torch.device("cpu"),
    )
    return prefetcher.loader  # what it feeds to the device: uint8, before the device normalises


PEERS_HERE = (
    Peer(
        name="timm",
        source=JPEG_FILES,
        antialias=True,
        install="python -m pip install timm",
        modules=("timm",),
        loader=_loader,
        note="PIL, whose filter antialiases; batches are taken before the normalisation, which timm does on the device",
        drops_last=True,
    ),
)
