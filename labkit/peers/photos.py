"""What the loaders of a comparison read: photos made for its class, or a sample of a reader's own."""

import math
import os
import random
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from labkit.data.decode import decode, open_image
from labkit.data.image_formats import IMAGE_SUFFIXES, JPEG, OTHER_IMAGE_SUFFIXES, opened_format
from labkit.data.partial_jpeg import is_progressive
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
_MIN_NAMES, _MAX_NAMES, _MAX_BYTES = 16, 8192, 2 * 2**30
# Seconds of a core that decodes a photo and crops it, to choose a number of photos. Assumed, not measured: so the same
# folder gives the same sample again.
_PHOTO_S, _PIXEL_S = 1.5e-3, 12e-9
_N_LOADED = 32  # photos that are read and checked at once


@dataclass
class OwnPhotos:
    """What a sample of a reader's JPEGs is.

    Attributes:
        files: Its files by suffix; those that are no images are "other".
        left_out: Those drawn that not all loaders read, by reason.
        sizes, n_bytes: Pixels, and bytes, of each photo of the sample.
        kinds: How many of them are gray or progressive.
        n_names: Photos of an epoch: of a small sample, each is read several times.
        core_s: What an epoch is expected to take a core.
    """

    files: Counter[str]
    left_out: Counter[str] = field(default_factory=Counter)
    sizes: list[WidthHeight] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    n_names: int = 0
    core_s: float = 0.0

    def facts(self) -> dict[str, str]:
        """What the sample is, in words."""
        jpegs = {suffix: number for suffix, number in self.files.items() if suffix in _JPEG_SUFFIXES}
        n_photos, n_times = len(self.sizes), self.n_names // len(self.sizes)
        width, height = (round(statistics.median(sides)) for sides in zip(*self.sizes, strict=True))
        return {
            "photos": f"{n_photos:,} of {sum(jpegs.values()):,} JPEGs, drawn at random with seed 0"
            + f"; each is read {n_times} times in an epoch" * (n_times > 1),
            "median size": f"{width:,} x {height:,} pixels, {statistics.median(self.n_bytes) / 1e3:,.0f} KB",
            "among them": _listed(self.kinds) or "none gray or progressive",
            "drawn, but left out": f"{_listed(self.left_out)}: not all loaders read them" if self.left_out else "none",
            "no JPEGs, left out": _listed(self.files - Counter(jpegs)) or "none",
        }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.most_common())


def sample_photos(folder: str | os.PathLike, root: Path, run_s: float) -> OwnPhotos:
    """Copy JPEGs from a folder to `root`, drawn at random: as many as all cores decode in about `run_s` seconds.

    Those that not all loaders read are left out: CMYK, damaged, or of another format than their name says.

    Raises:
        ValueError: `folder` is none, or holds no JPEG that can be used; says what it holds.
    """
    path = require_local_path("--own", folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else f"does not exist (looked for in {os.getcwd()})"
        raise ArgumentError(f"--own takes a folder of photos, and {path} {what}")
    folders = list(walk(path))
    names = [os.path.join(each.path, name) for each in folders for name in each.files]
    files = Counter(_suffix(name) for name in names)
    jpegs = sorted(name for name in names if _suffix(name) in _JPEG_SUFFIXES)
    if not jpegs:
        raise ArgumentError(
            f"{path} holds no JPEG, and JPEGs are what the loaders compared here read (it holds "
            f"{_listed(files) or 'no file'}): name another folder, or write some of its images as JPEGs into one"
        )
    random.Random(0).shuffle(jpegs)
    own, wanted = OwnPhotos(files), 0
    if n_unlisted := sum(each.error is not None for each in folders):
        own.left_out["folder" + "s" * (n_unlisted > 1) + " that cannot be listed"] = n_unlisted
    with progress_bar(desc="photos", unit="photo") as bar:
        for data, size, kinds in _load_fitting(jpegs, own.left_out):
            write_atomic(root / _name(len(own.sizes)), data)
            own.sizes.append(size)
            own.n_bytes.append(len(data))
            own.kinds.update(kinds)
            own.core_s += _PHOTO_S + _PIXEL_S * size[0] * size[1]
            n_in_time = run_s * usable_cores() * len(own.sizes) / own.core_s
            wanted = 2 ** int(math.log2(min(max(n_in_time, _MIN_NAMES), _MAX_NAMES)))
            bar.update()
            if len(own.sizes) >= wanted or sum(own.n_bytes) >= _MAX_BYTES:
                break
    if not own.sizes:
        raise ArgumentError(f"none of the {len(jpegs):,} JPEGs in {path} can be used: {_listed(own.left_out)}")
    n_photos = len(own.sizes)
    n_times = max(1, min(round(wanted / n_photos), _MAX_BYTES // sum(own.n_bytes)))  # formats store each name's bytes
    own.n_names, own.core_s = n_photos * n_times, own.core_s * n_times
    for number in range(n_photos, own.n_names):
        (root / _name(number)).parent.mkdir(exist_ok=True)
        try:
            (root / _name(number)).hardlink_to(root / _name(number % n_photos))
        except OSError:  # exFAT, and some network disks, have no links
            shutil.copyfile(root / _name(number % n_photos), root / _name(number))
    return own


def _suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower()
    return suffix if suffix in (*IMAGE_SUFFIXES, *OTHER_IMAGE_SUFFIXES) else "other"


def _name(number: int) -> str:
    return f"{number % _N_FOLDERS}/{number:05d}.jpg"


_Photo = tuple[bytes, WidthHeight, list[str]]


def _load_fitting(names: list[str], left_out: Counter[str]) -> Iterator[_Photo]:
    """Bytes, size and kinds of each photo that every loader reads; counts the others."""
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
    is_kind = {"gray": image.mode == "L", "progressive": is_progressive(data)}
    return data, image.size, [kind for kind, it_is in is_kind.items() if it_is]
