"""One pass over folders: the images in each, and the names beside them that may state a size."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from labkit.core import IMAGE_SUFFIXES

# Further formats of diffusion trainers: sd-scripts takes AVIF and JPEG XL if Pillow has their plug-ins.
SUFFIXES = (*IMAGE_SUFFIXES, ".avif", ".bmp", ".jxl")
METADATA = "metadata_cache.json"


@dataclass
class Folder:
    """What one folder holds.

    prefix: Its path under the root, `""` or `"a/b/"`. refused: Path under the root -> why it was not read.
    """

    path: str
    prefix: str
    images: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    has_metadata: bool = False
    refused: dict[str, str] = field(default_factory=dict)


def scan(path: str, *, recursive: bool, prefix: str = "", parents: tuple = ()) -> Iterator[Folder]:
    """Every folder from the root down, parents first, each listed once. Follows links, but never in a circle.

    Args:
        path: The folder to begin with.
        recursive: Go on with the folders below.
        prefix, parents: Of a folder below the root, its path under the root and the identities of the folders above.

    Raises:
        OSError: the root cannot be listed. A folder below it that cannot be listed is `refused` instead.
    """
    try:
        status = os.stat(path)
        identity = status.st_dev, status.st_ino
        if identity in parents:  # a link to one of the folders above: all in it is listed already
            return
        folder = _list_folder(path, prefix)
    except OSError as error:
        if not parents:
            raise
        yield Folder(path, prefix, refused={prefix: f"the folder cannot be listed: {error.strerror}"})
        return
    yield folder
    for name in folder.folders if recursive else ():
        below = os.path.join(path, name)
        yield from scan(below, recursive=True, prefix=f"{prefix}{name}/", parents=(*parents, identity))


def _list_folder(path: str, prefix: str) -> Folder:
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
            elif name == METADATA:
                folder.has_metadata = True
            elif name.lower().endswith(SUFFIXES):
                if entry.is_file():
                    folder.images.append(name)
                else:  # opening a pipe would block
                    folder.refused[prefix + name] = "not a file, or a broken link"
    return folder
