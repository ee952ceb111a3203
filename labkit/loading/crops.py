"""Draw crops and flips for many images at once, from numbers that depend only on (seed, epoch, index, occurrence)."""

import numpy as np

from labkit.loading.seeding import derived_seed

_ATTEMPTS = 10  # as in torchvision; if all fail, the crop is the largest central one
DRAWS = 2 * _ATTEMPTS + 3  # numbers per image: area and aspect ratio of each attempt, position, flip

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


def middle_crops(sizes: np.ndarray, size: int) -> np.ndarray:
    """Crops for evaluation: the central square that Resize and a CenterCrop to 7/8 of it would keep, int64 (N, 4)."""
    resized = round(size / 0.875)
    side = np.maximum(1, np.rint(sizes.min(1) * (size / resized)).astype(np.int64))
    top, left = (np.rint((sizes[:, axis] - side) / 2).astype(np.int64) for axis in (0, 1))
    return np.stack([top, left, side, side], axis=1)


def _mix_bits(numbers: np.ndarray) -> np.ndarray:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))


def _scale_to(draws: np.ndarray, least: float, largest: float) -> np.ndarray:
    return least + draws * (largest - least)


def _largest_central_crop(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    crop_height, crop_width = min(height, round(width / min(ratio))), min(width, round(height * max(ratio)))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width
