"""litdata: its optimised chunks, with the JPEG bytes as they are."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.peers.adapters.torchvision import fast_settings, tensor_transform
from labkit.peers.peer import JPEG_PACKED, Peer, Work, labelled_photos, prepare_once


def _sample(photo: tuple[Path, int]) -> dict[str, Any]:
    import litdata

    path, label = photo
    return {"image": litdata.Jpeg(path=str(path), max_quality=None), "label": label}  # a limit would encode anew


def _prepare(work: Work) -> Path:
    import litdata

    def build(folder: Path) -> None:
        litdata.optimize(
            _sample, inputs=labelled_photos(work), output_dir=str(folder), chunk_bytes="64MB",
            num_workers=work.num_workers, verbose=False,
        )  # fmt: skip

    return prepare_once(work, "litdata", build)


class _Crop:
    """The transform of a sample."""

    def __init__(self, work: Work):
        self.transform = tensor_transform(work)

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, int]:
        return self.transform(sample["image"]), sample["label"]


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    import litdata

    dataset = litdata.StreamingDataset(str(_prepare(work)), shuffle=True, seed=work.seed, transform=_Crop(work))
    return litdata.StreamingDataLoader(dataset, **fast_settings(work))


PEERS_HERE = (
    Peer(
        name="litdata",
        source=JPEG_PACKED,
        antialias=True,
        install="python -m pip install litdata",
        modules=("litdata",),
        loader=_loader,
        prepare=_prepare,
        note="chunks of 64 MB with the files' own bytes, decoded by torchvision, as litdata does by itself",
    ),
)
