"""A compressed tar made plain, so that its members can be read in any order."""

import os
from pathlib import Path
from typing import BinaryIO

from labkit.core import atomic_path, file_lock, progress_bar, sibling_path
from labkit.data.tar.index import TarError
from labkit.data.tar.stream import BLOCK_BYTES, TarStream, unpacked


def convert_tar(source: str | os.PathLike, target: str | os.PathLike, *, progress: bool = True) -> Path:
    """Unpack a compressed tar (gzip, bzip2, xz; zstd from Python 3.14 on) to a plain one, with the same members.

    The plain tar is the very stream that was compressed. It is written whole or not at all; a rerun after a kill
    begins anew. Memory does not grow with what is unpacked; the disk must have room for it.

    Args:
        source: The compressed tar.
        target: The plain tar to write; its folder is made if missing.
        progress: Show a live bar.

    Returns:
        `target` as a Path.

    Raises:
        FileNotFoundError: no such `source`.
        FileExistsError: there is a `target` already.
        TarError: `source` is not compressed, cut, damaged or no tar; names the remedy.

    Taught in: notebooks/09_marigold_storage.ipynb
    """
    source, target = Path(source), Path(target)
    with open(source, "rb") as file:
        stream = unpacked(file, str(source))
        if stream is None:
            raise TarError(f"{source} is not compressed: use it as it is")
        with file_lock(sibling_path(target, ".lock", hidden=True)):
            if target.exists():
                raise FileExistsError(f"{target} exists: remove it, or choose another name")
            _write(file, stream, target, progress)
    return target


def _write(file: BinaryIO, stream: BinaryIO, target: Path, progress: bool) -> None:
    with atomic_path(target) as partial:
        with open(partial, "wb") as plain:
            _copy(file, stream, plain, progress)
        _check_is_tar(partial, file.name)


def _copy(file: BinaryIO, stream: BinaryIO, plain: BinaryIO, progress: bool) -> None:
    size = os.path.getsize(file.name)
    with progress_bar(show=progress, total=size, unit="B", unit_scale=True, desc="convert") as bar:
        while block := _read(file, stream):
            plain.write(block)
            bar.update(file.tell() - bar.n)


def _read(file: BinaryIO, stream: BinaryIO) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except Exception as error:  # each compression has its own class of error
        raise TarError(f"{file.name} is cut or damaged ({error}): copy or download it again") from error


def _check_is_tar(partial: Path, name: str) -> None:
    with TarStream(partial, name) as tar:
        for _ in tar:
            pass
