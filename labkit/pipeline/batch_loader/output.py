"""What the pixels of a batch are written as: bytes or normalised floats, channels last or in planes."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import cv2
import numpy as np
import torch
from torch import Tensor

from labkit.core import require_choice
from labkit.pipeline.batch_loader.resample import Box, flip_into, resize_into

# NumPy has no bfloat16, and OpenCV copies the bits of either half type as those of an integer.
_ARRAY_DTYPES = {
    torch.uint8: np.uint8, torch.float32: np.float32, torch.float16: np.uint16, torch.bfloat16: np.uint16,
}  # fmt: skip
_MEMORY_FORMATS = (torch.channels_last, torch.contiguous_format)


@dataclass(frozen=True)
class PixelFormat:
    """The pixels of a batch. The arguments are those of `BatchLoader`, which says what is accepted."""

    size: int
    dtype: torch.dtype
    mean: Sequence[float] | None
    std: Sequence[float] | None
    memory_format: torch.memory_format

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, _ARRAY_DTYPES)
        require_choice("memory_format", self.memory_format, _MEMORY_FORMATS)
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"pass both mean and std, or neither: got mean={self.mean!r}, std={self.std!r}")
        if self.mean is not None and self.std is not None:
            if self.dtype == torch.uint8:
                raise ValueError("mean and std need floats: pass dtype=torch.float32, torch.float16 or torch.bfloat16")
            _check_channels("mean", self.mean)
            _check_channels("std", self.std, above=0)

    @property
    def is_channels_last(self) -> bool:
        return self.memory_format == torch.channels_last

    @property
    def array_dtype(self) -> type:
        """NumPy's type of what is stored."""
        return _ARRAY_DTYPES[self.dtype]

    def shape(self, n_images: int) -> tuple[int, int, int, int]:
        """Of a batch, in the order of its memory."""
        return (n_images, self.size, self.size, 3) if self.is_channels_last else (n_images, 3, self.size, self.size)

    def as_batch(self, memory: Tensor) -> Tensor:
        """A tensor over a batch's memory, as the type and the shape (N, 3, size, size) that users see."""
        images = memory.view(self.dtype)
        return images.permute(0, 3, 1, 2) if self.is_channels_last else images

    @cached_property
    def table(self) -> np.ndarray:
        """The float that each byte becomes, by channel: (256, 3). Half types are rounded once, after normalising."""
        from torchvision.transforms.v2 import functional as F

        values = F.to_dtype(torch.arange(256, dtype=torch.uint8).expand(3, 1, 256), torch.float32, scale=True)
        if self.mean is not None and self.std is not None:
            values = F.normalize(values, list(self.mean), list(self.std))
        stored = values.to(self.dtype)[:, 0].T.contiguous()
        return (stored.view(torch.uint16) if self.array_dtype == np.uint16 else stored).numpy()


def _check_channels(name: str, values: Sequence[float], above: float = -np.inf) -> None:
    if len(values) != 3 or not np.isfinite(values).all() or min(values) <= above:
        bound = f" > {above:g}" if np.isfinite(above) else ""
        raise ValueError(f"{name} must be three numbers{bound}, for red, green and blue, got {values!r}")


class CropWriter:
    """Writes crops into their places in a batch, from any thread.

    Args:
        pixels: What they are written as.
        antialias: As in `labkit.pipeline.batch_loader.resample.resize_into`.
    """

    def __init__(self, pixels: PixelFormat, antialias: bool):
        self._antialias = antialias
        self._converter = _converter(pixels)
        self._local = _Scratch(pixels.size)

    def write(self, row: np.ndarray, source: np.ndarray, box: Box, mirror: int) -> None:
        """Write the crop `box` of `source`, uint8 (H, W, 3), into `row`, one image of the batch."""
        image = self._local.image if self._converter else row
        resize_into(image, source, box, self._antialias)
        if mirror:
            flip_into(image)
        if self._converter:
            self._converter(image, row)


class _Scratch(threading.local):
    """A crop in bytes for each thread: small enough for its core's cache, where a batch is not."""

    def __init__(self, size: int):
        self.image = np.empty((size, size, 3), np.uint8)

    def __reduce__(self) -> tuple:  # on the way to another process
        return _Scratch, (len(self.image),)


def _converter(pixels: PixelFormat) -> Callable[[np.ndarray, np.ndarray], None] | None:
    """What turns a crop of bytes into an image of the batch; None: nothing, crops are resized into it as they are."""
    if pixels.dtype == torch.uint8:
        return None if pixels.is_channels_last else _write_planes
    if pixels.is_channels_last:
        return partial(_write_floats, pixels.table[None])
    return partial(_write_float_planes, np.ascontiguousarray(pixels.table.T)[:, None])


def _write_floats(table: np.ndarray, image: np.ndarray, row: np.ndarray) -> None:
    cv2.LUT(image, table, dst=row)


def _write_planes(image: np.ndarray, row: np.ndarray) -> None:
    for channel, plane in enumerate(row):
        cv2.extractChannel(image, channel, dst=plane)


def _write_float_planes(tables: np.ndarray, image: np.ndarray, row: np.ndarray) -> None:
    for channel, plane in enumerate(row):
        cv2.LUT(cv2.extractChannel(image, channel), tables[channel], dst=plane)
