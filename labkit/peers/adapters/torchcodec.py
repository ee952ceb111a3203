"""torchcodec: the decoder that torchvision points to, in torchvision's loader.

Source: https://docs.pytorch.org/torchcodec/stable/ (`torchcodec.decoders.decode_image`).
"""

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from labkit.peers.adapters.torchvision import folder_loader, tensor_transform
from labkit.peers.peer import Work, pip_peer


def _decode(path: str) -> Tensor:
    decoders: Any = import_module("torchcodec.decoders")
    return decoders.decode_image(Path(path).read_bytes())


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    return folder_loader(work, tensor_transform(work), loader=_decode)


PEERS_HERE = (
    pip_peer(
        "torchcodec",
        modules=("torchcodec.decoders",),
        loader=_loader,
        note="torchcodec decodes, torchvision transforms",
        multi_crop=True,
    ),
)
