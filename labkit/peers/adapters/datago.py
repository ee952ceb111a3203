"""datago: Rust threads that read and decode a folder, and hand over one image at a time.

Source: https://github.com/Photoroom/datago (README, "Local files").
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.peers.adapters.torchvision import tensor_transform
from labkit.peers.peer import Work, labelled_photos, pip_peer


class _Epochs:
    def __init__(self, work: Work):
        self._work, self._transform = work, tensor_transform(work)
        self._labels = {str(path): label for path, label in labelled_photos(work)}

    def __iter__(self) -> Iterator[tuple]:
        images: list[Tensor] = []
        labels: list[int] = []
        for sample in self._samples():
            images.append(self._transform(torch.from_numpy(sample.image.to_numpy_array()).permute(2, 0, 1)))
            labels.append(self._labels[json.loads(sample.id)])
            if len(images) == self._work.batch_size:
                yield torch.stack(images), torch.tensor(labels)
                images, labels = [], []
        if images:
            yield torch.stack(images), torch.tensor(labels)

    def _samples(self) -> Iterator[Any]:
        from datago import DatagoClient

        client = DatagoClient(json.dumps({
            "source_type": "file",
            "source_config": {"root_path": str(self._work.root), "random_sampling": True},
            "limit": len(self._labels),
            "samples_buffer_size": 2 * self._work.batch_size,
        }))  # fmt: skip
        try:
            while (sample := client.get_sample()) is not None:
                yield sample
        finally:
            client.stop()


def _loader(work: Work) -> Iterable:
    return _Epochs(work)


PEERS_HERE = (
    pip_peer(
        "datago",
        loader=_loader,
        note="Rust threads read and decode; torchvision crops and resizes in the main process",
    ),
)
