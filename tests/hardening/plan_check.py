"""Is a plan right? Rates that `lk.plan` predicts from parts measured apart, beside rates measured whole.

    python -m tests.hardening.plan_check --rounds 5 --record tests/hardening/records/plan_check.csv

Parts: the core time of an image on one thread (`lk.loader_costs`); the time of one request at 0 ms, and its core time
on both sides, since the server runs on the same cores. Wholes: one and two threads over photos, small JPEGs and
prepared pixels; two processes at a time, as two ranks; a server that answers 0, 5 and 50 ms late, with 1 to 64 requests
in flight. Rounds go through all cells, every second one backwards.
"""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import typer
from PIL import Image

import labkit as lk
from labkit.core import write_atomic
from tests.hardening.far import timed
from tests.hardening.tables import RECORDS

LATENCIES_MS, IN_FLIGHT = (0, 5, 50), (1, 4, 16, 64)
_BATCH, _REPEATS, _SETTLING = 32, 1000, 256
_AT_A_TIME = 8
_NEAR = 0.15


class Cell(NamedTuple):
    """A whole: `rate` measures it in so many seconds, `plan` holds what `lk.plan` is given."""

    name: str
    rate: Callable[[float], float]
    plan: dict[str, Any]


def images_of(source: Any, num_threads: int, reads_in_flight: int | None = None) -> Iterator[int]:
    sampler = list(range(len(source.keys() if callable(source.keys) else source.keys))) * _REPEATS
    loader = lk.BatchLoader(
        source, batch_size=_BATCH, sampler=sampler, num_threads=num_threads, reads_in_flight=reads_in_flight,
        prefetch_factor=4, pin_memory=False,
    )  # fmt: skip
    return (len(labels) for _, labels in loader)


def rate_of(make: Callable[[], Any], num_threads: int, reads_in_flight: int | None, seconds: float) -> float:
    images = images_of(make(), num_threads, reads_in_flight)
    run = timed(images, seconds, _SETTLING if reads_in_flight != 1 else _BATCH)
    images.close()
    return run.n_images / run.seconds


