"""What the commands under test read: small, made once, copied for each trial."""

import hashlib
import shutil
from pathlib import Path

import nbformat
import numpy as np
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from tests.image_files import encoded
from tests.tars import make_tar

_WNIDS = ("n01440764", "n03888257")

_TITLE = "# {name}\n\n**Question.** Why {name}?\n\n**Prerequisites.** None\n\n**Minutes.** 1"
_MEASURING = """
import labkit as lk
runs = lk.compare({{"slow": lambda: [1, 1], "quick": lambda: [1, 1]}}, baseline="slow", rounds=3, experiment="{name}")
"""
FRAME_ROWS = 2 * (3 + 1)  # of each notebook: two variants, three rounds and a warm-up

_TRAINING = """
import labkit as lk


def make_training():
    config = lk.LoaderConfig(batch_size=2, num_workers=2, oversubscribe=True)
    dataset = lk.ImageDataset(lk.FolderStore("src/photos"))
    return lk.make_loader(dataset, config, collate_fn=len), lambda batch: None
"""


def make_sources(root: Path) -> Path:
    """Fill `root`: photos, tars of them, shards, pixels, a stand-in for Imagenette, notebooks, a training script."""
    from labkit import FolderStore, PixelStore, write_shards

    photos = root / "photos"
    for number in range(12):
        _photo(photos / "abc"[number % 3] / f"{number:02d}.jpg", number)
    for number in range(200):
        _photo(root / "many" / f"{number:03d}.jpg", number, (16, 16))
    _tar(root / "photos.tar", photos, "w")
    _tar(root / "photos.tar.gz", photos, "w:gz")
    _tar(root / "other.tar", photos / "a", "w")
    write_shards(FolderStore(photos), root / "shards", max_count=4, engine="threads", num_workers=1, progress=False)
    PixelStore.build(FolderStore(photos), root / "photos.pixels", short_side=32, num_workers=1, progress=False)
    (root / "notebooks").mkdir()
    for name in ("10_first", "11_second"):
        cells = [new_markdown_cell(_TITLE.format(name=name)), new_code_cell(_MEASURING.format(name=name))]
        nbformat.write(new_notebook(cells=cells), root / "notebooks" / f"{name}.ipynb")
    (root / "train.py").write_text(_TRAINING)
    return root


def copy_sources(names: tuple[str, ...], root: Path, target: Path) -> None:
    """Copy some of the sources, with their times, over what is there."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, dirs_exist_ok=True)
        else:
            shutil.copy2(root / name, target / name)


def md5_of(path: Path) -> str:
    """MD5 of a file, as torchvision has it of Imagenette's."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _photo(path: Path, number: int, size: tuple[int, int] = (96, 64)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    path.write_bytes(encoded(Image.fromarray(pixels), "JPEG", quality=90))


def _tar(path: Path, folder: Path, mode: str) -> None:
    files = sorted(folder.rglob("*.jpg"))
    make_tar(path, {f"{folder.name}/{file.relative_to(folder)}": file.read_bytes() for file in files}, mode)
