"""Make a set of photos without a download, from the photographs that come with scikit-image.

    python data_scripts/make_photos.py photos/imagenet 2048
    python data_scripts/make_photos.py photos/camera 128 --profile camera --seed 1 --num-threads 4
    python data_scripts/make_photos.py /shared/photos 1281167 --engine ray --address 10.0.0.1:6379

A rerun makes only what is missing.
"""

from typing import Annotated

from labkit.app.commands import Argument, Option
from labkit.app.scripts import Address, Engine, Root, Seed, command
from labkit.data.samples import make_photos


@command
def main(
    root: Root,
    count: Annotated[int, Argument(help="Number of photos.")],
    profile: Annotated[str, Option(help="imagenet (about 500 x 375) or camera (2000 x 1500).")] = "imagenet",
    seed: Seed = 0,
    num_threads: Annotated[int | None, Option(help="Default: the usable cores.", least=1)] = None,
    engine: Engine = "threads",
    address: Address = None,
) -> str:
    """Make COUNT JPEG photos under ROOT, one folder per class."""
    options = {"num_threads": num_threads, "engine": engine, "address": address}
    return f"{make_photos(root, count, profile=profile, seed=seed, **options)}: {count} photos"


if __name__ == "__main__":
    main()
