"""Decode and resize images once, into one file of raw pixels.

    python data_scripts/make_pixels.py photos/imagenet imagenet.pixels
    python data_scripts/make_pixels.py train.tar train-320.pixels --short-side 320
    python data_scripts/make_pixels.py s3://bucket/train train.pixels --engine ray --address auto

A rerun makes only what is missing. `labkit.PixelStore("imagenet.pixels")` reads the file.
"""

from pathlib import Path
from typing import Annotated

from labkit.app.commands import Argument, Option
from labkit.app.scripts import Address, Engine, Ignore, NumWorkers, Source, command
from labkit.data.pixels import PixelStore
from labkit.data.remote import open_store


@command
def main(
    source: Source,
    path: Annotated[Path, Argument(help="File to write.")],
    short_side: Annotated[int, Option(help="Pixels of the shorter side; smaller images are kept.")] = 256,
    decoder: Annotated[str, Option(help="One of labkit.DECODERS.")] = "turbojpeg",
    ignore: Ignore = (),
    engine: Engine = "threads",
    address: Address = None,
    num_workers: NumWorkers = None,
) -> str:
    """Write the pixels of all images of SOURCE to PATH."""
    options = {"engine": engine, "num_workers": num_workers, "address": address}
    store = PixelStore.build(open_store(source, ignore=ignore), path, short_side=short_side, decoder=decoder, **options)
    return f"{path}: {len(store)} images, {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
