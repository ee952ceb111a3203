"""Download Imagenette (10 classes of ImageNet, 13,394 photos) into a folder.

    python data_scripts/download.py data
    python data_scripts/download.py data --size 320px

Then `labkit.FolderStore("data/imagenette2-160/train")` reads it. A rerun keeps a whole archive, or a complete
set.
"""

import shutil
from pathlib import Path
from typing import Annotated

from torchvision.datasets import Imagenette

from labkit.app.commands import Option
from labkit.app.scripts import Root, command
from labkit.util.arguments import require_choice


@command
def main(
    root: Root, size: Annotated[str, Option(help="Short side of the photos: full, 320px or 160px.")] = "160px"
) -> str:
    """Download Imagenette with torchvision, which checks its md5, and extract it into ROOT."""
    url, _ = Imagenette._ARCHIVES[require_choice("size", size, Imagenette._ARCHIVES)]
    folder = Path(root) / Path(url).stem
    if not folder.is_dir():  # torchvision would take the half set of a killed extraction for whole
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial / folder.name, ignore_errors=True)
        Imagenette(partial, size=size, download=True)
        (partial / folder.name).rename(folder)
        shutil.rmtree(partial)
    counts = {split: len(Imagenette(root, split=split, size=size)) for split in ("train", "val")}
    return f"{folder}: " + ", ".join(f"{count} images in {split}" for split, count in counts.items())


if __name__ == "__main__":
    main()
