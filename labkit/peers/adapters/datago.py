"""datago: Rust threads that read and decode a folder, and hand over one image at a time.

Source: https://github.com/Photoroom/datago (README, "Local files").
"""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from labkit.peers.adapters.torchvision import tensor_transform
from labkit.peers.peer import Work, labeled_photos, pip_peer


def _loader(work: Work) -> Iterator[tuple]:
    transform, labels = tensor_transform(work), {str(path): label for path, label in labeled_photos(work)}
    samples = _read_samples(work, len(labels))
    while batch := list(islice(samples, work.batch_size)):
        images = [transform(torch.from_numpy(sample.image.to_numpy_array()).permute(2, 0, 1)) for sample in batch]
        yield torch.stack(images), torch.tensor([labels[json.loads(sample.id)] for sample in batch])


def _read_samples(work: Work, n_photos: int) -> Iterator[Any]:
    from datago import DatagoClient

    client = DatagoClient(json.dumps({
        "source_type": "file",
        "source_config": {"root_path": str(work.root), "random_sampling": True},
        "limit": n_photos,
        "samples_buffer_size": 2 * work.batch_size,
    }))  # fmt: skip
    try:
        while (sample := client.get_sample()) is not None:
            yield sample
    finally:
        client.stop()


PEERS_HERE = (
    pip_peer(
        "datago",
        loader=_loader,
        published="plots in its README, against torch and WebDataset: of whole images, which here are "
        "cropped and stacked in Python",
        note="Rust threads read and decode; torchvision crops and resizes in the main process",
    ),
)
