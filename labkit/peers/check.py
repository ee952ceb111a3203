"""check_peer(): does a loader do the work that it is compared by?"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.peers import probe_images as pictures
from labkit.peers.peer import RAW_PIXELS, Peer, Work
from labkit.peers.probe_images import Seen

_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_MEAN_AREA = 0.43  # less than the middle of the range: a large crop that does not fit the picture is drawn again
_SLACK = 1.06  # crops are whole pixels, and read from brightness
_SHRUNK_GRAIN = 3.6  # what is left of the grain by averaging, where a crop is twice the output; sampling leaves 5


class PeerError(Exception):
    """A loader does not do the work; the message says what is wrong."""


def check_peer(peer: Peer, work: Work) -> dict[str, float]:
    """Let a loader do the work on pictures that tell what was done to them.

    Two epochs are read. Each picture has to come exactly once in each (but for a last short batch, where `drops_last`
    says so), with its folder's label, in uint8 batches of the right shape; the crops have to be as those of
    RandomResizedCrop, half of them flipped, no two epochs alike, and colors right.

    Args:
        peer: The loader.
        work: What it will be asked to do. The pictures lie under its `scratch`; its photos are not touched.

    Returns:
        What was seen: `images` in two epochs, mean `area` and `flipped` share of the crops, and `grain`: what is left
        of the grain where crops were shrunk to half or less.

    Raises:
        PeerError: the work is not done; says what is wrong.

    Taught in: notebooks/13_peers.ipynb
    """
    work = replace(work, root=make_pictures(work), scratch=work.scratch / "check" / peer.name)
    if peer.prepare:
        peer.prepare(work)
    epochs = [_epoch(peer, work) for _ in range(2)]
    for seen, labels in epochs:
        _check_complete(seen.number, labels, work.batch_size if peer.drops_last else 1)
    first, second = epochs[0][0], epochs[1][0]
    _check_order(first.number, second.number)
    _check_crops(first, second)
    return _findings(peer, first, second)


def make_pictures(work: Work) -> Path:
    """The folder of pictures for `check_peer`, made if it is not there."""
    return pictures.make_pictures(work.scratch / "check" / "pictures")


def _epoch(peer: Peer, work: Work) -> tuple[Seen, np.ndarray]:
    """What one epoch's images tell, and its labels."""
    parts, labels = [], []
    for batch in peer.loader(work):
        images, own = _checked_batch(batch, work)
        parts.append(pictures.look_at(images))
        labels.append(own)
    if not parts:
        raise PeerError("gives no batch")
    fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])}
    return Seen(**fields), np.concatenate(labels)


def _checked_batch(batch: Any, work: Work) -> tuple[Tensor, np.ndarray]:
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[0], Tensor):
        raise PeerError(f"gives {type(batch).__name__}, where a pair (images, labels) is wanted, images a tensor")
    images = batch[0]
    labels = torch.as_tensor(batch[1]).cpu().reshape(-1).numpy().copy()  # FFCV writes over a batch's memory
    if images.dtype != torch.uint8:
        raise PeerError(f"gives {images.dtype}, not uint8")
    wanted = (3, work.size, work.size)
    if images.ndim != 4 or tuple(images.shape[1:]) != wanted or not 1 <= len(images) <= work.batch_size:
        raise PeerError(f"gives batches of shape {tuple(images.shape)}, not (at most {work.batch_size}, {wanted})")
    if len(labels) != len(images):
        raise PeerError(f"gives {len(labels)} labels with {len(images)} images")
    return images, labels


def _check_complete(numbers: np.ndarray, labels: np.ndarray, drop_below: int) -> None:
    """Each picture once, with its label; `drop_below`: a last batch of fewer may be left out."""
    strange = int((numbers < 0).sum())
    if strange:
        raise PeerError(f"{strange} of {len(numbers)} images have colors that no photo has")
    counts = np.bincount(numbers, minlength=pictures.N_PICTURES)
    if counts.max() > 1:
        raise PeerError(f"{_named(counts > 1)} came more than once in an epoch")
    if (counts == 0).sum() > pictures.N_PICTURES % drop_below:
        raise PeerError(f"{_named(counts == 0)} never came in an epoch")
    wrong = [pictures.picture_label(number) != label for number, label in zip(numbers, labels, strict=True)]
    if any(wrong):
        raise PeerError(f"{sum(wrong)} of {len(labels)} labels are not those of the image's folder")


