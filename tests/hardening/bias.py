"""Does `compare` measure the steady rate? Its speed-ups against those of a stopwatch over a hundred batches and more.

    python -m tests.hardening.bias --tries 20 --record tests/hardening/records/bias.csv

Four pairs of loaders, over the lab's photos: `compare` times them with its defaults, over epochs of eight batches; the
stopwatch times long epochs, 120 batches of each, in the order A B B A, and leaves out those before the queue settles.
The fifth pair is new against kept workers: `epoch_time` against ten whole epochs by the clock. Both come in turn.
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from scipy import stats
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import labkit as lk
from labkit.core import write_atomic
from tests.hardening.tables import RECORDS

_N_BATCHES = 60  # of the stopwatch, in each of its two turns
_N_SETTLING = 10
_N_EPOCHS = 10


def make_pairs(store: lk.FolderStore) -> dict[str, tuple[Callable, Callable]]:
    """The pairs: functions of the order of photos that return loaders, the baseline first."""
    size = lk.scale().batch_size
    resize = lk.ImageDataset(store, decoder="pil", transform=v2.Resize((224, 224)))
    naive = lk.PILDataset(store, transform=lk.make_augment("light", "pil"))
    tensors, albumentations = (lk.ImageDataset(store, transform=lk.make_augment("light", name))
                               for name in ("v2", "albumentations"))  # fmt: skip
    crops = lk.ImageDataset(store, transform=lk.make_augment("light", "v2", part="geometry"))

    def plain(dataset: lk.ImageDataset, num_workers: int = 2) -> Callable:
        return lambda order: DataLoader(dataset, size, sampler=order, num_workers=num_workers)

    return {
        "2 workers over none": (plain(resize, 0), plain(resize)),
        "v2 on tensors over naive PIL": (plain(naive), plain(tensors)),
        "Albumentations over v2": (plain(tensors), plain(albumentations)),
        "BatchLoader over make_loader": (
            lambda order: lk.make_loader(crops, lk.LoaderConfig(size, 2), sampler=order),
            lambda order: lk.BatchLoader(store, batch_size=size, sampler=order),
        ),
    }


def watch(loader: Iterable) -> float:
    """Images per second over one long epoch, by the clock, once the queue has settled."""
    batches = iter(loader)
    for _ in range(_N_SETTLING):
        next(batches)
    begin = time.perf_counter()
    n_images = sum(len(next(batches)[0]) for _ in range(_N_BATCHES))
    seconds = time.perf_counter() - begin
    for _ in batches:
        pass
    return n_images / seconds


def watched_speedup(loaders: dict[str, Iterable]) -> float:
    """Of two loaders of long epochs."""
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for name in [*loaders, *reversed(loaders)]:
        rates[name].append(watch(loaders[name]))
    return stats.hmean(rates["other"]) / stats.hmean(rates["base"])


def compared_speedup(loaders: dict[str, Iterable], seed: int) -> float:
    """Of two loaders of short epochs."""
    variants = {name: partial(_same, one) for name, one in loaders.items()}
    frame = lk.compare(variants, baseline="base", seed=seed, progress=False)
    return lk.summarize(frame).loc["other", "speedup"]


def _same(loader: Iterable) -> Iterable:
    return loader


def speedups_of(makers: tuple[Callable, Callable], store: lk.FolderStore) -> dict[str, Callable[[int], float]]:
    """Both ways to time a pair, as functions of a seed. Loaders are made once, as workers and threads are kept."""
    n_passes = math.ceil((_N_BATCHES + _N_SETTLING) * lk.scale().batch_size / len(store))
    short, long = (
        {name: make(list(range(len(store))) * times) for name, make in zip(("base", "other"), makers, strict=True)}
        for times in (1, n_passes)
    )
    for loader in long.values():
        watch(loader)  # its warm-up; compare has its own
    return {"watched": lambda seed: watched_speedup(long), "compared": lambda seed: compared_speedup(short, seed)}


def epoch_loaders(store: lk.FolderStore) -> dict[str, Callable]:
    dataset = lk.ImageDataset(store, transform=v2.RandomResizedCrop(224, antialias=True))
    kept = DataLoader(dataset, lk.scale().batch_size, num_workers=2, persistent_workers=True)
    list(kept)  # its workers start once a training
    return {"base": lambda: DataLoader(dataset, lk.scale().batch_size, num_workers=2), "other": lambda: kept}


def watched_epochs(variants: dict[str, Callable]) -> float:
    seconds = dict.fromkeys(variants, 0.0)
    for name in [*variants, *reversed(variants)] * (_N_EPOCHS // 2):
        loader = variants[name]()
        begin = time.perf_counter()
        for _ in loader:
            pass
        seconds[name] += time.perf_counter() - begin
    return seconds["base"] / seconds["other"]


def compared_epochs(variants: dict[str, Callable], n_batches: int, seed: int) -> float:
    frame = lk.compare(variants, baseline="base", seed=seed, progress=False)
    seconds = lk.epoch_time(frame, n_batches)["epoch_s"]
    return seconds["base"] / seconds["other"]


def summarize_tries(rows: pd.DataFrame) -> pd.DataFrame:
    """Bias of `compare` against the stopwatch by pair, in percent, with its 95 % interval (Student's of logarithms)."""

    def row(found: pd.DataFrame) -> pd.Series:
        logs = np.log(found["compared"] / found["watched"])
        low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
        percent = 100 * np.expm1([logs.mean(), low, high])
        return pd.Series({
            "tries": len(logs), "watched": found["watched"].median(), "compared": found["compared"].median(),
            **dict(zip(("bias", "bias_low", "bias_high"), percent, strict=True)),
        })  # fmt: skip

    return rows.groupby("pair", sort=False)[["watched", "compared"]].apply(row).round(3).reset_index()


def run(record: Path = RECORDS / "bias.csv", tries: int = 20, only: str = "") -> None:
    """Time all pairs in both ways, again and again; the table is written after each round.

    `only` chooses the pairs whose names contain it.
    """
    store = lk.FolderStore(lk.make_photos(lk.photo_root("imagenet"), lk.scale().n_photos))
    epochs = epoch_loaders(store)
    n_batches = len(epochs["other"]())
    ways = {name: speedups_of(makers, store) for name, makers in make_pairs(store).items()}
    ways["kept workers over new, epochs"] = {
        "watched": lambda seed: watched_epochs(epochs),
        "compared": lambda seed: compared_epochs(epochs, n_batches, seed),
    }
    chosen = {pair: both for pair, both in ways.items() if only in pair}
    if not chosen:
        raise typer.BadParameter(f"no pair's name contains {only!r}: there are {', '.join(ways)}")
    rows = []
    for seed in range(tries):
        for pair, both in chosen.items():
            rows.append({"pair": pair, **{name: both[name](seed) for name in sorted(both, reverse=bool(seed % 2))}})
        if seed:
            write_atomic(record, summarize_tries(pd.DataFrame(rows)).to_csv(index=False).encode())
        print(f"{time.strftime('%H:%M:%S')} {seed + 1} of {tries}", flush=True)
    print(summarize_tries(pd.DataFrame(rows)).to_string(index=False))


if __name__ == "__main__":
    typer.run(run)
