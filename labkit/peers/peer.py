"""What every loader of the comparison is asked to do, and how one is described."""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.core import usable_cores, write_atomic
from labkit.data.stores import FolderStore

JPEG_FILES, JPEG_PACKED, RAW_PIXELS = "JPEG files", "JPEG in own format", "raw pixels"

# Epochs in a run. One of raw pixels is over in a tenth of a second: its start and end would be most of what is timed.
EPOCHS_A_RUN = {JPEG_FILES: 1, JPEG_PACKED: 1, RAW_PIXELS: 16}


@dataclass(frozen=True)
class Work:
    """The same work for all: every photo once an epoch, in shuffled order, as uint8 batches.

    Each image is cropped by torchvision's RandomResizedCrop (area 0.08 to 1, aspect ratio 3/4 to 4/3) and flipped left
    to right half of the time.

    Args:
        root: Folder of photos, one sub-folder a class; labels number the sorted sub-folders.
        scratch: Where a loader keeps a prepared format, in a sub-folder of its own; built once, kept.
        size: Side of the square images in pixels.
        batch_size: Images a batch.
        num_workers: Worker processes, or threads for loaders made of threads; default: all usable cores.
        seed: Seed of order and crops.
        short_side: Raw-pixel formats hold the photos resized to this short side in pixels.

    Taught in: notebooks/13_peers.ipynb
    """

    root: Path
    scratch: Path
    size: int = 224
    batch_size: int = 64
    num_workers: int = field(default_factory=usable_cores)
    seed: int = 0
    short_side: int = 256


@dataclass(frozen=True)
class Peer:
    """A loader that a reader may pick instead, and how it is made to do `Work`.

    Args:
        name: What the project calls it.
        source: What is read: `JPEG_FILES`, `JPEG_PACKED` or `RAW_PIXELS`.
        antialias: Class of resampling: True averages over all source pixels, as torchvision v2 does; False samples
            bilinearly, as OpenCV does; None is neither, which `note` explains.
        install: The command that installs it, Debian packages first.
        modules: Importable names that have to be there.
        loader: `Work` to one epoch of batches: uint8 tensor (N, 3, size, size) and N labels. Called anew for each run;
            may hand out the same object each time, whose workers then live on.
        prepare: Converts the photos once; does nothing where that is done.
        note: What differs from the others, with the reason.
        drops_last: It leaves out a last batch that is not full, and cannot be told otherwise.

    Taught in: notebooks/13_peers.ipynb
    """

    name: str
    source: str
    antialias: bool | None
    install: str
    modules: tuple[str, ...]
    loader: Callable[[Work], Iterable]
    prepare: Callable[[Work], None] | None = None
    note: str = ""
    drops_last: bool = False


def prepare_once(work: Work, name: str, build: Callable[[Path], None]) -> Path:
    """The folder of a prepared format under `work.scratch`, built if it is not there or not of these photos.

    Args:
        name: Of the sub-folder.
        build: Fills the folder that it is given, which is there and empty.
    """
    folder, unfinished = work.scratch / name, work.scratch / f".{name}.unfinished"
    made_of = work.scratch / f"{name}.made-of"
    digest = _digest_of(work)
    if made_of.is_file() and made_of.read_text() == digest and folder.is_dir():
        return folder
    made_of.unlink(missing_ok=True)
    for left in (folder, unfinished):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir(parents=True)
    build(unfinished)
    unfinished.rename(folder)
    write_atomic(made_of, digest.encode())
    return folder


def _digest_of(work: Work) -> str:
    """Changes when the photos do: their names, sizes and times of modification."""
    facts = [f"{path.relative_to(work.root)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in _photos(work)]
    return hashlib.sha256("\n".join([*facts, str(work.short_side)]).encode()).hexdigest()


def _photos(work: Work) -> list[Path]:
    return FolderStore(work.root).paths()


def labelled_photos(work: Work) -> list[tuple[Path, int]]:
    """Path and label of every photo, in the order of their names."""
    photos = _photos(work)
    label_of = {name: label for label, name in enumerate(sorted({photo.parent.name for photo in photos}))}
    return [(photo, label_of[photo.parent.name]) for photo in photos]
