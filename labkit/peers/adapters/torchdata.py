"""torchdata: its StatefulDataLoader, which can resume, and its nodes, which need no DataLoader.

Source: https://meta-pytorch.org/data/beta/ (`StatefulDataLoader`, a drop-in replacement; "Migrating to torchdata.nodes
from torch.utils.data", whose `ParallelMapper` runs processes or threads).
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

from torch.utils.data import RandomSampler, default_collate

from labkit.peers.adapters.torchvision import decode_file, fast_settings, tensor_transform
from labkit.peers.peer import Work, pip_peer


def _photos(work: Work) -> Any:
    from torchvision.datasets import ImageFolder

    return ImageFolder(work.root, tensor_transform(work), loader=decode_file)


@lru_cache(maxsize=1)
def _load_stateful(work: Work) -> Iterable:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(_photos(work), shuffle=True, **fast_settings(work))


def _load_batch(photos: Any, indices: list[int]) -> Any:
    return default_collate([photos[index] for index in indices])


@lru_cache(maxsize=1)
def _load_by_nodes(work: Work) -> Iterable:
    from torchdata import nodes

    photos, num_workers = _photos(work), max(1, work.num_workers)
    node: Any = nodes.SamplerWrapper(RandomSampler(photos))
    node = nodes.Batcher(node, batch_size=work.batch_size, drop_last=False)
    node = nodes.ParallelMapper(node, partial(_load_batch, photos), num_workers, in_order=True, method="thread")
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2 * num_workers))


_torchdata_peer = partial(pip_peer, package="torchdata", multi_crop=True)
PEERS_HERE = (
    _torchdata_peer(
        "torchdata StatefulDataLoader",
        loader=_load_stateful,
        note="torchvision decodes and transforms in worker processes, whose state can be saved",
    ),
    _torchdata_peer(
        "torchdata nodes",
        loader=_load_by_nodes,
        note="torchvision decodes and transforms in threads, a batch in each; threads start again in each epoch",
    ),
)
