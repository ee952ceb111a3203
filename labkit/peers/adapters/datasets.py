"""Hugging Face datasets: an Arrow table over the folder.

Source: https://huggingface.co/docs/datasets/image_process (`with_transform`), and, for the DataLoader,
https://huggingface.co/docs/datasets/use_with_pytorch.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import DataLoader

from labkit.peers.adapters.torchvision import decode_file, fast_settings, tensor_transform
from labkit.peers.peer import Work, pip_peer


def _open_table(work: Work) -> Any:
    import datasets

    datasets.disable_progress_bars()
    cache = str(work.scratch / "datasets")
    table = datasets.load_dataset("imagefolder", data_dir=str(work.root), split="train", cache_dir=cache)
    return table.cast_column("image", datasets.Image(decode=False))  # else PIL decodes each image


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    transform = tensor_transform(work)

    def load(rows: dict[str, list]) -> dict[str, list]:
        images = [transform(decode_file(image["path"])) for image in rows["image"]]
        return {"image": images, "label": rows["label"]}

    table = _open_table(work).with_transform(load)
    return DataLoader(table, shuffle=True, collate_fn=_collate, **fast_settings(work))


def _collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([sample["image"] for sample in samples]), torch.tensor([sample["label"] for sample in samples])


PEERS_HERE = (
    pip_peer(
        "Hugging Face datasets",
        "datasets",
        loader=_loader,
        decoder="torchvision",
        prepare=_open_table,
        note="an Arrow table of paths and labels; torchvision decodes and transforms, since its own decoder is PIL",
    ),
)
