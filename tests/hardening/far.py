"""What reading from far away costs: `BatchLoader` and `read_shards` with N requests in flight, over HTTP and S3.

    python -m tests.hardening.far --rounds 5 --record tests/hardening/records/far.csv

The same photos in the same order, from servers in processes of their own that answer at once or 50 ms late, and from a
warm folder. Runs at both latencies follow each other, and rounds go through all ways, every second one backwards.
`ratio` is a rate over that of the same client at 0 ms, beside it in time, with the range over rounds; `of_best` is the
median rate over the best median at 0 ms, whatever was in flight there. The client's CPU time per request is that per
image, less what images of the warm folder take.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import typer

import labkit as lk
from labkit.core import write_atomic
from tests.hardening.tables import RECORDS

LATENCIES_MS = (0, 50)
IN_FLIGHT = (None, 1, 4, 8, 16, 32, 64, 128)
_BATCH, _SHARD = 32, 48
_REPEATS = 1000
_KEYS = ["way", "place", "latency_ms", "reads_in_flight"]


class Place(NamedTuple):
    """Where photos and shards lie, and how long a request takes."""

    name: str
    latency_ms: float
    store: Callable[[], lk.Store]
    shards: Callable[[int | None], Iterable]


@contextmanager
def places(root: Path) -> Iterator[list[Place]]:
    """The warm folder, and servers over the same files."""
    with (
        lk.serve_folder(root) as near, lk.serve_folder(root, latency_ms=LATENCIES_MS[1]) as far,
        lk.serve_s3({"lab": root}) as near_s3, lk.serve_s3({"lab": root}, latency_ms=LATENCIES_MS[1]) as far_s3,
    ):  # fmt: skip

        def over_http(url: str) -> tuple:
            return partial(lk.HttpStore, url + "photos"), partial(samples, url + "shards", {})

        def over_s3(options: dict) -> tuple:
            return partial(lk.ObjectStore, "s3://lab/photos", **options), partial(samples, "s3://lab/shards", options)

        yield [
            Place("folder", 0, partial(lk.FolderStore, root / "photos"), partial(samples, root / "shards", {})),
            *(Place("HTTP", ms, *over_http(url)) for ms, url in zip(LATENCIES_MS, (near, far), strict=True)),
            *(Place("S3", ms, *over_s3(options)) for ms, options in zip(LATENCIES_MS, (near_s3, far_s3), strict=True)),
        ]


def samples(shards: str | Path, storage_options: dict, reads_in_flight: int | None) -> Iterable:
    """The same shards again and again."""
    once = lk.read_shards(shards, storage_options=storage_options).urls
    return lk.read_shards(once * _REPEATS, storage_options=storage_options, reads_in_flight=reads_in_flight)


class Timed(NamedTuple):
    n_images: int
    seconds: float
    cpu_s: float


def timed(images: Iterator[int], seconds: float, n_settling: int) -> Timed:
    """The steady rate: numbers of images as they come, in the middle of a long epoch."""
    while n_settling > 0:
        n_settling -= next(images)
    n_images, start, cpu = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - start) < seconds:
        n_images += next(images)
    return Timed(n_images, passed, time.process_time() - cpu)


def count_batches(place: Place, reads_in_flight: int | None) -> Iterator[int]:
    store = place.store()
    sampler = list(range(len(store.keys()))) * _REPEATS
    loader = lk.BatchLoader(
        store, batch_size=_BATCH, sampler=sampler, reads_in_flight=reads_in_flight, pin_memory=False
    )
    return (len(labels) for _, labels in loader)


def count_samples(place: Place, reads_in_flight: int | None) -> Iterator[int]:
    return (1 for _ in place.shards(reads_in_flight))


WAYS = {"BatchLoader": count_batches, "read_shards": count_samples}


def time_round(found: list[Place], number: int, in_flight: tuple, seconds: float) -> list[dict]:
    """One run of each way, every second round backwards."""
    runs = [(way, place, None) for way in WAYS for place in found if place.name == "folder"]
    for way, name, count in product(WAYS, ("HTTP", "S3"), in_flight):
        runs += [(way, place, count) for place in found if place.name == name]
    rows = []
    for way, place, count in runs[:: -1 if number % 2 else 1]:
        images = WAYS[way](place, count)
        run = timed(images, seconds, 4 * _BATCH + (count or 0))
        images.close()
        rows.append({
            "round": number, "way": way, "place": place.name, "latency_ms": place.latency_ms,
            "reads_in_flight": count or 0, "images_per_s": run.n_images / run.seconds,
            "cpu_us_per_image": 1e6 * run.cpu_s / run.n_images,
        })  # fmt: skip
        print(f"{time.strftime('%H:%M:%S')}", *rows[-1].values(), flush=True)
    return rows


def summarize_rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians over rounds, and the range of the ratios to the same client at 0 ms."""
    beside = rows[rows["latency_ms"] == 0].set_index(["round", "way", "place", "reads_in_flight"])["images_per_s"]
    folder = rows[rows["place"] == "folder"].set_index(["round", "way"])
    rows = rows.join(beside.rename("beside"), on=beside.index.names)
    rows = rows.join(folder["images_per_s"].rename("warm_folder"), on=["round", "way"])
    rows = rows.join(folder["cpu_us_per_image"].rename("folder_cpu_us"), on=["round", "way"])
    rows["ratio"] = rows["images_per_s"] / rows["beside"]
    rows["cpu_us_per_request"] = (rows["cpu_us_per_image"] - rows["folder_cpu_us"]).where(rows["way"] == "BatchLoader")
    by_way = rows.groupby(_KEYS)
    columns = ["images_per_s", "warm_folder", "cpu_us_per_image", "cpu_us_per_request"]
    table = by_way[columns].median().round().join(by_way["ratio"].agg(["median", "min", "max"]).round(3))
    table = table.rename(columns={"median": "ratio", "min": "ratio_low", "max": "ratio_high"})
    best = table.xs(0, level="latency_ms")["images_per_s"].groupby(["way", "place"]).max()
    table["of_best"] = (table["images_per_s"] / best).reorder_levels(table.index.names).round(3)
    table.insert(0, "rounds", by_way.size())
    return table.reset_index()


def run(
    rounds: int = 5, photos: int = 384, only: str = "", seconds: float = 3.0, record: Path = RECORDS / "far.csv"
) -> None:
    """Time all ways in rounds, and record the table. `--only 8,64`: so many requests in flight alone."""
    in_flight = tuple(int(count) or None for count in only.split(",")) if only else IN_FLIGHT
    with lk.ScratchFolder() as root:
        store = lk.FolderStore(lk.make_photos(root / "photos", photos))
        lk.write_shards(store, root / "shards", max_count=_SHARD)
        np.sum([len(store.read(key)) for key in store.keys()])  # noqa: SIM118 - into memory
        with places(root) as found:
            rows = [row for number in range(rounds) for row in time_round(found, number, in_flight, seconds)]
    table = summarize_rounds(pd.DataFrame(rows))
    write_atomic(record, table.to_csv(index=False).encode())
    print(table.to_string(index=False))


if __name__ == "__main__":
    typer.run(run)
