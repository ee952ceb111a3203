"""Show the images of a batch."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor


def plot_images(images: Tensor | Sequence[Tensor], titles: Sequence[str] | None = None, *, columns: int = 8) -> Figure:
    """Draw images side by side.

    Args:
        images: uint8 (3, H, W), or floating point with values 0 to 1.
        titles: One per image.
        columns: Images per row.
    """
    rows = math.ceil(len(images) / columns)
    size = (1.25 * columns, (1.45 if titles else 1.25) * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, dpi=80)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (axis, image) in enumerate(zip(axes.flat, images, strict=False)):
        pixels = image if image.dtype == torch.uint8 else image.clamp(0, 1)
        axis.imshow(pixels.cpu().permute(1, 2, 0).numpy())
        if titles:
            axis.set_title(titles[number], fontsize="small")
    return figure
