"""Crops resized into a batch: one class equals torchvision's v2, the other OpenCV's."""

import cv2
import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from labkit.loading.fill import flip_into, resize_into

BOXES = [(0, 0, 300, 400), (10, 20, 250, 260), (5, 7, 100, 120), (0, 0, 224, 224), (3, 9, 290, 120), (1, 2, 60, 300)]


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    rows, columns = np.mgrid[:300, :400] / 9
    waves = np.stack([np.sin(rows + columns), np.cos(rows * 2), np.sin(columns * 3)], 2)
    noise = np.random.default_rng(0).normal(0, 25, waves.shape)
    return np.clip(128 + 80 * waves + noise, 0, 255).astype(np.uint8)


def resized(pixels, box, antialias, size=224):
    target = np.full((size, size, 3), 77, np.uint8)
    resize_into(target, pixels, box, antialias)
    return target


@pytest.mark.parametrize("box", BOXES)
def test_with_antialiasing_as_torchvision(pixels, box):
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    expected = F.resized_crop(image, *box, [224, 224], antialias=True).permute(1, 2, 0).numpy()
    difference = np.abs(resized(pixels, box, True).astype(int) - expected)
    assert difference.max() <= 1
    assert difference.mean() < 0.3


@pytest.mark.parametrize("box", BOXES)
def test_without_as_opencv(pixels, box):
    top, left, height, width = box
    expected = cv2.resize(pixels[top : top + height, left : left + width], (224, 224), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(resized(pixels, box, False), expected)


def test_classes_differ_where_a_crop_shrinks(pixels):
    with_, without = (resized(pixels, BOXES[0], antialias).astype(int) for antialias in (True, False))
    assert np.abs(with_ - without).mean() > 2


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
    image = np.rint(smooth(*(np.mgrid[:120, :130] + 0.5))).astype(np.uint8)
    got = resized(image, box, antialias, size=56).astype(float)
    top, left, height, width = box
    rows = top + (np.arange(56)[:, None] + 0.5) * height / 56
    columns = left + (np.arange(56)[None] + 0.5) * width / 56
    assert np.abs(got - smooth(rows, columns))[2:-2, 2:-2].max() < 2.5


def test_a_read_only_source(pixels, recwarn):
    frozen = pixels.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(resized(frozen, BOXES[0], True), resized(pixels, BOXES[0], True))
    assert not recwarn.list


def test_flip(pixels):
    target = np.ascontiguousarray(pixels[:100, :101])
    expected = target[:, ::-1].copy()
    flip_into(target)
    np.testing.assert_array_equal(target, expected)
