"""The rules of buckets, against loops and fractions written for these tests."""

import math
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from labkit.data.buckets import bucket_shapes, parse_resolution, round_half_up, shrink


def every_shape(area: int, step: int, low: int, high: int) -> set[tuple[int, int]]:
    """All pairs on the grid of which neither side could be a step longer, besides the largest square."""
    grid = [side for side in range(low, high + 1) if side % step == 0]
    tallest = {width: max((height for height in grid if width * height <= area), default=0) for width in grid}
    pairs = {pair for width, height in tallest.items() if height for pair in ((width, height), (height, width))}
    square = max(side for side in range(step, high + 1, step) if side * side <= area)
    return pairs | {(square, square)}


class TestShapes:
    def test_the_defaults(self):
        shapes = bucket_shapes()
        assert len(shapes) == 17
        assert shapes[0] == (256, 832)
        assert shapes[8] == (512, 512)
        assert shapes[-1] == (1024, 256)

    @settings(max_examples=50, deadline=None)
    @given(
        step=st.sampled_from([8, 16, 50, 64, 100]),
        resolution=st.tuples(st.integers(256, 700), st.integers(256, 700)),
        min_side=st.integers(100, 256),
        max_side=st.integers(700, 1100),
    )
    def test_they_are_the_largest_on_the_grid(self, step, resolution, min_side, max_side):
        low, high = min_side - min_side % step, max_side + -max_side % step
        found = bucket_shapes(resolution, step=step, min_side=min_side, max_side=max_side)
        assert found == sorted(every_shape(resolution[0] * resolution[1], step, low, high))

    @pytest.mark.parametrize("resolution", [512, 640, (768, 512)])
    def test_each_has_its_mirror_image(self, resolution):
        shapes = bucket_shapes(resolution)
        assert {(height, width) for width, height in shapes} == set(shapes)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"resolution": 128}, "resolution must have sides from 256 to 1024 .* got 128 x 128"),
            ({"resolution": (512, 1040)}, "got 512 x 1040"),
            ({"resolution": 0}, "resolution must be an integer >= 1, got 0"),
            ({"step": 0}, "step must be an integer >= 1"),
            ({"min_side": 63}, "min_side must be an integer >= 64, got 63"),
            ({"max_side": "long"}, "max_side must be an integer"),
        ],
    )
    def test_refused(self, options, said):
        with pytest.raises(ValueError, match=said):
            bucket_shapes(**options)


def shrunk_exactly(width: int, height: int, area: int, step: int) -> tuple[int, int]:
    """The rule in fractions, with the root to 50 digits; (0, 0) where a side rounds to nothing."""
    if width * height <= area:
        return width, height
    aspect = Fraction(width, height)
    free_width = Fraction((Decimal(area) * width / height).sqrt(Context(prec=50)))

    def whole(side: Fraction) -> int:
        return math.floor(side + Fraction(1, 2))

    def stepped(side: Fraction) -> int:
        return whole(side) - whole(side) % step

    by_width, by_height = stepped(free_width), stepped(area / free_width)
    if not by_height or not stepped(by_width / aspect):
        return 0, 0
    error_of_width = abs(Fraction(by_width, stepped(by_width / aspect)) - aspect)
    error_of_height = abs(Fraction(stepped(by_height * aspect), by_height) - aspect)
    if error_of_width < error_of_height:
        return by_width, whole(by_width / aspect)
    return whole(by_height * aspect), by_height


class TestShrink:
    def test_as_in_fractions(self):
        rng = np.random.default_rng(1)
        sizes = np.concatenate([rng.integers(1, 4000, (800, 2)), rng.integers(400, 700, (400, 2))])
        for area, step in ((512 * 512, 64), (300 * 500, 8), (1024 * 1024, 100)):
            found = shrink(*sizes.T, area, step)
            assert found.tolist() == [list(shrunk_exactly(*size, area, step)) for size in sizes.tolist()]
            assert found.dtype == np.int64

    def test_an_image_of_the_area_keeps_its_size(self):
        assert shrink(*np.array([[500, 300], [501, 300]]).T, 500 * 300, 64).tolist() == [[500, 300], [448, 268]]

    def test_what_rounds_to_nothing_is_nothing(self):
        assert shrink(np.array([10_000]), np.array([50]), 512 * 512, 64).tolist() == [[0, 0]]


def test_half_a_pixel_is_rounded_up():
    halves = np.array([0.5, 1.5, 2.5, 2.4])
    assert round_half_up(halves).tolist() == [int(Fraction(half) + Fraction(1, 2)) for half in halves] == [1, 2, 3, 2]


def test_one_number_means_a_square():
    assert parse_resolution(512) == parse_resolution((512, 512)) == (512, 512)
