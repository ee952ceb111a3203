"""Which image goes to which shard, decided before the first byte is written."""

import hashlib
import tarfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labkit.core import progress_bar
from labkit.data.shards.layout import Sample, member_names, sample_bytes
from labkit.data.stores import Store


class PlannedShard(NamedTuple):
    """A shard to be written: its file name, and its samples in order."""

    name: str
    samples: list[Sample]


class Plan(NamedTuple):
    """All shards of a set; `classes` are the folder names that labels count, `digest` is that of names and sizes."""

    shards: list[PlannedShard]
    classes: list[str]
    digest: str


def make_plan(store: Store, max_count: int, max_bytes: int, seed: int | None, progress: bool) -> Plan:
    """The plan that follows from a store's keys and sizes."""
    samples, classes = _samples(store, progress)
    if seed is not None:
        samples = [samples[position] for position in np.random.default_rng(seed).permutation(len(samples))]
    shards = [
        PlannedShard(f"shard-{number:06d}.tar", part) for number, part in enumerate(_cut(samples, max_count, max_bytes))
    ]
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.member}\0{sample.n_bytes}\0{sample.label}\0".encode(errors="surrogateescape"))
    return Plan(shards, classes, digest.hexdigest())


def _samples(store: Store, progress: bool) -> tuple[list[Sample], list[str]]:
    from labkit.data.datasets import labels_of  # here, since it imports torch, which no writing process needs

    keys = list(store.keys())
    classes, labels = labels_of(keys)
    sizes = _sizes(store, keys, progress)
    columns = zip(keys, member_names(keys), sizes, labels.tolist(), strict=True)
    return [Sample(*column) for column in columns], classes


def _sizes(store: Store, keys: Sequence[str], progress: bool) -> list[int]:
    if hasattr(store, "sizes"):
        return store.sizes().tolist()
    return [len(store.read(key)) for key in progress_bar(keys, show=progress, desc="sizes", unit="image")]


def _cut(samples: list[Sample], max_count: int, max_bytes: int) -> list[list[Sample]]:
    """Consecutive parts, as full as the limits allow; an image larger than the limit has a shard for itself."""
    parts, room = [], 0
    all_room = max_bytes // tarfile.RECORDSIZE * tarfile.RECORDSIZE - 2 * tarfile.BLOCKSIZE  # what the end leaves
    for sample in samples:
        if not parts or len(parts[-1]) == max_count or sample_bytes(sample) > room:
            parts.append([])
            room = all_room
        parts[-1].append(sample)
        room -= sample_bytes(sample)
    return parts
