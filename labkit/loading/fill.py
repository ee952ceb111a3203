"""Write the images of a store straight into their places in a batch: decode, resize, and convert to bytes or floats.

There are two kinds of resize, because the loaders that people use differ: `antialias=True` gives what torchvision's v2
transforms and Pillow give, `antialias=False` OpenCV's bilinear, as Albumentations uses it. Enlarged crops are the same
in both, except for rounding. Batches are channels last or in planes. Their memory is used again when nobody holds it.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from labkit.data.dataset import SkipLog
from labkit.data.decode import MAX_PIXELS, decode, jpeg_orientation
from labkit.data.partial_jpeg import SCALES, Frame, Part, open_decoder
from labkit.data.stores import Store
from labkit.data.tiles import Tiling, cut, tiling_of
from labkit.errors import ArgumentError, DecodeError, MissingKeyError
from labkit.loading.crops import flips, middle_crops, random_crops, uniforms
from labkit.util.arguments import check_normalization, require_choice


class BatchBuffers:
    """Hand out memory for batches of images.

    New memory costs a page fault every 4 KB, for raw pixels as much as reading them. So the memory of a batch is
    reused once its tensor, and everything that shares it, is gone; a batch that is kept is never overwritten. Pinned
    memory comes from torch, which waits for unfinished copies before it hands memory out again.

    Args:
        shape: Of a batch, in the order of its memory.
        dtype: NumPy's.
        n_kept: Number of free buffers to keep.
        pin_memory: Use page-locked memory, so that copies to the GPU overlap with compute.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type, n_kept: int, pin_memory: bool):
        self._shape, self._dtype, self._pin_memory = shape, dtype, pin_memory
        self._free: deque[np.ndarray] = deque(maxlen=n_kept)

    def take(self) -> tuple[np.ndarray, Tensor]:
        """An array to fill, and a tensor over the same memory."""
        if self._pin_memory:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
            pinned = torch.empty(self._shape, dtype=dtype, device="cpu", pin_memory=True)
            return pinned.numpy(), pinned
        memory = self._free.pop() if self._free else np.empty(self._shape, self._dtype)
        lent = memory.view()  # torch keeps this object alive as long as any tensor over it
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent, torch.from_numpy(lent)


Box = tuple[float, float, float, float]


def resize_into(target: np.ndarray, pixels: np.ndarray, box: Box, antialias: bool) -> None:
    """Write a crop of `pixels` into `target`.

    Args:
        target: uint8 (height, width, 3), contiguous; overwritten.
        pixels: uint8 (H, W, 3).
        box: Top, left, height and width of the crop in `pixels`. Fractions of a pixel count: after decoding at 1/4,
            rounding would move the crop by up to half of a pixel that is four times as large.
        antialias: Average over all source pixels when shrinking.
    """
    if any(side % 1 for side in box):
        (_resize_fractional_antialias if antialias else _resize_fractional)(target, pixels, box)
        return
    top, left, height, width = map(int, box)
    crop = pixels[top : top + height, left : left + width]
    if antialias and (height > target.shape[0] or width > target.shape[1]):
        _resize_antialias(target, crop)
    else:
        cv2.resize(crop, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)


def _resize_antialias(target: np.ndarray, crop: np.ndarray) -> None:
    if not crop.flags.writeable:  # a mapped file: torch has no read-only tensors, and warns
        crop = crop.copy()
    # Add the batch axis before permuting: from its stride torch recognizes channels-last memory, and does not copy.
    image = torch.from_numpy(crop)[None].permute(0, 3, 1, 2)
    resized = interpolate(image, target.shape[:2], mode="bilinear", antialias=True)
    np.copyto(target, resized.permute(0, 2, 3, 1)[0].numpy())


