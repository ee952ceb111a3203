"""What every loader of the comparison has to do, how a loader is described, and the classes of the comparison.

A class says what is read and what is delivered; only within one does a ratio mean anything.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit.data.labels import labels_of
from labkit.data.stores import FolderStore
from labkit.loading import augment
from labkit.util.files import write_atomic
from labkit.util.machine import package_version, usable_cores

JPEG_FILES, JPEG_PACKED, RAW_PIXELS = "JPEG files", "JPEG in own format", "raw pixels"
FULL_SIZE, PART, SCALED = "full size", "part", "scaled"
UINT8, FLOAT32 = "uint8", "float32"

MEAN, STD = augment.MEAN, augment.STD
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a crop


@dataclass(frozen=True)
class Work:
    """The work that all loaders do: every photo once per epoch, in shuffled order, as batches of crops.

    Each image is cropped like torchvision's RandomResizedCrop (area 0.08 to 1, aspect ratio 3/4 to 4/3) and flipped
    left to right half of the time.

    Args:
        root: Folder of photos, with one sub-folder per class; labels number the sorted sub-folders.
        scratch: Folder for prepared formats. Each loader builds its format once, in a sub-folder of its own.
        size: Side of the square images in pixels.
        batch_size: Images per batch.
        num_workers: Worker processes, or threads for loaders that use threads; default: all usable cores.
        seed: Seed of order and crops.
        short_side: Short side, in pixels, of the resized photos in raw-pixel formats.
        dtype: `"uint8"`, or `"float32"`: scaled to 0 to 1, less `MEAN`, over `STD`, as `v2.Normalize` does it.
        min_steady_s: Shortest steady state of a timed run, in seconds.
    """

    root: Path
    scratch: Path
    size: int = 224
    batch_size: int = 64
    num_workers: int = field(default_factory=usable_cores)
    seed: int = 0
    short_side: int = 256
    dtype: str = UINT8
    min_steady_s: float = 1.0

    @property
    def is_float(self) -> bool:
        return self.dtype == FLOAT32


@dataclass(frozen=True)
class Peer:
    """A loader to compare with, and how to make it do `Work`.

    Args:
        name: The project's own name.
        source: What it reads: `JPEG_FILES`, `JPEG_PACKED` or `RAW_PIXELS`.
        antialias: How it resamples: True averages over all source pixels, as torchvision v2 does; False samples
            bilinearly, as OpenCV does; None is something else, which `note` explains.
        install: The command that installs it, Debian packages first.
        modules: Modules that must be importable.
        loader: Takes `Work`, returns one epoch of batches: tensor (N, 3, size, size) of `Work.dtype`, and N labels.
            Called for each epoch; may return the same object each time, to keep its workers.
        prepare: Converts the photos; does nothing if that is done already.
        note: What it does differently from the others, and why.
        decoder: The library that decodes its JPEGs, such as `"torchvision"`; empty if it is not known.
        decodes: How much of a JPEG: `FULL_SIZE`, all pixels; `PART`, those that the crop needs; or `SCALED`, those at
            1/2, 1/4 or 1/8 of the size where the crop is as many times as large as the output.
        drops_last: It always leaves out a last batch that is not full.
        dtypes: The `Work.dtype` that it can deliver.
        distribution: The installed package whose version is told.
        published: What its authors publish about its speed, where, and why it differs from what is measured here.

    Taught in: notebooks/13_peers.ipynb
    """

    name: str
    source: str
    antialias: bool | None
    install: str
    modules: tuple[str, ...]
    loader: Callable[[Work], Iterable]
    prepare: Callable[[Work], object] | None = None
    note: str = ""
    decoder: str = ""
    decodes: str = FULL_SIZE
    drops_last: bool = False
    dtypes: tuple[str, ...] = (UINT8, FLOAT32)
    distribution: str = ""
    published: str = ""

    @property
    def decoded_at(self) -> str:
        """How JPEGs are decoded, as `decodes` says it; empty for raw pixels."""
        return "" if self.source == RAW_PIXELS else self.decodes

    @property
    def version(self) -> str:
        """The installed version; empty if it is not known."""
        return (package_version(self.distribution) or "") if self.distribution else ""


def missing_modules(peer: Peer) -> list[str]:
    """Modules that a peer needs and this environment lacks."""

    def is_missing(name: str) -> bool:
        with suppress(ModuleNotFoundError):  # a parent package is missing
            return find_spec(name) is None
        return True

    return [name for name in peer.modules if is_missing(name)]


def pip_peer(
    name: str,
    package: str = "",
    *,
    debian: str = "",
    source: str = JPEG_FILES,
    antialias: bool | None = True,
    **details: Any,
) -> Peer:
    """A `Peer` that pip installs as `package` (default: `name`), after the Debian packages in `debian`."""
    package = package or name
    install = f"apt-get install {debian} && " * bool(debian) + f"python -m pip install {package}"
    return Peer(name, source, antialias, install, **{"modules": (package,), "distribution": package, **details})


def prepare_once(work: Work, name: str, build: Callable[[Path], Any]) -> Path:
    """Build a prepared format under `work.scratch`, unless it is there and was made from the same photos.

    Args:
        name: Name of the sub-folder, which is returned.
        build: Fills the empty folder that it is called with.
    """
    folder, unfinished = work.scratch / name, work.scratch / f".{name}.unfinished"
    digest_file = work.scratch / f"{name}.made-of"
    stats = [(path.relative_to(work.root), path.stat()) for path in FolderStore(work.root).paths()]
    facts = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    digest = hashlib.sha256("\n".join([*facts, str(work.short_side)]).encode()).hexdigest()
    if digest_file.is_file() and digest_file.read_text() == digest and folder.is_dir():
        return folder
    digest_file.unlink(missing_ok=True)
    for outdated in (folder, unfinished):
        shutil.rmtree(outdated, ignore_errors=True)
    unfinished.mkdir(parents=True)
    build(unfinished)
    unfinished.rename(folder)
    write_atomic(digest_file, digest.encode())
    return folder


def labeled_photos(work: Work) -> list[tuple[Path, int]]:
    """Path and label of every photo, sorted by name."""
    photos = FolderStore(work.root)
    _, labels = labels_of(photos.keys(), source=photos)
    return list(zip(photos.paths(), labels.tolist(), strict=True))


_JPEG, _ALL = (JPEG_FILES, JPEG_PACKED), (JPEG_FILES, JPEG_PACKED, RAW_PIXELS)


@dataclass(frozen=True)
class PeerClass:
    """Loaders that may be compared, as `python -m labkit peers --class` names them.

    Args:
        title: What is read and delivered, in words.
        sources: The `Peer.source` of those that take part.
        profile: Photos: `"imagenet"` or `"camera"`.
        jpeg_short_side: Short side in pixels that the photos are reduced to, as JPEGs, before anyone reads them.
        dtype: As of `Work`.
    """

    title: str
    sources: tuple[str, ...]
    dtype: str = UINT8
    profile: str = "imagenet"
    jpeg_short_side: int | None = None

    def admits(self, peer: Peer) -> bool:
        return self.dtype in peer.dtypes and peer.source in self.sources


#: The first two are of a profile's photos: all that read them and deliver bytes, JPEGs and raw pixels in one run.
CLASSES = {
    "imagenet": PeerClass("photos of 500 pixels to uint8", _ALL),
    "camera": PeerClass("camera photos to uint8", _ALL, profile="camera"),
    "jpeg-uint8": PeerClass("JPEG to uint8", _JPEG),
    "jpeg-float32": PeerClass("JPEG to normalized float32", _JPEG, FLOAT32),
    "raw-uint8": PeerClass("raw pixels at 256 to uint8", (RAW_PIXELS,)),
    "raw-float32": PeerClass("raw pixels at 256 to normalized float32", (RAW_PIXELS,), FLOAT32),
    "jpeg256-uint8": PeerClass("JPEG at 256 to uint8", _JPEG, jpeg_short_side=256),
    "camera-uint8": PeerClass("camera JPEG to uint8", _JPEG, profile="camera"),
}
PROFILES = ("imagenet", "camera")
OWN_PHOTOS = PeerClass("your JPEGs to uint8", _JPEG)  # raw pixels at 256 hardly tell what they were made of
