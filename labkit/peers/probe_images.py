"""Pictures that show, in any crop of them, which picture it is, what was cut out and whether it was flipped.

Each picture has its own color (the same chroma in every pixel), a brightness that rises to the right and, less, to the
bottom, and grain. A crop keeps the color. The rise of brightness across it is the crop's share of the width and height;
a falling brightness shows a flip. The grain that is left distinguishes a filter that averages from one that samples.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from labkit.core import atomic_path

N_PICTURES = 70
WIDTH, HEIGHT = 800, 600
CLASSES = ("amber", "blue", "coral")

_RISE_X, _RISE_Y = 60.0, 44.0  # of the brightness across the whole picture
_GRAIN_SD = 8.0
_COLUMNS, _ROWS = 10, 7  # grid of colors
_COLOR_STEP = 10.0  # between neighbours in the grid, of 255
_MAX_COLOR_ERROR = 3.0  # encoders and filters change a color by less than 1


def picture_key(number: int) -> str:
    """File name of a picture, in the folder of its class."""
    return f"{CLASSES[number % len(CLASSES)]}/{number:03d}.jpg"


def picture_label(number: int | np.ndarray) -> int | np.ndarray:
    return number % len(CLASSES)


def make_probe_pictures(root: Path) -> Path:
    """Write the pictures that are missing, as JPEG with 4:4:4 chroma and quality 95."""
    from PIL import Image

    grain = np.random.default_rng(0).normal(0, _GRAIN_SD, (HEIGHT, WIDTH))
    for number in range(N_PICTURES):
        path = root / picture_key(number)
        if not path.exists():
            with atomic_path(path) as partial:
                Image.fromarray(_draw_picture(number, grain)).save(partial, "JPEG", quality=95, subsampling="4:4:4")
    return root


def _draw_picture(number: int, grain: np.ndarray) -> np.ndarray:
    x, y = np.arange(WIDTH) / WIDTH - 0.5, np.arange(HEIGHT) / HEIGHT - 0.5
    brightness = 128 + _RISE_X * x[None, :] + _RISE_Y * y[:, None] + grain
    cb, cr = _make_colors()[number]
    red, blue = 1.402 * cr, 1.772 * cb
    green = -(0.299 * red + 0.114 * blue) / 0.587
    return np.stack([brightness + offset for offset in (red, green, blue)], -1).clip(0, 255).astype(np.uint8)


def _make_colors() -> np.ndarray:
    """Chroma (Cb, Cr) of each picture, around 0."""
    columns = (np.arange(_COLUMNS) - (_COLUMNS - 1) / 2) * _COLOR_STEP
    rows = (np.arange(_ROWS) - (_ROWS - 1) / 2) * _COLOR_STEP
    return np.array([(cb, cr) for cr in columns for cb in rows])


@dataclass(frozen=True)
class CropReading:
    """What crops show, as arrays with one entry per image.

    Attributes:
        number: Number of the picture; -1 for a color that no picture has.
        width, height: Shares of the picture's width and height.
        flipped: Left to right.
        upside_down: Top to bottom, which is not part of the work.
        grain: Standard deviation of the grain that is left.
    """

    number: np.ndarray
    width: np.ndarray
    height: np.ndarray
    flipped: np.ndarray
    upside_down: np.ndarray
    grain: np.ndarray


def read_crops(images: Tensor) -> CropReading:
    """Read what uint8 crops (N, 3, H, W) of the pictures show."""
    # Use all pixels: with a sample of them, the grain of a small crop causes a larger error than `check_peer` accepts.
    pixels = images.cpu().to(torch.float32)
    red, green, blue = pixels.unbind(1)
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    colors = torch.stack([(blue - brightness) / 1.772, (red - brightness) / 1.402], -1).mean((1, 2)).numpy()
    errors = np.abs(colors[:, None] - _make_colors()[None]).max(-1)
    number = np.where(errors.min(1) <= _MAX_COLOR_ERROR, errors.argmin(1), -1)
    rise_x, rise_y, grain = _fit_planes(brightness)
    return CropReading(number, abs(rise_x) / _RISE_X, abs(rise_y) / _RISE_Y, rise_x < 0, rise_y < 0, grain)


def _fit_planes(brightness: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rise of a fitted plane over the whole width and height, and the standard deviation of the residuals."""
    y, x = (torch.arange(side) / side for side in brightness.shape[-2:])
    x, y = x - x.mean(), y - y.mean()
    level = brightness - brightness.mean((1, 2), keepdim=True)
    rise_x = (level * x).mean((1, 2)) / x.square().mean()
    rise_y = (level * y[:, None]).mean((1, 2)) / y.square().mean()
    residuals = level - rise_x[:, None, None] * x - rise_y[:, None, None] * y[:, None]
    return rise_x.numpy(), rise_y.numpy(), residuals.std((1, 2)).numpy()
