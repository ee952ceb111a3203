"""Is the memcpy limit a limit? Five runs of it, each beside libc's memcpy over memory of the same size.

    python -m tests.hardening.copying --record tests/hardening/records/copying.csv

Both copy batches of 64 uint8 images of 224 x 224 on all cores, in threads, between blocks larger than the caches, for
two seconds a run, in turn. libc's is called by ctypes, without NumPy: an independent figure.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import typer

import labkit as lk
from labkit.core import write_atomic
from tests.hardening.tables import RECORDS

_BATCH, _IMAGE_BYTES = 64, 224 * 224 * 3
_N_BLOCKS = 16


def libc_rate(seconds: float) -> float:
    """Images per second that libc copies, with one thread per core."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    size = _BATCH * _IMAGE_BYTES
    sources, targets = (bytearray(value * (_N_BLOCKS * size)) for value in (b"\1", b"\2"))
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in (targets, sources)]
    counts = [0] * lk.usable_cores()
    end = time.perf_counter() + seconds

    def copy(number: int) -> None:
        block = number
        while time.perf_counter() < end:
            offset = block % _N_BLOCKS * size
            memcpy(starts[0] + offset, starts[1] + offset, size)
            counts[number] += 1
            block += len(counts)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(len(counts))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) * _BATCH / (time.perf_counter() - begin)


def limit_rate(seconds: float) -> float:
    """Images per second of `lk.memcpy_limit`."""
    limit = lk.memcpy_limit(16 * _BATCH)
    list(limit)
    n_images, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        n_images += sum(limit)
    return n_images / (time.perf_counter() - begin)


def run(record: Path = RECORDS / "copying.csv", runs: int = 5, seconds: float = 2.0) -> None:
    """Time both in turn, and record each run."""
    ways: dict[str, Callable[[float], float]] = {"memcpy_limit": limit_rate, "libc memcpy": libc_rate}
    rows = [
        {"run": number, "way": name, "images_per_s": round(way(seconds)), "cores": lk.usable_cores()}
        for number in range(runs)
        for name, way in (ways.items() if number % 2 else reversed(ways.items()))
    ]
    found = pd.DataFrame(rows)
    found["gb_per_s"] = (found["images_per_s"] * _IMAGE_BYTES / 1e9).round(2)
    write_atomic(record, found.to_csv(index=False).encode())
    rates = found.groupby("way")["images_per_s"]
    print(found.to_string(index=False))
    print((rates.max() / rates.min() - 1).map("largest over smallest: +{:.0%}".format).to_string())


if __name__ == "__main__":
    typer.run(run)
