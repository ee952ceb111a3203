"""What every loader of the comparison is asked to do, and how one is described."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.measure.env import usable_cores

JPEG_FILES, JPEG_PACKED, RAW_PIXELS = "JPEG files", "JPEG in own format", "raw pixels"


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
