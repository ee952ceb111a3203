"""The rules of buckets, against loops and fractions written for these tests."""

import pytest
from hypothesis import given, settings, strategies as st

from labkit.data.buckets import bucket_shapes


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
