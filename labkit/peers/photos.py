"""What the loaders of a comparison read: photos made for its class, or a sample of a reader's own."""

import os
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from labkit.data.decode import decode, open_image
from labkit.data.image_formats import JPEG, opened_format
from labkit.data.pixels import shrink
from labkit.data.samples import make_photos
from labkit.data.stores import FolderStore, read_bytes
from labkit.errors import ArgumentError, DecodeError
from labkit.peers.peer import CLASSES, Work
from labkit.util.arguments import require_choice, require_int, require_local_path
from labkit.util.files import walk, write_atomic
from labkit.util.machine import labkit_home, scale, usable_cores
from labkit.util.pictures import WidthHeight, encode_image
from labkit.util.process import progress_bar

# Enough for 16 batches of 64 in an epoch, and for raw pixels several times as large as a cache; fewer at `ci` scale,
# which only tests the code. Camera photos are large: each is read three times in an epoch, under as many names, which
# gives 6 batches.
_N_PHOTOS = {
    "imagenet": {"ci": 24, "laptop": 1024, "gpu": 4096},
    "camera": {"ci": 3, "laptop": 128, "gpu": 256},
}
_N_NAMES = {"imagenet": 1, "camera": 3}
_BATCH_SIZE = 64
_QUALITY = 90  # of photos that are made small
_MIN_STEADY_S = {"ci": 0.05, "laptop": 1.0, "gpu": 1.0}


def make_work(peer_class: str = "imagenet", *, n_photos: int | None = None, progress: bool = True) -> Work:
    """Make the photos of a class that are missing, and return the work to do on them.

    Arguments as in `compare_peers`.
    """
    chosen = CLASSES[require_choice("peer_class", peer_class, CLASSES)]
    default = _N_PHOTOS[chosen.profile][scale().name]
    n_photos = require_int("n_photos", default if n_photos is None else n_photos)
    folder, name = labkit_home() / "photos", f"{chosen.profile}-{n_photos}"
    root = make_photos(folder / name, n_photos, profile=chosen.profile, progress=progress)
    if chosen.jpeg_short_side is not None:
        name += f"-jpeg{chosen.jpeg_short_side}"
        root = make_small_photos(root, folder / name, chosen.jpeg_short_side)
    if (n_names := _N_NAMES[chosen.profile]) > 1 and scale().name != "ci":
        name += f"-x{n_names}"
        root = repeat_photos(root, folder / name, n_names)
    return Work(
        root, labkit_home() / "peers" / name, batch_size=min(_BATCH_SIZE, max(1, n_photos // 2)), dtype=chosen.dtype,
        min_steady_s=_MIN_STEADY_S[scale().name],
    )  # fmt: skip


def make_small_photos(photos: Path, root: Path, short_side: int) -> Path:
    """Reduce photos once, as most people who store JPEGs do before training: to a quality of 90, under `root`.

    Those that are there are kept. DecodeError names a photo that cannot be decoded.
    """
    store = FolderStore(photos)

    def make_small(key: str) -> None:
        if not (root / key).exists():
            image = Image.fromarray(shrink(decode(read_bytes(store, key), key=key), short_side))
            write_atomic(root / key, encode_image(image, "JPEG", quality=_QUALITY))

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(make_small, store.keys()))
    return root


def repeat_photos(photos: Path, root: Path, n_names: int) -> Path:
    """A folder in which each photo has `n_names` names, links to the same bytes: a long epoch of a few large photos."""
    for path in FolderStore(photos).paths():
        for number in range(n_names):
            name = root / path.relative_to(photos).with_stem(f"{path.stem}-{number}")
            if not name.exists():
                name.parent.mkdir(parents=True, exist_ok=True)
                name.hardlink_to(path)
    return root


# --- a reader's own

_JPEG_SUFFIXES = JPEG.suffixes + JPEG.other_suffixes
_N_FOLDERS = 10  # of the sample: some loaders want several classes, and which ones costs no time
_FEWEST, _MOST, _MAX_BYTES = 16, 8192, 2 * 2**30
# Seconds of a core that decodes a photo and crops it, to choose a number of photos. Assumed, not measured: so the same
# folder gives the same sample again.
_PHOTO_S, _PIXEL_S = 1.5e-3, 12e-9
_N_LOADED = 32  # photos that are read and checked at once


@dataclass
class OwnPhotos:
    """What a sample of a reader's JPEGs is.

    Attributes:
        n_jpegs: JPEGs in the folder.
        left_out: Those drawn that not all loaders read, by reason.
        sizes, n_bytes: Pixels, and bytes, of each photo of the sample.
        core_s: What an epoch is expected to take a core.
    """

    n_jpegs: int
    left_out: Counter[str] = field(default_factory=Counter)
    sizes: list[WidthHeight] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)
    core_s: float = 0.0

    def facts(self) -> dict[str, str]:
        """What the sample is, in words."""
        width, height = (round(statistics.median(sides)) for sides in zip(*self.sizes, strict=True))
        return {
            "photos": f"{len(self.sizes):,} of {self.n_jpegs:,} JPEGs, drawn at random with seed 0",
            "median size": f"{width:,} x {height:,} pixels, {statistics.median(self.n_bytes) / 1e3:,.0f} KB",
            "drawn, but left out": f"{_listed(self.left_out)}: not all loaders read them" if self.left_out else "none",
        }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.most_common())


