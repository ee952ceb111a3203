"""Rows of a batch: the memory of a batch, and how a crop of decoded pixels is written into its row.

A crop is resized as bytes, mirrored, given to the user's own transform, and becomes what the batch holds: bytes or
floats, channels last. The memory of a batch is used again when nobody holds it.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from labkit.loading.crops import Crop, Place, Size
from labkit.loading.own_transform import OwnTransform

# NumPy has no bfloat16, and OpenCV copies the bits of either half type as those of an integer.
ARRAY_DTYPES = {
    torch.uint8: np.uint8, torch.float32: np.float32, torch.float16: np.uint16, torch.bfloat16: np.uint16,
}  # fmt: skip


class Batch:
    """A batch that is being made: its images' numbers, and the rows that they are written into.

    Args:
        writers: Of each crop of an image, one.
        indices, occurrences: int (N,): of the images, and how many times each came before in the epoch.
        epoch: Its number.

    Attributes:
        images: A tensor (N, 3, height, width) for each writer.
    """

    def __init__(self, writers: "Sequence[RowWriter]", indices: np.ndarray, occurrences: np.ndarray, epoch: int):
        self.indices, self.occurrences, self.epoch, self._writers = indices, occurrences, epoch, writers
        taken = [writer.rows.take(len(indices)) for writer in writers]
        self._memory, self.images = [memory for memory, _ in taken], [images for _, images in taken]

    def write(self, position: int, number: int, pixels: np.ndarray, place: Place, crop: Crop) -> None:
        """Write a crop of the image at a position into its row; `number` is that of the writer.

        Args:
            pixels: uint8 (H, W, 3): decoded pixels of the image.
            place: Where the crop's part lies in them.
            crop: What becomes of it.
        """
        writer, row = self._writers[number], self._memory[number][position]
        if writer.transform is None:
            writer.write(row, pixels, place, crop)
        else:
            sample = self.epoch, int(self.indices[position]), int(self.occurrences[position])
            writer.write(row, pixels, place, crop, sample)


class BatchBuffers:
    """Hand out memory for batches of images.

    New memory costs a page fault every 4 KB, for raw pixels as much as reading them. So the memory of a batch is
    reused once its tensor, and everything that shares it, is gone; a batch that is kept is never overwritten. Pinned
    memory comes from torch, which waits for unfinished copies before it hands memory out again.

    Args:
        n_kept: Number of free buffers to keep.
        pin_memory: Use page-locked memory, so that copies to the GPU overlap with compute.
    """

    def __init__(self, n_kept: int, pin_memory: bool):
        self._pin_memory, self._n_bytes = pin_memory, 0
        self._free: deque[np.ndarray] = deque(maxlen=n_kept)

    def take(self, n_bytes: int) -> tuple[np.ndarray, Tensor]:
        """Bytes to fill, and a tensor over the same memory."""
        if self._pin_memory:
            pinned = torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            return pinned.numpy(), pinned
        self._n_bytes = max(self._n_bytes, n_bytes)  # a batch sampler's batches may have several lengths
        memory = self._free.pop() if self._free else np.empty(0, np.uint8)
        if len(memory) < n_bytes:
            memory = np.empty(self._n_bytes, np.uint8)
        lent = memory[:n_bytes]  # torch keeps this object alive as long as any tensor over it
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent, torch.from_numpy(lent)

    def __reduce__(self) -> tuple:  # of a copy of the loader, such as for another process
        return BatchBuffers, (self._free.maxlen, self._pin_memory)


@dataclass(frozen=True)
class Rows:
    """What the rows of a batch hold; `size` is height and width, the others are as `BatchLoader` takes them."""

    size: Size
    dtype: torch.dtype
    mean: Sequence[float] | None
    std: Sequence[float] | None
    buffers: BatchBuffers

    def take(self, n_images: int) -> tuple[np.ndarray, Tensor]:
        """Memory for a batch: an array in its order, and a tensor (N, 3, height, width) of the type that users see."""
        sides = (*self.size, 3)
        array_dtype = ARRAY_DTYPES[self.dtype]
        memory, images = self.buffers.take(n_images * math.prod(sides) * np.dtype(array_dtype).itemsize)
        images = images.view(self.dtype).view(n_images, *sides)
        array: np.ndarray = memory.view(array_dtype).reshape(n_images, *sides)
        return array, images.permute(0, 3, 1, 2)

    @cached_property
    def table(self) -> np.ndarray:
        """The float that each byte becomes, by channel: (256, 3). Half types are rounded once, after normalizing."""
        from torchvision.transforms.v2 import functional as F

        values = F.to_dtype(
            torch.arange(256, dtype=torch.uint8, device="cpu").expand(3, 1, 256), torch.float32, scale=True
        )
        if self.mean is not None and self.std is not None:
            values = F.normalize(values, list(self.mean), list(self.std))
        stored = values.to(self.dtype)[:, 0].T.contiguous()
        return (stored.view(torch.uint16) if ARRAY_DTYPES[self.dtype] == np.uint16 else stored).numpy()


class RowWriter:
    """Writes crops into their rows, from any thread.

    Args:
        rows: What is written.
        resize: `resize_crop` or `resize_photo` of a `Resizer`.
        transform: Called with each crop, before it is written as something else than bytes.
    """

    def __init__(self, rows: Rows, resize: Callable[..., None], transform: OwnTransform | None = None):
        self.rows, self._resize, self.transform = rows, resize, transform
        self._table = None if rows.dtype == torch.uint8 else rows.table[None]  # a row of bytes is resized into
        self._local = _Scratch()

    def write(
        self, row: np.ndarray, pixels: np.ndarray, place: Place, crop: Crop, sample: tuple[int, int, int] | None = None
    ) -> None:
        """Write one image of a batch into `row`; other arguments as of `Batch.write`.

        Args:
            sample: Epoch, index and occurrence, which the draws of a transform depend on.
        """
        # A transform of one's own may write into its image, and keep it: never a batch's memory.
        is_row = self._table is None and self.transform is None
        image = row if is_row else self._local.image(self.rows.size)
        self._resize(image, pixels, place, crop)
        if crop.mirror:
            cv2.flip(image, 1, dst=image)
        if self.transform and sample:
            try:
                image = self.transform.apply(image, *sample)
            except Exception as error:
                error.is_of_transform = True  # type: ignore[attr-defined]  # the image is there, and can be decoded
                raise
        if self._table is not None:
            cv2.LUT(image, self._table, dst=row)
        elif self.transform:
            np.copyto(row, image)


class _Scratch(threading.local):
    """A crop in bytes for each thread: small enough for its core's cache, where a batch is not."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def image(self, size: Size) -> np.ndarray:
        """Memory for a crop, uint8 (height, width, 3); the next one overwrites it."""
        n_bytes = math.prod(size) * 3
        if len(self._bytes) < n_bytes:
            self._bytes = np.empty(n_bytes, np.uint8)
        return self._bytes[:n_bytes].reshape(*size, 3)

    def __reduce__(self) -> tuple:  # of a copy of the loader, such as for another process
        return _Scratch, ()


