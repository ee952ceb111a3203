"""Images and figures as bytes of a file."""

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # photos are made without plotting libraries
    from matplotlib.figure import Figure

WidthHeight = tuple[int, int]  # pixels: the order of Pillow and of file names; arrays have the other one


def encode_image(image: Any, image_format: str, **options: Any) -> bytes:
    """A Pillow image as a file of a format, such as `"JPEG"`, with the options of its `save`."""
    data = io.BytesIO()
    image.save(data, image_format, **options)
    return data.getvalue()


def png_bytes(figure: "Figure", *, dpi: int = 110) -> bytes:
    """A figure as a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()


def png_base64(figure: "Figure", *, dpi: int = 110) -> str:
    """A figure as a PNG in base64, for `<img src="data:image/png;base64,...">`."""
    return base64.b64encode(png_bytes(figure, dpi=dpi)).decode()
