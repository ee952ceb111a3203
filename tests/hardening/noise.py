"""How often is `compare` wrong? Twins, two names of one loader, for real, and their noise replayed at known ratios.

    python -m tests.hardening.noise --repetitions 50 --replays 2000 --record tests/hardening/records/noise.csv

Loaders without workers, with two workers and with threads are compared with themselves, on a quiet machine and beside a
program that keeps one core busy. The conditions take turns, so that other work of the machine affects all of them. Then
`compare`'s rule for stopping is run again and again over the runs that were recorded: any stretch of them, in time's
order, is a pair of twins, and of a known ratio if one twin's rates are multiplied by it.
"""

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from scipy import stats
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import labkit as lk
from labkit.core import write_atomic
from labkit.measure import save_frame
from labkit.measure.intervals import speedup_interval, speedup_of, verdict_of
from labkit.measure.stopping import Stopping
from tests.hardening.tables import RECORDS

BESIDE = ("nothing", "a busy core")
RATIOS = (1.0, 1.05, 1.15, 1.5, 2.0)
_EQUAL = 5  # times as many replays of equal twins: what is counted there is rare
_PARTS_S = ["startup_s", "first_batch_s", "settle_s", "steady_s", "shutdown_s"]


def make_loaders(store: lk.FolderStore) -> dict[str, Callable]:
    """Functions that return the three loaders."""
    dataset = lk.ImageDataset(store, transform=v2.RandomResizedCrop(224, antialias=True))
    size = lk.scale().batch_size
    return {
        "no workers": lambda: DataLoader(dataset, size),
        "2 workers": lambda: DataLoader(dataset, size, num_workers=2),
        "threads": lambda: lk.BatchLoader(store, batch_size=size),
    }


@contextlib.contextmanager
def company(beside: str) -> Iterator[None]:
    """Keep one core busy, or none."""
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    hogs = [subprocess.Popen(command)] if beside != "nothing" else []
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def compare_twins(loader: Callable, seed: int) -> pd.DataFrame:
    """The measured runs of one comparison with defaults, in time's order, with their `seconds`."""
    frame = lk.compare({"base": loader, "other": loader}, baseline="base", seed=seed, progress=False)
    runs = frame[~frame["is_warmup"]].sort_values(["round", "order"])
    return runs.assign(seconds=runs[_PARTS_S].sum(axis=1))


def judge(ratios: np.ndarray, n_looks: int, truth: float) -> dict:
    """What `summarize` says of these ratios, and whether that is wrong."""
    low, high = speedup_interval(ratios, n_looks=n_looks)
    verdict = verdict_of(ratios, n_looks=n_looks)
    wrong = verdict != "inconclusive" if truth == 1 else verdict == "slower"
    return {"truth": truth, "n_rounds": len(ratios), "speedup": speedup_of(ratios), "ci_low": low, "ci_high": high,
            "verdict": verdict, "wrong": wrong}  # fmt: skip


def judge_twins(runs: pd.DataFrame) -> dict:
    """`judge` of a real comparison."""
    rates = runs.pivot(index="round", columns="variant", values="images_per_s")
    return judge((rates["other"] / rates["base"]).to_numpy(), int(runs["n_looks"].iloc[0]), 1.0)


def replay(seconds: np.ndarray, rates: np.ndarray, truth: float, rng: np.random.Generator) -> dict:
    """Compare twins by recorded runs, from anywhere on, the rates of one of them times `truth`."""
    scale, place, now = lk.scale(), int(rng.integers(len(rates))), 0.0
    stopping = Stopping(scale.rounds, 0.05, 2 * scale.budget_s, lambda: now)
    stopping.begin()
    rows: list[dict] = []
    ratios: list[float] = []
    order = ["base", "other"]
    while len(ratios) == 0 or stopping.next_round(rows, ["base", "other"], "base", len(ratios)):
        order = list(rng.permutation(order)) if len(ratios) % 2 == 0 else order[::-1]
        taken = {}
        for label in order:
            taken[label] = rates[place % len(rates)] * (truth if label == "other" else 1.0)
            now += seconds[place % len(rates)]
            place += 1
        rows += [{"variant": label, "round": len(ratios), "images_per_s": rate} for label, rate in taken.items()]
        ratios.append(taken["other"] / taken["base"])
    return judge(np.array(ratios), stopping.n_looks, truth)


def summarize_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rates by condition, in percent; `wrong_at_most` is the 95 % Clopper-Pearson bound of `wrong`.

    `half_width` is the median over comparisons, in percent; `n_wrong` is a count.
    """
    rows = rows.assign(
        covered=100.0 * rows["truth"].between(rows["ci_low"], rows["ci_high"]),
        found=100.0 * (rows["verdict"] != "inconclusive"),
        half_width=100 * np.expm1(np.log(rows["ci_high"] / rows["ci_low"]) / 2),
    )
    rates = rows.groupby(["how", "truth", "loader", "beside"], sort=False).agg(
        n=("wrong", "size"), n_wrong=("wrong", "sum"), found=("found", "mean"), covered=("covered", "mean"),
        speedup=("speedup", "median"), half_width=("half_width", "median"), n_rounds=("n_rounds", "mean"),
    )  # fmt: skip
    bound = stats.beta.ppf(0.95, rates["n_wrong"] + 1, rates["n"] - rates["n_wrong"])
    rates.insert(2, "wrong_at_most", 100 * bound)
    return rates.round(2).reset_index()


def run(
    record: Path = RECORDS / "noise.csv", repetitions: int = 50, replays: int = 2000, runs_csv: Path | None = None
) -> None:
    """Compare twins in all conditions again and again, then replay their noise.

    `replays` comparisons of each ratio, and five times as many of equal twins. `runs_csv` keeps the recorded runs.
    """
    store = lk.FolderStore(lk.make_photos(lk.photo_root("imagenet"), lk.scale().n_photos))
    conditions = [(name, beside) for name in make_loaders(store) for beside in BESIDE]
    runs, rows = [], []
    for seed in range(repetitions):
        for name, beside in random.Random(seed).sample(conditions, len(conditions)):
            with company(beside):
                twins = compare_twins(make_loaders(store)[name], seed)
            runs.append(twins.assign(loader=name, beside=beside, comparison=seed))
            rows.append({"how": "real", "loader": name, "beside": beside, **judge_twins(twins)})
        print(f"{time.strftime('%H:%M:%S')} {seed + 1} of {repetitions}", flush=True)
        write_atomic(record, summarize_rows(pd.DataFrame(rows)).to_csv(index=False).encode())
    recorded, rng = pd.concat(runs), np.random.default_rng(0)
    if runs_csv:
        save_frame(recorded, runs_csv)
    for (name, beside), some in recorded.groupby(["loader", "beside"], sort=False):
        seconds, rates = some["seconds"].to_numpy(), some["images_per_s"].to_numpy()
        for truth in RATIOS:
            n = -(-replays * (_EQUAL if truth == 1 else 1) // len(conditions))
            found = [replay(seconds, rates, truth, rng) for _ in range(n)]
            rows += [{"how": "replayed", "loader": name, "beside": beside, **one} for one in found]
    table = summarize_rows(pd.DataFrame(rows))
    write_atomic(record, table.to_csv(index=False).encode())
    print(table.to_string(index=False))


if __name__ == "__main__":
    typer.run(run)
