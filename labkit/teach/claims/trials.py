"""Claims that need no timing: a call is tried on the spot, and the effect of a resize is read from pixels."""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from labkit.core import photo_root
from labkit.data import decode
from labkit.data.stores import FolderStore
from labkit.measure import speedup_interval, speedup_of
from labkit.teach.claims.frames import Frames, Read
from labkit.teach.claims.verdicts import Reading

SHORT_SIDE = 256  # as in the claim
_MAX_PHOTOS, _N_BOXES = 16, 4
_BOUND_SCRIPT = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(min(8, os.cpu_count()))"

Trial = Callable[[], tuple[bool, str] | None]


def read_trial(trial: Trial) -> Read:
    """Reading of a trial, which runs once per process."""
    once = functools.cache(trial)

    def read(frames: Frames) -> Reading:
        passed, note = once() or (None, "")
        doubt = "this system does not allow the trial" if passed is None else ""
        return Reading(passed=passed, note=note, experiment="tried on the spot", doubt=doubt)

    return read


def persistent_without_workers() -> tuple[bool, str]:
    """Does torch refuse persistent workers with num_workers=0?"""
    try:
        DataLoader(TensorDataset(torch.zeros(1)), num_workers=0, persistent_workers=True)
    except ValueError as error:
        return True, f"ValueError: {error}"
    return False, "no error"


def clamped_on_one_cpu() -> tuple[bool, str]:
    """Is a request for 8 persistent workers accepted when it is clamped to one CPU?"""
    try:
        DataLoader(TensorDataset(torch.zeros(1)), num_workers=min(8, 1), persistent_workers=True)
    except ValueError as error:
        return False, f"1 worker: ValueError: {error}"
    return True, "8 clamped to 1 CPU asks for 1 worker, no error"


def clamped_where_bound() -> tuple[bool, str] | None:
    """Does the clamp notice that a process may use one core only, as in a batch job or under taskset?"""
    if not hasattr(os, "sched_setaffinity"):
        return None
    n_workers = int(subprocess.check_output([sys.executable, "-c", _BOUND_SCRIPT], text=True))
    return n_workers == 1, f"bound to 1 core, it asks for {n_workers} worker(s)"


class Draws(Dataset):
    """Samples are random numbers: from the generators that are seeded for workers, or from the data set's own."""

    def __init__(self, own_generator: bool):
        self.own = np.random.default_rng() if own_generator else None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.own is not None:
            return torch.tensor([index, self.own.random()])
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])


def seed_worker(worker: int) -> None:
    """The popular recipe."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def _draw_two_epochs(num_workers: int, own_generator: bool) -> torch.Tensor:
    loader = DataLoader(
        Draws(own_generator), batch_size=2, shuffle=True, num_workers=num_workers, persistent_workers=True,
        worker_init_fn=seed_worker, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return torch.cat([batch for _ in range(2) for batch in loader])


def seeded_again(num_workers: int = 2, own_generator: bool = False) -> tuple[bool, str]:
    """Does a second run give the samples of the first, which had two workers?

    Args:
        num_workers: Workers of the second run.
        own_generator: The data set, or a library in it, has its own generator.
    """
    same = torch.equal(_draw_two_epochs(2, own_generator), _draw_two_epochs(num_workers, own_generator))
    return same, f"two epochs {'come out the same' if same else 'differ'}"


def reading_back() -> tuple[bool, str]:
    """Does the write-ups' CutMix leave all values on the device?"""
    from labkit.measure import count_readbacks
    from labkit.teach.reference import writeup_cutmix

    images, labels = torch.rand(4, 3, 32, 32), torch.arange(4)
    _, reads = count_readbacks(lambda: writeup_cutmix(images, labels, num_classes=4))
    return reads == 0, f"reads {reads} values back a batch: on a GPU, the host waits each time"


def detail_kept(profile: str) -> Read:
    """Detail in random crops of photos that were first resized to `SHORT_SIDE`, over that in crops of the originals.

    Detail is the standard deviation of the Laplacian. Each photo gives one ratio, since its crops are similar. Needs
    the photos of this scale, which a tour makes.
    """

    def read(frames: Frames) -> Reading | None:
        ratios = _measure_detail(profile)
        if ratios is None:
            return None
        interval, note = speedup_interval(ratios), f"detail, {len(ratios)} photos"
        return Reading(speedup_of(ratios), *interval, len(ratios), "pixels compared on the spot", note=note)

    return read


@functools.cache
def _measure_detail(profile: str) -> np.ndarray | None:
    if not photo_root(profile).is_dir():
        return None
    store = FolderStore(photo_root(profile))
    keys = store.keys()[:: max(1, len(store) // _MAX_PHOTOS)][:_MAX_PHOTOS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.array([_detail_ratio(store.read(key)) for key in keys])


def _detail_ratio(data: bytes) -> float:
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.v2.functional import resize, to_pil_image

    pixels = decode(data)
    large = min(pixels.shape[1:]) > SHORT_SIDE  # nothing is enlarged
    smaller = resize(pixels, [SHORT_SIDE], antialias=True) if large else pixels
    photo, prepared = to_pil_image(pixels), to_pil_image(smaller)
    boxes = [RandomResizedCrop.get_params(pixels, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(_N_BOXES)]
    zoom = prepared.width / photo.width
    ratios = [_measure_crop(prepared, box, zoom) / _measure_crop(photo, box, 1.0) for box in boxes]
    return float(np.exp(np.median(np.log(ratios))))


def _measure_crop(image: Any, box: tuple[int, int, int, int], zoom: float) -> float:
    import cv2
    from PIL import Image

    top, left, height, width = (zoom * side for side in box)
    edges = (left, top, min(left + width, image.width), min(top + height, image.height))
    crop = image.resize((224, 224), Image.Resampling.BILINEAR, box=edges).convert("L")
    return float(cv2.Laplacian(np.asarray(crop), cv2.CV_64F).std())
