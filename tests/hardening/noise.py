"""How often is the verdict of `compare` wrong, on a quiet machine and beside CPU hogs?

    python -m tests.hardening.noise --repetitions 100 --record tests/hardening/records/noise.csv

Two equal variants, and two of which one does 6/5 of the other's work, are compared again and again: in this process and
in the workers of a DataLoader; alone, beside a hog on every core that never rests, and beside hogs that come and go.
The conditions take turns, so that other work of the machine affects all of them.
"""

import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import typer
from scipy import stats
from torch.utils.data import DataLoader, Dataset

import labkit as lk
from labkit.core import write_atomic
from labkit.measure import quiet_summary
from tests.hardening.tables import RECORDS

# Photos of a run, for about 0.05 s, or 0.1 s with workers.
_N_PHOTOS = {"loop": 4, "workers": 16}
_TIMES = {1.0: (5, 5), 1.2: (6, 5)}  # how much faster the second variant is -> decodings of each photo
_SPIN = {
    "steady": "while True: pass",
    "bursty": (
        "import random, time\n"
        "while True:\n"
        "    until = time.perf_counter() + random.expovariate(10)\n"
        "    while time.perf_counter() < until: pass\n"
        "    time.sleep(random.expovariate(10))\n"
    ),
}
_HOGS = ("none", *_SPIN)


class RepeatedDecoding(Dataset):
    """Decodes a photo several times for one item."""

    def __init__(self, photos: list[bytes], times: int):
        self._photos, self._times = photos, times

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> int:
        for _ in range(self._times):
            image = lk.decode(self._photos[index])
        return image.shape[0] // 3


@contextlib.contextmanager
def run_hogs(kind: str) -> Iterator[None]:
    """Keep every usable core busy, or none."""
    count = lk.usable_cores() if kind in _SPIN else 0
    hogs = [subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN[kind]]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def compare_once(photos: list[bytes], kind: str, hog: str, truth: float, seed: int) -> dict:
    """Run one comparison with defaults; returns its verdict and whether that is wrong."""
    sources = [RepeatedDecoding(photos[: _N_PHOTOS[kind]], times) for times in _TIMES[truth]]
    if kind == "workers":
        sources = [DataLoader(source, batch_size=4, num_workers=2, persistent_workers=True) for source in sources]
    variants = dict(zip(("base", "other"), [partial(iter, source) for source in sources], strict=True))
    with run_hogs(hog):
        frame = lk.compare(variants, baseline="base", seed=seed, progress=False)
    result = quiet_summary(frame).loc["other"]
    return {
        "kind": kind, "hog": hog, "truth": truth, **result[["speedup", "ci_low", "ci_high", "verdict"]],
        "wrong": result.verdict != "inconclusive" if truth == 1 else result.verdict == "slower",
        "unstable": "unstable" in result.note,
    }  # fmt: skip


def summarize_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rates by condition, in percent; `wrong_at_most` is the 95 % Clopper-Pearson bound of `wrong`."""
    rows = rows.assign(
        covered=100.0 * rows["truth"].between(rows["ci_low"], rows["ci_high"]),
        inconclusive=100.0 * (rows["verdict"] == "inconclusive"),
        unstable=100.0 * rows["unstable"],
        interval=rows["ci_high"] / rows["ci_low"],
    )
    rates = rows.groupby(["kind", "truth", "hog"]).agg(
        n=("wrong", "size"), wrong=("wrong", "sum"), inconclusive=("inconclusive", "mean"), covered=("covered", "mean"),
        speedup=("speedup", "median"), interval=("interval", "median"), unstable=("unstable", "mean"),
    )  # fmt: skip
    bound = stats.beta.ppf(0.95, rates["wrong"] + 1, rates["n"] - rates["wrong"])
    rates.insert(2, "wrong_at_most", 100 * bound)
    rates["wrong"] = 100 * rates["wrong"] / rates["n"]
    return rates.round(2).reset_index()


def run(record: Path = RECORDS / "noise.csv", repetitions: int = 100) -> None:
    """Compare all conditions again and again; the table is written after each round."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = lk.FolderStore(lk.make_photos(folder, max(_N_PHOTOS.values())))
        photos = list(map(store.read, store.keys()))
        for seed in range(repetitions):
            conditions = list(itertools.product(_N_PHOTOS, _HOGS, _TIMES))
            random.Random(seed).shuffle(conditions)
            rows += [compare_once(photos, *condition, seed) for condition in conditions]
            table = summarize_rows(pd.DataFrame(rows))
            write_atomic(record, table.to_csv(index=False).encode())
            print(f"{seed + 1} of {repetitions}", flush=True)
    print(table.to_string(index=False))


if __name__ == "__main__":
    typer.run(run)
