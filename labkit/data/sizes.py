"""The sizes of all images under a folder, from the cheapest source that states each.

Names of latent caches and `metadata_cache.json`, both of kohya-ss/sd-scripts, state sizes without opening an image. The
other images' headers are read with as many readers as pay off: the time of the first files decides.
"""

import json
import math
import multiprocessing
import os
import re
import statistics
import time
import warnings
from array import array
from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from labkit.data.headers import MAX_SIDE, Header, Size, read_header
from labkit.errors import ArgumentError, ItemErrors, MissingFileError
from labkit.util.arguments import require_int
from labkit.util.files import (
    IMAGE_SUFFIXES,
    OTHER_IMAGE_SUFFIXES,
    Folder,
    checked_suffixes,
    key_from_name,
    path_from_key,
    walk,
    write_atomic,
)
from labkit.util.machine import main_is_script, usable_cores
from labkit.util.parallel import map_items

_PROBE = 64  # files read before the choice
_BATCH_SIZE = 128  # files that a reader takes at once
_MAX_THREADS = 32
_STORAGE_WAIT_S = 30e-6  # a shorter wait is not storage: a header in memory takes less
_SEEK_WAIT_S = 2e-3  # a moving disk head takes longer; a virtual disk that reports rotation does not
_START_S = 2.0  # new processes must save at least this to pay off, as each starts a Python; shorter work needs no bar


class Readers(NamedTuple):
    """The engine of `map_items`, and how many workers; with one, this thread reads."""

    engine: str
    n_workers: int


def read_headers(paths: list[str], *, num_workers: int | None = None, progress: bool = True) -> list[Header]:
    """The header of each file, in their order; see `read_header`. Arguments as for `collect_sizes`."""
    remaining = paths[_PROBE:]
    if not remaining:
        return _read_batch(paths)
    headers, wall_s, cpu_s = _time_headers(paths[:_PROBE])
    cores = usable_cores() if _may_start_processes() else 1
    _, rotating = disk_under(paths[0])
    readers = choose_readers(wall_s, cpu_s, len(remaining), rotating=rotating, cores=cores, num_workers=num_workers)
    return headers + _read_batches(remaining, readers, _BATCH_SIZE, progress and wall_s * len(remaining) > _START_S)


def choose_readers(
    wall_s: float, cpu_s: float, n_files: int, *, rotating: bool, cores: int, num_workers: int | None = None
) -> Readers:
    """How to read `n_files` more, given the time of one file.

    - Files that wait for storage: threads, twice as many as keep a core busy, since most of the work is the kernel's.
      But a disk whose head must move gets one reader: several would send the head back and forth.
    - Files in the page cache: this thread alone, since threads would only compete for the GIL; or one process per core,
      if the processes save more time than they take to start.

    Args:
        wall_s: Time of one file.
        cpu_s: CPU time of one file.
        n_files: Files left to read.
        rotating: Whether the kernel reports a rotating disk.
        cores: Cores for processes.
        num_workers: The caller's number of readers, if given; the kind is still chosen here.
    """
    wait_s = wall_s - cpu_s
    if wait_s > _STORAGE_WAIT_S:
        one_head = rotating and wait_s > _SEEK_WAIT_S
        fitting = 1 if one_head else min(_MAX_THREADS, 2 * math.ceil(wall_s / cpu_s))
        return Readers("threads", num_workers or fitting)
    pays_off = cpu_s * n_files * (1 - 1 / cores) > _START_S
    return Readers("local", num_workers or (cores if pays_off else 1))


def disk_under(path: str | os.PathLike, devices: Path = Path("/sys/dev/block")) -> tuple[str, bool]:
    """Name of the disk that holds `path`, and whether the kernel reports that it rotates; `""` and False if unknown.

    Virtual machines often report this for any disk.
    """
    with suppress(OSError):  # not a block device (tmpfs, network), or not Linux
        device = os.stat(path).st_dev
        block = (devices / f"{os.major(device)}:{os.minor(device)}").resolve()
        disk = block if (block / "queue").is_dir() else block.parent  # a partition has the queue of its disk
        return disk.name, (disk / "queue/rotational").read_text().strip() == "1"
    return "", False


def _may_start_processes() -> bool:
    """Only in a notebook or console: in a script without a main guard, new processes would run the script again."""
    return not main_is_script() and not multiprocessing.current_process().daemon


