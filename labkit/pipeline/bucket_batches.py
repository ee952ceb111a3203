"""How the images of buckets become batches, and how ranks share these evenly."""

from itertools import cycle, islice

import numpy as np


def cut_batches(numbers: np.ndarray, order: np.ndarray, batch_size: int, remainder: str) -> list[np.ndarray]:
    """Batches bucket by bucket.

    Args:
        numbers: Of each image's bucket, int64 (N,).
        order: In which images of a bucket follow each other, int64 (N,).
        batch_size, remainder: As for `BucketBatchSampler`.
    """
    order = order[np.argsort(numbers[order], kind="stable")]
    groups = np.split(order, np.cumsum(np.bincount(numbers))[:-1])
    return [batch for group in groups for batch in _cut(group, batch_size, remainder)]


def _cut(group: np.ndarray, batch_size: int, remainder: str) -> list[np.ndarray]:
    if remainder == "drop":
        group = group[: len(group) // batch_size * batch_size]
    elif remainder == "fill":
        group = np.resize(group, -(-len(group) // batch_size) * batch_size)  # NumPy repeats them from the first on
    return [group[at : at + batch_size] for at in range(0, len(group), batch_size)]


def even_out(batches: list[np.ndarray], world_size: int, remainder: str) -> list[np.ndarray]:
    """A multiple of `world_size` batches: the last are dropped, the first repeated, or the largest halved.

    Raises:
        ValueError: with `"keep"`, there are fewer images than batches are needed.
    """
    if remainder == "drop":
        return batches[: len(batches) // world_size * world_size]
    n_missing = -len(batches) % world_size
    if remainder == "fill":
        return batches + list(islice(cycle(batches), n_missing))
    batches, lengths = list(batches), np.array([len(batch) for batch in batches])
    check_halving(int(lengths.sum()), len(batches), world_size)
    for _ in range(n_missing):
        place = int(lengths.argmax())
        whole, half = batches[place], -(-int(lengths[place]) // 2)
        batches[place : place + 1] = [whole[:half], whole[half:]]
        lengths = np.insert(lengths, place + 1, lengths[place] - half)
        lengths[place] = half
    return batches


def check_halving(n_images: int, n_batches: int, world_size: int) -> None:
    """Raise ValueError where halving cannot give each rank as many batches: there are too few images."""
    if n_images < n_batches + -n_batches % world_size:
        raise ValueError(
            f'remainder="keep" cannot give {world_size} ranks equally many batches: {n_images} images make {n_batches} '
            'batches, and too few can be halved. Use another number of ranks, or remainder="drop" or "fill"'
        )
