"""Buckets by aspect ratio, as in kohya-ss/sd-scripts: images of one bucket are resized and cropped to one shape."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.errors import ArgumentError, WrongTypeError
from labkit.util.arguments import require_int
from labkit.util.pictures import WidthHeight

if TYPE_CHECKING:  # workers import this module, and need neither
    import pandas as pd
    from torch import Tensor

MAX_SIDE = 999_999_999  # pixels; a larger number is not a size
_ROWS_AT_ONCE = 1 << 16  # of a table with a column for each bucket
_FIRST_SWAPPED = 5  # EXIF orientations from here on swap width and height


def bucket_shapes(
    resolution: int | WidthHeight = 512, *, step: int = 64, min_side: int = 256, max_side: int = 1024
) -> list[WidthHeight]:
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
    sides = resolution if isinstance(resolution, tuple) else (resolution, resolution)
    width, height = (require_int("resolution", side) for side in sides)
    step = require_int("step", step)
    low = require_int("min_side", min_side, step) // step * step
    high = -(-require_int("max_side", max_side, step) // step) * step
    if min(width, height) < low or max(width, height) > high:
        raise ArgumentError(
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


@dataclass(frozen=True)
class Buckets:
    """Shapes for batches, and which image goes into which: resized to cover the shape, then cropped to its center.

    An image is enlarged or shrunk to the shape whose aspect ratio is closest to its own; a shape that equals its size
    comes first.

    Args:
        shapes: (width, height) of each bucket; kept sorted. A bucket's number is its place among them.

    Raises:
        ValueError: no shapes, or a side below 1.

    >>> buckets = lk.Buckets.fit(lk.collect_sizes("photos"), 512)
    """

    shapes: tuple[WidthHeight, ...]

    def __post_init__(self) -> None:
        try:
            pairs = [(width, height) for width, height in self.shapes]
        except (TypeError, ValueError):
            message = f"shapes must hold pairs such as ((512, 512), (448, 576)), got {self.shapes!r:.100}"
            raise WrongTypeError(message) from None
        sides = {(require_int("width", width), require_int("height", height)) for width, height in pairs}
        if not sides:
            raise ArgumentError("shapes must hold at least one (width, height), got none")
        object.__setattr__(self, "shapes", tuple(sorted(sides)))

    @classmethod
    def fit(
        cls,
        sizes: "pd.DataFrame",
        resolution: int | WidthHeight = 512,
        *,
        step: int = 64,
        min_side: int = 256,
        max_side: int = 1024,
    ) -> "Buckets":
        """Buckets for the images of a frame.

        Args:
            sizes: From `collect_sizes`, see `upright_sizes`.
            resolution, step, min_side, max_side: As for `bucket_shapes`. All its shapes are kept, used or not.

        Raises:
            ValueError: as `bucket_shapes` and `upright_sizes`.
        """
        upright_sizes(sizes)  # an unfit frame is an error here
        return cls(tuple(bucket_shapes(resolution, step=step, min_side=min_side, max_side=max_side)))

    def select(self, widths: Any, heights: Any) -> np.ndarray:
        """The number of each image's bucket.

        Args:
            widths, heights: Of the images, upright, in pixels: integers (N,).

        Returns:
            int64 (N,), indices into `shapes`.

        Raises:
            ValueError: a side is not a size in pixels.
        """
        widths, heights = _as_sides(widths, heights)
        shapes, aspects = np.array(self.shapes, np.int64), widths / heights
        own, images = shapes[:, 0] << 32 | shapes[:, 1], widths << 32 | heights
        equal = np.searchsorted(own, images).clip(max=len(own) - 1)
        parts = (aspects[at : at + _ROWS_AT_ONCE, None] for at in range(0, len(aspects), _ROWS_AT_ONCE))
        nearest = [np.abs(shapes[:, 0] / shapes[:, 1] - part).argmin(1) for part in parts]
        return np.where(own[equal] == images, equal, np.concatenate([np.zeros(0, np.int64), *nearest]))

    def resized(self, widths: Any, heights: Any) -> np.ndarray:
        """The size to which each image is resized before it is cropped; never below its bucket's shape.

        Args:
            widths, heights: As for `select`.

        Returns:
            int64 (N, 2): width, height.
        """
        widths, heights = _as_sides(widths, heights)
        shapes = np.array(self.shapes)[self.select(widths, heights)]
        by_height = widths / heights > shapes[:, 0] / shapes[:, 1]  # the wider ones lose at their sides
        scales = np.where(by_height, shapes[:, 1] / heights, shapes[:, 0] / widths)
        return np.floor(np.stack([widths * scales, heights * scales], 1) + 0.5).astype(np.int64)

    def crop(self, image: "Tensor") -> "Tensor":
        """Resize an image, antialiased, and crop it to the center, so that it has its bucket's shape.

        Args:
            image: uint8 or float (C, H, W), upright.

        Returns:
            The same type, (C, height, width) of the bucket; may share memory with `image`.

        Raises:
            ValueError: as `select`; or the resized image would have more than `max_pixels()`, as a very long and
                narrow one has.
        """
        from torch.nn.functional import interpolate  # here: a frame of sizes needs no torch

        from labkit.data.decode import max_pixels

        old_height, old_width = image.shape[-2:]
        (width, height), (new_width, new_height) = _place(self, old_width, old_height)
        if new_width * new_height > max_pixels():
            raise ArgumentError(
                f"an image of {old_width} x {old_height} would be enlarged to {new_width} x {new_height} for a bucket "
                f"of {width} x {height}, more than {max_pixels():.0f} pixels: leave it out"
            )
        if (new_width, new_height) != (old_width, old_height):
            image = interpolate(image[None], (new_height, new_width), mode="bilinear", antialias=True)[0]
        top, left = (new_height - height) // 2, (new_width - width) // 2
        return image[:, top : top + height, left : left + width]


def upright_sizes(sizes: "pd.DataFrame") -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights of a frame's images as `ImageDataset` decodes them, with EXIF applied: int64 (N,) each.

    Args:
        sizes: Columns path, width and height, and exif_orientation if known, as `collect_sizes` gives them. Where the
            orientation is missing, as it is for sizes from caches, the image counts as upright.

    Raises:
        ValueError: no such columns, no rows, or rows without a size.
    """
    if not hasattr(sizes, "columns"):
        raise WrongTypeError(f"sizes must be a frame of lk.collect_sizes, got {sizes!r:.100}")
    if missing := [name for name in ("path", "width", "height") if name not in sizes]:
        raise ArgumentError(f"sizes has no column {', '.join(missing)}: give a frame of collect_sizes")
    if not len(sizes):
        raise ArgumentError("sizes has no rows: give a frame of collect_sizes with at least one image")
    unknown = (sizes["width"].isna() | sizes["height"].isna()).to_numpy()
    if unknown.any():
        raise ArgumentError(
            f"{unknown.sum()} images have no size, the first: {sizes['path'].iloc[int(unknown.argmax())]}. Leave them "
            'out: sizes[sizes["width"].notna()]'
        )
    widths, heights = (sizes[name].to_numpy(np.int64) for name in ("width", "height"))
    if "exif_orientation" in sizes:
        is_swapped = sizes["exif_orientation"].fillna(1).to_numpy(np.int64) >= _FIRST_SWAPPED
        widths, heights = np.where(is_swapped, heights, widths), np.where(is_swapped, widths, heights)
    return widths, heights


@lru_cache(maxsize=4096)  # images share sizes, and NumPy is slow on arrays of one
def _place(buckets: Buckets, width: int, height: int) -> tuple[WidthHeight, WidthHeight]:
    """The shape of an image's bucket, and the size to which the image is resized."""
    new_width, new_height = buckets.resized([width], [height])[0].tolist()
    return buckets.shapes[int(buckets.select([width], [height])[0])], (new_width, new_height)


def _as_sides(widths: Any, heights: Any) -> tuple[np.ndarray, np.ndarray]:
    sides = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    for values in sides:
        if len(values) and not (values.min() >= 1 and values.max() <= MAX_SIDE):
            found = f"{values.min()} to {values.max()}"
            raise ArgumentError(f"widths and heights must be from 1 to {MAX_SIDE} pixels, got {found}")
    return sides
