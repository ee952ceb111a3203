"""Unpack a compressed tar, so that its members can be read in any order."""

import os
from pathlib import Path

from labkit.core import atomic_path, file_lock, progress_bar, sibling_path
from labkit.data.tar.compressions import BLOCK_BYTES, open_unpacked
from labkit.data.tar.errors import TarError, damage_error
from labkit.data.tar.stream import TarStream


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
        FileExistsError: `target` exists.
        TarError: `source` is not compressed, cut, damaged or not a tar; names the remedy.

    Taught in: notebooks/09_marigold_storage.ipynb
    """
    source, target = Path(source), Path(target)
    with open(source, "rb") as file:
        stream = open_unpacked(file, str(source))
        if stream is None:
            raise TarError(f"{source} is not compressed: use it as it is")
        with file_lock(sibling_path(target, ".lock", hidden=True)):
            if target.exists():
                raise FileExistsError(f"{target} exists: remove it, or choose another name")
            bar = progress_bar(show=progress, total=source.stat().st_size, unit="B", unit_scale=True, desc="convert")
            with atomic_path(target) as partial, bar:
                with open(partial, "wb") as plain:
                    while block := _read_block(stream, source):
                        plain.write(block)
                        bar.update(file.tell() - bar.n)
                _check_members(partial, source)
    return target


def _read_block(stream, source: Path) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except Exception as error:  # each compression has its own class of error
        raise damage_error(str(source), error) from error


def _check_members(partial: Path, source: Path) -> None:
    with TarStream(partial, str(source)) as tar:
        for _ in tar:
            pass
