"""Figures as PNG, for web pages and notebooks."""

import base64
import io

from matplotlib.figure import Figure


def png_bytes(figure: Figure, *, dpi: int = 110) -> bytes:
    """A figure as a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()


def png_base64(figure: Figure, *, dpi: int = 110) -> str:
    """A figure as a PNG in base64, for `<img src="data:image/png;base64,...">`."""
    return base64.b64encode(png_bytes(figure, dpi=dpi)).decode()
