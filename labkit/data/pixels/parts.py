"""The parts of a pixel file that is being built: each is a small pixel file, whole or absent, made by one worker."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from labkit.core import PackedStrings, atomic_path
from labkit.core.mapping import ItemErrors, format_error
from labkit.data.decoders import DecodeError, decode
from labkit.data.pixels.format import (
    ALIGNMENT,
    HEADER_BYTES,
    Contents,
    Origin,
    PixelError,
    aligned,
    laid_out,
    packed_head,
)
from labkit.data.pixels.mapped import PixelMap
from labkit.data.stores import HasSizes, Store

_MAX_PART_IMAGES = 256
_RECIPE = 1  # of the pixels; raised when the same images and settings give others
_MIN_PARTS = 32  # few images are spread over the cores, too


@dataclass(frozen=True)
class Part:
    """Consecutive images, and what they are made of."""

    name: str
    keys: list[str]
    origin: Origin

    def __str__(self) -> str:
        return f"{self.name} ({self.keys[0]} to {self.keys[-1]})"


def plan_parts(store: Store, short_side: int, decoder: str) -> tuple[Origin, list[Part]]:
    """The origin of all images, and the parts, each with an origin of its own: a changed image spoils only its part."""
    keys = list(store.keys())
    sizes = store.sizes().tolist() if isinstance(store, HasSizes) else [None] * len(keys)
    count = min(_MAX_PART_IMAGES, -(-len(keys) // _MIN_PARTS))  # whatever the number of workers: a rerun may have more

    def origin(slot: slice) -> Origin:
        digest = hashlib.sha256(json.dumps([_RECIPE, short_side, decoder]).encode())
        for key, size in zip(keys[slot], sizes[slot], strict=True):
            digest.update(f"\0{key}\0{size}".encode(errors="surrogateescape"))
        return Origin(digest.digest(), short_side, decoder)

    slots = [slice(first, first + count) for first in range(0, len(keys), max(1, count))]
    parts = [Part(f"part-{number:06d}.pixels", keys[slot], origin(slot)) for number, slot in enumerate(slots)]
    return origin(slice(None)), parts


def make_part(store: Store, folder: Path, part: Part) -> dict[str, str]:
    """Write a part, unless it is there.

    Returns:
        Key -> error text of images that could not be read; if there is one, the part is not written.
    """
    path = folder / part.name
    if _is_made(path, part.origin):
        return {}
    try:
        _write_part(path, part, _load_images(store, part))
    except ItemErrors as error:
        return error.failures
    return {}


def pixels_start(contents: Contents) -> int:
    """Where the first image begins in a new file."""
    return aligned(HEADER_BYTES + contents.index_bytes())


def fill_in_head(file: BinaryIO, origin: Origin, contents: Contents, shapes: np.ndarray, crcs: np.ndarray) -> None:
    """Write header and index of a file that has all its images."""
    index, file_bytes = laid_out(contents, shapes, crcs, contents.index_bytes())
    file.truncate(file_bytes)
    file.seek(0)
    file.write(packed_head(origin, index, file_bytes))


def shrink(image: Tensor, short_side: int) -> np.ndarray:
    """Resize a uint8 (3, H, W) tensor to (H, W, 3) pixels whose shorter side is at most `short_side`."""
    from torchvision.transforms.v2 import functional  # takes a second to load, and readers do not need it

    if min(image.shape[1:]) > short_side:
        image = functional.resize(image, [short_side], antialias=True)
    return image.permute(1, 2, 0).contiguous().numpy()


def _is_made(path: Path, origin: Origin) -> bool:
    """Whether the part is there, of this origin, and intact: after a loss of power a file may be incomplete."""
    with suppress(FileNotFoundError, PixelError):
        part = PixelMap(path)
        return part.head.origin == origin and all(map(part.is_sound, range(len(part))))
    return False


def _load_images(store: Store, part: Part) -> Iterator[np.ndarray]:
    """The part's images; those that cannot be read are left out, and named in an error after the last one."""
    failures = {}
    for key in part.keys:
        try:
            yield shrink(decode(store.read(key), part.origin.decoder, key=key), part.origin.short_side)
        except (DecodeError, KeyError, OSError) as error:
            failures[key] = format_error(error)
    if failures:
        raise ItemErrors(failures, [None] * len(part.keys))


def _write_part(path: Path, part: Part, images: Iterable[np.ndarray]) -> None:
    """Write a pixel file in one pass: leave space for header and index, write the images, then fill that in."""
    # Labels are those of the whole file: the pixels of a part do not depend on them.
    contents = Contents(PackedStrings(part.keys), np.zeros(len(part.keys), np.int64), [])
    shapes, crcs = [], []
    with atomic_path(path) as partial, open(partial, "wb") as file:
        file.seek(pixels_start(contents))
        for image in images:
            file.write(image.data)
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            shapes.append(image.shape[:2])
            crcs.append(zlib.crc32(image.data))
        fill_in_head(file, part.origin, contents, np.array(shapes), np.array(crcs))
