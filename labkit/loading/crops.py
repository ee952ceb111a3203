"""What is seen of a photo: how crops are drawn, many at once, and what a crop is.

Numbers come first, which depend only on (seed, epoch, index, occurrence). Crops follow from them once the sizes of the
photos are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.loading.seeding import derived_seed

Size = tuple[int, int]  # height and width in pixels
Box = tuple[int, int, int, int]  # top, left, height and width, in pixels of a photo at its full size
Place = tuple[float, float, float, float]  # the same in decoded pixels, which may be at a part of its size

_SHARE_SEEN = 0.875  # of each side: 224 of 256
_ATTEMPTS = 10  # as in torchvision; if all fail, the crop is the largest central one
DRAWS = 2 * _ATTEMPTS + 3  # numbers per image: area and aspect ratio of each attempt, position, flip


class Crop(NamedTuple):
    """What one image of a batch is made of: a part of its photo is resized, and an image cut out of the result.

    A crop for training is its part, resized to its size. For evaluation the part is the whole photo.

    top, left, height, width: The part, in pixels of the upright photo.
    resized_height, resized_width: What the part is resized to.
    seen_top, seen_left: Where in the result the image begins. Negative: so many rows or columns of zeros come first.
    mirror: 1 if left and right change places, else 0.
    """

    top: int
    left: int
    height: int
    width: int
    resized_height: int
    resized_width: int
    seen_top: int
    seen_left: int
    mirror: int


# The columns of an array of crops, whose rows have the fields of `Crop`.
BOX, TOP_LEFT, SIDES, RESIZED, SEEN = slice(0, 4), slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)


@dataclass(frozen=True)
class CropPolicy:
    """How one crop of each photo is drawn; without `train`, it is the center of the photo, which is resized as a whole.

    `size` is height and width, `radius` that of the filter that resizes. The others are as `BatchLoader` takes them.
    """

    size: Size
    train: bool
    seed: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    resize: int | None
    radius: int

    def crops(self, draws: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """A crop of each photo, int64 (N, 9), with the fields of `Crop`.

        Args:
            draws: From `uniforms`, (N, DRAWS).
            sizes: int (N, 2): height and width of each photo in pixels.
        """
        crops = np.zeros((len(sizes), len(Crop._fields)), np.int64)
        if self.train:
            crops[:, BOX] = random_crops(draws, sizes, self.scale, self.ratio)
            crops[:, RESIZED] = self.size
            crops[:, -1] = flips(draws, self.flip)
        else:
            crops[:, SIDES] = sizes
            crops[:, RESIZED], crops[:, SEEN] = np.hsplit(center_crops(sizes, self.size, self.resize), 2)
        return crops

    def boxes(self, crops: np.ndarray, scales: np.ndarray | int) -> np.ndarray:
        """The pixels that crops (N, 9) need of their photos, decoded at 1 / scales: int64 (N, 4), top, left, height and
        width at full size."""
        if self.train:
            return crops[:, BOX]
        needed = pixels_needed(crops, self.size, self.radius)
        return np.where(np.reshape(scales, (-1, 1)) == 1, needed, crops[:, BOX])


class CropPolicies:
    """What a loader sees of a photo: a crop by each policy.

    Args:
        policies: All for training, or a single one.
    """

    def __init__(self, policies: Sequence[CropPolicy]):
        self._policies, self.train = policies, policies[0].train

    def draw(self, epoch: int, indices: np.ndarray, occurrences: np.ndarray) -> np.ndarray:
        """Random numbers for each photo and policy, before their sizes are known: float64 (N, policies, DRAWS).

        `occurrences` is how many times each index came before in the epoch.
        """
        return np.stack([uniforms(each.seed, epoch, indices, occurrences) for each in self._policies], axis=1)

    def of(self, draws: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """The crops of photos with these draws, whose height and width are `sizes` (N, 2): int64 (N, policies, 9)."""
        return np.stack([each.crops(draws[:, number], sizes) for number, each in enumerate(self._policies)], axis=1)

    def boxes(self, crops: np.ndarray, scales: np.ndarray | int = 1) -> np.ndarray:
        """The box around what all crops of a photo need of it, decoded at 1 / scales: int64 (N, 4), as of `Box`."""
        boxes = np.array([each.boxes(crops[:, number], scales) for number, each in enumerate(self._policies)])
        if len(boxes) == 1:
            return boxes[0]
        begins = boxes[..., TOP_LEFT].min(0)
        return np.hstack([begins, (boxes[..., TOP_LEFT] + boxes[..., SIDES]).max(0) - begins])


# SplitMix64: each 64-bit counter gives an independent number, so there is no generator to keep or to share.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_64_BITS = (1 << 64) - 1


def uniforms(seed: int, epoch: int, indices: np.ndarray, occurrences: np.ndarray | None = None) -> np.ndarray:
    """Random float64 (len(indices), DRAWS) in [0, 1); each row depends only on seed, epoch, its index and occurrence.

    Args:
        seed, epoch: Integers.
        indices: int (N,).
        occurrences: int (N,), how many times each index came before in the epoch. Default: never.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    keys = np.full(len(indices), derived_seed(seed, epoch) & _64_BITS, np.uint64)
    for again in np.unique(occurrences[occurrences > 0]).tolist() if occurrences is not None else ():
        keys[occurrences == again] = derived_seed(seed, epoch, again) & _64_BITS
    with np.errstate(over="ignore"):
        counters = (indices.astype(np.uint64) + keys)[:, None] + np.arange(1, DRAWS + 1, dtype=np.uint64) * _GOLDEN
        return (_mix_bits(counters) >> np.uint64(11)) * 2.0**-53


