"""The sizes of all images under a folder, from the cheapest source that states each.

Names of latent caches, as kohya-ss/sd-scripts writes them, state sizes without opening an image. The other images'
headers are read with as many readers as pay off: the time of the first files decides.
"""

import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from labkit.data.decode import PixelLimit
from labkit.data.headers import read_header
from labkit.data.image_formats import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, Header
from labkit.data.stores import checked_suffixes
from labkit.errors import MissingFileError
from labkit.util.arguments import require_int, require_local_path
from labkit.util.files import key_from_name, path_from_key, walk
from labkit.util.machine import disk_under, main_is_script, usable_cores
from labkit.util.parallel import map_items
from labkit.util.pictures import WidthHeight

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
    headers, walls, cpus = [], [], []
    for path in paths[:_PROBE]:
        wall, cpu = time.perf_counter(), time.thread_time()
        headers.append(read_header(path))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)
    # Medians: neither a pause nor an import counts.
    wall_s, cpu_s = statistics.median(walls), max(statistics.median(cpus), 1e-6)
    # In a script without a main guard, new processes would run the script again: only a notebook or console starts any.
    cores = 1 if main_is_script() or multiprocessing.current_process().daemon else usable_cores()
    _, rotating = disk_under(paths[0])
    readers = choose_readers(wall_s, cpu_s, len(remaining), rotating=rotating, cores=cores, num_workers=num_workers)
    batches = map_items(
        partial(_read_batch, limit=PixelLimit()),
        [remaining[at : at + _BATCH_SIZE] for at in range(0, len(remaining), _BATCH_SIZE)],
        engine=readers.engine,
        num_workers=readers.n_workers,
        key=itemgetter(0),
        progress=progress and wall_s * len(remaining) > _START_S,
        description="image headers",
        unit=f" x {_BATCH_SIZE} files",
    )
    return headers + [header for batch in batches for header in batch]


def _read_batch(paths: list[str], limit: PixelLimit | None = None) -> list[Header]:
    """The headers, under the limit of pixels that came along."""
    return [read_header(path) for path in paths]


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


def sizes_from_caches(images: list[str], caches: list[str]) -> dict[str, WidthHeight | None]:
    """Sizes that the caches of one folder state for the images next to them.

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
    sizes: dict[str, WidthHeight | None] = {}
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


_SUFFIXES = (*IMAGE_SUFFIXES, *OTHER_IMAGE_SUFFIXES)


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

    A size comes from a latent cache of kohya-ss/sd-scripts next to the image (`{stem}_{width}x{height}_{model}.npz`);
    the image is then not opened. Its header is read if there is none, if they disagree, or if another image has the
    same stem. The age of a cache is not checked, which would cost what it saves: use `caches=False` to read every
    header.

    Args:
        root: The folder. Images are those of `FolderStore`, and those that it refuses since labkit does not decode
            them, such as AVIF, GIF and JPEG XL (`import pillow_jxl`), by their suffix.
        recursive: Include the folders below.
        caches: Trust the names of latent caches.
        ignore: Suffixes of files to leave out, as for `FolderStore`: with the same ones, rows and keys are the same.
        num_workers: Readers of headers. Default: chosen by the cost of the first files; processes only in a notebook
            or console. To use them in a script, give a number, under `if __name__ == "__main__":`.
        progress: Show a live bar while headers are read.

    Returns:
        One row per image, sorted by path (as `FolderStore.keys()` names it): width, height (Int64, as stored; NA if
        unreadable); source (`cache`, `header`, `unreadable`); exif_orientation (Int64, tag 274, 1 to 8, as
        `decode` turns the image; from 5 on, width and height are swapped when shown upright; 1 if there is none or if
        it is damaged, NA if no header was read); error (why it is unreadable, else empty). A folder that cannot be
        listed has a row, too.

    >>> sizes = lk.collect_sizes("photos", progress=False)
    >>> list(sizes.columns[:3])
    ['path', 'width', 'height']

    Raises:
        FileNotFoundError: `root` is not a folder, or holds no image.
        OSError: `root` cannot be listed.
        ValueError: `num_workers` below 1, or `ignore` names no suffixes.

    Source: kohya-ss/sd-scripts. Taught in: notebooks/10_image_sizes.ipynb
    """
    if num_workers is not None:
        num_workers = require_int("num_workers", num_workers)
    root = os.fspath(require_local_path("root", root))
    if not os.path.isdir(root):
        raise MissingFileError(f"{root} is not a folder: give the folder that holds the images")
    suffixes = tuple(set(_SUFFIXES) - set(checked_suffixes(ignore)))
    rows: list[list[Any]] = []
    for folder in walk(root, recursive=recursive):
        images = _ending(suffixes, folder.files)
        stated = sizes_from_caches(images, _ending((".npz",), folder.files)) if caches else {}
        for image in images:
            width, height = stated.get(image) or (None, None)
            source = "cache" if width else "header"
            rows.append([key_from_name(folder.prefix + image), width, height, source, None, ""])
        unreadable = dict.fromkeys(_ending(suffixes, folder.broken), "not a file, or a broken link")
        if folder.error:
            unreadable[""] = f"the folder cannot be listed: {folder.error.strerror}"
        for name, error in unreadable.items():
            rows.append([key_from_name(folder.prefix + name), None, None, "unreadable", None, error])
    if not rows:
        raise MissingFileError(f"{root} holds no image ({', '.join(_SUFFIXES)})")
    unknown = [row for row in rows if row[3] == "header"]
    files = [f"{root}/{path_from_key(row[0])}" for row in unknown]
    for row, header in zip(unknown, read_headers(files, num_workers=num_workers, progress=progress), strict=True):
        source = "unreadable" if header.error else "header"
        row[1:] = [header.width, header.height, source, header.orientation, header.error]
    rows.sort(key=itemgetter(0))
    names = ["path", "width", "height", "source", "exif_orientation", "error"]
    frame = pd.DataFrame(rows, columns=names, dtype=object)  # pandas' text type refuses file names that are not UTF-8
    for name in ("width", "height", "exif_orientation"):
        numbers = np.array([number or 0 for number in frame[name]], np.int64)
        frame[name] = pd.arrays.IntegerArray(numbers, numbers == 0)
    return frame


def _ending(suffixes: tuple[str, ...], names: list[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(suffixes)]
