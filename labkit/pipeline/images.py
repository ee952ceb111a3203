"""Show the images of a batch."""

import math
from collections.abc import Sequence
from textwrap import fill

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from labkit.measure import SMALL_PT, WIDTH_IN, characters_per_line, write_title


def plot_images(
    images: Tensor | Sequence[Tensor], titles: Sequence[str] | None = None, *, columns: int = 8, message: str = ""
) -> Figure:
    """Draw images side by side.

    Args:
        images: uint8 (3, H, W), or floating point with values 0 to 1.
        titles: One per image.
        columns: Images per row.
        message: What the images show, computed from them; written above all.
    """
    rows, width = math.ceil(len(images) / columns), WIDTH_IN / columns
    names = [fill(title, characters_per_line(width, 1.1 * SMALL_PT)) for title in titles or ()]
    n_lines = max((name.count("\n") + 1 for name in names), default=0)
    size = (WIDTH_IN, (width + 0.17 * n_lines) * rows + (0.3 if message else 0))
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (axis, image) in enumerate(zip(axes.flat, images, strict=False)):
        pixels = image if image.dtype == torch.uint8 else image.clamp(0, 1)
        axis.imshow(pixels.cpu().permute(1, 2, 0).numpy())
        if names:
            axis.set_title(names[number], fontsize=SMALL_PT)
    if message:
        write_title(figure, message)
    return figure
