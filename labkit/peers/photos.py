"""Folders of photos made from others: reduced and encoded again, or under several names."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from labkit.core import atomic_path, usable_cores
from labkit.data import decode
from labkit.data.stores import FolderStore

_QUALITY = 90


def make_small_photos(photos: Path, root: Path, short_side: int) -> Path:
    """Reduce photos once, as most people who store JPEGs do before training.

    Each is written as a JPEG of quality 90, its shorter side at most `short_side` pixels.

    Args:
        photos: Folder of photos in sub-folders.
        root: Where the small ones go, under the same names. Those that are there are kept.

    Returns:
        `root`.

    Raises:
        DecodeError: a photo cannot be decoded; names it.
    """
    store = FolderStore(photos)
    with ThreadPoolExecutor(usable_cores()) as pool:
        for _ in pool.map(partial(_make_small, store, root, short_side), store.keys()):
            pass
    return root


def _make_small(store: FolderStore, root: Path, short_side: int, key: str) -> None:
    from torchvision.transforms.v2 import functional as F

    path = root / key
    if path.exists():
        return
    image = decode(store.read(key), key=key)
    if min(image.shape[1:]) > short_side:
        image = F.resize(image, [short_side], antialias=True)
    with atomic_path(path) as partial_path:
        F.to_pil_image(image).save(partial_path, "JPEG", quality=_QUALITY)


def repeat_photos(photos: Path, root: Path, n_names: int) -> Path:
    """A folder in which each photo has `n_names` names, so that an epoch of a few large photos is a long one.

    The names are links to one and the same bytes. Those that are there are kept.
    """
    store = FolderStore(photos)
    for path, key in zip(store.paths(), store.keys(), strict=True):
        for number in range(n_names):
            name = root / Path(key).with_stem(f"{Path(key).stem}-{number}")
            if not name.exists():
                name.parent.mkdir(parents=True, exist_ok=True)
                _link(path, name)
    return root


def _link(path: Path, name: Path) -> None:
    try:
        name.hardlink_to(path)
    except OSError:  # a file system without them
        with atomic_path(name) as partial_path:
            shutil.copyfile(path, partial_path)
