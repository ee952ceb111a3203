"""The tiny photos in every form that a loader reads: files, a tar, shards, raw pixels, pairs with depth, servers."""

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import labkit as lk
from tests.hardening.soak.pictures import CLASSES, COUNT, HEIGHT, encoded, key_of, pixels_of, write_photos
from tests.hardening.soak.subjects import Places

_N_SHARDS = 8
_N_BROKEN = 8


@contextmanager
def served_places(root: Path) -> Iterator[Places]:
    """Fill `root`, and serve the photos while the block lasts."""
    places = made_places(root)
    with lk.serve_folder(places.photos) as url, lk.serve_s3({"photos": places.photos}) as options:
        yield Places(root, url, options)


def made_places(root: Path) -> Places:
    """Fill `root`."""
    places = Places(root)
    write_photos(places.photos)
    with tarfile.open(places.tar, "w") as tar:
        tar.add(places.photos, ".")
    store = lk.FolderStore(places.photos)
    lk.write_shards(store, places.shards, max_count=COUNT // _N_SHARDS, engine="threads", progress=False)
    lk.PixelStore.build(store, places.pixels, short_side=HEIGHT, progress=False)
    _write_broken(places)
    _write_depth(places.depth)
    return places


def _write_broken(places: Places) -> None:
    """The photos, and among them some that no decoder reads."""
    folder = shutil.copytree(places.photos, places.root / "with-broken")
    broken = (folder / key_of(0)).read_bytes()[:200]
    for number in range(_N_BROKEN):
        (folder / f"class{number % CLASSES}" / f"broken-{number}.jpg").write_bytes(broken)


def _write_depth(root: Path) -> None:
    """Pairs of a photo and a 16-bit depth in millimetres, in Hypersim's form."""
    root.mkdir()
    names = [(f"rgb_{number:03d}.png", f"depth_{number:03d}.png") for number in range(COUNT)]
    for number, (rgb, depth) in enumerate(names):
        photo = pixels_of(number)
        (root / rgb).write_bytes(encoded(photo, "PNG"))
        (root / depth).write_bytes(encoded(1000 + 20 * photo[..., 0].astype(np.uint16), "PNG"))
    (root / "list.txt").write_text("".join(f"{rgb} {depth}\n" for rgb, depth in names))
