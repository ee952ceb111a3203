"""Tiny photos that can be told apart, so that order and content can be checked without labkit.

Each has its own colour, which cropping and mirroring keep, and a faint pattern, which they change.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from tests import image_files

COUNT, CLASSES, WIDTH, HEIGHT = 128, 4, 32, 24
_LEVELS, _STEP, _DARKEST = 6, 36, 36  # of each colour channel
_PATTERN = 12  # levels around the colour: under half a step, so that no crop has a neighbour's mean
_FAR = 2  # mean difference, of 255, that decoders may have


def key_of(number: int) -> str:
    return f"class{number % CLASSES}/{number:03d}.jpg"


def color_of(number: int) -> np.ndarray:
    """Red, green and blue, float64 (3,)."""
    digits = [number // _LEVELS**place % _LEVELS for place in range(3)]
    return _DARKEST + _STEP * np.array(digits, float)


def pixels_of(number: int) -> np.ndarray:
    """uint8 (HEIGHT, WIDTH, 3)."""
    turns = np.random.default_rng(number).uniform(0, 2 * np.pi, 4)
    rows, columns = np.arange(HEIGHT)[:, None] / 1.3, np.arange(WIDTH) / 1.7
    pattern = np.sin(rows + turns[0]) * np.cos(columns + turns[1])
    pattern += np.sin(rows + turns[2]) * np.sin(columns + turns[3])
    return np.rint(color_of(number) + _PATTERN / 2 * pattern[..., None]).astype(np.uint8)


def write_photos(root: Path, count: int = COUNT) -> Path:
    for number in range(count):
        path = root / key_of(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels_of(number)))
    return root


def encoded(pixels: np.ndarray, image_format: str = "JPEG") -> bytes:
    options = {"quality": 95, "subsampling": 0} if image_format == "JPEG" else {}
    return image_files.encoded(Image.fromarray(pixels), image_format, **options)


@dataclass(frozen=True)
class Oracle:
    """The right keys, pixels and labels of the photos under `root`, from Pillow and the names, in the order of keys."""

    root: Path

    @cached_property
    def keys(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*.jpg"))

    @cached_property
    def images(self) -> np.ndarray:
        """int16 (N, 3, H, W)."""
        images = np.stack([np.asarray(Image.open(self.root / key)) for key in self.keys])
        return images.transpose(0, 3, 1, 2).astype(np.int16)

    @cached_property
    def labels(self) -> np.ndarray:
        return np.array([int(key[len("class")]) for key in self.keys])

    def rows_of(self, images: np.ndarray) -> np.ndarray:
        """Which photo each image is, by its mean colour: (N,)."""
        means, colors = images.mean((2, 3)), self.images.mean((2, 3))
        return np.abs(means[:, None] - colors[None]).sum(2).argmin(1)

    def are_whole(self, images: np.ndarray, rows: np.ndarray) -> bool:
        """Whether the images are these photos, each as it is or mirrored."""
        expected = self.images[rows]
        far = [np.abs(images - photos).mean((1, 2, 3)) for photos in (expected, expected[..., ::-1])]
        return bool((np.minimum(*far) <= _FAR).all())

    def are_crops(self, images: np.ndarray, rows: np.ndarray) -> bool:
        """Whether the images can be crops of these photos: no level that the photo has not."""
        expected = self.images[rows]
        low, high = expected.min((2, 3), keepdims=True) - _FAR, expected.max((2, 3), keepdims=True) + _FAR
        return bool(((images >= low) & (images <= high)).all())
