"""Decide which image goes into which shard, before the first byte is written."""

import hashlib
import tarfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labkit.core import progress_bar
from labkit.data.labels import labels_of
from labkit.data.shards.layout import Sample, member_names, sample_bytes
from labkit.data.stores import HasSizes, Store


class Plan(NamedTuple):
    """The samples of each shard by its file name. `digest` is the SHA-256 of names, sizes and labels."""

    shards: dict[str, list[Sample]]
    classes: list[str]
    digest: str


def make_plan(
    store: Store, max_count: int, max_bytes: int, seed: int | None, classes: Sequence[str] | None, progress: bool
) -> Plan:
    """The plan for a store, from its keys and sizes."""
    samples, classes = _list_samples(store, classes, progress)
    if seed is not None:
        samples = [samples[position] for position in np.random.default_rng(seed).permutation(len(samples))]
    parts = _split_into_shards(samples, max_count, max_bytes)
    shards = {f"shard-{number:06d}.tar": part for number, part in enumerate(parts)}
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.member}\0{sample.n_bytes}\0{sample.label}\0".encode(errors="surrogateescape"))
    return Plan(shards, classes, digest.hexdigest())


def _list_samples(store: Store, classes: Sequence[str] | None, progress: bool) -> tuple[list[Sample], list[str]]:
    keys = list(store.keys())
    classes, labels = labels_of(keys, classes, source=store)
    if isinstance(store, HasSizes):
        sizes = store.sizes().tolist()
    else:
        sizes = [len(store.read(key)) for key in progress_bar(keys, show=progress, desc="sizes", unit="image")]
    columns = zip(keys, member_names(keys), sizes, labels.tolist(), strict=True)
    return [Sample(*column) for column in columns], classes


def _split_into_shards(samples: list[Sample], max_count: int, max_bytes: int) -> list[list[Sample]]:
    """Consecutive parts, as full as the limits allow; an image larger than the limit has a shard of its own."""
    parts: list[list[Sample]] = []
    bytes_left = 0
    capacity = max_bytes // tarfile.RECORDSIZE * tarfile.RECORDSIZE - 2 * tarfile.BLOCKSIZE  # without the end mark
    for sample in samples:
        if not parts or len(parts[-1]) == max_count or sample_bytes(sample) > bytes_left:
            parts.append([])
            bytes_left = capacity
        parts[-1].append(sample)
        bytes_left -= sample_bytes(sample)
    return parts