def _time_headers(paths: list[str]) -> tuple[list[Header], float, float]:
    """Headers, and the median wall and CPU time of one file: neither a pause nor an import counts."""
    headers, walls, cpus = [], [], []
    for path in paths:
        wall, cpu = time.perf_counter(), time.thread_time()
        headers.append(read_header(path))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)
    return headers, statistics.median(walls), max(statistics.median(cpus), 1e-6)


def _read_batches(paths: list[str], readers: Readers, batch_size: int, progress: bool) -> list[Header]:
    """Headers by batches; the files of a batch that killed its process are read again one by one."""
    batches, failures = [paths[at : at + batch_size] for at in range(0, len(paths), batch_size)], {}
    try:
        found = map_items(
            _read_batch, batches, engine=readers.engine, num_workers=readers.n_workers, key=itemgetter(0),
            progress=progress, description="image headers", unit=f" x {batch_size} files",
        )  # fmt: skip
    except ItemErrors as failed:
        found, failures = failed.results, failed.failures
    headers: list[Header] = []
    for batch, read in zip(batches, found, strict=True):
        if read is None and len(batch) == 1:
            read = [Header(error=failures[batch[0]])]
        headers += read or _read_batches(batch, readers, batch_size=1, progress=False)
    return headers


def _read_batch(paths: list[str]) -> list[Header]:
    return [read_header(path) for path in paths]


# `{stem}_{width:04d}x{height:04d}_{model}.npz`. Other names in .npz state no size: text-encoder outputs
# (`{stem}_te_outputs.npz`, `{stem}_flux_te.npz`, ...) and the oldest caches, which are `{stem}.npz`.
_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")
_PIXELS = r"(\d{4}|[1-9]\d{4,8})"
_NAME = re.compile(rf"(.+)_{_PIXELS}x{_PIXELS}_(?:{'|'.join(_MODELS)})\.npz", re.ASCII | re.DOTALL)


def parse_cache_name(name: str) -> tuple[str, int, int] | None:
    """(stem, width, height) from the name of a cache, or None if it states no size.

    The size is that in the image's header, not the training bucket's, and before EXIF rotation. The stem is the image's
    name without its suffix. `0000x0000`, which marks an unreadable image, is not a size, nor is a side of more than
    `MAX_SIDE`.

    Source: `get_latents_npz_path` in kohya-ss/sd-scripts. Taught in: notebooks/10_image_sizes.ipynb
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    stem, width, height = match.groups()
    size = int(width), int(height)
    return (stem, *size) if min(size) > 0 else None


def sizes_from_caches(images: list[str], caches: list[str]) -> dict[str, Size | None]:
    """Sizes that the caches of one folder state for the images beside them.

    A cache belongs to the image with exactly its stem. None marks an image whose caches disagree. A cache that could
    belong to several images is ignored: `a.jpg` and `a.png` have the same stem, and `a_0512x0512_sd.npz` may also be a
    cache of the oldest kind, of an `a_0512x0512_sd.png`.

    Args:
        images: File names.
        caches: File names that end in `.npz`.

    Returns:
        Image -> (width, height) or None. Images without a cache are absent.
    """
    if not caches:
        return {}
    by_stem: dict[str, str | None] = {}
    sizes: dict[str, Size | None] = {}
    for image in images:
        stem = image.rpartition(".")[0]
        by_stem[stem] = None if stem in by_stem else image  # None: several images share the stem
    for cache in caches:
        parsed = parse_cache_name(cache)
        named = by_stem.get(parsed[0]) if parsed else None
        if parsed is None or named is None or cache.removesuffix(".npz") in by_stem:
            continue
        if sizes.setdefault(named, parsed[1:]) != parsed[1:]:
            sizes[named] = None
    return sizes


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
        raise ArgumentError(f"{path} is not JSON ({error}): repair or remove it") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ArgumentError(f"{path} is not a table of images: repair or remove it")
    return table


def _valid_size(entry: dict[str, Any]) -> Size | None:
    """The resolution of an entry, if valid. (In Python True is an int; it is not a width.)"""
    resolution = entry.get("resolution")
    if not isinstance(resolution, list) or [type(pixels) for pixels in resolution] != [int, int]:
        return None
    return tuple(resolution) if min(resolution) > 0 and max(resolution) <= MAX_SIDE else None


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
        raise MissingFileError(f"{root} is not a folder: give the folder that holds the images")
    table = _list_images(root, recursive, caches, checked_suffixes(ignore))
    if not table.paths:
        raise MissingFileError(f"{root} holds no image ({', '.join(_SUFFIXES)})")
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
