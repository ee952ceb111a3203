"""mosaicml-streaming: shards in its MDS format.

Source: https://docs.mosaicml.com/projects/streaming/en/stable/getting_started/main_concepts.html.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from labkit.peers.adapters.torchvision import decode_bytes, fast_settings, tensor_transform
from labkit.peers.peer import JPEG_PACKED, Work, labeled_photos, pip_peer, prepare_once


def _prepare(work: Work) -> Path:
    return prepare_once(work, "streaming", partial(_write_shards, work))


def _write_shards(work: Work, folder: Path) -> None:
    from streaming import MDSWriter

    # "bytes", since PIL decodes what is stored as "jpeg".
    with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}) as writer:
        for path, label in labeled_photos(work):
            writer.write({"image": path.read_bytes(), "label": label})


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Photos(StreamingDataset):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(decode_bytes(sample["image"])), sample["label"]

    transform = tensor_transform(work)
    clean_stale_shared_memory()  # left behind by a killed run, it would be an error
    dataset = Photos(local=str(_prepare(work)), shuffle=True, shuffle_seed=work.seed, batch_size=work.batch_size)
    return StreamingDataLoader(dataset, **fast_settings(work))


PEERS_HERE = (
    pip_peer(
        "mosaicml-streaming",
        modules=("streaming",),
        source=JPEG_PACKED,
        loader=_loader,
        prepare=_prepare,
        published="its authors give none; litdata's give 2,800 to 5,200 images/s, "
        "https://lightning.ai/docs/litdata/benchmarks: ImageNet from S3, and more cores; here shards are local",
        note="MDS shards with the files' own bytes; torchvision decodes and transforms",
    ),
)
