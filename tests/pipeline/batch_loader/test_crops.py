"""Crops have torchvision's distribution, and depend on (seed, epoch, index) only."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torchvision.transforms import RandomResizedCrop

from labkit.loading.crops import DRAWS, flips, middle_crops, random_crops, uniforms

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
SIZES = {
    "photo": (375, 500),
    "upright": (640, 427),
    "wide": (50, 400),
    "narrow": (300, 40),
    "tiny": (3, 2),
    "dot": (1, 1),
}


def torchvision_crops(size, n):
    torch.manual_seed(0)
    image = torch.empty(3, *size)
    return np.array([RandomResizedCrop.get_params(image, SCALE, RATIO) for _ in range(n)])


def measures(crops):
    top, left, height, width = crops.T
    return top, left, height * width, width / height


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_distribution(size):
    own = random_crops(uniforms(3, 0, np.arange(3000)), np.tile(size, (3000, 1)), SCALE, RATIO)
    theirs = torchvision_crops(size, 3000)
    assert own.min() >= 0
    assert own[:, 2:].min() >= 1
    assert ((own[:, :2] + own[:, 2:]).max(0) <= size).all()
    for one, other in zip(measures(own), measures(theirs), strict=True):
        assert ks_2samp(one, other, method="asymp").pvalue > 1e-4


def test_distribution_would_show_a_wrong_one():
    """The side drawn evenly, instead of the area."""
    theirs = torchvision_crops((375, 500), 3000)
    draws = uniforms(0, 0, np.arange(3000))
    draws[:, :10] **= 2
    wrong = random_crops(draws, np.tile((375, 500), (3000, 1)), SCALE, RATIO)
    assert ks_2samp(wrong[:, 2] * wrong[:, 3], theirs[:, 2] * theirs[:, 3]).pvalue < 1e-4


def scalar_crop(draws, height, width):
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


def test_each_step():
    sizes = np.array([size for size in SIZES.values() for _ in range(200)])
    draws = uniforms(0, 1, np.arange(len(sizes)))
    expected = [scalar_crop(row, *size) for row, size in zip(draws.tolist(), sizes.tolist(), strict=True)]
    np.testing.assert_array_equal(random_crops(draws, sizes, SCALE, RATIO), expected)


def test_numbers_are_uniform_and_independent():
    draws = uniforms(0, 0, np.arange(4000))
    assert draws.shape == (4000, DRAWS)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert min(kstest(column, "uniform").pvalue for column in draws.T) > 1e-4
    across = np.corrcoef(draws.T) - np.eye(DRAWS)
    assert np.abs(across).max() < 0.08
    neighbours = [np.corrcoef(draws[:-1, column], draws[1:, column])[0, 1] for column in range(DRAWS)]
    assert np.abs(neighbours).max() < 0.08


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (1, 1)])
def test_other_seeds_and_epochs_give_other_numbers(other):
    one, another = uniforms(0, 0, np.arange(2000)), uniforms(*other, np.arange(2000))
    assert not np.intersect1d(one, another).size
    assert abs(np.corrcoef(one[:, 0], another[:, 0])[0, 1]) < 0.08


def test_a_row_depends_on_its_index_only():
    together = uniforms(7, 2, np.arange(100))
    np.testing.assert_array_equal(uniforms(7, 2, np.array([42, 5])), together[[42, 5]])
    np.testing.assert_array_equal(uniforms(7, 2, np.array([3], np.int32)), together[[3]])


def test_flips():
    draws = uniforms(0, 0, np.arange(4000))
    assert not flips(draws, 0.0).any()
    assert flips(draws, 1.0).all()
    assert 0.22 < flips(draws, 0.25).mean() < 0.28


def test_middle_crop():
    sizes = np.array([(256, 256), (256, 341), (1000, 512), (1, 1), (375, 500)])
    crops = middle_crops(sizes, 224)
    assert crops[[0, 2, 3]].tolist() == [[16, 16, 224, 224], [276, 32, 448, 448], [0, 0, 1, 1]]
    np.testing.assert_allclose(crops[:, :2] + crops[:, 2:] / 2, sizes / 2, atol=0.5)
