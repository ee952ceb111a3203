"""Make pairs of a photo and its depth without a download, in the layout that Marigold trains from.

    python data_scripts/make_depth.py depth/motorcycle 128 --tar
    python data_scripts/make_depth.py /shared/motorcycle 10000 --engine ray --address auto

A rerun makes only what is missing.
"""

from typing import Annotated

from labkit.app.commands import Argument, Option
from labkit.app.scripts import Address, Engine, NumWorkers, Root, Seed, command
from labkit.data.samples import make_depth


@command
def main(
    root: Root,
    count: Annotated[int, Argument(help="Number of pairs.")],
    seed: Seed = 0,
    tar: Annotated[bool, Option(flag="--tar", help="Write the tar too.")] = False,
    engine: Engine = "local",
    num_workers: NumWorkers = None,
    address: Address = None,
) -> str:
    """Make COUNT pairs under ROOT/train, their list, and with --tar the tar."""
    folder = make_depth(root, count, seed=seed, tar=tar, engine=engine, num_workers=num_workers, address=address)
    return f"{folder}: {count} pairs"


if __name__ == "__main__":
    main()
