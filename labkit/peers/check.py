"""check_peer(): does a loader do the work that it is timed on?"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.peers import probe_images
from labkit.peers.peer import RAW_PIXELS, Peer, Work
from labkit.peers.probe_images import HEIGHT, N_PICTURES, WIDTH, CropReading

_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_MEAN_AREA = 0.43  # less than the middle of the range: a large crop that does not fit the picture is drawn again
_TOLERANCE = 1.06  # crops have whole pixels, and are read from brightness
_MAX_ANTIALIASED_GRAIN = 3.6  # in crops of twice the output's size; sampling leaves 5


class PeerError(Exception):
    """A loader does not do the work; the message says what is wrong."""


def check_peer(peer: Peer, work: Work) -> dict[str, float]:
    """Let a loader do the work on pictures that show what was done to them.

    Reads two epochs. In each, every picture must come exactly once (with `drops_last`, the last short batch may be
    missing), with its folder's label, in uint8 batches of the right shape and with the right colors. The crops must be
    distributed as those of RandomResizedCrop, with half of them flipped, and differ between epochs.

    Args:
        peer: The loader.
        work: What it will be asked to do. The pictures are made in its `scratch`; its photos are not read.

    Returns:
        `images` in two epochs, mean `area` and `flipped` share of the crops, and `grain`: how much grain is left in
        crops that were shrunk to half or less.

    Raises:
        PeerError: the loader does not do the work; says what is wrong.

    Taught in: notebooks/13_peers.ipynb
    """
    work = replace(work, root=make_pictures(work), scratch=work.scratch / "check" / peer.name)
    if peer.prepare:
        peer.prepare(work)
    (first, first_labels), (second, second_labels) = (_read_epoch(peer, work) for _ in range(2))
    _check_complete(first.number, first_labels, work, peer)
    _check_complete(second.number, second_labels, work, peer)
    _check_order(first.number, second.number)
    return _check_crops(peer, first, second)


def make_pictures(work: Work) -> Path:
    """Make the pictures for `check_peer`, unless they are there, and return their folder."""
    return probe_images.make_pictures(work.scratch / "check" / "pictures")


def _read_epoch(peer: Peer, work: Work) -> tuple[CropReading, np.ndarray]:
    """What the images of one epoch show, and their labels."""
    batches = [_check_batch(batch, work) for batch in peer.loader(work)]
    if not batches:
        raise PeerError("gives no batch")
    readings, labels = zip(*batches, strict=True)
    return _concatenate(*readings), np.concatenate(labels)


def _concatenate(*readings: CropReading) -> CropReading:
    names = [field.name for field in fields(CropReading)]
    return CropReading(*(np.concatenate([getattr(reading, name) for reading in readings]) for name in names))


def _check_batch(batch: Any, work: Work) -> tuple[CropReading, np.ndarray]:
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[0], Tensor):
        raise PeerError(f"gives {type(batch).__name__}, not a pair (images, labels) with a tensor of images")
    images = batch[0]
    labels = torch.as_tensor(batch[1]).cpu().reshape(-1).numpy().copy()  # FFCV reuses a batch's memory
    if images.dtype != torch.uint8:
        raise PeerError(f"gives {images.dtype}, not uint8")
    shape = (3, work.size, work.size)
    if images.ndim != 4 or tuple(images.shape[1:]) != shape or not 1 <= len(images) <= work.batch_size:
        raise PeerError(f"gives batches of shape {tuple(images.shape)}, not (at most {work.batch_size}, {shape})")
    if len(labels) != len(images):
        raise PeerError(f"gives {len(labels)} labels with {len(images)} images")
    return probe_images.read_crops(images), labels


def _check_complete(numbers: np.ndarray, labels: np.ndarray, work: Work, peer: Peer) -> None:
    n_unknown = int((numbers < 0).sum())
    if n_unknown:
        raise PeerError(f"{n_unknown} of {len(numbers)} images have colors that no photo has")
    counts = np.bincount(numbers, minlength=N_PICTURES)
    if counts.max() > 1:
        raise PeerError(f"{_describe(counts > 1)} came more than once in an epoch")
    n_droppable = N_PICTURES % work.batch_size if peer.drops_last else 0
    if (counts == 0).sum() > n_droppable:
        raise PeerError(f"{_describe(counts == 0)} never came in an epoch")
    n_wrong = int((probe_images.picture_label(numbers) != labels).sum())
    if n_wrong:
        raise PeerError(f"{n_wrong} of {len(labels)} labels are not those of the image's folder")


def _describe(chosen: np.ndarray) -> str:
    numbers = np.flatnonzero(chosen)
    return f"{len(numbers)} of {len(chosen)} images, the first {probe_images.picture_key(numbers[0])},"


def _check_order(first: np.ndarray, second: np.ndarray) -> None:
    by_name = np.argsort([probe_images.picture_key(number) for number in range(N_PICTURES)])
    rank = np.argsort(by_name)
    for numbers in (first, second):
        if np.corrcoef(rank[numbers], np.arange(len(numbers)))[0, 1] > 0.95:
            raise PeerError("images come in the order of their names: nothing is shuffled")
    if np.array_equal(first, second):
        raise PeerError("two epochs have the same order")


def _check_crops(peer: Peer, first: CropReading, second: CropReading) -> dict[str, float]:
    crops = _concatenate(first, second)
    area, flipped, grain = crops.width * crops.height, crops.flipped.mean(), _grain_left(crops)
    if crops.upside_down.any():
        raise PeerError("images are turned upside down")
    _check_range("area", area, _AREA)
    _check_range("aspect ratio", crops.width * WIDTH / (crops.height * HEIGHT), _RATIO)
    if abs(area.mean() - _MEAN_AREA) > 0.1:
        raise PeerError(f"crops cover {area.mean():.0%} of the image on average, not about {_MEAN_AREA:.0%}")
    if not 0.3 < flipped < 0.7:
        raise PeerError(f"{flipped:.0%} of the images are flipped, not about half of them")
    if _repeated_share(first, second) > 0.2:
        raise PeerError("two epochs cut the same crops")
    if peer.antialias and peer.source != RAW_PIXELS and grain > _MAX_ANTIALIASED_GRAIN:
        raise PeerError(f"does not antialias: grain of {grain:.1f} is left where crops were shrunk")
    return {"images": float(len(area)), "area": float(area.mean()), "flipped": float(flipped), "grain": grain}


def _check_range(name: str, values: np.ndarray, allowed: tuple[float, float]) -> None:
    low, high = allowed
    span = f"{values.min():.2f} to {values.max():.2f}"
    if values.min() < low / _TOLERANCE or values.max() > high * _TOLERANCE:
        raise PeerError(f"crops have {name} {span}, not {low:.2f} to {high:.2f}")
    if values.max() - values.min() < 0.3 * (high - low):
        raise PeerError(f"the {name} of crops hardly varies: {span}")


def _repeated_share(first: CropReading, second: CropReading) -> float:
    """Share of the pictures whose crop was the same in both epochs."""
    _, in_first, in_second = np.intersect1d(first.number, second.number, return_indices=True)
    return float(np.mean(np.abs(first.width[in_first] - second.width[in_second]) < 0.005))


def _grain_left(crops: CropReading) -> float:
    """Median grain of the crops of at least twice the output's size each way."""
    shrunk = (crops.width > 448 / WIDTH) & (crops.height > 448 / HEIGHT)
    return float(np.median(crops.grain[shrunk])) if shrunk.any() else float("nan")
