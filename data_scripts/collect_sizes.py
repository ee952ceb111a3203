"""Write the sizes of all images under a folder to a CSV file, without decoding one.

    python data_scripts/collect_sizes.py photos sizes.csv
    python data_scripts/collect_sizes.py photos sizes.csv --no-caches --num-workers 8
    python data_scripts/collect_sizes.py train sizes.csv --no-recursive --write-metadata-cache

What cannot be read has a row that says why. `--write-metadata-cache` also keeps the sizes where sd-scripts'
`cache_info` looks for them, beside the captions that are there.
"""

import os
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from labkit import collect_sizes
from labkit.core.atomic import write_atomic
from labkit.core.stdio import print_utf8
from labkit.data.sizes.sd_metadata import write_metadata_cache

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    root: Annotated[Path, typer.Argument(readable=False, help="Folder of images.")],
    table: Annotated[Path, typer.Argument(readable=False, help="CSV file to write.")],
    recursive: Annotated[bool, typer.Option(help="Look into the folders below, too.")] = True,
    caches: Annotated[bool, typer.Option(help="Believe names of latent caches and metadata_cache.json.")] = True,
    num_workers: Annotated[int | None, typer.Option(help="Readers of headers. Default: as measured.", min=1)] = None,
    write_cache: Annotated[bool, typer.Option("--write-metadata-cache", help="Write metadata_cache.json.")] = False,
) -> None:
    """Write a row for every image under ROOT: path, width, height, source, exif_orientation, error."""
    try:
        frame = collect_sizes(root, recursive=recursive, caches=caches, num_workers=num_workers)
        write_atomic(table, _csv(frame))
        if write_cache:
            write_metadata_cache(frame, root)
    except (ValueError, OSError) as error:
        typer.echo(f"collect_sizes: {error}", err=True)
        raise typer.Exit(2) from error
    counts = frame["source"].value_counts()
    said = f"{table}: {len(frame)} images, " + ", ".join(f"{n} {source}" for source, n in counts.items())
    typer.echo(os.fsencode(said))  # names may be broken UTF-8


def _csv(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogateescape")


if __name__ == "__main__":
    print_utf8()
    app()
