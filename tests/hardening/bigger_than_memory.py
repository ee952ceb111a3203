"""More images than the page cache holds: what each format reads and loads, and what order, read-ahead and hints change.

    python -m tests.hardening.bigger_than_memory --record tests/hardening/records/bigger_than_memory.csv

Each way has a process of its own, in a memory group of `--limit-mb`, and begins with nothing of its set cached: an
epoch, and for reading another one. Each round takes the ways in another order. `disk` reads the tar around the page
cache; `read` gets bytes and drops them; `load` makes batches of random crops of 224. What came from the disk is the
kernel's count. This needs Linux with control groups of version 1, root, and room on the disk for six sets.
"""

import math
import mmap
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import typer
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import labkit as lk
from labkit.core import ScratchFolder, write_atomic
from labkit.measure import tree_usage
from tests.hardening.big_sets import Sets, make_sets
from tests.hardening.memory_group import MemoryGroup
from tests.hardening.tables import RECORDS

_AHEAD = 16  # images that are asked for before they are read
_BUFFER = 500  # samples that shards are shuffled in
_LIMIT_S = {"disk": 3, "read": 6, "load": 2}  # of an epoch; the second one needs all of the first
_WAY = ["what", "format", "order", "hint", "workers", "epoch"]


class Way(NamedTuple):
    """What is measured: `epoch(sets, order, hint, workers, number)` gives (images, bytes asked for) as they come."""

    what: str
    format: str
    order: str
    hint: str
    workers: int
    epoch: Callable[[Sets, str, str, int, int], Iterator[tuple[int, int]]]


def indices(order: str, count: int, number: int) -> list[int]:
    shuffled = np.random.default_rng(number).permutation(count)
    return (shuffled if order == "random" else np.arange(count)).tolist()


