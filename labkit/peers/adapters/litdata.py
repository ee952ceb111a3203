"""litdata: its optimized chunks, with the JPEG bytes as they are.

Source: https://github.com/Lightning-AI/litData (README, "Optimize datasets" and "Stream optimized datasets").
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from labkit.peers.adapters.torchvision import fast_settings, tensor_transform
from labkit.peers.peer import JPEG_PACKED, Work, labeled_photos, pip_peer, prepare_once


def _prepare(work: Work) -> Path:
    return prepare_once(work, "litdata", partial(_write_chunks, work))


def _write_chunks(work: Work, folder: Path) -> None:
    import litdata

    options = {"chunk_bytes": "64MB", "num_workers": work.num_workers, "verbose": False}
    litdata.optimize(_read_sample, inputs=labeled_photos(work), output_dir=str(folder), **options)


def _read_sample(photo: tuple[Path, int]) -> dict[str, Any]:
    import litdata

    path, label = photo
    return {"image": litdata.Jpeg(path=str(path), max_quality=None), "label": label}  # with a limit it would re-encode


def _transform_sample(transform: Callable[[Any], Any], sample: dict[str, Any]) -> tuple[Any, int]:
    return transform(sample["image"]), sample["label"]


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    import litdata

    crop = partial(_transform_sample, tensor_transform(work))
    dataset = litdata.StreamingDataset(str(_prepare(work)), shuffle=True, seed=work.seed, transform=crop)
    return litdata.StreamingDataLoader(dataset, **fast_settings(work))


PEERS_HERE = (
    pip_peer(
        "litdata",
        source=JPEG_PACKED,
        loader=_loader,
        decoder="torchvision",
        prepare=_prepare,
        published="5,800 to 7,200 images/s, https://lightning.ai/docs/litdata/benchmarks: ImageNet from S3, and more "
        "cores; here chunks are local",
        note="chunks of 64 MB with the files' own bytes, which litdata itself decodes with torchvision",
    ),
)
