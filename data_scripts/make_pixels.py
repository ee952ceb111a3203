"""Decode and resize images once, into one file of raw pixels.

    python data_scripts/make_pixels.py photos/imagenet imagenet.pixels
    python data_scripts/make_pixels.py train.tar train-320.pixels --short-side 320
    python data_scripts/make_pixels.py s3://bucket/train train.pixels --engine ray --address auto

A rerun makes only what is missing. `labkit.PixelStore("imagenet.pixels")` reads it.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from labkit import PixelStore
from labkit.core.stdio import print_utf8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    source: Annotated[str, typer.Argument(help="Root folder of the images, a tar, or a URL of either.")],
    path: Annotated[Path, typer.Argument(readable=False, help="File to write.")],
    short_side: Annotated[int, typer.Option(help="Pixels of the shorter side; smaller images stay as they are.")] = 256,
    decoder: Annotated[str, typer.Option(help="As in labkit.DECODERS.")] = "turbojpeg",
    engine: Annotated[str, typer.Option(help="threads, local (processes) or ray.")] = "threads",
    address: Annotated[str | None, typer.Option(help="Ray cluster to join, such as auto.")] = None,
    num_workers: Annotated[int | None, typer.Option(help="Default: the usable cores.", min=0)] = None,
) -> None:
    """Write the pixels of all images of SOURCE to PATH."""
    try:
        store = PixelStore.build(
            source, path, short_side=short_side, decoder=decoder, engine=engine, num_workers=num_workers,
            address=address,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError, ImportError) as error:  # ItemErrors is a RuntimeError
        typer.echo(f"make_pixels: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(os.fsencode(f"{path}: {len(store)} images, {path.stat().st_size} bytes"))  # names may be broken UTF-8


if __name__ == "__main__":
    print_utf8()
    app()
