"""Pictures that tell, from any crop, which picture it is, what was cut out and whether it was flipped.

Each picture has a color of its own (its chroma, the same in every pixel), a brightness that rises to the right and,
less, to the bottom, and grain. A crop keeps the color; how much the brightness rises across it is the crop's share of
width and height, and a falling one is a flip; how much of the grain is left tells an averaging filter from a sampling
one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

N_PICTURES = 70
WIDTH, HEIGHT = 800, 600
CLASSES = ("amber", "blue", "coral")

_RISE_X, _RISE_Y = 60.0, 44.0  # of the brightness, over the whole picture
_GRAIN = 8.0  # standard deviation
_COLUMNS, _ROWS = 10, 7  # of the grid of colors
_STEP = 10.0  # between neighbours in it, of 255
_LARGEST_ERROR = 3.0  # of a measured color; what coders and filters do to it stays under 1


def picture_key(number: int) -> str:
    """File name of a picture, under its class."""
    return f"{CLASSES[number % len(CLASSES)]}/{number:03d}.jpg"


def picture_label(number: int) -> int:
    return number % len(CLASSES)


def make_pictures(root: Path) -> Path:
    """Write the pictures, as JPEG of 4:4:4 and quality 95, unless they are there."""
    from PIL import Image

    grain = np.random.default_rng(0).normal(0, _GRAIN, (HEIGHT, WIDTH))
    for number in range(N_PICTURES):
        path = root / picture_key(number)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            Image.fromarray(_pixels(number, grain)).save(partial, "JPEG", quality=95, subsampling="4:4:4")
            partial.rename(path)
    return root


def _pixels(number: int, grain: np.ndarray) -> np.ndarray:
    x, y = np.arange(WIDTH) / WIDTH - 0.5, np.arange(HEIGHT) / HEIGHT - 0.5
    brightness = 128 + _RISE_X * x[None, :] + _RISE_Y * y[:, None] + grain
    cb, cr = _colors()[number]
    red, blue = 1.402 * cr, 1.772 * cb
    green = -(0.299 * red + 0.114 * blue) / 0.587
    return np.stack([brightness + offset for offset in (red, green, blue)], -1).clip(0, 255).astype(np.uint8)


def _colors() -> np.ndarray:
    """Chroma (Cb, Cr) of each picture, around 0."""
    columns = (np.arange(_COLUMNS) - (_COLUMNS - 1) / 2) * _STEP
    rows = (np.arange(_ROWS) - (_ROWS - 1) / 2) * _STEP
    return np.array([(cb, cr) for cr in columns for cb in rows])


@dataclass(frozen=True)
class Seen:
    """What crops tell: arrays with one entry an image.

    number: of the picture, -1 where the color is none of theirs. width, height: the crop's shares of the picture's.
    flipped: left to right. upside_down: top to bottom, which nobody asked for. grain: standard deviation of what is
    left of it.
    """

    number: np.ndarray
    width: np.ndarray
    height: np.ndarray
    flipped: np.ndarray
    upside_down: np.ndarray
    grain: np.ndarray


def look_at(images: Tensor) -> Seen:
    """What uint8 crops (N, 3, H, W) of the pictures tell."""
    # Every pixel: read from a sample of them, a small crop is off, by its grain, by more than `check_peer` admits.
    pixels = images.cpu().to(torch.float32)
    red, green, blue = pixels.unbind(1)
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    colors = torch.stack([(blue - brightness) / 1.772, (red - brightness) / 1.402], -1).mean((1, 2)).numpy()
    errors = np.abs(colors[:, None] - _colors()[None]).max(-1)
    number = np.where(errors.min(1) <= _LARGEST_ERROR, errors.argmin(1), -1)
    rise_x, rise_y, grain = _plane(brightness)
    return Seen(number, abs(rise_x) / _RISE_X, abs(rise_y) / _RISE_Y, rise_x < 0, rise_y < 0, grain)


def _plane(brightness: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rise of a fitted plane over the whole width and height, and the standard deviation of the rest."""
    y, x = (torch.arange(side) / side for side in brightness.shape[-2:])
    x, y = x - x.mean(), y - y.mean()
    level = brightness - brightness.mean((1, 2), keepdim=True)
    rise_x = (level * x).mean((1, 2)) / x.square().mean()
    rise_y = (level * y[:, None]).mean((1, 2)) / y.square().mean()
    rest = level - rise_x[:, None, None] * x - rise_y[:, None, None] * y[:, None]
    return rise_x.numpy(), rise_y.numpy(), rest.std((1, 2)).numpy()
