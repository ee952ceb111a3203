"""Batches as pictures."""

import base64
import io

import pytest
import torch
from matplotlib import pyplot
from PIL import Image

import labkit as lk
from labkit.core.png import png_base64


def test_every_image_is_drawn_with_its_title():
    images = [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 2.0), torch.ones(3, 8, 8)]
    figure = lk.plot_images(images, ["a", "b", "c"], columns=2)
    drawn = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in drawn] == ["a", "b", "c"]
    assert len(figure.axes) == 4
    assert drawn[1].images[0].get_array().max() == pytest.approx(1.0)  # values beyond white are clamped


def test_a_figure_is_a_png_of_the_asked_size_whatever_the_users_settings():
    with pyplot.rc_context({"savefig.format": "svg", "savefig.dpi": 300}):
        figure = pyplot.figure(figsize=(2, 1))
        with Image.open(io.BytesIO(base64.b64decode(png_base64(figure, dpi=50)))) as picture:
            assert (picture.format, picture.size) == ("PNG", (100, 50))
