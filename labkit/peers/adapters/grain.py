"""grain: Google's loader for JAX, which needs no JAX.

Source: https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html (a `MapDataset` that
shuffles, maps and batches, then `mp_prefetch` for worker processes).
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.peers.adapters.torchvision import decode_file, tensor_transform
from labkit.peers.peer import Work, labelled_photos, pip_peer


class _Epochs:
    """Epochs of one endless iterator: grain starts new workers for each iterator."""

    def __init__(self, work: Work):
        self._n_batches = -(-len(labelled_photos(work)) // work.batch_size)
        self._batches = iter(_make_dataset(work))

    def __iter__(self) -> Iterator[tuple]:
        for images, labels in islice(self._batches, self._n_batches):
            yield torch.from_numpy(images), torch.from_numpy(labels)


def _make_dataset(work: Work) -> Any:
    import grain

    load = partial(_load, tensor_transform(work))
    photos = grain.MapDataset.source(labelled_photos(work)).seed(work.seed).shuffle().random_map(load)
    batches = photos.batch(work.batch_size).repeat(reseed_each_epoch=True)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)  # in each worker; the defaults suit records
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=work.num_workers)
    return batches.to_iter_dataset(reading).mp_prefetch(workers)


def _load(transform: Any, photo: tuple[Path, int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    torch.manual_seed(int(rng.integers(2**63)))
    torch.set_num_threads(1)
    path, label = photo
    return transform(decode_file(str(path))).numpy(), label


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    return _Epochs(work)


PEERS_HERE = (
    pip_peer(
        "grain",
        loader=_loader,
        note="torchvision decodes and transforms in worker processes, which go on with the next epoch behind the last "
        "one",
    ),
)
