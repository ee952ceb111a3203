"""The sizes of all images under a folder, from the cheapest source that states each.

Names of latent caches, as kohya-ss/sd-scripts writes them, state sizes without opening an image. The other images'
headers are read by as many threads as pay off: the time of the first files decides. What Pillow says of a header, or
refuses, is final, but for a JPEG or PNG that it refuses for its metadata alone.
"""

import io
import math
import os
import re
import statistics
import time
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base

from labkit.data.decode import IF_TRUSTED
from labkit.data.image_formats import (
    IMAGE_SUFFIXES,
    JPEG,
    OTHER_IMAGE_SUFFIXES,
    OTHER_PLUGINS,
    PLUGINS,
    PNG,
    format_of,
)
from labkit.data.orientation import has_late_metadata, open_without_metadata, pillow_orientation
from labkit.data.stores import checked_suffixes
from labkit.errors import MissingFileError
from labkit.util.arguments import require_int, require_local_path
from labkit.util.files import key_from_name, path_from_key, walk
from labkit.util.machine import disk_under
from labkit.util.parallel import map_items
from labkit.util.pictures import WidthHeight

_PROBE = 64  # files read before the choice
_BATCH_SIZE = 128  # files that a reader takes at once
_MAX_THREADS = 32
_STORAGE_WAIT_S = 30e-6  # a shorter wait is not storage: a header in memory takes less
_SEEK_WAIT_S = 2e-3  # a moving disk head takes longer; a virtual disk that reports rotation does not
_LONG_S = 2.0  # shorter work needs no bar


class Header(NamedTuple):
    """What a file's header states.

    width, height: Pixels as stored, not rotated. orientation: As `lk.decode` turns the image, 1 to 8; None where there
    is no size. error: Why there is none.
    """

    width: int | None = None
    height: int | None = None
    orientation: int | None = None
    error: str = ""


def read_header(path: str) -> Header:
    """Size and orientation of one image file, as Pillow states them. What Pillow refuses has an `error` and no size."""
    try:
        return _read_with_pillow(path)
    except UnidentifiedImageError:
        is_empty = os.path.getsize(path) == 0
        return Header(error="the file is empty" if is_empty else "no image format that this Pillow reads")
    except Image.DecompressionBombError as error:
        return Header(error=f"{str(error).rstrip('.')}: {IF_TRUSTED}")
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise errors of any kind
        return Header(error=getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")


def _read_with_pillow(path: str) -> Header:
    with open(path, "rb") as file, _open(file) as image:
        is_late = image.format in PNG.names_in_pillow and has_late_metadata(
            lambda n, at: os.pread(file.fileno(), n, at)
        )
        orientation = pillow_orientation(image, load=is_late)
        stored = getattr(image, "tag_v2", {})  # of a TIFF, whose `size` is that of the turned image
        width, height = map(stored.get, (Base.ImageWidth, Base.ImageLength), image.size)
        return Header(width, height, orientation)


def _open(file: io.BufferedReader) -> Image.Image:
    try:
        return Image.open(file, formats=_plugins())
    except (UnidentifiedImageError, ValueError, SyntaxError):
        file.seek(0)
        if format_of(file.peek()) in (JPEG, PNG) and (image := open_without_metadata(file.read())):
            return image
        raise


def _plugins() -> list[str]:
    """Names of those that are there: some come with other packages, such as pillow_jxl."""
    Image.init()
    return [name for name in (*PLUGINS, *OTHER_PLUGINS) if name in Image.OPEN]


def read_headers(paths: list[str], *, num_workers: int | None = None, progress: bool = True) -> list[Header]:
    """The header of each file, in their order; see `read_header`. Arguments as for `collect_sizes`."""
    headers, walls, cpus = [], [], []
    for path in paths[:_PROBE]:
        wall, cpu = time.perf_counter(), time.thread_time()
        headers.append(read_header(path))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)
    if not (remaining := paths[_PROBE:]):
        return headers
    # Medians: neither a pause nor an import counts.
    wall_s, cpu_s = statistics.median(walls), max(statistics.median(cpus), 1e-6)
    _, rotating = disk_under(paths[0])
    batches = map_items(
        lambda some: [read_header(path) for path in some],
        [remaining[at : at + _BATCH_SIZE] for at in range(0, len(remaining), _BATCH_SIZE)],
        engine="threads",
        num_workers=num_workers or choose_readers(wall_s, cpu_s, rotating=rotating),
        key=itemgetter(0),
        progress=progress and wall_s * len(remaining) > _LONG_S,
        description="image headers",
        unit=f" x {_BATCH_SIZE} files",
    )
    return headers + [header for batch in batches for header in batch]


def choose_readers(wall_s: float, cpu_s: float, *, rotating: bool) -> int:
    """How many threads read the headers of files.

    Where files wait for storage, twice as many as keep a core busy, since most of the work is the kernel's; but of a
    disk whose head must move, one: several would send the head back and forth. Files in the page cache get one as well:
    more would compete for Python's lock.

    Args:
        wall_s: Time of one file.
        cpu_s: CPU time of one file.
        rotating: Whether the kernel reports a rotating disk.
    """
    wait_s = wall_s - cpu_s
    if wait_s <= _STORAGE_WAIT_S or (rotating and wait_s > _SEEK_WAIT_S):
        return 1
    return min(_MAX_THREADS, 2 * math.ceil(wall_s / cpu_s))


# `{stem}_{width:04d}x{height:04d}_{model}.npz`. Other names in .npz state no size: text-encoder outputs
# (`{stem}_te_outputs.npz`, `{stem}_flux_te.npz`, ...) and the oldest caches, which are `{stem}.npz`.
_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")
_PIXELS = r"(\d{4}|[1-9]\d{4,8})"
_NAME = re.compile(rf"(.+)_{_PIXELS}x{_PIXELS}_(?:{'|'.join(_MODELS)})\.npz", re.ASCII | re.DOTALL)


def parse_cache_name(name: str) -> tuple[str, int, int] | None:
    """(stem, width, height) from the name of a cache, or None if it states no size.

    The size is that in the image's header, not the training bucket's, and before EXIF rotation. The stem is the image's
    name without its suffix. `0000x0000`, which marks an unreadable image, is not a size, nor is a side of more than
    nine digits.

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
        num_workers: Threads that read headers. Default: chosen by the cost of the first files.
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
