"""Crops have torchvision's distribution, and depend on (seed, epoch, index) alone; for pixels see BatchLoader's."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

import labkit as lk
from labkit.loading.crops import center_crops, flips, random_crops, uniforms
from labkit.loading.resize import Resizer

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
SIZES = [(375, 500), (640, 427), (50, 400), (300, 40), (3, 2), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_crops_are_distributed_as_those_of_torchvision(size):
    torch.manual_seed(0)
    image = torch.empty(3, *size)
    theirs = np.array([RandomResizedCrop.get_params(image, SCALE, RATIO) for _ in range(3000)])
    own = random_crops(uniforms(3, 0, np.arange(3000)), np.tile(size, (3000, 1)), SCALE, RATIO)
    assert own.min() >= 0
    assert own[:, 2:].min() >= 1
    assert ((own[:, :2] + own[:, 2:]).max(0) <= size).all()
    measures = [(top, left, height * width, width / height) for top, left, height, width in (own.T, theirs.T)]
    assert all(ks_2samp(*pair, method="asymp").pvalue > 1e-4 for pair in zip(*measures, strict=True))


def crop_step_by_step(draws, height, width):
    """torchvision's steps for one image, with given numbers."""
    for attempt in range(10):
        area = height * width * (SCALE[0] + draws[attempt] * (SCALE[1] - SCALE[0]))
        low, high = math.log(RATIO[0]), math.log(RATIO[1])
        aspect = math.exp(low + draws[10 + attempt] * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return math.floor(draws[20] * (height - h + 1)), math.floor(draws[21] * (width - w + 1)), h, w
    if width / height < RATIO[0]:
        w, h = width, round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w, h = round(height * RATIO[1]), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


def test_each_crop_is_that_of_torchvisions_steps():
    sizes = np.array([size for size in SIZES for _ in range(200)])
    draws = uniforms(0, 1, np.arange(len(sizes)))
    expected = [crop_step_by_step(row, *size) for row, size in zip(draws.tolist(), sizes.tolist(), strict=True)]
    np.testing.assert_array_equal(random_crops(draws, sizes, SCALE, RATIO), expected)


def test_numbers_are_uniform_and_independent_and_depend_on_seed_epoch_and_index_only():
    draws = uniforms(0, 0, np.arange(4000))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert min(kstest(column, "uniform").pvalue for column in draws.T) > 1e-4
    assert np.abs(np.corrcoef(draws.T) - np.eye(draws.shape[1])).max() < 0.08
    neighbors = [np.corrcoef(column[:-1], column[1:])[0, 1] for column in draws.T]
    assert np.abs(neighbors).max() < 0.08
    for other in (1, 0), (0, 1), (1, 1):
        others = uniforms(*other, np.arange(4000))
        assert not np.intersect1d(draws, others).size
        assert abs(np.corrcoef(draws[:, 0], others[:, 0])[0, 1]) < 0.08
    np.testing.assert_array_equal(uniforms(0, 0, np.array([42, 5], np.int32)), draws[[42, 5]])


def test_flips_have_their_probability():
    draws = uniforms(0, 0, np.arange(4000))
    assert not flips(draws, 0.0).any()
    assert flips(draws, 1.0).all()
    assert 0.22 < flips(draws, 0.25).mean() < 0.28


@pytest.mark.parametrize(
    ("size", "resize"),
    [((224, 224), None), ((224, 224), 235), ((96, 160), 128), ((90, 150), 60), ((33, 20), 50)],
)
def test_centers_are_those_of_torchvision(size, resize):
    """Also of photos that are smaller than what is seen, which then lie in its middle."""
    sizes = np.array([(256, 256), (256, 341), (1000, 512), (1, 1), (375, 500), (40, 300)])
    for photo, (top, left, *resized) in zip(sizes.tolist(), center_crops(sizes, size, resize).tolist(), strict=True):
        whole = F.resize(torch.zeros(1, *photo), [resize or 256])
        assert list(whole.shape[1:]) == resized
        places = torch.stack(torch.meshgrid(*map(torch.arange, resized), indexing="ij"))
        row, column = F.center_crop(places, list(size))[:, size[0] // 2, size[1] // 2].tolist()
        assert (row - size[0] // 2, column - size[1] // 2) == (top, left)


def test_centers_of_other_shapes_are_of_photos_that_just_cover_what_is_seen_and_a_margin():
    sizes = np.array([(256, 256), (256, 341), (1000, 512), (1, 1), (375, 500), (40, 300)])
    top_left, resized = np.hsplit(center_crops(sizes, (96, 160), None), 2)
    assert (resized >= (110, 183)).all()  # of which 7/8 is seen
    assert (resized == (110, 183)).any(1).all()
    assert (np.ptp(resized / sizes * sizes.min(1, keepdims=True), axis=1) <= 1).all()  # in their own shape
    np.testing.assert_allclose(top_left + np.array([48, 80]), resized / 2, atol=0.5)


def smooth(rows, columns):
    """A picture known at every point; pixels are centered at halves."""
    rows, columns = np.broadcast_arrays(rows, columns)
    return np.stack(
        [128 + 100 * np.sin(rows / 30), 128 + 100 * np.cos(columns / 40), 128 + 60 * np.sin((rows + columns) / 50)], 2
    )


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(
    "box", [(10.25, 3.5, 100.75, 120.0), (0.0, 0.5, 90.5, 70.25), (40.125, 60.875, 59.875, 39.125)]
)
def test_fractions_of_a_pixel_are_kept(antialias, box):
    image, got = np.rint(smooth(*(np.mgrid[:120, :130] + 0.5))).astype(np.uint8), np.empty((56, 56, 3), np.uint8)
    Resizer(antialias).crop(got, image, box)
    top, left, height, width = box
    rows = top + (np.arange(56)[:, None] + 0.5) * height / 56
    columns = left + (np.arange(56)[None] + 0.5) * width / 56
    assert np.abs(got.astype(float) - smooth(rows, columns))[2:-2, 2:-2].max() < 2.5


def test_every_image_is_drawn_with_its_title():
    images = [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 2.0), torch.ones(3, 8, 8)]
    figure = lk.plot_images(images, ["a", "b", "c"], columns=2)
    drawn = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in drawn] == ["a", "b", "c"]
    assert len(figure.axes) == 4
    assert drawn[1].images[0].get_array().max() == pytest.approx(1.0)  # values beyond white are clamped
