"""torchdata's StatefulDataLoader, which can resume.

Source: https://meta-pytorch.org/data/beta/ (`StatefulDataLoader`, a drop-in replacement).
"""

from collections.abc import Iterable
from functools import lru_cache

from labkit.peers.adapters.torchvision import decode_file, fast_settings, tensor_transform
from labkit.peers.peer import Work, pip_peer


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchvision.datasets import ImageFolder

    photos = ImageFolder(work.root, tensor_transform(work), loader=decode_file)
    return StatefulDataLoader(photos, shuffle=True, **fast_settings(work))


PEERS_HERE = (
    pip_peer(
        "torchdata StatefulDataLoader",
        "torchdata",
        loader=_loader,
        decoder="torchvision",
        note="torchvision decodes and transforms in worker processes, whose state can be saved",
    ),
)
