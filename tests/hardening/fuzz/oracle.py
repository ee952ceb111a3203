"""The fuzz targets by name, and what they share: seeds, files of an input, and the errors that an entry may raise."""

import contextlib
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

FOUND = Path(__file__).with_name("found")
_PILLOW = tuple(f"PIL.{name}ImagePlugin" for name in ("Jpeg", "Png", "WebP", "Tiff", "Bmp", "Ppm")) + ("PIL.Image",)

# Module, and Python modules that read for the target, instrumented beside labkit's. Nothing is imported before that.
TARGETS = {
    "decoders": ("images", *_PILLOW), "headers": ("images", *_PILLOW), "regions": ("images",), "cuts": ("images",),
    "tar_index": ("tars", "tarfile"), "stored_index": ("tars", "zipfile", "numpy.lib._format_impl"),
    "tar_extract": ("tars", "tarfile"), "shards": ("tars", "tarfile", "webdataset.tariterators"),
    "json_tables": ("tables", "json"), "listings": ("tables", "html.parser", "_markupbase", "urllib.parse"),
    "lists": ("tables",),
}  # fmt: skip


def load(name: str) -> Callable[[bytes], None]:
    """A target: raises where there is a bug; its `seeds()` gives small sound and hostile inputs by name."""
    return getattr(import_module(f"tests.hardening.fuzz.{TARGETS[name][0]}"), name)


def seeded(seeds: Callable[[], dict[str, bytes]]) -> Callable[[Callable], Callable]:
    """Give a target its seeds."""

    def give(target: Callable) -> Callable:
        target.seeds = seeds
        return target

    return give


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Turn an allocation of more than a GiB into a MemoryError, even if its pages are never touched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
