"""Write the sizes of all images under a folder to a CSV file, without decoding any of them.

    python data_scripts/collect_sizes.py photos sizes.csv
    python data_scripts/collect_sizes.py photos sizes.csv --no-caches --num-workers 8
    python data_scripts/collect_sizes.py train sizes.csv --no-recursive

An image that cannot be read gets a row with the reason. A table of an earlier run is replaced, and no other file.
"""

from pathlib import Path
from typing import Annotated

from labkit.app.commands import Argument, Option
from labkit.app.scripts import Ignore, command
from labkit.data.sizes import collect_sizes
from labkit.util.files import check_own_file, write_atomic

HEADER = "path,width,height,source,exif_orientation,error\n"


@command
def main(
    root: Annotated[Path, Argument(help="Folder of images.")],
    table: Annotated[Path, Argument(help="CSV file to write.")],
    recursive: Annotated[bool, Option(help="Include subfolders.")] = True,
    caches: Annotated[bool, Option(help="Trust the names of latent caches.")] = True,
    num_workers: Annotated[int | None, Option(help="Readers of headers. Default: as measured.", least=1)] = None,
    ignore: Ignore = (),
) -> str:
    """Write a row for every image under ROOT: path, width, height, source, exif_orientation, error."""
    check_own_file(table, HEADER, what="table of sizes")
    frame = collect_sizes(root, recursive=recursive, caches=caches, ignore=ignore, num_workers=num_workers)
    write_atomic(table, frame.to_csv(index=False, lineterminator="\n").encode("utf-8", "surrogateescape"))
    counts = ", ".join(f"{count} {source}" for source, count in frame["source"].value_counts().items())
    return f"{table}: {len(frame)} images, {counts}"


if __name__ == "__main__":
    main()
