"""Fuzz target that is handed a pixel file."""

import io
import struct
import zlib
from functools import cache

from PIL import Image

from labkit.data.pixels.store import PixelError, PixelStore
from tests.hardening.fuzz.oracle import may_refuse, scratch, written
from tests.memory_store import MemoryStore

_HEADER, _INDEX, _SIZE = 1, 2, 4  # options: what is made right after each mutation


@cache
def pixel_seeds() -> dict[str, bytes]:
    """A file of three small images, sealed in every way, and damaged ones."""
    buffer = io.BytesIO()
    Image.new("RGB", (5, 3), (1, 2, 3)).save(buffer, "PNG")

    path = scratch() / "seed.pixels"
    PixelStore.build(
        MemoryStore(dict.fromkeys(["a/x.png", "a/y.png", "b/z.png"], buffer.getvalue())),
        path,
        num_workers=0,
        progress=False,
    )
    whole = path.read_bytes()
    files = {
        "whole": whole,
        "cut": whole[:-1],
        "short": whole[:100],
        "empty": b"",
        "newer": whole[:8] + b"\2" + whole[9:],
    }
    return {f"{name} {options}": bytes([options]) + data for name, data in files.items() for options in (0, 7)}


def _sealed(options: int, data: bytes) -> bytes:
    if len(data) < 128:
        return data
    header, rest = bytearray(data[:128]), data[128:]
    if options & _SIZE:
        header[32:40] = struct.pack("<Q", len(data))
    if options & _INDEX:
        size = int.from_bytes(header[24:32], "little")
        header[40:44] = struct.pack("<I", zlib.crc32(rest[: min(size, len(rest))]))
    if options & _HEADER:
        header[124:128] = struct.pack("<I", zlib.crc32(header[:124]))
    return bytes(header) + rest


def pixel_file(data: bytes) -> None:
    """A pixel file is refused with PixelError, or all its images lie inside it, in the order of its keys."""
    file = _sealed((data[:1] or b"\0")[0], data[1:])
    path = written("x.pixels", file)
    with may_refuse(PixelError, names=path):
        store = PixelStore(path)
        assert len(store) == len(store.keys) == len(store.shapes) == len(store.labels)
        end = 128
        for index, (height, width) in enumerate(store.shapes.tolist()):
            pixels = store.pixels(index)
            assert pixels.shape == (height, width, 3)
            offset = int(store.head.index.offsets[index])
            assert offset >= end, "images overlap"
            end = offset + pixels.nbytes
            assert end <= len(file)
            assert pixels.tobytes() == file[offset:end]
        assert all(0 <= label < len(store.classes) for label in store.labels)
        assert repr(store)
        with may_refuse(PixelError, names=path):
            store.verify(progress=False)
