"""Claims that no stopwatch settles: what a call does is tried on the spot, what a resize does is read off pixels."""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from labkit.measure import speedup_interval
from labkit.teach.claims.frames import Frames, Read
from labkit.teach.claims.verdicts import Reading

SHORT_SIDE = 256  # as the claim has it
_MOST_PHOTOS, _BOXES = 16, 4
_TRIED = "tried on the spot"
_BOUND = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(min(8, os.cpu_count()))"

Trial = Callable[[], tuple[bool, str] | None]


def trial(function: Trial) -> Read:
    """Read a trial; it is made once a process."""

    def read(frames: Frames) -> Reading:
        made = _once(function)
        if made is None:
            return Reading(experiment=_TRIED, doubt="this system does not allow the trial")
        return Reading(passed=made[0], note=made[1], experiment=_TRIED)

    return read


@functools.cache
def _once(function: Callable) -> tuple[bool, str] | None:
    return function()


def persistent_without_workers() -> tuple[bool, str]:
    """Does torch refuse persistent workers where there are none?"""
    try:
        DataLoader([0], num_workers=0, persistent_workers=True)
    except ValueError as error:
        return True, f"ValueError: {error}"
    return False, "no error"


def clamped_on_one_cpu() -> tuple[bool, str]:
    """Is a request for many persistent workers, clamped to one CPU, still accepted?"""
    clamped = min(8, 1)
    try:
        DataLoader([0], num_workers=clamped, persistent_workers=True)
    except ValueError as error:
        return False, f"{clamped} worker: ValueError: {error}"
    return True, f"8 clamped to 1 CPU asks for {clamped} worker, no error"


def clamped_where_bound() -> tuple[bool, str] | None:
    """Does the clamp notice that a process may use one core only, as in a batch job or under taskset?"""
    if not hasattr(os, "sched_setaffinity"):
        return None
    asked = int(subprocess.run([sys.executable, "-c", _BOUND], capture_output=True, text=True, check=True).stdout)
    return asked == 1, f"bound to 1 core, it asks for {asked} worker(s)"


class Draws(Dataset):
    """A sample is what the random generators say: those that are seeded for workers, or one of its own."""

    def __init__(self, own_generator: bool):
        self.own = np.random.default_rng() if own_generator else None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.own is not None:
            return torch.tensor([index, self.own.random()])
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])


def seed_worker(worker: int) -> None:
    """The recipe that goes around."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def _two_epochs(num_workers: int, own_generator: bool = False) -> torch.Tensor:
    loader = DataLoader(
        Draws(own_generator), batch_size=2, shuffle=True, num_workers=num_workers, persistent_workers=True,
        worker_init_fn=seed_worker, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return torch.cat([batch for _ in range(2) for batch in loader])


def _alike(one: torch.Tensor, other: torch.Tensor) -> tuple[bool, str]:
    same = torch.equal(one, other)
    return same, f"two epochs {'come out the same' if same else 'differ'}"


def seeded_again() -> tuple[bool, str]:
    """Does a second run with as many workers give the same samples?"""
    return _alike(_two_epochs(2), _two_epochs(2))


def seeded_with_other_workers() -> tuple[bool, str]:
    """And one with another number of workers?"""
    return _alike(_two_epochs(2), _two_epochs(1))


def seeded_with_own_generator() -> tuple[bool, str]:
    """And where the data set, or a library in it, draws from a generator of its own?"""
    return _alike(_two_epochs(2, own_generator=True), _two_epochs(2, own_generator=True))


def reading_back() -> tuple[bool, str]:
    """Does the write-ups' CutMix leave values on the device, and its input alone?"""
    from labkit.measure import count_readbacks
    from labkit.teach.reference import writeup_cutmix

    images, labels = torch.rand(4, 3, 32, 32), torch.arange(4)
    _, reads = count_readbacks(lambda: writeup_cutmix(images, labels, num_classes=4))
    return reads == 0, f"reads {reads} values back a batch: on a GPU, the host waits each time"


def detail_kept(profile: str) -> Read:
    """Detail in random crops of photos resized to `SHORT_SIDE` first, over that in crops of the photos.

    Detail is the spread of the Laplacian; one number a photo, since crops of one photo are alike. Needs the photos of
    this scale, which a tour makes.
    """

    def read(frames: Frames) -> Reading | None:
        kept = _kept(profile)
        if kept is None:
            return None
        ratio = float(np.exp(np.log(kept).mean()))
        note = f"detail, {len(kept)} photos"
        return Reading(ratio, *speedup_interval(kept), len(kept), "pixels compared on the spot", note=note)

    return read


@functools.cache
def _kept(profile: str) -> np.ndarray | None:
    from labkit.core import photo_root
    from labkit.data.stores import FolderStore

    if not photo_root(profile).is_dir():
        return None
    store = FolderStore(photo_root(profile))
    keys = store.keys()[:: max(1, len(store) // _MOST_PHOTOS)][:_MOST_PHOTOS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.array([_kept_of(store.read(key)) for key in keys])


def _kept_of(data: bytes) -> float:
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.v2.functional import resize, to_pil_image

    from labkit.data import decode

    pixels = decode(data)
    large = min(pixels.shape[1:]) > SHORT_SIDE  # nothing is enlarged
    smaller = resize(pixels, [SHORT_SIDE], antialias=True) if large else pixels
    photo, prepared = to_pil_image(pixels), to_pil_image(smaller)
    boxes = [RandomResizedCrop.get_params(pixels, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(_BOXES)]
    zoom = prepared.width / photo.width
    ratios = [_detail(prepared, box, zoom) / _detail(photo, box, 1.0) for box in boxes]
    return float(np.exp(np.median(np.log(ratios))))


def _detail(image, box: tuple[int, int, int, int], zoom: float) -> float:
    import cv2
    from PIL import Image

    top, left, height, width = (zoom * side for side in box)
    edges = (left, top, min(left + width, image.width), min(top + height, image.height))
    crop = image.resize((224, 224), Image.Resampling.BILINEAR, box=edges).convert("L")
    return cv2.Laplacian(np.asarray(crop), cv2.CV_64F).std()
