"""The rules of kohya-ss/sd-scripts for buckets: the shapes, and how an image shrinks where none may be enlarged."""

import math

import numpy as np

from labkit.core import require_int
from labkit.data.sizes.latent_caches import Size


def bucket_shapes(
    resolution: int | Size = 512, *, step: int = 64, min_side: int = 256, max_side: int = 1024
) -> list[Size]:
    """Shapes of about one area: the square, and for each width the largest height that the area allows, both ways.

    Args:
        resolution: Side of a square, or (width, height); only their product counts. Its sides must lie within
            `min_side` and `max_side`.
        step: All sides are multiples of it, in pixels.
        min_side: Shortest side, rounded down to a multiple of `step`.
        max_side: Longest side, rounded up to a multiple of `step`.

    Returns:
        (width, height) of each bucket, sorted. The defaults are those of sd-scripts.

    Raises:
        ValueError: a value below 1, a `min_side` below `step`, or a resolution outside the limits.

    Source: `make_bucket_resolutions` in https://github.com/kohya-ss/sd-scripts/blob/48d368fa/library/model_util.py,
    with limits as in `adjust_min_max_bucket_reso_by_steps` of train_util.py. Taught in: notebooks/10_image_sizes.ipynb
    """
    width, height = parse_resolution(resolution)
    require_int("step", step)
    low = require_int("min_side", min_side, step) // step * step
    high = -(-require_int("max_side", max_side, step) // step) * step
    if min(width, height) < low or max(width, height) > high:
        raise ValueError(
            f"resolution must have sides from {low} to {high} (min_side, max_side), got {width} x {height}: "
            "change the limits or the resolution"
        )
    area = width * height
    square = math.isqrt(area) // step * step
    shapes = {(square, square)}
    for side in range(low, high + 1, step):
        other = min(high, area // side // step * step)
        if other >= low:
            shapes |= {(side, other), (other, side)}
    return sorted(shapes)


def shrink(widths: np.ndarray, heights: np.ndarray, max_area: int, step: int) -> np.ndarray:
    """Sizes (N, 2): images above `max_area` shrunk to it, one side a multiple of `step`; of the two, the truer ratio.

    Those for which a side rounds to nothing become 0 x 0.
    """
    aspects = widths / heights
    free_widths = np.sqrt(max_area * aspects)
    free_heights = max_area / free_widths

    def to_steps(sides: np.ndarray) -> np.ndarray:
        return round_half_up(sides) // step * step

    whole_widths, whole_heights = to_steps(free_widths), to_steps(free_heights)
    their_heights, their_widths = to_steps(whole_widths / aspects), to_steps(whole_heights * aspects)
    is_lost = (whole_heights == 0) | (their_heights == 0)
    by_width = np.abs(whole_widths / np.where(is_lost, 1, their_heights) - aspects)
    by_height = np.abs(their_widths / np.where(is_lost, 1, whole_heights) - aspects)
    along_width = np.stack([whole_widths, round_half_up(whole_widths / aspects)], 1)
    along_height = np.stack([round_half_up(whole_heights * aspects), whole_heights], 1)
    shrunk = np.where((by_width < by_height)[:, None], along_width, along_height)
    is_large = widths * heights > max_area
    return np.where(is_large[:, None], np.where(is_lost[:, None], 0, shrunk), np.stack([widths, heights], 1))


def round_half_up(sides: np.ndarray) -> np.ndarray:
    """Sides in pixels as int64."""
    return np.floor(sides + 0.5).astype(np.int64)


def parse_resolution(resolution: int | Size) -> Size:
    """(width, height) of a resolution, of which one number means a square."""
    width, height = resolution if isinstance(resolution, tuple) else (resolution, resolution)
    return require_int("resolution", width), require_int("resolution", height)
