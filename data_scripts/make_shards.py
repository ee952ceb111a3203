"""Pack images into WebDataset shards.

    python data_scripts/make_shards.py photos/imagenet shards/imagenet --seed 0
    python data_scripts/make_shards.py train.tar shards/train --max-count 5000 --max-mb 500
    python data_scripts/make_shards.py s3://bucket/train shards/train --engine ray --address auto

A rerun verifies the checksums of existing shards and makes only what is missing.
`labkit.read_shards("shards/imagenet")` reads them.
"""

from typing import Annotated

from labkit.app.commands import Option
from labkit.app.scripts import Address, Engine, Ignore, NumWorkers, Root, Source, command
from labkit.data.remote import open_store
from labkit.data.shards_write import write_shards


@command
def main(
    source: Source,
    root: Root,
    max_count: Annotated[int, Option(help="Maximum number of samples per shard.")] = 10_000,
    max_mb: Annotated[float, Option(help="Maximum size of a shard, in MB (1e6 bytes).")] = 256,
    seed: Annotated[int | None, Option(help="Shuffle once before writing. Default: the source's order.")] = None,
    ignore: Ignore = (),
    engine: Engine = "local",
    address: Address = None,
    num_workers: NumWorkers = None,
) -> str:
    """Pack the images of SOURCE into tars under ROOT."""
    options = {"seed": seed, "engine": engine, "address": address, "num_workers": num_workers}
    store = open_store(source, ignore=ignore)
    folder = write_shards(store, root, max_count=max_count, max_bytes=int(max_mb * 1e6), **options)
    n_shards = len(list(folder.glob("*.tar")))
    return f"{folder}: {n_shards} shard{'s' * (n_shards != 1)}"


if __name__ == "__main__":
    main()
