"""Figures as PNG."""

import base64
import io

from matplotlib import pyplot
from PIL import Image

from labkit.util.pictures import png_base64


def test_a_figure_is_a_png_of_the_asked_size_whatever_the_users_settings():
    with pyplot.rc_context({"savefig.format": "svg", "savefig.dpi": 300}):
        figure = pyplot.figure(figsize=(2, 1))
        with Image.open(io.BytesIO(base64.b64decode(png_base64(figure, dpi=50)))) as picture:
            assert (picture.format, picture.size) == ("PNG", (100, 50))
