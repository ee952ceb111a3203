"""What all fuzz targets share: a folder for their files, the check of what an entry may raise, sealed checksums."""

import contextlib
import struct
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_keep = []


@cache
def scratch() -> Path:
    """A folder of this process, removed with it; in memory where there is room for it, since inputs are files."""
    memory = Path("/dev/shm")
    _keep.append(TemporaryDirectory(prefix="labkit-fuzz-", dir=memory if memory.is_dir() else tempfile.gettempdir()))
    return Path(_keep[0].name)


def written(name: str, data: bytes) -> Path:
    """The input as a file."""
    path = scratch() / name
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def may_refuse(*documented: type[Exception], names: object) -> Iterator[None]:
    """An entry may raise what its docstring states, in a message that names the file; anything else is a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except documented as error:
        if str(names) not in str(error):
            raise AssertionError(f"the error does not name {names}: {type(error).__name__}: {error}") from error


def sealed_tar(data: bytes) -> bytes:
    """With the checksum of every header made right: a fuzzer does not guess one, someone who means harm does."""
    blocks = bytearray(data)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            blocks[start + 148 : start + 156] = b" " * 8
            blocks[start + 148 : start + 156] = b"%06o\0 " % sum(blocks[start : start + 512])
    return bytes(blocks)


def sealed_png(data: bytes) -> bytes:
    """With the checksum of every chunk made right."""
    sealed, at = bytearray(data), 8
    while at + 12 <= len(sealed):
        end = at + 8 + int.from_bytes(sealed[at : at + 4], "big")
        sealed[end : end + 4] = struct.pack(">I", zlib.crc32(sealed[at + 4 : end]))
        at = end + 4
    return bytes(sealed[: len(data)])
