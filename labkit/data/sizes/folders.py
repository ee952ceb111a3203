"""One pass over folders: which images lie there, and which names beside them may state a size."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from labkit.core import IMAGE_SUFFIXES

# What diffusion trainers read besides: sd-scripts takes AVIF and JPEG XL where Pillow has their plug-ins.
SUFFIXES = (*IMAGE_SUFFIXES, ".avif", ".bmp", ".jxl")
METADATA = "metadata_cache.json"


@dataclass
class Folder:
    """What one folder holds.

    prefix: What the names begin with under the root, `""` or `"a/b/"`. refused: Path under the root -> why it was not
    looked at.
    """

    path: str
    prefix: str
    images: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    has_metadata: bool = False
    refused: dict[str, str] = field(default_factory=dict)


def scan(root: str, *, recursive: bool) -> Iterator[Folder]:
    """Every folder from `root` down, parents first, each listed once. Links are followed, but never in a circle.

    Raises:
        OSError: `root` cannot be listed. A folder below it that cannot is `refused` instead.
    """
    yield from _scan(root, "", recursive, above=())


def _scan(path: str, prefix: str, recursive: bool, above: tuple) -> Iterator[Folder]:
    try:
        status = os.stat(path)
        identity = status.st_dev, status.st_ino
        if identity in above:  # a link to a folder around it: everything there is listed already
            return
        folder = _list(path, prefix)
    except OSError as error:
        if not above:
            raise
        yield Folder(path, prefix, refused={prefix: f"the folder cannot be listed: {error.strerror}"})
        return
    yield folder
    for name in folder.folders if recursive else ():
        yield from _scan(os.path.join(path, name), f"{prefix}{name}/", recursive, (*above, identity))


def _list(path: str, prefix: str) -> Folder:
    folder = Folder(path, prefix)
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if entry.is_dir():
                folder.folders.append(name)
            elif name.endswith(".npz"):
                folder.caches.append(name)
            elif name.lower().endswith(SUFFIXES):
                _add(folder, entry)
            elif name == METADATA:
                folder.has_metadata = True
    return folder


def _add(folder: Folder, entry: os.DirEntry) -> None:
    if entry.is_file():
        folder.images.append(entry.name)
    else:  # opening a pipe would wait for ever
        folder.refused[folder.prefix + entry.name] = "not a file, or a link to none"
