"""`metadata_cache.json`, in which kohya-ss/sd-scripts keeps captions and sizes: read with suspicion, written whole."""

import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from labkit.core import key_from_name, path_from_key, write_atomic
from labkit.data.sizes.folders import METADATA
from labkit.data.sizes.latent_caches import MAX_SIDE, Size


class Entry(NamedTuple):
    """A size that a file states. written_ns: When that file was written last."""

    size: Size
    written_ns: int


def read_metadata(folder: str | os.PathLike) -> dict[str, Entry]:
    """Sizes that the `metadata_cache.json` of a folder states, by absolute path.

    An entry without two whole numbers from 1 to `MAX_SIDE` is left out. Relative paths count from the working
    directory, as they do for sd-scripts. A file that is not such a table is left out whole, with a warning that names
    it.
    """
    path = os.path.join(folder, METADATA)
    try:
        written_ns = os.stat(path).st_mtime_ns
        table = _load(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; its sizes do not count", stacklevel=2)
        return {}
    sizes = {key: _size(entry) for key, entry in table.items()}
    return {os.path.abspath(path_from_key(key)): Entry(size, written_ns) for key, size in sizes.items() if size}


def is_current(entry: Entry, path: str) -> bool:
    """Whether the image is as it was when the entry was written; a copy, or another in its place, is not."""
    try:
        return os.stat(path).st_ctime_ns < entry.written_ns
    except OSError:
        return False


def write_metadata_cache(frame: pd.DataFrame, root: str | os.PathLike) -> Path:
    """Write the sizes of a frame to `root/metadata_cache.json`, for sd-scripts' `cache_info`; whole or not at all.

    What the file holds already stays: captions, and entries of images that are not in the frame or have no size in
    it. sd-scripts reads no caption files once it has this one, so images that would be left without a caption are
    counted in a warning.

    Args:
        frame: From `collect_sizes`; a column `caption`, where there is one, gives the captions.
        root: The folder that was collected. Paths are written in full.

    Returns:
        The file.

    Raises:
        ValueError: the file is there and is not such a table; it is left as it is.

    Taught in: notebooks/10_image_sizes.ipynb
    """
    path = Path(root) / METADATA
    table = _load(path) if path.exists() else {}
    keys = {os.path.abspath(path_from_key(key)): key for key in table}  # theirs may be relative
    known = frame[frame["width"].notna()]
    captions = known["caption"] if "caption" in known else [None] * len(known)
    for name, width, height, caption in zip(known["path"], known["width"], known["height"], captions, strict=True):
        image = os.path.abspath(os.path.join(root, path_from_key(name)))
        entry = table.setdefault(keys.get(image, key_from_name(image)), {})
        entry["caption"] = (entry.get("caption") or "") if pd.isna(caption) else caption
        entry["resolution"] = [int(width), int(height)]
    if n_bare := sum(not entry.get("caption") for entry in table.values()):
        warnings.warn(f"{n_bare} images in {path} have no caption: add a column `caption` to the frame", stacklevel=2)
    write_atomic(path, _dump(table))
    return path


def _load(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove it") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ValueError(f"{path} is not a table of images: repair or remove it")
    return table


def _dump(table: dict) -> bytes:
    options = {"indent": 2, "sort_keys": True}
    try:
        return json.dumps(table, ensure_ascii=False, **options).encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8: escaped, it survives
        return json.dumps(table, **options).encode()


def _size(entry: dict[str, Any]) -> Size | None:
    """The entry's resolution, if it is one. (True is an int to Python, and no width.)"""
    resolution = entry.get("resolution")
    if not isinstance(resolution, list) or [type(pixels) for pixels in resolution] != [int, int]:
        return None
    return tuple(resolution) if min(resolution) > 0 and max(resolution) <= MAX_SIDE else None
