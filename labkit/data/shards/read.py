"""Read WebDataset shards: each sample once per epoch, for any number of ranks and workers."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from labkit.data.shards.cache import ShardCache
from labkit.data.shards.dataset import ShardDataset
from labkit.data.shards.listing import ShardList
from labkit.data.shards.orders import Orders


def read_shards(
    urls: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    decoder: str = "turbojpeg",
    transform: Callable[[Tensor], Any] | None = None,
    shuffle: int = 0,
    shuffle_initial: int = 100,
    seed: int = 0,
    samples_per_rank: int | None = None,
    on_error: str = "raise",
    verify: bool = False,
    storage_options: dict[str, Any] | None = None,
    reads_in_flight: int | None = None,
    cache: ShardCache | None = None,
) -> ShardDataset:
    """Images and labels of WebDataset shards, as a data set for torch's `DataLoader`.

    Ranks (`torchrun`'s, or `torch.distributed`'s) and their workers share the shards: every sample comes exactly once
    per epoch. Ranks may have unequally many, and with DistributedDataParallel one would wait for another for ever: set
    `samples_per_rank`, or wrap the loop in `torch.distributed.algorithms.join.Join`.

    Args:
        urls: A folder that `write_shards` filled, or its URL; or one shard, or a list; braces stand for several
            (`http://host/shard-{000000..000015}.tar`). Paths, `http(s)://`, `s3://`, others by fsspec.
        decoder: One of `labkit.DECODERS`.
        transform: Called with the uint8 (3, H, W) tensor. Generators other than torch's need a `worker_init_fn`.
        shuffle: Above 0, each epoch has an order of shards of its own, and a buffer of so many samples mixes them.
        shuffle_initial: Samples in that buffer before it gives its first. The default is WebDataset's.
        seed: The same (seed, epoch) gives the same order, for as many ranks and workers. Each pass is the next epoch,
            unless `set_epoch` is called. With several ranks, it must be.
        samples_per_rank: Of each epoch; the next goes on where it ended. Without a manifest, samples are counted first.
        on_error: `"raise"` or `"skip"`, as in `ImageDataset`.
        verify: Compare each shard's SHA-256 with the manifest's, when its end is reached.
        storage_options: Passed to fsspec, for object storage; its configuration and the environment fill in.
        reads_in_flight: Requests at a time per process, each for 4 MiB, of which `reads_in_flight + 1` are in memory.
        cache: Keeps remote shards in a local folder.

    Returns: A `ShardDataset` of `(image, label)`: image uint8 (3, H, W) RGB, label an int. It can resume in mid-epoch,
        with other ranks and workers, too: `dataset.load_state_dict(loader_state)`, then make the new loader over it.

    Raises:
        FileNotFoundError: no such shard or folder, or `write_shards` has not finished it.
        ValueError: no shard, a command (`pipe:`), an unknown option, or `verify` without a manifest.

    Taught in: notebooks/08b_shard_order.ipynb
    """
    shards = ShardList.find(urls, verify=verify, storage_options=storage_options or {})
    shards = replace(shards, reads_in_flight=reads_in_flight, cache=cache)
    orders = Orders(shards, shuffle, shuffle_initial, seed, samples_per_rank)
    return ShardDataset(orders, decoder, transform, on_error)
