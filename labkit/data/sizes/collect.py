"""The sizes of all images under a folder, from the cheapest source that states each."""

import os
from array import array
from collections.abc import Iterable

import numpy as np
import pandas as pd

from labkit.core import (
    IMAGE_SUFFIXES,
    OTHER_IMAGE_SUFFIXES,
    Folder,
    checked_suffixes,
    key_from_name,
    path_from_key,
    require_int,
    walk,
)
from labkit.data.sizes.latent_caches import Size, sizes_from_caches
from labkit.data.sizes.readers import read_headers
from labkit.data.sizes.sd_metadata import METADATA, Entry, is_current, read_metadata

_SOURCES = ("header", "cache", "metadata", "unreadable")
_SUFFIXES = (*IMAGE_SUFFIXES, *OTHER_IMAGE_SUFFIXES)
_HEADER, _CACHE, _METADATA, _UNREADABLE = range(4)


def collect_sizes(
    root: str | os.PathLike,
    *,
    recursive: bool = True,
    caches: bool = True,
    ignore: str | Iterable[str] = (),
    num_workers: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Width and height of every image under a folder, without decoding any.

    A size comes from a latent cache of kohya-ss/sd-scripts beside the image (`{stem}_{width}x{height}_{model}.npz`) or
    from `metadata_cache.json`; the image is then not opened. Its header is read if there is neither, if they disagree,
    if another image has the same stem, or if the image is newer than `metadata_cache.json`. The age of a latent cache
    is not checked, which would cost what it saves: use `caches=False` to read every header.

    Args:
        root: The folder. Images are those of `FolderStore`, and those that it refuses since labkit does not decode
            them, such as AVIF, BMP, GIF, TIFF and JPEG XL (`import pillow_jxl`), by their suffix.
        recursive: Include the folders below.
        caches: Trust caches and `metadata_cache.json`.
        ignore: Suffixes of files to leave out, as for `FolderStore`: with the same ones, rows and keys are the same.
        num_workers: Readers of headers. Default: chosen by the cost of the first files; processes only in a notebook
            or console. To use them in a script, give a number, under `if __name__ == "__main__":`.
        progress: Show a live bar while headers are read.

    Returns:
        One row per image, sorted by path (as `FolderStore.keys()` names it): width, height (Int64, as stored; NA if
        unreadable); source (`cache`, `metadata`, `header`, `unreadable`); exif_orientation (Int64, tag 274, 1 to 8, as
        `decode` turns the image; from 5 on, width and height are swapped when shown upright; 1 if there is none or if
        it is damaged, NA if no header was read); error (why it is unreadable, else empty). A folder that cannot be
        listed has a row, too.

    Raises:
        FileNotFoundError: `root` is not a folder, or holds no image.
        OSError: `root` cannot be listed.
        ValueError: `num_workers` below 1, or `ignore` names no suffixes.

    Source: kohya-ss/sd-scripts. Taught in: notebooks/10_image_sizes.ipynb
    """
    if num_workers is not None:
        require_int("num_workers", num_workers)
    root = os.fspath(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root} is not a folder: give the folder that holds the images")
    table = _list_images(root, recursive, caches, checked_suffixes(ignore))
    if not table.paths:
        raise FileNotFoundError(f"{root} holds no image ({', '.join(_SUFFIXES)})")
    table.read_unknown(root, num_workers, progress)
    return table.to_frame()


def _list_images(root: str, recursive: bool, caches: bool, ignore: tuple[str, ...]) -> "_Table":
    table = _Table()
    entries: dict[str, Entry] = {}
    suffixes = tuple(set(_SUFFIXES) - set(ignore))
    for folder in walk(root, recursive=recursive):
        if caches and METADATA in folder.files:
            entries |= read_metadata(folder.path)
        images = _ending(suffixes, folder.files)
        stated = _stated_sizes(folder, images, entries) if caches else {}
        for image in images:
            table.add(folder.prefix + image, *stated.get(image, ((0, 0), _HEADER)))
        for name in _ending(suffixes, folder.broken):  # opening a pipe would block
            table.add_unreadable(folder.prefix + name, "not a file, or a broken link")
        if folder.error:
            table.add_unreadable(folder.prefix, f"the folder cannot be listed: {folder.error.strerror}")
    return table


def _ending(suffixes: tuple[str, ...], names: list[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(suffixes)]


def _stated_sizes(folder: Folder, images: list[str], entries: dict[str, Entry]) -> dict[str, tuple[Size, int]]:
    """Image -> its size and where that is stated, unless two places disagree."""
    sizes = sizes_from_caches(images, _ending((".npz",), folder.files))
    stated = {image: (size, _CACHE) for image, size in sizes.items() if size}
    if not entries:
        return stated
    absolute = os.path.abspath(folder.path)
    for image in images:
        path = os.path.join(absolute, image)
        entry = entries.get(path)
        if entry is None or not is_current(entry, path):
            continue
        if image not in sizes:
            stated[image] = entry.size, _METADATA
        elif sizes[image] != entry.size:
            stated.pop(image, None)
    return stated


class _Table:
    """Rows of the frame, in memory that allows millions. 0 stands for an unknown size or orientation."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.numbers = array("q")  # of each row: width, height, source, orientation
        self.errors: dict[int, str] = {}

    def add(self, path: str, size: Size, source: int) -> None:
        self.paths.append(key_from_name(path))
        self.numbers.extend((*size, source, 0))

    def add_unreadable(self, path: str, error: str) -> None:
        self.errors[len(self.paths)] = error
        self.add(path, (0, 0), _UNREADABLE)

    def read_unknown(self, root: str, num_workers: int | None, progress: bool) -> None:
        numbers = np.frombuffer(self.numbers, np.int64).reshape(-1, 4)
        rows = np.flatnonzero(numbers[:, 2] == _HEADER).tolist()
        files = [f"{root}/{path_from_key(self.paths[row])}" for row in rows]
        for row, header in zip(rows, read_headers(files, num_workers=num_workers, progress=progress), strict=True):
            if header.error:
                numbers[row, 2], self.errors[row] = _UNREADABLE, header.error
            else:
                numbers[row] = header.width or 0, header.height or 0, _HEADER, header.orientation or 0

    def to_frame(self) -> pd.DataFrame:
        order = sorted(range(len(self.paths)), key=self.paths.__getitem__)
        width, height, source, orientation = np.frombuffer(self.numbers, np.int64).reshape(-1, 4)[order].T
        columns = {
            "path": _to_text(self.paths[row] for row in order),
            "width": _to_integers(width),
            "height": _to_integers(height),
            "source": _to_text(map(_SOURCES.__getitem__, source)),
            "exif_orientation": _to_integers(orientation),
            "error": _to_text(self.errors.get(row, "") for row in order),
        }
        return pd.DataFrame(columns)


def _to_text(values: Iterable[str]) -> pd.Series:
    return pd.Series(list(values), dtype=object)  # pandas' own text type refuses file names that are not UTF-8


def _to_integers(values: np.ndarray) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(values.copy(), values == 0)
