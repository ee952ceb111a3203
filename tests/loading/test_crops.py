"""Crops have torchvision's distribution, and depend on (seed, epoch, index) alone; for pixels see BatchLoader's."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torchvision.transforms import RandomResizedCrop

import labkit as lk
from labkit.loading.crops import flips, random_crops, uniforms
from labkit.loading.rows import Resizer

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


def test_numbers_are_independent_and_depend_on_seed_epoch_and_index_only():
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
    Resizer(antialias).resize_crop(got, image, box)
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
