"""Buckets: their shapes, which image goes into which, and what is cropped; against loops, fractions and Pillow."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import labkit as lk
from labkit.data.buckets import bucket_shapes, upright_sizes

SIDES = st.integers(1, 5000)
SIZES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=30)
DEFAULT = lk.Buckets(tuple(bucket_shapes()))
some = settings(max_examples=20, deadline=None)


def frame_of_sizes(*sizes, **columns) -> pd.DataFrame:
    widths, heights = zip(*sizes, strict=True)
    paths = [f"{number}.jpg" for number in range(len(sizes))]
    known = {name: pd.array(values, "Int64") for name, values in (("width", widths), ("height", heights))}
    return pd.DataFrame({"path": paths, **known, **columns})


# Shapes.


def every_shape(area: int, step: int, low: int, high: int) -> set[tuple[int, int]]:
    """All pairs on the grid of which neither side could be a step longer, besides the largest square."""
    grid = [side for side in range(low, high + 1) if side % step == 0]
    tallest = {width: max((height for height in grid if width * height <= area), default=0) for width in grid}
    pairs = {pair for width, height in tallest.items() if height for pair in ((width, height), (height, width))}
    square = max(side for side in range(step, high + 1, step) if side * side <= area)
    return pairs | {(square, square)}


def test_the_default_shapes_are_those_of_sd_scripts():
    shapes = bucket_shapes()
    assert (len(shapes), shapes[0], shapes[8], shapes[-1]) == (17, (256, 832), (512, 512), (1024, 256))
    assert lk.Buckets.fit(frame_of_sizes((9, 9))) == DEFAULT


@some
@given(
    step=st.sampled_from([8, 16, 50, 64, 100]),
    resolution=st.tuples(st.integers(256, 700), st.integers(256, 700)),
    min_side=st.integers(100, 256),
    max_side=st.integers(700, 1100),
)
def test_shapes_are_the_largest_on_the_grid_both_ways(step, resolution, min_side, max_side):
    limits = {"step": step, "min_side": min_side, "max_side": max_side}
    low, high = min_side - min_side % step, max_side + -max_side % step
    shapes = bucket_shapes(resolution, **limits)
    assert shapes == sorted(every_shape(resolution[0] * resolution[1], step, low, high))
    assert {(height, width) for width, height in shapes} == set(shapes)
    assert lk.Buckets.fit(frame_of_sizes((9, 9)), resolution, **limits).shapes == tuple(shapes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resolution": 128}, "resolution must have sides from 256 to 1024 .* got 128 x 128"),
        ({"resolution": (512, 1040)}, "got 512 x 1040"),
        ({"step": 0}, "step must be an integer >= 1"),
        ({"min_side": 63}, "min_side must be an integer >= 64, got 63"),
        ({"max_side": "long"}, "max_side must be an integer"),
    ],
)
def test_settings_that_give_no_shapes_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        bucket_shapes(**options)


# Which image goes into which bucket.


def nearest(size: tuple[int, int], shapes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """One bucket after the other, as a reader would write it."""
    best = None
    for shape in sorted(shapes):
        if shape == size:
            return shape
        error = abs(shape[0] / shape[1] - size[0] / size[1])
        if best is None or error < best[0]:
            best = error, shape
    return best[1]


@some
@given(SIZES)
def test_an_image_goes_to_the_closest_ratio_and_is_resized_to_cover_it(sizes):
    numbers, resized = DEFAULT.select(*np.array(sizes).T), DEFAULT.resized(*np.array(sizes).T)
    shapes = np.array(DEFAULT.shapes)[numbers]
    assert list(map(tuple, shapes.tolist())) == [nearest(size, DEFAULT.shapes) for size in sizes]
    assert (resized >= shapes).all()
    assert (resized == shapes).any(1).all()  # one side is whole
    aspects = np.divide(*np.array(sizes).T)
    assert (abs(resized[:, 0] - resized[:, 1] * aspects) <= 0.5 + aspects / 2).all()  # rounded, and no more


def test_its_own_size_comes_before_another_of_its_ratio():
    buckets = lk.Buckets(((1024, 1024), (512, 512), (256, 512)))
    assert buckets.shapes == ((256, 512), (512, 512), (1024, 1024))
    assert buckets.select([1024, 1023, 2000], [1024, 1023, 2000]).tolist() == [2, 1, 1]


@pytest.mark.parametrize("sides", [([0], [5]), ([5], [-1]), ([5], [10**9])])
def test_sides_that_are_none_are_refused(sides):
    with pytest.raises(ValueError, match="widths and heights must be from 1 to 999999999 pixels"):
        DEFAULT.select(*sides)


# Sizes as decoded.


def test_sizes_are_upright_as_far_as_the_orientation_is_known():
    orientations = [1, 4, 5, 6, 8, None]
    sizes = frame_of_sizes(*[(40, 30)] * 6, exif_orientation=pd.array(orientations, "Int64"))
    widths, heights = upright_sizes(sizes)
    assert list(zip(widths, heights, strict=True)) == [(40, 30)] * 2 + [(30, 40)] * 3 + [(40, 30)]
    assert widths.dtype == heights.dtype == np.int64
    assert {*zip(*upright_sizes(sizes.drop(columns="exif_orientation")), strict=True)} == {(40, 30)}


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (frame_of_sizes((4, 3), (None, 3)), r'1 images have no size, the first: 1\.jpg.*sizes\["width"\]'),
        (frame_of_sizes((4, 3))[:0], "sizes has no rows"),
        (frame_of_sizes((4, 3)).drop(columns="height"), "sizes has no column height"),
    ],
)
def test_a_frame_without_sizes_is_refused(frame, said):
    for refusing in (upright_sizes, lk.Buckets.fit):
        with pytest.raises(ValueError, match=said):
            refusing(frame)


# Pixels.


@pytest.mark.parametrize("size", [(500, 375), (40, 30), (1500, 300), (96, 96)])
def test_a_crop_is_that_of_pillow(size):
    buckets = lk.Buckets(tuple(bucket_shapes(96, step=8, min_side=48, max_side=192)))
    pixels = np.random.default_rng(3).integers(0, 256, (*size[::-1], 3), np.uint8)
    width, height = buckets.shapes[buckets.select([size[0]], [size[1]])[0]]
    resized = buckets.resized([size[0]], [size[1]])[0].tolist()
    left, top = (resized[0] - width) // 2, (resized[1] - height) // 2
    image = Image.fromarray(pixels).resize(tuple(resized), Image.Resampling.BILINEAR)
    expected = np.asarray(image.crop((left, top, left + width, top + height)))
    found = buckets.crop(torch.from_numpy(pixels).permute(2, 0, 1))
    assert (found.dtype, found.shape) == (torch.uint8, (3, height, width))
    off = np.abs(found.permute(1, 2, 0).numpy().astype(int) - expected).max()
    assert off == 0 if size == (width, height) else off <= 1


def test_a_strip_that_would_fill_the_memory_is_refused():
    with pytest.raises(ValueError, match=r"30000 x 1 would be enlarged to 7680000 x 256 .*leave it out"):
        DEFAULT.crop(torch.zeros(3, 1, 30_000, dtype=torch.uint8))
