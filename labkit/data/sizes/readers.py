"""Many headers, with as many readers as pay off: the time of the first files decides."""

import math
import multiprocessing
import os
import statistics
import time
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from labkit.core import main_is_script, usable_cores
from labkit.core.mapping import ItemErrors, map_items
from labkit.data.sizes.headers import Header, read_header

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
