"""What `labkit watch` costs a training, from its start to its end: the same script with it and without it, in turns.

    python -m tests.hardening.watch_cost --pairs 12 --record tests/hardening/records/watch_cost.csv

The script times its own batches. A step is a fixed amount of work, and a worker keeps up with it: so whatever watching
takes, from the loop or from the processor, is in the loop's time.
"""

import os
import subprocess
import sys
import time
import timeit
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

from labkit.core import write_atomic
from labkit.measure import speedup_interval
from tests.hardening.tables import RECORDS
from tests.paths import REPO

N_BATCHES = {5: 600, 50: 80, 500: 12}  # by the milliseconds of a step
_N_SETTLING = 4


def train(step_ms: int, spins: int) -> None:
    """The script: prints the seconds per batch of its loop."""
    loader = DataLoader(TensorDataset(torch.zeros(4 * N_BATCHES[step_ms], 3, 64, 64)), 4, num_workers=1)
    model = torch.nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    times_s = []
    for (images,) in loader:
        times_s.append(time.perf_counter())
        optimizer.zero_grad()
        model(images).mean().backward()
        optimizer.step()
        spin(spins)
    print((times_s[-1] - times_s[_N_SETTLING]) / (len(times_s) - 1 - _N_SETTLING))


def spin(times: int) -> int:
    """Work for Python's interpreter, which a thread that watched would take from it."""
    return sum(number & 3 for number in range(times))


def spins_per_ms() -> int:
    return int(100_000 / (1e3 * min(timeit.repeat(lambda: spin(100_000), number=1, repeat=20))))


def timed(step_ms: int, spins: int, *, watched: bool) -> float:
    words = [sys.executable, *(["-m", "labkit", "watch"] if watched else []), "-m", "tests.hardening.watch_cost"]
    words += ["--step-ms", str(step_ms), "--spins", str(spins)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    return float(done.stdout)


def pair(step_ms: int, spins: int, number: int) -> dict[str, float]:
    """One run of each, every second time the watched one first."""
    order = (True, False) if number % 2 else (False, True)
    found = {watched: timed(step_ms, spins, watched=watched) for watched in order}
    return {"step_ms": step_ms, "plain_ms": 1e3 * found[False], "watched_ms": 1e3 * found[True]}


def summarize_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Watched over plain, by the length of the step, with the 95 % interval of paired ratios."""

    def row(found: pd.DataFrame) -> pd.Series:
        ratios = np.array(found["watched_ms"] / found["plain_ms"])
        low, high = speedup_interval(ratios)
        return pd.Series({
            "pairs": len(found), **found[["plain_ms", "watched_ms"]].median(),
            "ratio": np.median(ratios), "ratio_low": low, "ratio_high": high,
        })  # fmt: skip

    return rows.groupby("step_ms")[["plain_ms", "watched_ms"]].apply(row).round(4).reset_index()


def run(step_ms: int = 0, spins: int = 0, pairs: int = 12, record: Path = RECORDS / "watch_cost.csv") -> None:
    """Run the pairs; with `--step-ms`, be the script itself."""
    if step_ms:
        train(step_ms, spins)
        return
    rows, each_spins = [], spins_per_ms()
    for number in range(pairs):
        rows += [pair(each_ms, each_ms * each_spins, number) for each_ms in N_BATCHES]
        print(f"{time.strftime('%H:%M:%S')} {number + 1} of {pairs}", flush=True)
    table = summarize_pairs(pd.DataFrame(rows))
    write_atomic(record, table.to_csv(index=False).encode())
    print(table.to_string(index=False))


if __name__ == "__main__":
    typer.run(run)
