"""The same bytes of photos in each format, made by copying a few hundred: what is measured is the disk's part."""

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import labkit as lk

_N_PHOTOS, _N_CLASSES = 300, 10


@dataclass(frozen=True)
class Sets:
    """Sets of about as many bytes each; raw pixels are of fewer images."""

    root: Path

    @property
    def folder(self) -> lk.FolderStore:
        return lk.FolderStore(self.root / "folder")

    @property
    def tar(self) -> lk.TarStore:
        return lk.TarStore(self.root / "set.tar")

    @property
    def pixels(self) -> lk.PixelStore:
        return lk.PixelStore(self.root / "set.pixels")

    def paths(self, form: str) -> list[Path]:
        """The files of a format."""
        if form == "folder":
            return self.folder.paths()
        return sorted((self.root / "shards").glob("*.tar")) if form == "shards" else [self.root / f"set.{form}"]


class First:
    """The first images of a store."""

    def __init__(self, store: lk.FolderStore, count: int):
        self._store, self._keys = store, list(store.keys())[:count]

    def keys(self) -> list[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        return self._store.read(key)


def make_sets(root: Path, set_mb: int) -> Sets:
    """Make all formats of a set below `root`; each takes `set_mb`, the pixels twice that while they are made."""
    photos = lk.FolderStore(lk.make_photos(root / "photos", _N_PHOTOS))
    images = [photos.read(key) for key in photos.keys()]  # noqa: SIM118
    for number in range(_N_CLASSES):
        (root / "folder" / f"class{number}").mkdir(parents=True)
    number = n_bytes = 0
    while n_bytes < set_mb * 1e6:
        path = root / "folder" / f"class{number % _N_CLASSES}" / f"{number:06}.jpg"
        n_bytes += path.write_bytes(images[number % _N_PHOTOS])
        number += 1
    sets = Sets(root)
    with tarfile.open(root / "set.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key in sets.folder.keys():  # noqa: SIM118
            tar.add(root / "folder" / key, key)
    lk.write_shards(sets.folder, root / "shards", seed=0, engine="threads", progress=False)
    few = lk.PixelStore.build(First(sets.folder, _N_PHOTOS), root / "few.pixels", progress=False)
    count = int(set_mb * 1e6 / os.path.getsize(few.path) * _N_PHOTOS)
    lk.PixelStore.build(First(sets.folder, count), root / "set.pixels", progress=False)
    sets.tar.keys()  # writes its index
    os.sync()
    return sets
