"""Extract tars, each into a folder of its own, completely or not at all.

    python data_scripts/extract_tars.py data/marigold hypersim_processed_train.tar --verify
    python data_scripts/extract_tars.py tars ILSVRC2012_img_train.tar
    python data_scripts/extract_tars.py train tars/ILSVRC2012_img_train/*.tar

A rerun resumes, or leaves complete folders alone; with --verify it compares them with their archives.
"""

from pathlib import Path
from typing import Annotated

import typer

from labkit.app.scripts import Address, Engine, NumWorkers, Root, command
from labkit.data.extract import extract_tars


@command
def main(
    root: Root,
    archives: Annotated[
        list[Path], typer.Argument(readable=False, help="Tars, plain or compressed with gzip, bzip2 or xz.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with the archives.")] = False,
    num_workers: NumWorkers = None,
    engine: Engine = "local",
    address: Address = None,
) -> str:
    """Extract each of ARCHIVES into a folder of its own under ROOT."""
    folders = extract_tars(archives, root, verify=verify, engine=engine, num_workers=num_workers, address=address)
    return f"{root}: {len(folders)} folders, each {'the same as its archive' if verify else 'complete'}"


if __name__ == "__main__":
    main()
