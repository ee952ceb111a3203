"""A folder of images with odd names, and what stores read of it."""

import io
import os
import random
import struct
import uuid
from pathlib import Path

import fsspec
from PIL import Image

from labkit.data.stores import Store
from tests.paths import contents

KEYS = (
    "top.jpg", "cat/a.jpeg", "cat/B.JPG", "cat/deeper/still/c.png", "dog/d.WebP", "dog/two words.jpg", "dog/[1] *?.jpg",
    "dog/50%20off #1 & more+.jpg", "dog/a:b;c=d.jpg", "dog/line\nbreak.jpg", "dog/back\\slash.jpg",
    'dog/"quoted" <b>.jpg', "Größe/日本.jpg", "v1.0/in a folder with a dot.jpg",
    "cat.jpg/in a folder with a suffix.jpg", os.fsdecode(b"caf\xe9/\xff.jpg"),
)  # fmt: skip
"""Images of every kind of name that a store has to find."""

HIDDEN = (
    "notes.txt", "README", "cat/.hidden.jpg", ".cache/e.jpg", "dog/f.svg", "cat/jpg", "dog/d.jpg.partial",
    "dog/..dots...jpg", "@eaDir/a.jpeg/thumb.jpg", "cat/@eaDir/a.jpeg/thumb.jpg", "__MACOSX/cat/a.jpeg",
    "#recycle/cat/e.jpg", "$RECYCLE.BIN/e.jpg",
)  # fmt: skip
"""Files beside them that are no images, or hidden."""


def encoded(image: Image.Image, image_format: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def tiff(width: int, height: int, data: bytes, **tags: int) -> bytes:
    """A TIFF of one strip, or of one tile, with the numbers of its tags: TIFF 6.0, section 2."""
    numbers = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1, **{int(tag[1:]): n for tag, n in tags.items()}}
    places = (324, 325) if 322 in numbers else (273, 279)
    start = 8 + 2 + 12 * (len(numbers) + 2) + 4
    numbers |= dict(zip(places, (start, len(data)), strict=True))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, number) for tag, number in sorted(numbers.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(numbers)) + entries + bytes(4) + data


def write_pictures(root: Path, *names: str, size: tuple[int, int] = (20, 16), **options) -> Path:
    """Pictures of one color each, in the formats of their suffixes; PNG under a name without one."""
    formats = Image.registered_extensions()
    for number, path in enumerate(root / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number, 40, 90)).save(path, formats.get(path.suffix.lower(), "PNG"), **options)
    return root


def write_images(root: Path) -> Path:
    """All files, each with other bytes; the first is empty."""
    for number, name in enumerate((*KEYS, *HIDDEN)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(random.Random(repr(name)).randbytes(700 * number))
    return root


def put_in_memory(folder: Path) -> str:
    place = f"memory://{uuid.uuid4()}/set"
    for name, data in contents(folder).items():
        fsspec.filesystem("memory").pipe_file(f"{place}/{name}", data)
        fsspec.filesystem("memory").pipe_file(f"{place}2/{name}", b"another folder")
    return place


def read_all(store: Store) -> list[bytes]:
    return list(map(store.read, store.keys()))
