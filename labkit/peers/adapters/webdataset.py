"""WebDataset: tar shards, read one after the other.

Source: https://github.com/webdataset/webdataset (README: shuffle, decode, map, batch in the workers, `WebLoader`).
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

from labkit.data.shards_write import write_shards
from labkit.data.stores import FolderStore
from labkit.peers.adapters.torchvision import decode_bytes, fast_settings, tensor_transform
from labkit.peers.peer import JPEG_PACKED, Work, pip_peer, prepare_once

_SHARDS_PER_WORKER = 4  # workers take whole shards: with few of them, one worker gets more to do than the others


def _prepare(work: Work) -> Path:
    store = FolderStore(work.root)
    max_count = max(1, len(store) // (_SHARDS_PER_WORKER * max(1, work.num_workers)))
    write = partial(write_shards, store, max_count=max_count, seed=work.seed, progress=False)
    return prepare_once(work, f"webdataset-{max_count}", write)


@lru_cache(maxsize=1)
def _loader(work: Work) -> Iterable:
    import webdataset as wds

    urls = sorted(str(shard) for shard in _prepare(work).glob("*.tar"))
    samples = (
        wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node)
        .shuffle(1000)
        .decode(wds.handle_extension("jpg", decode_bytes))
        .to_tuple("jpg", "cls")
        .map_tuple(tensor_transform(work), None)
        .batched(work.batch_size)
    )
    settings = {**fast_settings(work), "batch_size": None, "num_workers": min(work.num_workers, len(urls))}
    return wds.WebLoader(samples, **settings)


PEERS_HERE = (
    pip_peer(
        "WebDataset",
        "webdataset",
        source=JPEG_PACKED,
        loader=_loader,
        decoder="torchvision",
        prepare=_prepare,
        published="its authors give none; litdata's give 3,100 to 4,400 images/s, "
        "https://lightning.ai/docs/litdata/benchmarks: ImageNet from S3, and more cores; here shards are local",
        note="tar shards; torchvision decodes and transforms; each worker ends with a short batch of its own",
    ),
)
