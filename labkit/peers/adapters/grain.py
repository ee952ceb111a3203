"""grain: Google's loader for JAX, which needs no JAX.

Source: https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html (a `MapDataset` that
shuffles, maps and batches, then `mp_prefetch` for worker processes).
"""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.peers.adapters.torchvision import decode_file, tensor_transform
from labkit.peers.peer import Work, labeled_photos, pip_peer

_epoch_numbers = count()


def _loader(work: Work) -> Iterator[tuple]:
    """An epoch of its own. The workers of an endless iterator would fill their queues while others are timed."""
    batches = iter(_make_dataset(work, next(_epoch_numbers)))
    try:
        for images, labels in batches:
            yield torch.from_numpy(images), torch.from_numpy(labels)
    finally:
        batches.close()


def _make_dataset(work: Work, epoch: int) -> Any:
    import grain

    load = partial(_load, tensor_transform(work))
    photos = grain.MapDataset.source(labeled_photos(work)).seed(work.seed + epoch).shuffle().random_map(load)
    batches = photos.batch(work.batch_size)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)  # in each worker; the defaults suit records
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=work.num_workers)
    return batches.to_iter_dataset(reading).mp_prefetch(workers)


def _load(transform: Any, photo: tuple[Path, int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    torch.manual_seed(int(rng.integers(2**63)))
    torch.set_num_threads(1)
    path, label = photo
    return transform(decode_file(str(path))).numpy(), label


PEERS_HERE = (
    pip_peer(
        "grain",
        loader=_loader,
        restarts=True,
        note="torchvision decodes and transforms in worker processes, which start again in each epoch: its CPU seconds "
        "are left out",
    ),
)
