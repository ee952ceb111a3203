"""Writing files so that a reader never meets half of one."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, then rename: `path` is never half there. Makes missing folders."""
    with written_whole(path) as partial:
        partial.write_bytes(data)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end, removed on an error. Makes missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not from `path.name`, which may be as long as names get; random, since containers that share a disk share pids.
    partial = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        partial.open("x").close()  # never through a link, or into a file of somebody else's
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
