"""torchvision's two ways: the first tutorial's on PIL images, and the recommended one on tensors.

Source: https://docs.pytorch.org/vision/stable/transforms.html ("Performance considerations"), and, for the DataLoader,
https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html.
Its transforms, its decoder and the settings of a fast DataLoader serve other adapters, too.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import DataLoader

from labkit.peers.peer import MEAN, STD, Work, pip_peer


def pil_transform(work: Work) -> Callable[[Any], Any]:
    """The work on a PIL image, by torchvision's first generation of transforms."""
    from torchvision import transforms

    floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    output = floats if work.is_float else [transforms.PILToTensor()]
    return transforms.Compose([
        transforms.RandomResizedCrop(work.size), transforms.RandomHorizontalFlip(), *output
    ])  # fmt: skip


def tensor_transform(work: Work) -> Callable[[Any], Any]:
    """The work on a uint8 tensor (3, H, W), by torchvision v2."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(work.size, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(), *output_steps(work)])


def output_steps(work: Work) -> list[Any]:
    """What turns a uint8 tensor into what is delivered, by torchvision v2."""
    from torchvision.transforms import v2

    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)] if work.is_float else []


def decode_bytes(data: bytes) -> torch.Tensor:
    """Decode an image with torchvision to a uint8 tensor (3, H, W)."""
    return decode_file(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def decode_file(source: str | torch.Tensor) -> torch.Tensor:
    """Decode as `decode_bytes`, from a file's path (or from a tensor of its bytes)."""
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(source, ImageReadMode.RGB)


def fast_settings(work: Work) -> dict[str, Any]:
    """The DataLoader settings that PyTorch's tuning guide recommends."""
    return {
        "batch_size": work.batch_size,
        "num_workers": work.num_workers,
        "persistent_workers": work.num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
    }


def folder_loader(
    work: Work, transform: Callable[[Any], Any], *, worker_init_fn: Callable | None = None, **folder_options: Any
) -> DataLoader:
    """A fast DataLoader over torchvision's ImageFolder; `folder_options` may name another `loader` of files."""
    from torchvision.datasets import ImageFolder

    photos = ImageFolder(work.root, transform, **folder_options)
    return DataLoader(photos, shuffle=True, worker_init_fn=worker_init_fn, **fast_settings(work))


@lru_cache(maxsize=1)  # one loader, whose workers live on from epoch to epoch
def _load_v1(work: Work) -> Iterable:
    return folder_loader(work, pil_transform(work))


@lru_cache(maxsize=1)
def _load_v2(work: Work) -> Iterable:
    return folder_loader(work, tensor_transform(work), loader=decode_file)


PEERS_HERE = (
    pip_peer(
        "torchvision v1",
        "torchvision",
        loader=_load_v1,
        decoder="PIL",
        note="decodes and resizes with PIL, whose filter antialiases",
    ),
    pip_peer(
        "torchvision v2",
        "torchvision",
        loader=_load_v2,
        decoder="torchvision",
        note="uint8 tensors throughout, as its documentation advises",
    ),
)