def _named(chosen: np.ndarray) -> str:
    numbers = np.flatnonzero(chosen)
    return f"{len(numbers)} of {len(chosen)} images, the first {pictures.picture_key(numbers[0])},"


def _check_order(first: np.ndarray, second: np.ndarray) -> None:
    by_name = np.argsort([pictures.picture_key(number) for number in range(pictures.N_PICTURES)])
    place = np.argsort(by_name)
    for numbers in (first, second):
        if np.corrcoef(place[numbers], np.arange(len(numbers)))[0, 1] > 0.95:
            raise PeerError("images come in the order of their names: nothing is shuffled")
    if np.array_equal(first, second):
        raise PeerError("two epochs have the same order")


def _check_crops(first: Seen, second: Seen) -> None:
    if first.upside_down.any() or second.upside_down.any():
        raise PeerError("images are turned upside down")
    area, ratio, flipped = _crops(first, second)
    _check_range("area", area, _AREA)
    _check_range("aspect ratio", ratio, _RATIO)
    if abs(area.mean() - _MEAN_AREA) > 0.1:
        raise PeerError(f"crops cover {area.mean():.0%} of the image on average, not about {_MEAN_AREA:.0%}")
    if not 0.3 < flipped.mean() < 0.7:
        raise PeerError(f"{flipped.mean():.0%} of the images are flipped, where half of them should be")
    if _repeated(first, second) > 0.2:
        raise PeerError("two epochs cut the same crops")


def _crops(*epochs: Seen) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of the picture's area, width over height, and flips of all crops."""
    width, height = (np.concatenate([getattr(seen, side) for seen in epochs]) for side in ("width", "height"))
    ratio = width * pictures.WIDTH / (height * pictures.HEIGHT)
    return width * height, ratio, np.concatenate([seen.flipped for seen in epochs])


def _check_range(name: str, values: np.ndarray, allowed: tuple[float, float]) -> None:
    low, high = allowed[0] / _SLACK, allowed[1] * _SLACK
    if values.min() < low or values.max() > high:
        found = f"{values.min():.2f} to {values.max():.2f}"
        raise PeerError(f"crops have {name} {found}, not {allowed[0]:.2f} to {allowed[1]:.2f}")
    if values.max() - values.min() < 0.3 * (allowed[1] - allowed[0]):
        raise PeerError(f"the {name} of crops hardly varies: {values.min():.2f} to {values.max():.2f}")


def _repeated(first: Seen, second: Seen) -> float:
    """Share of the pictures whose crop was the same in both epochs."""
    common = np.intersect1d(first.number, second.number)
    one, two = (seen.width[np.argsort(seen.number)][np.isin(np.sort(seen.number), common)] for seen in (first, second))
    return float(np.mean(np.abs(one - two) < 0.005))


def _findings(peer: Peer, first: Seen, second: Seen) -> dict[str, float]:
    area, _, flipped = _crops(first, second)
    grain = _grain_left(first, second)
    if peer.antialias and peer.source != RAW_PIXELS and grain > _SHRUNK_GRAIN:
        raise PeerError(f"does not antialias: grain of {grain:.1f} is left where crops were shrunk")
    return {
        "images": float(len(area)),
        "area": float(area.mean()),
        "flipped": float(flipped.mean()),
        "grain": grain,
    }


def _grain_left(*epochs: Seen) -> float:
    """Median over the crops of at least twice the output's size each way."""
    width, height, grain = (np.concatenate([getattr(s, name) for s in epochs]) for name in ("width", "height", "grain"))
    shrunk = (width > 448 / pictures.WIDTH) & (height > 448 / pictures.HEIGHT)
    return float(np.median(grain[shrunk])) if shrunk.any() else float("nan")
