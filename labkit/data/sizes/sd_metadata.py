"""`metadata_cache.json`, in which kohya-ss/sd-scripts keeps captions and sizes: validated, and written atomically."""

import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from labkit.core import key_from_name, path_from_key, write_atomic
from labkit.data.sizes.latent_caches import MAX_SIDE, Size

METADATA = "metadata_cache.json"


class Entry(NamedTuple):
    """A size that a metadata file states. written_ns: Modification time of that file."""

    size: Size
    written_ns: int


def read_metadata(folder: str | os.PathLike) -> dict[str, Entry]:
    """Sizes that the `metadata_cache.json` of a folder states, by absolute path.

    Entries without two integers from 1 to `MAX_SIDE` are ignored. Relative paths start at the working directory, as
    for sd-scripts. A file that is not such a table is ignored, with a warning that names it.
    """
    path = os.path.join(folder, METADATA)
    try:
        written_ns = os.stat(path).st_mtime_ns
        table = _read_table(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; its sizes do not count", stacklevel=2)
        return {}
    sizes = {key: _valid_size(entry) for key, entry in table.items()}
    return {os.path.abspath(path_from_key(key)): Entry(size, written_ns) for key, size in sizes.items() if size}


def is_current(entry: Entry, path: str) -> bool:
    """Whether the image has not changed since the entry was written; a copy or a replacement counts as a change."""
    try:
        return os.stat(path).st_ctime_ns < entry.written_ns
    except OSError:
        return False


def write_metadata_cache(frame: pd.DataFrame, root: str | os.PathLike) -> Path:
    """Write the sizes of a frame to `root/metadata_cache.json`, for sd-scripts' `cache_info`; atomically.

    Captions in the file are kept, and so are entries of images that are not in the frame or have no size in it. With
    this file, sd-scripts reads no caption files, so a warning counts the images without a caption.

    Args:
        frame: From `collect_sizes`; an added column `caption` gives the captions.
        root: The folder that was collected. Paths are written as absolute paths.

    Returns:
        The file.

    Raises:
        ValueError: the file exists and is not such a table; it is left unchanged.

    Taught in: notebooks/10_image_sizes.ipynb
    """
    path = Path(root) / METADATA
    table = _read_table(path) if path.exists() else {}
    keys = {os.path.abspath(path_from_key(key)): key for key in table}  # those in the file may be relative
    known = frame[frame["width"].notna()]
    captions = known["caption"] if "caption" in known else [None] * len(known)
    for name, width, height, caption in zip(known["path"], known["width"], known["height"], captions, strict=True):
        image = os.path.abspath(os.path.join(root, path_from_key(name)))
        entry = table.setdefault(keys.get(image, key_from_name(image)), {})
        entry["caption"] = (entry.get("caption") or "") if pd.isna(caption) else caption
        entry["resolution"] = [int(width), int(height)]
    if n_missing := sum(not entry.get("caption") for entry in table.values()):
        warnings.warn(
            f"{n_missing} images in {path} have no caption: add a column `caption` to the frame", stacklevel=2
        )
    text = json.dumps(table, ensure_ascii=False, indent=2, sort_keys=True)
    write_atomic(path, text.encode(errors="backslashreplace"))  # a file name that is not UTF-8 must be escaped
    return path


def _read_table(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove it") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ValueError(f"{path} is not a table of images: repair or remove it")
    return table


def _valid_size(entry: dict[str, Any]) -> Size | None:
    """The resolution of an entry, if valid. (In Python True is an int; it is not a width.)"""
    resolution = entry.get("resolution")
    if not isinstance(resolution, list) or [type(pixels) for pixels in resolution] != [int, int]:
        return None
    return tuple(resolution) if min(resolution) > 0 and max(resolution) <= MAX_SIDE else None
