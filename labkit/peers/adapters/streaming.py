"""mosaicml-streaming: shards of its MDS format."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.peers.adapters.torchvision import decode_bytes, fast_settings, tensor_transform
from labkit.peers.peer import JPEG_PACKED, Peer, Work, labelled_photos, prepare_once


def _prepare(work: Work) -> Path:
    from streaming import MDSWriter

    def build(folder: Path) -> None:
        # Bytes, not "jpeg", which is decoded by PIL.
        with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}) as writer:
            for path, label in labelled_photos(work):
                writer.write({"image": path.read_bytes(), "label": label})

    return prepare_once(work, "streaming", build)


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Photos(StreamingDataset):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(decode_bytes(sample["image"])), sample["label"]

    transform = tensor_transform(work)
    clean_stale_shared_memory()  # what a run that was killed left would be an error
    dataset = Photos(local=str(_prepare(work)), shuffle=True, shuffle_seed=work.seed, batch_size=work.batch_size)
    return StreamingDataLoader(dataset, **fast_settings(work))


PEERS_HERE = (
    Peer(
        name="mosaicml-streaming",
        source=JPEG_PACKED,
        antialias=True,
        install="python -m pip install mosaicml-streaming",
        modules=("streaming",),
        loader=_loader,
        prepare=_prepare,
        note="MDS shards with the files' own bytes; torchvision decodes and transforms",
    ),
)
