"""The parts of a pixel file while it is built: each a pixel file of its own, whole or absent, made by one worker."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from labkit.core import PackedStrings, atomic_path
from labkit.core.mapping import format_error
from labkit.data.decoders import DecodeError, decode
from labkit.data.pixels.format import ALIGNMENT, VERSION, Origin, PixelError, laid_out, packed_head, pixels_start
from labkit.data.pixels.mapped import PixelMap
from labkit.data.stores import Store

_LARGEST_PART = 256
_FEWEST_PARTS = 32  # so that few images, too, are spread over the cores


@dataclass(frozen=True)
class Part:
    """Consecutive images, and what they are made of."""

    name: str
    keys: list[str]
    origin: Origin

    def __str__(self) -> str:
        return f"{self.name} ({self.keys[0]} to {self.keys[-1]})"


def planned(store: Store, short_side: int, decoder: str) -> tuple[Origin, list[Part]]:
    """The origin of all images, and the parts, each with its own: it outlives a change of an image in another one."""
    keys = list(store.keys())
    sizes = store.sizes().tolist() if hasattr(store, "sizes") else [None] * len(keys)
    count = min(_LARGEST_PART, -(-len(keys) // _FEWEST_PARTS))  # not by the workers: a rerun may have more of them

    def origin(slot: slice) -> Origin:
        digest = hashlib.sha256(json.dumps([VERSION, short_side, decoder]).encode())
        for key, size in zip(keys[slot], sizes[slot], strict=True):
            digest.update(f"\0{key}\0{size}".encode(errors="surrogateescape"))
        return Origin(digest.digest(), short_side, decoder)

    slots = [slice(first, first + count) for first in range(0, len(keys), max(1, count))]
    parts = [Part(f"part-{number:06d}.pixels", keys[slot], origin(slot)) for number, slot in enumerate(slots)]
    return origin(slice(None)), parts


def make_part(store: Store, folder: Path, part: Part) -> dict[str, str]:
    """Write a part, unless it is there.

    Returns:
        Key -> error text of images that could not be read; for them the part is not written.
    """
    path = folder / part.name
    if _is_there(path, part.origin):
        return {}
    try:
        _write(path, part, _images(store, part))
    except _Unreadable as error:
        return error.failures
    return {}


def fill_in_head(file: BinaryIO, origin: Origin, keys: PackedStrings, shapes: np.ndarray, crcs: np.ndarray) -> None:
    """Finish a file whose images are written."""
    index, file_bytes = laid_out(keys, shapes, crcs)
    file.truncate(file_bytes)
    file.seek(0)
    file.write(packed_head(origin, index, file_bytes))


def shrunk(image: Tensor, short_side: int) -> np.ndarray:
    """A uint8 (3, H, W) tensor as (H, W, 3) pixels whose shorter side is `short_side`, or less where it was."""
    from torchvision.transforms.v2 import functional  # here, since no reader needs it, and it takes a second to load

    if min(image.shape[1:]) > short_side:
        image = functional.resize(image, [short_side], antialias=True)
    return image.permute(1, 2, 0).contiguous().numpy()


class _Unreadable(Exception):
    """Images that could not be read: key -> error text."""

    def __init__(self, failures: dict[str, str]):
        super().__init__(failures)
        self.failures = failures


def _is_there(path: Path, origin: Origin) -> bool:
    """Whether the part is there, of this origin, with its checksums: where power was lost, a file may be half there."""
    try:
        part = PixelMap(path)
    except (FileNotFoundError, PixelError):
        return False
    return part.head.origin == origin and all(map(part.is_sound, range(len(part))))


def _images(store: Store, part: Part) -> Iterator[np.ndarray]:
    """The part's images. Those that cannot be read are left out, and named by an error behind the last."""
    failures = {}
    for key in part.keys:
        try:
            yield shrunk(decode(store.read(key), part.origin.decoder, key=key), part.origin.short_side)
        except (DecodeError, KeyError, OSError) as error:
            failures[key] = format_error(error)
    if failures:
        raise _Unreadable(failures)


def _write(path: Path, part: Part, images: Iterable[np.ndarray]) -> None:
    """A pixel file in one pass: header and index have their room before the images, and are filled in last."""
    keys, shapes, crcs = PackedStrings(part.keys), [], []
    with atomic_path(path) as partial, open(partial, "wb") as file:
        file.seek(pixels_start(keys))
        for image in images:
            file.write(image)
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            shapes.append(image.shape[:2])
            crcs.append(zlib.crc32(image))
        fill_in_head(file, part.origin, keys, np.array(shapes), np.array(crcs))
