"""Hugging Face datasets: an Arrow table over the folder."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from labkit.peers.adapters.torchvision import decode_file, fast_settings, tensor_transform
from labkit.peers.peer import JPEG_FILES, Peer, Work


def _table(work: Work) -> Any:
    import datasets

    datasets.disable_progress_bars()
    cache = str(work.scratch / "datasets")
    table = datasets.load_dataset("imagefolder", data_dir=str(work.root), split="train", cache_dir=cache)
    return table.cast_column("image", datasets.Image(decode=False))  # else each is decoded by PIL


def _prepare(work: Work) -> None:
    _table(work)


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    from torch.utils.data import DataLoader

    transform = tensor_transform(work)

    def load(rows: dict[str, list]) -> dict[str, list]:
        images = [transform(decode_file(image["path"])) for image in rows["image"]]
        return {"image": images, "label": rows["label"]}

    return DataLoader(
        _table(work).with_transform(load), shuffle=True, collate_fn=_collate, **fast_settings(work)
    )  # fmt: skip


def _collate(samples: list[dict[str, Any]]) -> tuple[Any, Any]:
    import torch

    return torch.stack([sample["image"] for sample in samples]), torch.tensor([sample["label"] for sample in samples])


PEERS_HERE = (
    Peer(
        name="Hugging Face datasets",
        source=JPEG_FILES,
        antialias=True,
        install="python -m pip install datasets",
        modules=("datasets",),
        loader=_loader,
        prepare=_prepare,
        note="an Arrow table of paths and labels; torchvision decodes and transforms, since its own decoding is PIL's",
    ),
)