def sample_photos(folder: str | os.PathLike, root: Path, run_s: float) -> OwnPhotos:
    """Copy JPEGs from a folder to `root`, drawn at random: as many as all cores decode in about `run_s` seconds.

    Those that not all loaders read are left out: CMYK, damaged, or of another format than their name says.

    Raises:
        ValueError: `folder` is none, or holds too few JPEGs that can be used.
    """
    path = require_local_path("--own", folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else f"does not exist (looked for in {os.getcwd()})"
        raise ArgumentError(f"--own takes a folder of photos, and {path} {what}")
    names = [os.path.join(each.path, name) for each in walk(path) for name in each.files]
    jpegs = sorted(name for name in names if name.lower().endswith(_JPEG_SUFFIXES))
    random.Random(0).shuffle(jpegs)
    own = OwnPhotos(len(jpegs))
    with progress_bar(desc="photos", unit="photo") as bar:
        for data, size in _load_fitting(jpegs, own.left_out):
            number = len(own.sizes)
            write_atomic(root / f"{number % _N_FOLDERS}/{number:05d}.jpg", data)
            own.sizes.append(size)
            own.n_bytes.append(len(data))
            own.core_s += _PHOTO_S + _PIXEL_S * size[0] * size[1]
            bar.update()
            is_enough = own.core_s >= run_s * usable_cores() or sum(own.n_bytes) >= _MAX_BYTES
            if number + 1 >= (_FEWEST if is_enough else _MOST):
                break
    if len(own.sizes) < _FEWEST:
        raise ArgumentError(
            f"{path} holds {len(own.sizes)} JPEGs that all loaders read, and {_FEWEST} are needed "
            f"(left out: {_listed(own.left_out) or 'none'}): name another folder"
        )
    return own


_Photo = tuple[bytes, WidthHeight]


def _load_fitting(names: list[str], left_out: Counter[str]) -> Iterator[_Photo]:
    """Bytes and size of each photo that every loader reads; counts the others."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        for start in range(0, len(names), _N_LOADED):
            for loaded in pool.map(_load, names[start : start + _N_LOADED]):
                if isinstance(loaded, str):
                    left_out[loaded] += 1
                else:
                    yield loaded


def _load(name: str) -> _Photo | str:
    """A photo, or why it is left out."""
    try:
        data = Path(name).read_bytes()
        decode(data)
    except OSError:
        return "not readable"
    except DecodeError:
        return "damaged"
    image = open_image(data)
    if opened_format(image) is not JPEG:
        return f"{image.format} inside"
    if image.mode not in ("RGB", "L"):
        return image.mode
    return data, image.size