def disk_epoch(sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    size = 1 << 17 if order == "random" else 1 << 20
    block = mmap.mmap(-1, size)
    file = os.open(sets.root / "set.tar", os.O_RDONLY | os.O_DIRECT)
    for index in indices(order, os.fstat(file).st_size // size, number):
        yield 1, os.preadv(file, [block], index * size)
    os.close(file)


def folder_epoch(sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    store = sets.folder
    keys = store.keys()
    for index in indices(order, len(keys), number):
        yield 1, len(store.read(keys[index]))


def tar_epoch(sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    store = sets.tar
    keys, places = store.keys(), list(zip(store.offsets().tolist(), store.sizes().tolist(), strict=True))
    store.read(keys[0])
    file = store._blob._file().descriptor  # type: ignore[attr-defined]  # hints belong to an open file
    if "RANDOM" in hint:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    if "SEQUENTIAL" in hint:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    chosen = indices(order, len(keys), number)
    for position, index in enumerate(chosen):
        if "WILLNEED" in hint:
            for later in chosen[position + _AHEAD : position + _AHEAD + 1]:
                os.posix_fadvise(file, *places[later], os.POSIX_FADV_WILLNEED)
        yield 1, len(store.read(keys[index]))


def shards_epoch(sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    shards = lk.read_shards(sets.root / "shards", shuffle=_BUFFER if order == "random" else 0)
    shards.set_epoch(number)
    for sample in shards.samples():
        yield 1, len(sample["jpg"])


def opened_pixels(sets: Sets, hint: str) -> lk.PixelStore:
    """The pixels, with labkit's own hints or without."""
    pixels = sets.pixels
    if hint != "labkit's":
        pixels._disk_reads.go_on = lambda n_images: False  # type: ignore[method-assign]
    if hint == "RANDOM":
        pixels._view().madvise(mmap.MADV_RANDOM)
    return pixels


def pixels_epoch(sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    pixels = opened_pixels(sets, hint)
    for index in indices(order, len(pixels), number):
        yield 1, pixels[index][0].nbytes


def load_epoch(form: str, sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    store = opened_pixels(sets, hint) if form == "pixels" else getattr(sets, form)
    loader = lk.BatchLoader(store, shuffle=order == "random", num_threads=workers, seed=number,
                            reads_in_flight=_AHEAD if "in flight" in hint else None)  # fmt: skip
    yield from batches(loader)


def load_shards(sets: Sets, order: str, hint: str, workers: int, number: int) -> Iterator[tuple[int, int]]:
    crop = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
    shards = lk.read_shards(sets.root / "shards", shuffle=_BUFFER, transform=crop)
    yield from batches(DataLoader(shards, 64, num_workers=workers))


def batches(loader: Iterable) -> Iterator[tuple[int, int]]:
    for images, _ in loader:
        yield len(images), 0


def ways() -> list[Way]:
    both = ("sequential", "random")
    kernel, random_hint = "none", ("random", "RANDOM")
    found = [Way("disk", "tar", order, kernel, 1, disk_epoch) for order in both]
    found += [Way("read", "folder", order, kernel, 1, folder_epoch) for order in both]
    tar_hints = [*((order, kernel) for order in both), ("sequential", "SEQUENTIAL"), ("sequential", "RANDOM"),
                 random_hint, ("random", "WILLNEED"), ("random", "RANDOM WILLNEED")]  # fmt: skip
    found += [Way("read", "tar", order, hint, 1, tar_epoch) for order, hint in tar_hints]
    found += [Way("read", "shards", order, kernel, 1, shards_epoch) for order in both]
    pixel_hints = [(order, hint) for hint in (kernel, "labkit's") for order in both]
    found += [Way("read", "pixels", order, hint, 1, pixels_epoch) for order, hint in [*pixel_hints, random_hint]]
    for workers in (1, 2):
        for form in ("folder", "tar"):
            hints = [*((order, kernel) for order in both), ("random", f"{_AHEAD} in flight")]
            found += [Way("load", form, *each, workers, partial(load_epoch, form)) for each in hints]
        found += [Way("load", "pixels", *each, workers, partial(load_epoch, "pixels")) for each in pixel_hints]
        found += [Way("load", "shards", "random", kernel, workers, load_shards)]
    return found


def time_epoch(way: Way, sets: Sets, number: int) -> dict[str, Any]:
    """Rates of one epoch, or of as much of it as its time allows; of loading, from the second batch on."""
    n_images = n_bytes = n_timed = 0
    before = tree_usage().read_bytes or 0
    start = time.perf_counter()
    epoch = way.epoch(sets, way.order, way.hint, way.workers, number)
    if way.what == "load":
        n_images, _ = next(epoch)
        start = time.perf_counter()
    is_whole = True
    for count, size in epoch:
        n_timed, n_bytes = n_timed + count, n_bytes + size
        if time.perf_counter() - start > _LIMIT_S[way.what]:
            is_whole = False
            break
    seconds = time.perf_counter() - start
    n_read = (tree_usage().read_bytes or 0) - before
    return {
        **dict(zip(_WAY, [*way[:5], number], strict=True)), "is_whole": is_whole,
        "images_per_s": n_timed / seconds, "mb_per_s": n_bytes / seconds / 1e6 if n_bytes else np.nan,
        "asked_kb": n_bytes / n_timed / 1e3 if n_bytes else np.nan, "read_kb": n_read / (n_images + n_timed) / 1e3,
    }  # fmt: skip


def time_epochs(way: Way, sets: Sets) -> list[dict[str, Any]]:
    first = time_epoch(way, sets, 1)
    return [first, time_epoch(way, sets, 2)] if way.what == "read" and first["is_whole"] else [first]


def cached_mb(sets: Sets, form: str) -> float:
    """Of the set, in the page cache, by mincore; of a folder, judged by a fiftieth of its files."""
    paths = sets.paths(form)
    return lk.resident_fraction(paths[:: 50 if form == "folder" else 1]) * sum(map(os.path.getsize, paths)) / 1e6


def run_way(way: Way, sets: Sets, limit_mb: int) -> list[dict[str, Any]]:
    paths = sets.paths(way.format)
    lk.evict(paths)
    if (left := cached_mb(sets, way.format)) > 1:
        raise RuntimeError(f"{left:.0f} MB of the {way.format} stay in the page cache: it is in use elsewhere")
    with MemoryGroup(limit_mb * 10**6) as group:
        rows = group.run(partial(time_epochs, way, sets), " ".join(map(str, way[:5])))
        return [row | {"cached_mb": cached_mb(sets, way.format)} for row in rows]


def lru_hit_share(cached: float) -> float:
    """Share of a shuffled epoch that the `cached` part of a set gives which was used last; 0 in a fixed order.

    Each epoch is a new permutation. Of an image read at p of one epoch and at q of the next, 1 - (1 - a)(1 - q) of the
    set is read in between, where a = 1 - p: a hit if that is below `cached`. The integral over p and q is
    c + (1 - c) ln(1 - c).
    """
    return cached + (1 - cached) * math.log1p(-cached)


def summarize_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians of the rounds, with the smallest and largest rate. `read_per_asked`: 1 if nothing is wasted or cached."""
    groups = rows.groupby(_WAY, sort=False)
    table = groups[["images_per_s", "mb_per_s", "asked_kb", "read_kb", "cached_mb"]].median()
    table.insert(1, "slowest", groups["images_per_s"].min())
    table.insert(2, "fastest", groups["images_per_s"].max())
    table["read_per_asked"] = (table["read_kb"] / table["asked_kb"]).round(2)
    table["rounds"] = groups.size()
    return table.round({name: 0 if name != "asked_kb" else 1 for name in table.columns[:7]}).reset_index()


def read_ahead_kb(folder: Path) -> int:
    """Of the disk below a folder."""
    device = os.stat(folder).st_dev
    return int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())


def run(
    record: Path = RECORDS / "bigger_than_memory.csv", folder: Path | None = None,
    set_mb: int = 2000, limit_mb: int = 500, rounds: int = 3, only: str = "",
) -> None:  # fmt: skip
    """Make the sets, run all ways (or `--only` those whose name holds it) in rounds, and record their medians."""
    rows = []
    with ScratchFolder(folder) as root:
        sets = make_sets(root, set_mb)
        chosen = [way for way in ways() if only in " ".join(map(str, way[:5]))]
        for number in range(rounds):
            random.Random(number).shuffle(chosen)
            for way in chosen:
                rows += run_way(way, sets, limit_mb)
            print(f"{time.strftime('%H:%M:%S')} round {number + 1} of {rounds}", flush=True)
        constants = {"set_mb": set_mb, "limit_mb": limit_mb, "read_ahead_kb": read_ahead_kb(root)}
    order = {tuple(map(str, way[:5])): position for position, way in enumerate(ways())}
    rows.sort(key=lambda row: (order[tuple(str(row[name]) for name in _WAY[:5])], row["epoch"]))
    table = summarize_rows(pd.DataFrame(rows)).assign(**constants)
    write_atomic(record, table.to_csv(index=False).encode())
    print(table.to_string(index=False))
    print(f"a cache of the last used would give {lru_hit_share(limit_mb / set_mb):.1%} of a shuffled second epoch")


if __name__ == "__main__":
    typer.run(run)
