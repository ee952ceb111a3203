"""Many headers, with as many readers as pay: the first files of the very call say how many that is."""

import math
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from labkit.core import usable_cores
from labkit.core.mapping import ItemErrors, map_items
from labkit.data.sizes.headers import Header, read_header

_PROBE = 64  # files that are read before the choice
_BATCH = 128  # files that a reader takes at once
_MOST_THREADS = 32
_STORAGE_S = 30e-6  # a shorter wait is none for storage: from memory, a header takes less
_SEEK_S = 2e-3  # a travelling head takes longer; a virtual disk that calls itself rotating does not
_START_S = 2.0  # processes have to save at least this, for each is a Python of its own; less than this needs no bar


class Readers(NamedTuple):
    """Who reads: `engine` as `map_items` has it, and how many at a time; `count` 1 is this thread."""

    engine: str
    count: int


def read_headers(paths: list[str], *, num_workers: int | None = None, progress: bool = True) -> list[Header]:
    """The header of each file, in their order; see `read_header`. Arguments as for `collect_sizes`."""
    left = paths[_PROBE:]
    if not left:
        return _read_batch(paths)
    headers, wall_s, cpu_s = _probe(paths[:_PROBE])
    cores = usable_cores() if _may_start_processes() else 1
    rotating = is_rotating(paths[0])
    readers = choose_readers(wall_s, cpu_s, len(left), rotating=rotating, cores=cores, num_workers=num_workers)
    return headers + _read(left, readers, _BATCH, progress and wall_s * len(left) > _START_S)


def choose_readers(
    wall_s: float, cpu_s: float, n_files: int, *, rotating: bool, cores: int, num_workers: int | None = None
) -> Readers:
    """How to read `n_files` more, from what one file took.

    - Files that wait for storage: threads, twice as many as would keep a core busy, since most of the work is the
      kernel's. But a disk whose head has to travel has one reader: several would send it back and forth.
    - Files that wait for nothing (the page cache has them): this thread alone, since threads would only take Python's
      lock from each other; or processes, one a core, where they save more than they cost to start.

    Args:
        wall_s: Time of one file.
        cpu_s: Of it, the time that a core worked.
        n_files: Files left to read.
        rotating: Whether the kernel calls their disk so.
        cores: That processes may use.
        num_workers: The caller's own count, where there is one; the kind is still chosen here.
    """
    wait_s = wall_s - cpu_s
    if wait_s > _STORAGE_S:
        one_head = rotating and wait_s > _SEEK_S
        fitting = 1 if one_head else min(_MOST_THREADS, 2 * math.ceil(wall_s / cpu_s))
        return Readers("threads", num_workers or fitting)
    pays = cpu_s * n_files * (1 - 1 / cores) > _START_S
    return Readers("local", num_workers or (cores if pays else 1))


def is_rotating(path: str, devices: Path = Path("/sys/dev/block")) -> bool:
    """Whether the kernel calls the disk under `path` a rotating one. Virtual machines often call any disk so."""
    try:
        device = os.stat(path).st_dev
        block = (devices / f"{os.major(device)}:{os.minor(device)}").resolve()
        queue = next(folder / "queue" for folder in (block, block.parent) if (folder / "queue").is_dir())
        return (queue / "rotational").read_text().strip() == "1"  # of a partition's disk, too
    except (OSError, StopIteration):  # no block device (tmpfs, network), or no Linux
        return False


def _may_start_processes() -> bool:
    """Unasked, only from a notebook or console: fresh processes run a script once more, as far as its main guard."""
    return not hasattr(sys.modules["__main__"], "__file__") and not multiprocessing.current_process().daemon


def _probe(paths: list[str]) -> tuple[list[Header], float, float]:
    """Headers, and of one file the time and a core's time: medians, so that neither a hiccup nor an import counts."""
    headers, walls, cpus = [], [], []
    for path in paths:
        wall, cpu = time.perf_counter(), time.thread_time()
        headers.append(read_header(path))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)
    return headers, statistics.median(walls), max(statistics.median(cpus), 1e-6)


def _read(paths: list[str], readers: Readers, batch: int, progress: bool) -> list[Header]:
    """Headers by batches; those of a batch that killed its process are read again file by file."""
    batches, failures = [paths[at : at + batch] for at in range(0, len(paths), batch)], {}
    try:
        found = map_items(
            _read_batch, batches, engine=readers.engine, num_workers=readers.count, key=_first, progress=progress,
            description="image headers", unit=f" x {batch} files",
        )  # fmt: skip
    except ItemErrors as failed:
        found, failures = failed.results, failed.failures
    pairs = zip(batches, found, strict=True)
    return [header for batch, read in pairs for header in read or _again(batch, readers, failures[_first(batch)])]


def _again(paths: list[str], readers: Readers, error: str) -> list[Header]:
    return [Header(error=error)] if len(paths) == 1 else _read(paths, readers, batch=1, progress=False)


def _read_batch(paths: list[str]) -> list[Header]:
    return [read_header(path) for path in paths]


def _first(paths: list[str]) -> str:
    return paths[0]
