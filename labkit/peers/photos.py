"""Folders of photos made from others: reduced and encoded again, or under several names."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image

from labkit.core import encode_image, usable_cores, write_atomic
from labkit.data import decode
from labkit.data.pixels import shrink
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
    path = root / key
    if not path.exists():
        image = Image.fromarray(shrink(decode(store.read(key), key=key), short_side))
        write_atomic(path, encode_image(image, "JPEG", quality=_QUALITY))


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
        write_atomic(name, path.read_bytes())
