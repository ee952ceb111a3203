"""Make a set of photos without a download, from the photographs that scikit-image carries.

    python data_scripts/make_photos.py photos/imagenet 2048
    python data_scripts/make_photos.py photos/camera 128 --profile camera --seed 1 --num-threads 4
    python data_scripts/make_photos.py /shared/photos 1281167 --engine ray --address 10.0.0.1:6379

A rerun makes only what is missing.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from labkit import make_photos
from labkit.core.stdio import print_utf8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    root: Annotated[Path, typer.Argument(readable=False, help="Folder to fill; made if missing.")],
    count: Annotated[int, typer.Argument(help="Number of photos.")],
    profile: Annotated[str, typer.Option(help="imagenet (about 500 x 375) or camera (2000 x 1500).")] = "imagenet",
    seed: Annotated[int, typer.Option(help="Another seed, another set.")] = 0,
    num_threads: Annotated[int | None, typer.Option(help="Default: the usable cores.", min=1)] = None,
    engine: Annotated[str, typer.Option(help="threads, local (processes) or ray (more than one machine).")] = "threads",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster, with --engine ray: host:port.")] = None,
) -> None:
    """Make COUNT JPEG photos under ROOT, one folder a class."""
    try:
        options = {"num_threads": num_threads, "engine": engine, "address": address}
        folder = make_photos(root, count, profile=profile, seed=seed, **options)
    except (RuntimeError, ImportError, ValueError, OSError) as error:
        typer.echo(f"make_photos: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(os.fsencode(f"{folder}: {count} photos"))  # names may be broken UTF-8


if __name__ == "__main__":
    print_utf8()
    app()
