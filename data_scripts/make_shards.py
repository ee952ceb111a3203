"""Pack images into WebDataset shards.

    python data_scripts/make_shards.py photos/imagenet shards/imagenet --seed 0
    python data_scripts/make_shards.py train.tar shards/train --max-count 5000 --max-mb 500
    python data_scripts/make_shards.py s3://bucket/train shards/train --engine ray --address auto

A rerun checks the checksums of what is there and makes only what is missing. `labkit.read_shards("shards/imagenet")`
reads them.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from labkit import open_store, write_shards
from labkit.core.stdio import print_utf8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    source: Annotated[str, typer.Argument(help="A folder of images, a tar, or a URL of either.")],
    root: Annotated[Path, typer.Argument(readable=False, help="Folder to fill; made if missing.")],
    max_count: Annotated[int, typer.Option(help="Most samples in a shard.")] = 10_000,
    max_mb: Annotated[float, typer.Option(help="Largest size of a shard, in MB (1e6 bytes).")] = 256,
    seed: Annotated[int | None, typer.Option(help="Shuffle once before writing. Default: the source's order.")] = None,
    engine: Annotated[str, typer.Option(help="local, threads or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Ray cluster to join, such as auto.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Default: the usable cores.", min=0)] = None,
) -> None:
    """Pack the images of SOURCE into tars under ROOT."""
    try:
        folder = write_shards(
            open_store(source), root, max_count=max_count, max_bytes=int(max_mb * 1e6), seed=seed, engine=engine,
            address=address, num_workers=num_workers,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        typer.echo(f"make_shards: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(os.fsencode(f"{folder}: {len(list(folder.glob('*.tar')))} shards"))  # names may be broken UTF-8


if __name__ == "__main__":
    print_utf8()
    app()
