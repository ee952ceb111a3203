"""What reading from far away costs: `BatchLoader` and `read_shards` with N requests in flight, over HTTP and S3.

    python -m tests.hardening.far --rounds 5 --record tests/hardening/records/far.csv

The same photos in the same order, from a server in a process of its own that answers at once or 50 ms late, and from a
warm folder. Rounds go through all ways, every second one backwards. `rate_of_0_ms` is the best rate at 50 ms over the
best at 0 ms of the same round, client and server. The client's CPU time per request is that per image, less what the
warm folder's images take.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
    runs = [
        (way, place, count)
        for way in WAYS
        for place in found
        for count in ((None,) if place.name == "folder" else in_flight)
        if place.latency_ms == 0 or count is None or count > 1
    ]
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
    """Median and range over rounds; and the rate over the best of the same round at 0 ms."""
    keys = ["way", "place", "latency_ms", "reads_in_flight"]
    rows = rows.copy()
    best = rows[rows["latency_ms"] == 0].groupby(["round", "way", "place"])["images_per_s"].max().rename("best")
    folder = rows[rows["place"] == "folder"].set_index(["round", "way"])
    rows = rows.join(best, on=["round", "way", "place"])
    rows = rows.join(folder["images_per_s"].rename("folder_images_per_s"), on=["round", "way"])
    rows = rows.join(folder["cpu_us_per_image"].rename("folder_cpu_us"), on=["round", "way"])
    rows["rate_of_0_ms"] = rows["images_per_s"] / rows["best"]
    rows["cpu_us_per_request"] = (rows["cpu_us_per_image"] - rows["folder_cpu_us"]).where(rows["way"] == "BatchLoader")

    def row(of_one: pd.DataFrame) -> pd.Series:
        ratio, rate = of_one["rate_of_0_ms"], of_one["images_per_s"]
        return pd.Series({
            "rounds": len(of_one), "images_per_s": rate.median(), "slowest": rate.min(), "fastest": rate.max(),
            "warm_folder_images_per_s": of_one["folder_images_per_s"].median(),
            "rate_of_0_ms": ratio.median(), "ratio_low": ratio.min(), "ratio_high": ratio.max(),
            "cpu_us_per_image": of_one["cpu_us_per_image"].median(),
            "cpu_us_per_request": of_one["cpu_us_per_request"].median(),
        })  # fmt: skip

    columns = [*rows.columns.difference(keys)]
    table = rows.groupby(keys, sort=False)[columns].apply(row).reset_index()
    whole = [
        name for name in table if "images_per_s" in name or name.startswith("cpu") or name in ("slowest", "fastest")
    ]
    return table.round(dict.fromkeys(whole, 0)).round(3).sort_values(keys)


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
