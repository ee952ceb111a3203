"""torchvision's own ways: the first tutorial's on PIL images, and the recommended one on tensors."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from labkit.peers.peer import JPEG_FILES, Peer, Work


def pil_transform(work: Work) -> Callable[[Any], Any]:
    """The work on a PIL image, by torchvision's first generation of transforms."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(work.size),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )


def tensor_transform(work: Work) -> Callable[[Any], Any]:
    """The work on a uint8 tensor (3, H, W), by torchvision v2."""
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(work.size, antialias=True), v2.RandomHorizontalFlip()])


def decode_bytes(data: bytes) -> Any:
    """uint8 tensor (3, H, W) of an encoded image, by torchvision's decoder."""
    import torch
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


def decode_file(path: str) -> Any:
    """As `decode_bytes`, from a file."""
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(path, ImageReadMode.RGB)


def fast_settings(work: Work) -> dict[str, Any]:
    """The settings of a DataLoader that PyTorch's tuning guide asks for."""
    import torch

    return {
        "batch_size": work.batch_size,
        "num_workers": work.num_workers,
        "persistent_workers": work.num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
    }


@lru_cache(maxsize=1)  # one loader, whose workers live on from epoch to epoch
def _v1(work: Work) -> Iterable:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    return DataLoader(ImageFolder(work.root, pil_transform(work)), shuffle=True, **fast_settings(work))


@lru_cache(maxsize=1)
def _v2(work: Work) -> Iterable:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(work.root, tensor_transform(work), loader=decode_file)
    return DataLoader(dataset, shuffle=True, **fast_settings(work))


_torchvision = partial(
    Peer, source=JPEG_FILES, antialias=True, install="python -m pip install torchvision", modules=("torchvision",)
)

PEERS_HERE = (
    _torchvision(name="torchvision v1", loader=_v1, note="decodes and resizes with PIL, whose filter antialiases"),
    _torchvision(name="torchvision v2", loader=_v2, note="uint8 tensors from end to end, as its documentation advises"),
)
