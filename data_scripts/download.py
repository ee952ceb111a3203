"""Download Imagenette (10 classes of ImageNet, 13,394 photos) into a folder.

    python data_scripts/download.py data
    python data_scripts/download.py data --size 320px --url https://mirror.example/imagenette2-320.tgz

Then `labkit.FolderStore("data/imagenette2-160/train")` reads it. A rerun resumes, or leaves a complete set alone.
"""

from typing import Annotated

import typer

from labkit.data.samples.imagenette import count_images, download_imagenette
from labkit.lab import Root, command


@command
def main(
    root: Root,
    size: Annotated[str, typer.Option(help="Short side of the photos: full, 320px or 160px.")] = "160px",
    url: Annotated[str | None, typer.Option(help="Mirror to download from; the md5 is still checked.")] = None,
) -> str:
    """Download Imagenette, verify it, and extract it into ROOT."""
    folder = download_imagenette(root, size=size, url=url)
    counts = count_images(root, size=size)
    return f"{folder}: " + ", ".join(f"{count} images in {split}" for split, count in counts.items())


if __name__ == "__main__":
    main()
