"""Measure how well a shuffle buffer shuffles."""

from tempfile import gettempdir
from types import SimpleNamespace

import numpy as np

from labkit.core import ScratchFolder
from labkit.data.shards.read import read_shards
from labkit.data.shards.write import write_shards


def shuffle_quality(n_samples: int, shuffle: int, *, initial: int = 100, n_shards: int = 1, seed: int = 0) -> float:
    """How much of the input's order is left in the output of `read_shards(..., shuffle=shuffle)`.

    Shards of `n_samples` numbered samples are written to a temporary folder and read.

    Args:
        n_samples: Samples in all.
        shuffle: Size of the buffer.
        initial: Samples in it before it gives its first.
        n_shards: One shows the buffer alone; with more, the order of shards is shuffled too.
        seed: Seed of the order.

    Returns:
        Spearman's rank correlation of input and output positions: 1 is the order itself, random access is near 0.

    Taught in: notebooks/08b_shard_order.ipynb
    """
    from scipy.stats import spearmanr

    numbers = {f"all/{number:09d}.png": str(number).encode() for number in range(n_samples)}
    store = SimpleNamespace(keys=lambda: list(numbers), read=numbers.__getitem__)
    with ScratchFolder(gettempdir()) as folder:
        max_count = -(-n_samples // n_shards)
        root = write_shards(store, folder, max_count=max_count, engine="threads", progress=False)
        dataset = read_shards(root, shuffle=shuffle, shuffle_initial=initial, seed=seed)
        order = [int(sample["png"]) for sample in dataset.samples()]
    return float(spearmanr(np.arange(n_samples), order).statistic)
