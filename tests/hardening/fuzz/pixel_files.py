"""Fuzz target that is handed a pixel file."""

import struct
from functools import cache

from labkit.data.pixels import PixelStore
from labkit.errors import PixelError
from tests.hardening.fuzz.oracle import may_refuse, scratch, write_input
from tests.hardening.inputs import image_bytes
from tests.memory_store import MemoryStore


@cache
def pixel_seeds() -> dict[str, bytes]:
    """A file of three small images, and damaged ones."""
    path, keys = scratch() / "seed.pixels", ["a/x.png", "a/y.png", "b/z.png"]
    PixelStore.build(MemoryStore(dict.fromkeys(keys, image_bytes((5, 3)))), path, num_workers=0, progress=False)
    whole = path.read_bytes()
    files = {"whole": whole, "cut": whole[:-1], "short": whole[:100], "empty": b""}
    files["newer"] = whole[:8] + b"\3" + whole[9:]
    return files


def pixel_file(data: bytes) -> None:
    """A pixel file is refused with PixelError, or all its images lie inside it, in the order of its keys."""
    path = write_input("x.pixels", data)
    with may_refuse(PixelError, names=path):
        store = PixelStore(path)
        assert len(store) == len(store.keys) == len(store.shapes) == len(store.labels)
        end = 128
        for index, (height, width) in enumerate(store.shapes.tolist()):
            pixels = store.pixels(index)
            assert pixels.shape == (height, width, 3)
            (offset,) = struct.unpack_from("<Q", data, 128 + 8 * index)
            assert offset >= end, "images overlap"
            end = offset + pixels.nbytes
            assert end <= len(data)
            assert pixels.tobytes() == data[offset:end]
        assert all(0 <= label < max(1, len(store.classes)) for label in store.labels)
        assert repr(store)
        with may_refuse(PixelError, names=path):
            store.verify(progress=False)