def random_crops(
    draws: np.ndarray, sizes: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Draw crops with the distribution of torchvision's RandomResizedCrop.

    Args:
        draws: From `uniforms`, (N, DRAWS).
        sizes: int (N, 2): height and width of each image in pixels.
        scale: Smallest and largest share of the image area.
        ratio: Smallest and largest width / height, drawn uniformly on a logarithmic scale.

    Returns:
        int64 (N, 4): top, left, height and width in pixels.
    """
    heights, widths = sizes[:, :1].astype(np.float64), sizes[:, 1:].astype(np.float64)
    area = heights * widths * _scale_to(draws[:, :_ATTEMPTS], *scale)
    aspect = np.exp(_scale_to(draws[:, _ATTEMPTS : 2 * _ATTEMPTS], *np.log(ratio)))
    crop_widths, crop_heights = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (crop_widths > 0) & (crop_widths <= widths) & (crop_heights > 0) & (crop_heights <= heights)
    first, rows = fits.argmax(1), np.arange(len(sizes))
    height, width = crop_heights[rows, first], crop_widths[rows, first]
    top = np.floor(draws[:, -3] * (heights[:, 0] - height + 1))
    left = np.floor(draws[:, -2] * (widths[:, 0] - width + 1))
    crops = np.stack([top, left, height, width], axis=1).astype(np.int64)
    for row in np.flatnonzero(~fits[rows, first]):
        image_height, image_width = sizes[row].tolist()
        crops[row] = _largest_central_crop(image_height, image_width, ratio)
    return crops


def flips(draws: np.ndarray, probability: float) -> np.ndarray:
    """Which images to mirror, bool (N,)."""
    return draws[:, -1] < probability


def center_crops(sizes: np.ndarray, size: Size, resize: int | None) -> np.ndarray:
    """The centers of photos, each resized as a whole and then cropped, as torchvision's Resize and CenterCrop do.

    Args:
        sizes: int (N, 2): height and width of each photo in pixels.
        size: Height and width of what is seen.
        resize: The photo's shorter side then. None: it just covers `size` / 0.875.

    Returns:
        int64 (N, 4): height and width that the photo is resized to; and top and left of what is seen of that, negative
        where nothing of it lies.

    Source: `_compute_resized_output_size` and `center_crop` of torchvision.
    """
    sizes, shape = sizes.astype(np.int64), np.array(size)
    sides = np.rint(shape / _SHARE_SEEN) if resize is None else np.array([resize, resize])
    is_first = (sides / sizes).argmax(1)[:, None] == np.arange(2)  # the side that decides; the other follows
    own, longer = np.broadcast_to(sides, sizes.shape)[is_first], sizes[~is_first]
    resized = np.empty_like(sizes)
    resized[is_first], resized[~is_first] = own, np.floor(own * longer / sizes[is_first])
    beyond = resized - shape
    offsets = np.where(beyond < 0, -(-beyond // 2), np.rint(beyond / 2))
    return np.hstack([resized, offsets.astype(np.int64)])


def pixels_needed(crops: np.ndarray, size: Size, radius: int) -> np.ndarray:
    """What is needed of photos that are resized as a whole, to make the parts of them that are seen.

    Args:
        crops: int64 (N, 9), of whole photos.
        size: Height and width of what is seen.
        radius: How far the filter reaches, in pixels of what is smaller: 1 if it is linear, 2 if cubic.

    Returns:
        int64 (N, 4): top, left, height and width, in pixels of the photos.
    """
    sides, resized, first = crops[:, SIDES], crops[:, RESIZED], crops[:, SEEN]
    steps = sides / resized
    reach = radius * np.maximum(steps, 1) + 1  # and one for rounding
    begins = np.floor(steps * (np.maximum(first, 0) + 0.5) - reach)
    ends = np.ceil(steps * (np.minimum(first + size, resized) - 0.5) + reach)
    # Of a side that hardly changes, a part may have as many pixels after as before, by rounding, for which OpenCV and
    # torch copy it. What is seen is central, so a part is at least half of the side, and 2 pixels settle it.
    hardly_changes = np.abs(sides - resized) <= 2
    begins = np.where(hardly_changes, 0, np.maximum(begins, 0)).astype(np.int64)
    ends = np.where(hardly_changes, sides, np.minimum(ends, sides)).astype(np.int64)
    return np.hstack([begins, ends - begins])


def _mix_bits(numbers: np.ndarray) -> np.ndarray:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))


def _scale_to(draws: np.ndarray, least: float, largest: float) -> np.ndarray:
    return least + draws * (largest - least)


def _largest_central_crop(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    crop_height, crop_width = min(height, round(width / min(ratio))), min(width, round(height * max(ratio)))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width
