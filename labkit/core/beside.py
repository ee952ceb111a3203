"""Names for what a file in the making needs beside it: a lock, its parts."""

import os
import zlib
from pathlib import Path

_LONGEST = 255  # bytes of a name, on almost every filesystem


def beside(path: Path, ending: str, *, hidden: bool = False) -> Path:
    """`path` with an ending to its name; of a name too long for that a checksum stands in its place."""
    before = "." if hidden else ""
    name = f"{before}{path.name}{ending}"
    if len(os.fsencode(name)) > _LONGEST:
        name = f"{before}{zlib.crc32(os.fsencode(path.name)):08x}{ending}"
    return path.with_name(name)
