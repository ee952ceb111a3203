"""Buckets by aspect ratio, as in kohya-ss/sd-scripts: images of one bucket are resized and cropped to one shape."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.data.headers import MAX_SIDE, Size
from labkit.errors import ArgumentError
from labkit.util.arguments import require_int


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


if TYPE_CHECKING:  # workers import this module, and need neither
    import pandas as pd
    from torch import Tensor

_ROWS_AT_ONCE = 1 << 16  # of a table with a column for each bucket
_FIRST_SWAPPED = 5  # EXIF orientations from here on swap width and height


@dataclass(frozen=True)
class Buckets:
    """Shapes for batches, and which image goes into which: resized to cover the shape, then cropped to its centre.

    Without `max_area`, an image is enlarged or shrunk to the shape whose aspect ratio is closest to its own; a shape
    that equals its size comes first. With `max_area`, an image is never enlarged: a larger one is shrunk to that
    area, and then both sides are cut to multiples of `step`; `fit` finds the shapes that a frame needs.

    Args:
        shapes: (width, height) of each bucket; kept sorted. A bucket's number is its place among them.
        max_area: Pixels of the largest image that keeps its size. None: all are resized to the shapes.
        step: Of the sides, with `max_area`.

    Raises:
        ValueError: no shape, or a side below 1.

    Source: `BucketManager.select_bucket` and `trim_and_resize_if_required` in
    https://github.com/kohya-ss/sd-scripts/blob/48d368fa/library/train_util.py. Pixels differ from its own: it resizes
    with OpenCV's INTER_AREA or Pillow's Lanczos, `crop` with antialiased bilinear, as the rest of labkit.
    Taught in: notebooks/10_image_sizes.ipynb
    """

    shapes: tuple[Size, ...]
    max_area: int | None = None
    step: int = 64

    def __post_init__(self) -> None:
        sides = {(require_int("width", width), require_int("height", height)) for width, height in self.shapes}
        if not sides:
            raise ArgumentError("shapes must hold at least one (width, height), got none")
        object.__setattr__(self, "shapes", tuple(sorted(sides)))
        if self.max_area is not None:
            require_int("max_area", self.max_area)
        require_int("step", self.step)

    @classmethod
    def fit(
        cls,
        sizes: "pd.DataFrame",
        resolution: int | Size = 512,
        *,
        step: int = 64,
        min_side: int = 256,
        max_side: int = 1024,
        upscale: bool = True,
    ) -> "Buckets":
        """Buckets for the images of a frame.

        Args:
            sizes: From `collect_sizes`, see `upright_sizes`.
            resolution, step, min_side, max_side: As for `bucket_shapes`. All its shapes are kept, used or not.
            upscale: False: no image is enlarged, as with sd-scripts' `bucket_no_upscale`. The shapes are then those
                of the frame's images, at most of the area of `resolution`, and `min_side` and `max_side` are ignored.

        Raises:
            ValueError: as `bucket_shapes` and `upright_sizes`; or, with `upscale=False`, images that are too small or
                too narrow for a side of one step. sd-scripts stops at these, too, or trains on nothing.
        """
        widths, heights = upright_sizes(sizes)
        if upscale:
            return cls(tuple(bucket_shapes(resolution, step=step, min_side=min_side, max_side=max_side)))
        width, height = parse_resolution(resolution)
        area = width * height
        resized = shrink(widths, heights, area, require_int("step", step))
        shapes = resized - resized % step
        if len(small := np.flatnonzero((shapes == 0).any(1))):
            row = small[0]
            raise ArgumentError(
                f"{len(small)} images are too small or too narrow for buckets of step {step}, the first: "
                f"{sizes['path'].iloc[row]} ({widths[row]} x {heights[row]}). Leave their rows out, or choose "
                "a smaller step or upscale=True"
            )
        return cls(tuple((int(width), int(height)) for width, height in np.unique(shapes, axis=0)), area, step)

    def select(self, widths: Any, heights: Any) -> np.ndarray:
        """The number of each image's bucket.

        Args:
            widths, heights: Of the images, upright, in pixels: integers (N,).

        Returns:
            int64 (N,), indices into `shapes`.

        Raises:
            ValueError: a side is not a size in pixels; or, with `max_area`, no bucket has the image's shape.
        """
        widths, heights = _as_sides(widths, heights)
        if self.max_area is None:
            numbers, is_known = self._find(np.stack([widths, heights], 1))
            return np.where(is_known, numbers, self._closest(widths / heights))
        resized = shrink(widths, heights, self.max_area, self.step)
        numbers, is_known = self._find(resized - resized % self.step)
        if not is_known.all():
            row = int(is_known.argmin())
            raise ArgumentError(
                f"no bucket fits an image of {widths[row]} x {heights[row]}, and it may not be enlarged: fit the "
                "buckets to a frame that has its size (Buckets.fit(sizes, upscale=False))"
            )
        return numbers

    def resized(self, widths: Any, heights: Any) -> np.ndarray:
        """The size to which each image is resized before it is cropped; never below its bucket's shape.

        Args:
            widths, heights: As for `select`.

        Returns:
            int64 (N, 2): width, height.
        """
        widths, heights = _as_sides(widths, heights)
        shapes = np.array(self.shapes)[self.select(widths, heights)]
        if self.max_area is not None:
            return shrink(widths, heights, self.max_area, self.step)
        by_height = widths / heights > shapes[:, 0] / shapes[:, 1]  # the wider ones lose at their sides
        scales = np.where(by_height, shapes[:, 1] / heights, shapes[:, 0] / widths)
        return np.stack([round_half_up(widths * scales), round_half_up(heights * scales)], 1)

    def crop(self, image: "Tensor") -> "Tensor":
        """Resize an image, antialiased, and crop it to the centre, so that it has its bucket's shape.

        Args:
            image: uint8 or float (C, H, W), upright.

        Returns:
            The same type, (C, height, width) of the bucket; may share memory with `image`.

        Raises:
            ValueError: as `select`; or the resized image would have more than `MAX_PIXELS` pixels, as a very long and
                narrow one has.
        """
        from torch.nn.functional import interpolate  # here: a frame of sizes needs no torch

        from labkit.data.decode import MAX_PIXELS

        old_height, old_width = image.shape[-2:]
        (width, height), (new_width, new_height) = _place(self, old_width, old_height)
        if new_width * new_height > MAX_PIXELS:
            raise ArgumentError(
                f"an image of {old_width} x {old_height} would be enlarged to {new_width} x {new_height} for a bucket "
                f"of {width} x {height}, more than {MAX_PIXELS} pixels: leave it out"
            )
        if (new_width, new_height) != (old_width, old_height):
            image = interpolate(image[None], (new_height, new_width), mode="bilinear", antialias=True)[0]
        top, left = (new_height - height) // 2, (new_width - width) // 2
        return image[:, top : top + height, left : left + width]

    def _find(self, shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of shapes (N, 2), the number of the bucket that has it, and whether one has."""
        own, wanted = (pairs[:, 0] << 32 | pairs[:, 1] for pairs in (np.array(self.shapes, np.int64), shapes))
        numbers = np.searchsorted(own, wanted).clip(max=len(own) - 1)
        return numbers, own[numbers] == wanted

    def _closest(self, aspects: np.ndarray) -> np.ndarray:
        own = np.array([width / height for width, height in self.shapes])
        parts = (aspects[at : at + _ROWS_AT_ONCE, None] for at in range(0, len(aspects), _ROWS_AT_ONCE))
        return np.concatenate([np.zeros(0, np.int64), *(np.abs(own - part).argmin(1) for part in parts)])


def upright_sizes(sizes: "pd.DataFrame") -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights of a frame's images as `ImageDataset` decodes them, with EXIF applied: int64 (N,) each.

    Args:
        sizes: Columns path, width and height, and exif_orientation if known, as `collect_sizes` gives them. Where the
            orientation is missing, as it is for sizes from caches, the image counts as upright.

    Raises:
        ValueError: no such columns, no rows, or rows without a size.
    """
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
def _place(buckets: Buckets, width: int, height: int) -> tuple[Size, Size]:
    """Of an image, the shape of its bucket, and the size to which it is resized."""
    new_width, new_height = buckets.resized([width], [height])[0].tolist()
    return buckets.shapes[int(buckets.select([width], [height])[0])], (new_width, new_height)


def _as_sides(widths: Any, heights: Any) -> tuple[np.ndarray, np.ndarray]:
    sides = np.asarray(widths, np.int64), np.asarray(heights, np.int64)
    for values in sides:
        if len(values) and not (values.min() >= 1 and values.max() <= MAX_SIDE):
            found = f"{values.min()} to {values.max()}"
            raise ArgumentError(f"widths and heights must be from 1 to {MAX_SIDE} pixels, got {found}")
    return sides
