"""Extract tars, each into a folder of its own, completely or not at all.

    python data_scripts/extract_tars.py data/marigold hypersim_processed_train.tar
    python data_scripts/extract_tars.py tars ILSVRC2012_img_train.tar
    python data_scripts/extract_tars.py train tars/ILSVRC2012_img_train/*.tar

A rerun resumes, or leaves complete folders alone.
"""

from pathlib import Path
from typing import Annotated

from labkit.app.commands import Argument
from labkit.app.scripts import Address, Engine, NumWorkers, Root, command
from labkit.data.extract import extract_tars


@command
def main(
    root: Root,
    archives: Annotated[list[Path], Argument(help="Tars, plain or compressed with gzip, bzip2 or xz.")],
    num_workers: NumWorkers = None,
    engine: Engine = "local",
    address: Address = None,
) -> str:
    """Extract each of ARCHIVES into a folder of its own under ROOT."""
    folders = extract_tars(archives, root, engine=engine, num_workers=num_workers, address=address)
    return f"{root}: {len(folders)} folders, each complete"


if __name__ == "__main__":
    main()