def rate_of_ranks(make: Callable[[], Any], seconds: float) -> float:
    """Two processes at a time, one thread each."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return sum(pool.starmap(rate_of, [(make, 1, None, seconds)] * 2, chunksize=1))


class Request(NamedTuple):
    """What one costs: milliseconds from its start to its end, and of core time on both sides."""

    ms: float
    cpu_ms: float


def time_request(url: str, n_requests: int) -> Request:
    """One at a time for the milliseconds; for the core time several, since threads that meet cost more of it."""
    store, servers = lk.HttpStore(url, num_connections=_AT_A_TIME), psutil.Process().children(recursive=True)
    keys = [store.keys()[number % len(store.keys())] for number in range(n_requests)]

    def cpu_s() -> float:
        return time.process_time() + sum(sum(server.cpu_times()[:2]) for server in servers)

    store.read(keys[0])
    start = time.perf_counter()
    for key in keys[: n_requests // 4]:
        store.read(key)
    each_s = (time.perf_counter() - start) / (n_requests // 4)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        cpu = cpu_s()
        deque(pool.map(store.read, keys), maxlen=0)
        return Request(1e3 * each_s, 1e3 * (cpu_s() - cpu) / n_requests)


def time_requests(urls: dict[int, str], n_requests: int) -> dict[int, Request]:
    """Of each server. With no wait between them, requests find every thread awake: a loader's do not, as it decodes
    between them, so those at 0 ms are taken to cost the core time of the next.
    """
    requests = {latency_ms: time_request(url, n_requests) for latency_ms, url in urls.items()}
    return requests | {0: requests[0]._replace(cpu_ms=requests[LATENCIES_MS[1]].cpu_ms)}


def make_cells(sources: dict[str, Callable[[], Any]], urls: dict[int, str], costs: lk.LoaderCosts, requests: dict):
    for data, make in sources.items():
        inputs = {name: costs.by_data[data].get(name) for name in ("cpu_ms_per_image", "gil_us_per_image")}
        inputs = {name: estimate.value for name, estimate in inputs.items() if estimate is not None}
        for n_threads in (1, lk.usable_cores()):
            slowed = {} if n_threads > 1 else {"slowdown": 1}
            whole = partial(rate_of, make, n_threads, None)
            yield Cell(f"{data}, threads: {n_threads}", whole, {"cores_per_node": n_threads, **inputs, **slowed})
        whole = partial(rate_of_ranks, make)
        yield Cell(f"{data}, ranks: 2", whole, {"n_gpus": 2, "cores_per_node": 2, **inputs})
    for latency_ms, url in urls.items():
        request = requests[latency_ms]
        both_ms = costs.by_data["photos"]["cpu_ms_per_image"].value + request.cpu_ms
        for count in IN_FLIGHT:
            rates = {"latency_ms": request.ms, "mb_per_s_per_request": 1e9}
            inputs = {"storage": lk.Storage("server", rates), "requests_in_flight_per_gpu": count, "batches_ahead": 100}
            inputs |= {"cores_per_node": lk.usable_cores(), "cpu_ms_per_image": both_ms}
            make = partial(lk.HttpStore, url, num_connections=count)
            whole = partial(rate_of, make, lk.usable_cores(), count)
            yield Cell(f"photos over HTTP, {latency_ms} ms, in flight: {count}", whole, inputs)


def predict(inputs: dict[str, Any]) -> tuple[float, float, float]:
    """Images/s, median and 95 % interval, for GPUs that are never the limit and leave the cores alone."""
    return lk.plan(1e6, step_cores_per_gpu=0, **{"storage": "memory", **inputs}).value("images_per_s")


def prepare(root: Path, n_photos: int) -> dict[str, Callable[[], Any]]:
    store = lk.FolderStore(lk.make_photos(root / "photos", n_photos))
    pixels = lk.PixelStore.build(store, root / "pixels")
    for number, key in enumerate(pixels.keys):
        path = root / "small" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.pixels(number)).save(path, quality=90)
    np.sum([len(store.read(key)) for key in store.keys()])  # noqa: SIM118 - into memory
    return {
        "photos": partial(lk.FolderStore, root / "photos"),
        "photos at 256": partial(lk.FolderStore, root / "small"),
        "pixels at 256": partial(lk.PixelStore, root / "pixels"),
    }


def summarize_cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Median and range of what was measured, and of measured over predicted."""
    table = rows.groupby("cell", sort=False)["measured"].agg(["median", "min", "max"])
    table = table.set_axis(["measured", "measured_low", "measured_high"], axis=1)
    table = table.join(rows.groupby("cell")[["predicted", "predicted_low", "predicted_high"]].first()).round(1)
    table["ratio"] = (table["measured"] / table["predicted"]).round(3)
    return table.assign(is_near=(table["ratio"] - 1).abs() <= _NEAR).reset_index()


def run(rounds: int = 5, photos: int = 192, seconds: float = 2.0, record: Path = RECORDS / "plan_check.csv") -> None:
    """Measure all cells in rounds, and record them beside what was predicted."""
    rows = []
    with lk.ScratchFolder() as root, ExitStack() as stack:
        sources = prepare(root, photos)
        urls = {ms: stack.enter_context(lk.serve_folder(root / "photos", latency_ms=ms)) for ms in LATENCIES_MS}
        costs = lk.loader_costs(sources["photos"](), rounds=7)
        requests = time_requests(urls, 4 * photos)
        print(costs, requests, flush=True)
        cells = list(make_cells(sources, urls, costs, requests))
        for number in range(rounds):
            for cell in cells[:: -1 if number % 2 else 1]:
                value, low, high = predict(cell.plan)
                row = {"cell": cell.name, "measured": cell.rate(seconds), "predicted": value, "predicted_low": low}
                rows.append({**row, "predicted_high": high})
                print(time.strftime("%H:%M:%S"), number, *row.values(), flush=True)
    table = summarize_cells(pd.DataFrame(rows))
    write_atomic(record, table.to_csv(index=False).encode())
    print(table.to_string(index=False))
    print(f"{table['is_near'].sum()} of {len(table)} cells within 15 %")


if __name__ == "__main__":
    typer.run(run)
