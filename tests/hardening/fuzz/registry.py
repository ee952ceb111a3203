"""The fuzz targets by name; importing this imports none of them, so that atheris can instrument what they import."""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

_HERE = "tests.hardening.fuzz"


class Target(NamedTuple):
    """An entry of labkit that takes bytes from outside.

    module, function, seeds: Where `function(data)` lies, which raises only where there is a bug, and `seeds()`, its
    small sound and hostile inputs by name. parsers: Python modules that read for it, instrumented beside labkit's.
    """

    module: str
    function: str
    seeds: str
    parsers: tuple[str, ...] = ()

    def load(self) -> tuple[Callable[[bytes], None], dict[str, bytes]]:
        module = import_module(f"{_HERE}.{self.module}")
        return getattr(module, self.function), getattr(module, self.seeds)()


_PILLOW = ("PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin", "PIL.TiffImagePlugin", "PIL.Image")

TARGETS = {
    "decoders": Target("images", "decoders", "image_seeds", _PILLOW),
    "headers": Target("images", "headers", "image_seeds", _PILLOW),
    "regions": Target("images", "regions", "image_seeds"),
    "tar_index": Target("tars", "tar_index", "tar_seeds", ("tarfile",)),
    "stored_index": Target("tars", "stored_index", "stored_index_seeds", ("zipfile", "numpy.lib._format_impl")),
    "tar_extract": Target("tars", "tar_extract", "tar_seeds", ("tarfile",)),
    "shards": Target("tars", "shards", "shard_seeds", ("tarfile", "webdataset.tariterators")),
    "packed": Target("tars", "packed", "packed_seeds", ("tarfile", "gzip")),
    "size_names": Target("tables", "size_names", "size_name_seeds"),
    "json_tables": Target("tables", "json_tables", "json_seeds", ("json",)),
    "listings": Target("tables", "listings", "listing_seeds", ("html.parser", "_markupbase", "urllib.parse")),
    "lists": Target("tables", "lists", "list_seeds"),
    "frames": Target("tables", "frames", "frame_seeds"),
    "pixel_file": Target("pixel_files", "pixel_file", "pixel_seeds"),
}