# Resizing


INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# torch's own functions behind `interpolate`, which take memory to write into, and a factor beside a size. Without them,
# torch gives new memory, and takes one of the two.
_INTERPOLATE = {name: getattr(torch._C._nn, f"_upsample_{name}2d_aa", None) for name in INTERPOLATIONS}


@dataclass(frozen=True)
class Resizer:
    """How photos and crops of them are resized: as torchvision, Pillow or OpenCV do.

    Args:
        antialias: Average over all source pixels when shrinking, as torchvision and Pillow do. False: as OpenCV does,
            and so Albumentations. Enlarged crops are the same in both, except for rounding.
        interpolation: One of `INTERPOLATIONS`; for others than bilinear antialiasing is needed.
    """

    antialias: bool = True
    interpolation: str = "bilinear"

    @property
    def radius(self) -> int:
        """How far the filter reaches, in pixels of what is smaller."""
        return 1 if self.interpolation == "bilinear" else 2

    def resize_crop(self, target: np.ndarray, pixels: np.ndarray, place: Place, crop: Crop | None = None) -> None:
        """Write the pixels at a place into `target`. Those beyond it do not count, as in `RandomResizedCrop`.

        Args:
            target: uint8 (height, width, 3), contiguous; overwritten.
            pixels: uint8 (H, W, 3).
            place: In `pixels`. Fractions of a pixel count: after decoding at 1/4, rounding would move the crop by up to
                half of a pixel that is four times as large.
            crop: Not needed: all of it is resized to the size of `target`.
        """
        top, left, height, width = place
        if top % 1 or left % 1 or height % 1 or width % 1:
            (self._by_pillow if self.antialias else _warp)(target, pixels, place)
            return
        part = pixels[int(top) : int(top + height), int(left) : int(left + width)]
        shrinks = height > target.shape[0] or width > target.shape[1]
        if self.interpolation != "bilinear":
            self._by_pillow(target, part, (0, 0, height, width))
        elif self.antialias and shrinks:
            _interpolate_into(target, part)
        else:
            cv2.resize(part, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)

    def resize_photo(self, target: np.ndarray, pixels: np.ndarray, place: Place, crop: Crop) -> None:
        """Write what is seen of a whole photo that is resized, bit for bit as torchvision's v2 resizes tensors.

        Pillow, and so timm, takes four times as long, for pixels that differ by 1 (bicubic: 2) in one of some hundreds.

        Args:
            target: As for `resize_crop`.
            pixels: uint8 (H, W, 3): the photo from its corner on, as far as `pixels_needed` says, or all of it.
            place: Of the whole photo, which begins with `pixels` and may reach beyond them. The last pixel of one that
                was decoded at a part of its size may stand for less than a pixel.
            crop: What it is resized to, and what is seen of that.
        """
        height, width, resized = math.ceil(place[2]), math.ceil(place[3]), (crop.resized_height, crop.resized_width)
        top, left = crop.seen_top, crop.seen_left
        if resized != (height, width):
            pixels = self._resize_corner(target.shape, pixels, (height, width), crop)
        bottom, right = min(top + target.shape[0], resized[0]), min(left + target.shape[1], resized[1])
        seen = pixels[max(0, top) : bottom, max(0, left) : right]
        if seen.shape != target.shape:
            target[:] = 0
        np.copyto(target[max(0, -top) :, max(0, -left) :][: seen.shape[0], : seen.shape[1]], seen)

    def _resize_corner(self, shape: Sequence[int], pixels: np.ndarray, size: Size, crop: Crop) -> np.ndarray:
        """A photo of a size, resized from its corner up to the end of what is seen of it, or a little further."""
        factors = crop.resized_height / size[0], crop.resized_width / size[1]
        if not self.antialias:
            return cv2.resize(pixels, None, fx=factors[1], fy=factors[0], interpolation=cv2.INTER_LINEAR)
        ends = (
            min(crop.seen_top + shape[0], crop.resized_height), min(crop.seen_left + shape[1], crop.resized_width)
        )  # fmt: skip
        return _interpolate_corner(pixels, ends, factors, self.interpolation)

    def _by_pillow(self, target: np.ndarray, pixels: np.ndarray, place: Place) -> None:
        top, left, height, width = place
        corners = (left, top, min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0]))
        resized = Image.fromarray(pixels).resize(target.shape[1::-1], INTERPOLATIONS[self.interpolation], box=corners)
        np.copyto(target, np.asarray(resized))


