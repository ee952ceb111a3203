"""Writing files so that a reader never meets half of one."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, then rename: `path` is never half there. Makes missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
