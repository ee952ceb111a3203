"""What all fuzz targets share: the files of an input, its byte of options, and the errors that an entry may raise."""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def _temporary() -> TemporaryDirectory:
    memory = Path("/dev/shm")
    return TemporaryDirectory(prefix="labkit-fuzz-", dir=memory if memory.is_dir() else None)


def scratch() -> Path:
    """A folder of this process, removed with it; in memory where the system allows, since every input is written."""
    return Path(_temporary().name)


def empty_folder(name: str) -> Path:
    """A folder below `scratch()`, without what an earlier input left there."""
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def write_input(name: str, data: bytes) -> Path:
    """The input as a file."""
    path = scratch() / name
    path.write_bytes(data)
    return path


def split_options(data: bytes) -> tuple[int, bytes]:
    """The first byte, which has the options of an input, and the rest."""
    return (data[:1] or b"\0")[0], data[1:]


@contextlib.contextmanager
def may_refuse(*documented: type[Exception], names: object) -> Iterator[None]:
    """Allow the errors that an entry documents, if their message names the file; anything else is a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except documented as error:
        if str(names) not in str(error):
            raise AssertionError(f"the error does not name {names}: {type(error).__name__}: {error}") from error
