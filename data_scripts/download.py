"""Download Imagenette (10 classes of ImageNet, 13,394 photos) into a folder.

    python data_scripts/download.py data
    python data_scripts/download.py data --size 320px --url https://mirror.example/imagenette2-320.tgz

Then `labkit.FolderStore("data/imagenette2-160/train")` reads it. A rerun resumes, or leaves a finished set alone.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from labkit.core.stdio import print_utf8
from labkit.data.samples.imagenette import count_images, download_imagenette

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    root: Annotated[Path, typer.Argument(readable=False, help="Folder to put the set in; made if missing.")],
    size: Annotated[str, typer.Option(help="Short side of the photos: full, 320px or 160px.")] = "160px",
    url: Annotated[str | None, typer.Option(help="Mirror to fetch the archive from; the md5 is still checked.")] = None,
) -> None:
    """Download Imagenette, check it, and put it in place whole."""
    try:
        folder = download_imagenette(root, size=size, url=url)
        counts = count_images(root, size=size)
    except (ValueError, OSError) as error:
        typer.echo(f"download: {error}", err=True)
        raise typer.Exit(2) from error
    said = f"{folder}: " + ", ".join(f"{count} images in {split}" for split, count in counts.items())
    typer.echo(os.fsencode(said))  # names may be broken UTF-8


if __name__ == "__main__":
    print_utf8()
    app()