def _resize_fractional(target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
    top, left, height, width = box
    step_y, step_x = height / target.shape[0], width / target.shape[1]
    place = np.array([[step_x, 0, left + step_x / 2 - 0.5], [0, step_y, top + step_y / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(pixels, place, target.shape[1::-1], dst=target, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def _resize_fractional_antialias(target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
    top, left, height, width = box
    corners = (left, top, min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0]))
    resized = Image.fromarray(pixels).resize(target.shape[1::-1], Image.Resampling.BILINEAR, box=corners)
    np.copyto(target, np.asarray(resized))


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
            raise ArgumentError(f"pass both mean and std, or neither: got mean={self.mean!r}, std={self.std!r}")
        if self.mean is not None and self.std is not None:
            if self.dtype == torch.uint8:
                raise ArgumentError(
                    "mean and std need floats: pass dtype=torch.float32, torch.float16 or torch.bfloat16"
                )
            check_normalization(self.mean, self.std)

    @property
    def is_channels_last(self) -> bool:
        return self.memory_format == torch.channels_last

    @property
    def array_dtype(self) -> type:
        """NumPy's type of what is stored."""
        return _ARRAY_DTYPES[self.dtype]

    def shape(self, n_images: int) -> tuple[int, int, int, int]:
        """The shape of a batch, in the order of its memory."""
        return (n_images, self.size, self.size, 3) if self.is_channels_last else (n_images, 3, self.size, self.size)

    def as_batch(self, memory: Tensor) -> Tensor:
        """A tensor over a batch's memory, as the type and the shape (N, 3, size, size) that users see."""
        images = memory.view(self.dtype)
        return images.permute(0, 3, 1, 2) if self.is_channels_last else images

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
        return (stored.view(torch.uint16) if self.array_dtype == np.uint16 else stored).numpy()


class CropWriter:
    """Writes crops into their places in a batch, from any thread.

    Args:
        pixels: What they are written as.
        antialias: As in `labkit.loading.fill.resize_into`.
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
            cv2.flip(image, 1, dst=image)
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


@dataclass(frozen=True)
class CropPolicy:
    """What happens to an image on its way into a batch. The arguments are those of `BatchLoader`."""

    size: int
    train: bool
    seed: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float

    def numbers(self, epoch: int, indices: np.ndarray, occurrences: np.ndarray) -> np.ndarray:
        """Random numbers for each image, drawn before its size is known, (N, DRAWS)."""
        return uniforms(self.seed, epoch, indices, occurrences)

    def crops(self, numbers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Top, left, height and width of each crop, and 1 if it is mirrored, int64 (N, 5)."""
        if not self.train:
            return np.pad(middle_crops(sizes, self.size), ((0, 0), (0, 1)))
        return np.column_stack([random_crops(numbers, sizes, self.scale, self.ratio), flips(numbers, self.flip)])


class View(NamedTuple):
    """One crop of each image on its way into a batch: what it becomes, how it is drawn, and what writes it."""

    pixels: PixelFormat
    draw: CropPolicy
    writer: CropWriter


class PixelFiller:
    """Fills batches from a `PixelStore`."""

    smallest_task = 8  # images; for fewer, a task costs more than it saves

    def __init__(self, store: Any, views: Sequence[View]):
        self._store, self._views = store, views

    def plan(self, indices: np.ndarray, epoch: int, occurrences: np.ndarray) -> np.ndarray:
        """Crops of a batch, (N, views, 5). Drawn for all at once: NumPy takes as long for one image as for all, and in
        between releases the GIL, which the threads that resize would then have to take back each time."""
        sizes = self._store.shapes[indices]
        draws = [view.draw for view in self._views]
        return np.stack([draw.crops(draw.numbers(epoch, indices, occurrences), sizes) for draw in draws], axis=1)

    def fill(self, rows: Sequence[np.ndarray], indices: np.ndarray, plan: np.ndarray) -> list[int]:
        """Write images into `rows`, the memory of a part of a batch, by view. Return the rows that stay empty: none."""
        numbers = indices.tolist()
        tops = plan[..., 0].min(1)
        self._store.read_ahead(numbers, zip(tops, (plan[..., 0] + plan[..., 2]).max(1) - tops, strict=True))
        for position, (index, crops) in enumerate(zip(numbers, plan.tolist(), strict=True)):
            pixels = self._store.pixels(index)
            for view, target, (*crop, mirror) in zip(self._views, rows, crops, strict=True):
                view.writer.write(target[position], pixels, crop, mirror)
        return []


class _EncodedImage:
    """An encoded image of known size: its bytes, or all its pixels if only a general decoder can read it."""

    def __init__(self, key: str, data: bytes, decoder: Any):
        self.key, self.data = key, data
        self._decoder = decoder
        self._whole: np.ndarray | None = None
        self.size = self._partial_decode_size() or Frame(*self._decode_whole().shape[:2])

    def _partial_decode_size(self) -> Frame | None:
        """The size of a JPEG that can be decoded in parts: complete, upright beyond doubt, and not too large."""
        if not self.data.endswith(b"\xff\xd9") or jpeg_orientation(self.data) != 1:
            return None
        frame = self._decoder.header(self.data)
        return frame if frame and frame.height * frame.width <= MAX_PIXELS else None

    def _decode_whole(self) -> np.ndarray:
        if self._whole is None:
            self._whole = decode(self.data, key=self.key).permute(1, 2, 0).numpy()
        return self._whole

    @cached_property
    def _tiling(self) -> Tiling | None:
        return tiling_of(self.data)

    def part(self, box: tuple[int, int, int, int], scale: int) -> Part:
        if self._whole is None:
            data, place = cut(self.data, self._tiling, box, scale) if self._tiling else (self.data, box)
            if part := self._decoder.decode(bytes(data), place, scale):
                return part
        return Part(self._decode_whole(), box)


class _ThreadDecoder(threading.local):
    """A decoder for each thread."""

    def __init__(self) -> None:
        self.decoder = open_decoder()

    def __reduce__(self) -> tuple:  # on the way to another process
        return _ThreadDecoder, ()


class EncodedFiller:
    """Fills batches from a store of encoded images; each thread has a decoder of its own."""

    smallest_task = 2

    def __init__(
        self, store: Store, keys: Sequence[str], views: Sequence[View], scaled_decoding: bool, skips: SkipLog | None
    ):
        self._store, self._keys, self._views, self._skips = store, keys, views, skips
        self._scales = SCALES if scaled_decoding else SCALES[:1]
        self._local = _ThreadDecoder()

    def plan(self, indices: np.ndarray, epoch: int, occurrences: np.ndarray) -> np.ndarray:
        """Numbers from which crops follow once the sizes of the images are known, (N, views, DRAWS)."""
        return np.stack([view.draw.numbers(epoch, indices, occurrences) for view in self._views], axis=1)

    def fill(
        self, rows: Sequence[np.ndarray], indices: np.ndarray, plan: np.ndarray, reads: Sequence[Future] | None = None
    ) -> list[int]:
        """Write images into `rows`, the memory of a part of a batch, by view. Return the rows that were skipped.

        `reads` has the bytes of the images, or the errors in their place. None: they are read here.
        """
        opened = [
            self._call_or_skip(self._open_image, self._keys[index], reads[position] if reads else None)
            for position, index in enumerate(indices.tolist())
        ]
        sizes = np.array([image.size if image else (1, 1) for image in opened])
        drawn = [view.draw.crops(plan[:, number], sizes) for number, view in enumerate(self._views)]
        empty = []
        for position, (image, crops) in enumerate(zip(opened, np.stack(drawn, axis=1).tolist(), strict=True)):
            targets = [target[position] for target in rows]
            if image is None or not self._call_or_skip(self._write_crops, image.key, targets, image, crops):
                empty.append(position)
        return empty

    def _call_or_skip(self, function: Any, key: str, *arguments: Any) -> Any:
        try:
            return function(key, *arguments)
        except Exception as error:
            if self._skips is not None and isinstance(error, DecodeError | MissingKeyError | FileNotFoundError):
                self._skips.add(key, str(error))
                return None
            if not isinstance(error, DecodeError):  # which names the key
                error.add_note(f"while loading {key}")
            raise

    def _open_image(self, key: str, read: Future | None) -> _EncodedImage:
        return _EncodedImage(key, read.result() if read else self._store.read(key), self._local.decoder)

    def _write_crops(self, key: str, targets: list[np.ndarray], image: _EncodedImage, crops: list[list[int]]) -> bool:
        """Decode what all crops of an image need together, once, and write each."""
        smallest = min(min(crop[2:4]) // view.draw.size for view, crop in zip(self._views, crops, strict=True))
        scale = max((scale for scale in self._scales if scale <= smallest), default=1)
        top, left = min(crop[0] for crop in crops), min(crop[1] for crop in crops)
        bottom, right = max(crop[0] + crop[2] for crop in crops), max(crop[1] + crop[3] for crop in crops)
        pixels, box = image.part((top, left, bottom - top, right - left), scale)
        shrunk = box[2] / (bottom - top)  # 1 where the decoder knows no smaller scale
        for view, target, (y, x, height, width, mirror) in zip(self._views, targets, crops, strict=True):
            place = box[0] + (y - top) * shrunk, box[1] + (x - left) * shrunk, height * shrunk, width * shrunk
            view.writer.write(target, pixels, place, mirror)
        return True
