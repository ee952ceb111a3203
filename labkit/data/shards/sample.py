"""Image and label of a sample, as WebDataset groups its members."""

from contextlib import suppress
from typing import Any

from labkit.core import IMAGE_SUFFIXES


def find_image(sample: dict[str, Any]) -> tuple[str, bytes]:
    """Name and data of a sample's image. Raises ValueError if there is none, more than one, or no label."""
    suffixes = [suffix for suffix in sample if f".{suffix}" in IMAGE_SUFFIXES]
    name = f"{sample['__key__']}.{suffixes[0] if suffixes else '*'} in {sample['__url__']}"
    if len(suffixes) != 1 or "cls" not in sample:
        found = ", ".join(part for part in sample if not part.startswith("__"))
        raise ValueError(f"{name}: a sample must have one image and a .cls with its label; it has {found}")
    return name, sample[suffixes[0]]


def parse_label(data: bytes, name: str) -> int:
    """The label in a `.cls` member. Raises ValueError, which names the sample, if it is no 64-bit integer."""
    with suppress(ValueError):
        label = int(data)
        if -(1 << 63) <= label < 1 << 63:  # a tensor of labels is int64
            return label
    raise ValueError(f"{name}: its label must be a 64-bit integer, got {data[:20]!r}")
