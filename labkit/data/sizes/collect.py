"""The sizes of all images under a folder, from what states them at the least cost."""

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from labkit.core import key_from_name, path_from_key
from labkit.data.sizes.folders import SUFFIXES, Folder, scan
from labkit.data.sizes.headers import Header
from labkit.data.sizes.latent_caches import Size, sizes_from_caches
from labkit.data.sizes.readers import read_headers
from labkit.data.sizes.sd_metadata import Entry, is_current, read_metadata

_SOURCES = ("header", "cache", "metadata", "unreadable")
_HEADER, _CACHE, _METADATA, _UNREADABLE = range(4)


def collect_sizes(
    root: str | os.PathLike,
    *,
    recursive: bool = True,
    caches: bool = True,
    num_workers: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Width and height of every image under a folder, without decoding one.

    One pass lists each folder once. Where kohya-ss/sd-scripts has left a latent cache beside an image
    (`{stem}_{width}x{height}_{model}.npz`) or a line in `metadata_cache.json`, the size is taken from there and the
    image is not opened; all others are asked themselves, by their headers. So are images whose witnesses disagree,
    images that share their stem with another, and those that have changed since `metadata_cache.json` was written.
    A cache's age is not looked at, which would cost what it saves: `caches=False` asks every file.

    Images are JPEG, PNG, WebP, AVIF, BMP and JPEG XL by their suffix; hidden files and folders are left out, links
    are followed. Pillow decides what is an image: JPEG XL needs a plug-in of it (`import pillow_jxl`).

    Args:
        root: The folder.
        recursive: Look into the folders below, too.
        caches: Believe caches and `metadata_cache.json`.
        num_workers: Readers of headers. None chooses by what the first files cost: threads where they wait for
            storage (one reader on a rotating disk); processes where very many wait for nothing, but those only in a
            notebook or console. A script asks for them with a number, under `if __name__ == "__main__":`.
        progress: Show a live bar while headers are read.

    Returns:
        One row an image, sorted by path:

        - path: under `root`, as `FolderStore.keys()` has it;
        - width, height (Int64): pixels as stored, not turned by EXIF; NA where unreadable;
        - source: `cache`, `metadata`, `header` or `unreadable`;
        - exif_orientation (Int64): EXIF tag 274, 1 to 8 (from 5 on, width and height change places when the image is
          shown upright); 1 where there is none, NA where the file was not opened or its EXIF is damaged;
        - error: why the image is unreadable, else empty. A folder that cannot be listed has such a row, too.

    Raises:
        FileNotFoundError: `root` is not a folder, or holds no image.
        OSError: `root` cannot be listed.
        ValueError: `num_workers` below 1.

    Source: kohya-ss/sd-scripts for the names of caches. Taught in: notebooks/10_image_sizes.ipynb
    """
    root = os.fspath(root)
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: at least one reader is needed")
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root} is not a folder: give the folder that holds the images")
    table = _Table()
    entries: dict[str, Entry] = {}
    for folder in scan(root, recursive=recursive):
        if caches and folder.has_metadata:
            entries |= read_metadata(folder.path)
        table.add(folder, _stated_sizes(folder, entries) if caches else {})
    if not table.paths:
        raise FileNotFoundError(f"{root} holds no image ({', '.join(SUFFIXES)})")
    unknown = [row for row, source in enumerate(table.sources) if source == _HEADER]
    files = [f"{root}/{path_from_key(table.paths[row])}" for row in unknown]
    table.fill(unknown, read_headers(files, num_workers=num_workers, progress=progress))
    return table.frame()


def _stated_sizes(folder: Folder, entries: dict[str, Entry]) -> dict[str, tuple[Size, int]]:
    """Image -> its size and who states it, for the images whose witnesses agree."""
    sizes = sizes_from_caches(folder.images, folder.caches)
    stated = {image: (size, _CACHE) for image, size in sizes.items() if size}
    if not entries:
        return stated
    above = os.path.abspath(folder.path)
    for image in folder.images:
        path = os.path.join(above, image)
        entry = entries.get(path)
        if entry is None or not is_current(entry, path):
            continue
        if image not in sizes:
            stated[image] = entry.size, _METADATA
        elif sizes[image] != entry.size:
            stated.pop(image, None)
    return stated


@dataclass
class _Table:
    """Rows by column, in arrays that are small enough for millions. 0 stands for an unknown size or orientation."""

    paths: list[str] = field(default_factory=list)
    widths: array = field(default_factory=lambda: array("q"))
    heights: array = field(default_factory=lambda: array("q"))
    sources: array = field(default_factory=lambda: array("b"))
    orientations: array = field(default_factory=lambda: array("b"))
    errors: dict[int, str] = field(default_factory=dict)

    def add(self, folder: Folder, stated: dict[str, tuple[Size, int]]) -> None:
        unknown = (0, 0), _HEADER
        for image in folder.images:
            self._append(key_from_name(folder.prefix + image), *stated.get(image, unknown))
        for path, error in folder.refused.items():
            self.errors[len(self.paths)] = error
            self._append(key_from_name(path), (0, 0), _UNREADABLE)

    def _append(self, path: str, size: Size, source: int) -> None:
        self.paths.append(path)
        self.widths.append(size[0])
        self.heights.append(size[1])
        self.sources.append(source)
        self.orientations.append(0)

    def fill(self, rows: list[int], headers: list[Header]) -> None:
        for row, header in zip(rows, headers, strict=True):
            if header.error:
                self.sources[row], self.errors[row] = _UNREADABLE, header.error
            else:
                self.widths[row], self.heights[row] = header.width, header.height
                self.orientations[row] = header.orientation or 0

    def frame(self) -> pd.DataFrame:
        order = sorted(range(len(self.paths)), key=self.paths.__getitem__)
        columns = {
            "path": _texts(self.paths[row] for row in order),
            "width": _integers(np.frombuffer(self.widths, np.int64)[order]),
            "height": _integers(np.frombuffer(self.heights, np.int64)[order]),
            "source": _texts(_SOURCES[self.sources[row]] for row in order),
            "exif_orientation": _integers(np.frombuffer(self.orientations, np.int8)[order].astype(np.int64)),
            "error": _texts(self.errors.get(row, "") for row in order),
        }
        return pd.DataFrame(columns)


def _texts(values: Iterable[str]) -> pd.Series:
    return pd.Series(list(values), dtype=object)  # pandas' own type for text refuses file names that are not UTF-8


def _integers(values: np.ndarray) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(values, values == 0)
