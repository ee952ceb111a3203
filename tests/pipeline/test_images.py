"""Batches as pictures."""

import pytest
import torch

import labkit as lk


def test_every_image_is_drawn_with_its_title():
    images = [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 2.0), torch.ones(3, 8, 8)]
    figure = lk.plot_images(images, ["a", "b", "c"], columns=2)
    drawn = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in drawn] == ["a", "b", "c"]
    assert len(figure.axes) == 4
    assert drawn[1].images[0].get_array().max() == pytest.approx(1.0)  # values beyond white are clamped