def _interpolate_into(target: np.ndarray, pixels: np.ndarray) -> None:
    """All of `pixels` resized to the size of `target`."""
    if function := _INTERPOLATE["bilinear"]:
        function(_as_torch(pixels), target.shape[:2], False, None, None, out=_as_torch(target))
    else:
        np.copyto(target, _as_numpy(interpolate(_as_torch(pixels), target.shape[:2], mode="bilinear", antialias=True)))


def _interpolate_corner(pixels: np.ndarray, ends: Size, factors: tuple[float, float], mode: str) -> np.ndarray:
    """Pixels of a photo from its corner on, resized by factors; rows and columns up to `ends`, or some more."""
    if function := _INTERPOLATE[mode]:
        # torch leaves a side as it is that is to have as many pixels as before, whatever the factor.
        rows, columns = (
            end + (end == n and factor != 1) for end, n, factor in zip(ends, pixels.shape, factors, strict=False)
        )
        return _as_numpy(function(_as_torch(pixels), (rows, columns), False, *factors))
    upward = tuple(_rounded_up(*side) for side in zip(factors, pixels.shape, ends, strict=False))
    return _as_numpy(interpolate(_as_torch(pixels), scale_factor=upward, mode=mode, antialias=True))


def _rounded_up(factor: float, n_pixels: int, end: int) -> float:
    """The factor, or one that is larger by rounding errors.

    By the factor itself a pixel too few may come out, or as many as went in, and torch then leaves them as they are.
    """
    while int(n_pixels * factor) < end or (factor > 1 and int(n_pixels * factor) == n_pixels):
        factor = math.nextafter(factor, math.inf)
    return factor


def _as_torch(pixels: np.ndarray) -> Tensor:
    """A tensor (1, 3, H, W) over pixels (H, W, 3), or over a copy in one piece, which torch would make more slowly."""
    if not (pixels.flags.c_contiguous and pixels.flags.writeable):  # torch has no read-only tensors, and warns
        pixels = pixels.copy()
    # By `reshape`, and not by `[None]`, whose axis has the stride 0: from the stride torch recognizes channels-last
    # memory, and does not copy.
    return torch.from_numpy(pixels.reshape(1, *pixels.shape).transpose(0, 3, 1, 2))


def _as_numpy(images: Tensor) -> np.ndarray:
    return images.permute(0, 2, 3, 1)[0].numpy()


def _warp(target: np.ndarray, pixels: np.ndarray, place: Place) -> None:
    top, left, height, width = place
    step_y, step_x = height / target.shape[0], width / target.shape[1]
    mapping = np.array([[step_x, 0, left + step_x / 2 - 0.5], [0, step_y, top + step_y / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(pixels, mapping, target.shape[1::-1], dst=target, flags=flags, borderMode=cv2.BORDER_REPLICATE)
