"""Write the images of a store straight into their places in a batch: decode, resize, and convert to bytes or floats.

Batches are channels last or in planes. Their memory is used again when nobody holds it.
"""

import math
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
from torch import Tensor

from labkit.data.dataset import SkipLog
from labkit.data.decode import decode, max_pixels
from labkit.data.orientation import jpeg_orientation
from labkit.data.partial_jpeg import END_OF_IMAGE, SCALES, JpegHeader, Part, open_decoder
from labkit.data.stores import Store, read_bytes
from labkit.data.tiles import Tiling, cut, head_of, tiling_of
from labkit.errors import ArgumentError, DecodeError, MissingKeyError
from labkit.loading.crops import Size, center_crops, flips, random_crops, uniforms
from labkit.loading.own_transform import OwnTransform
from labkit.loading.resize import Box, Resizer
from labkit.util.arguments import check_normalization, require_choice


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


# NumPy has no bfloat16, and OpenCV copies the bits of either half type as those of an integer.
_ARRAY_DTYPES = {
    torch.uint8: np.uint8, torch.float32: np.float32, torch.float16: np.uint16, torch.bfloat16: np.uint16,
}  # fmt: skip


@dataclass(frozen=True)
class PixelFormat:
    """The pixels of a batch; `size` is height and width, the others are as `BatchLoader` accepts them."""

    size: Size
    dtype: torch.dtype
    mean: Sequence[float] | None
    std: Sequence[float] | None
    # A flag: pickle finds a memory format by name in any module that imports torch, and each worker would import that.
    is_channels_last: bool

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, _ARRAY_DTYPES)
        if (self.mean is None) != (self.std is None):
            raise ArgumentError(f"pass both mean and std, or neither: got mean={self.mean!r}, std={self.std!r}")
        if self.mean is not None and self.std is not None:
            if self.dtype == torch.uint8:
                raise ArgumentError(
                    "mean and std need floats: pass dtype=torch.float32, torch.float16 or torch.bfloat16"
                )
            check_normalization(self.mean, self.std)

    @property
    def array_dtype(self) -> type:
        """NumPy's type of what is stored."""
        return _ARRAY_DTYPES[self.dtype]

    def take_batch(self, buffers: BatchBuffers, n_images: int) -> tuple[np.ndarray, Tensor]:
        """Memory for a batch: an array in its order, and a tensor (N, 3, height, width) of the type that users see."""
        sides = (*self.size, 3) if self.is_channels_last else (3, *self.size)
        memory, images = buffers.take(n_images * math.prod(sides) * np.dtype(self.array_dtype).itemsize)
        images = images.view(self.dtype).view(n_images, *sides)
        array: np.ndarray = memory.view(self.array_dtype).reshape(n_images, *sides)
        return array, images.permute(0, 3, 1, 2) if self.is_channels_last else images

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


class Crop(NamedTuple):
    """What an image of a batch is made of.

    place: A box in the photo, or, if `is_whole`, what `center_crops` gives for it.
    draw: Epoch, index and occurrence, which the draws of a transform depend on; None without one.
    """

    place: Box
    mirror: int
    is_whole: bool
    draw: tuple[int, int, int] | None


class CropWriter:
    """Writes crops into their places in a batch, from any thread.

    Args:
        pixels: What they are written as.
        resizer: How they are resized.
        transform: Called with each, before it is written as something else than bytes.
    """

    def __init__(self, pixels: PixelFormat, resizer: Resizer, transform: OwnTransform | None = None):
        self._resizer, self.transform = resizer, transform
        self._converter = _converter(pixels)
        self._size, self._local = pixels.size, _Scratch()

    def write(self, row: np.ndarray, source: np.ndarray, crop: Crop) -> None:
        """Write one image of a batch into `row`.

        Args:
            source: uint8 (H, W, 3).
            crop: What of it.
        """
        # A transform of one's own may write into its image, and keep it: never a batch's memory.
        image = self._local.image(self._size) if self._converter or self.transform else row
        (self._resizer.fit if crop.is_whole else self._resizer.crop)(image, source, crop.place)
        if crop.mirror:
            cv2.flip(image, 1, dst=image)
        if self.transform and crop.draw:
            try:
                image = self.transform.apply(image, *crop.draw)
            except Exception as error:
                error.is_of_transform = True  # type: ignore[attr-defined]  # the image is there, and can be decoded
                raise
        if self._converter:
            self._converter(image, row)
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
    """What happens to an image on its way into a batch. `size` is height and width; the others are `BatchLoader`'s."""

    size: Size
    train: bool
    seed: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    resize: int | None = None

    def numbers(self, epoch: int, indices: np.ndarray, occurrences: np.ndarray) -> np.ndarray:
        """Random numbers for each image, drawn before its size is known, (N, DRAWS)."""
        return uniforms(self.seed, epoch, indices, occurrences)

    @property
    def is_whole(self) -> bool:
        """Whether photos are resized as a whole; else crops are."""
        return not self.train

    def crops(self, numbers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Top, left, height and width of each crop, and 1 if it is mirrored, int64 (N, 5).

        If photos are resized as a whole, the first four are those of `center_crops`.
        """
        if self.is_whole:
            boxes = center_crops(sizes, self.size, self.resize)
        else:
            boxes = random_crops(numbers, sizes, self.scale, self.ratio)
        return np.column_stack([boxes, flips(numbers, self.flip if self.train else 0.0)])


class View(NamedTuple):
    """One crop of each image on its way into a batch: what it becomes, how it is drawn, and what writes it."""

    pixels: PixelFormat
    draw: CropPolicy
    writer: CropWriter


class BatchPart(NamedTuple):
    """Some images of a batch, which one thread makes."""

    views: Sequence[View]
    images: Sequence[np.ndarray]  # the memory that they go into, by view
    indices: np.ndarray
    occurrences: np.ndarray
    epoch: int
    plan: np.ndarray  # of the filler

    def draw(self, position: int) -> tuple[int, int, int] | None:
        """What the draws of an image's transform depend on; None without one."""
        if self.views[0].writer.transform is None:
            return None
        return self.epoch, int(self.indices[position]), int(self.occurrences[position])


class PixelFiller:
    """Fills batches from a `PixelStore`."""

    smallest_task = 8  # images; for fewer, a task costs more than it saves

    def __init__(self, store: Any, rows: np.ndarray | None = None):
        self._store, self._rows = store, rows

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        """Of images in the store."""
        return indices if self._rows is None else self._rows[indices]

    def plan(self, views: Sequence[View], indices: np.ndarray, epoch: int, occurrences: np.ndarray) -> np.ndarray:
        """Crops of a batch, (N, views, 5). Drawn for all at once: NumPy takes as long for one image as for all, and in
        between releases the GIL, which the threads that resize would then have to take back each time."""
        sizes, draws = self._store.shapes[self._numbers(indices)], [view.draw for view in views]
        return np.stack([draw.crops(draw.numbers(epoch, indices, occurrences), sizes) for draw in draws], axis=1)

    def fill(self, part: BatchPart) -> list[int]:
        """Write a part of a batch. Return the places that stay empty: none."""
        rows = self._numbers(part.indices)
        numbers = rows.tolist()
        if part.views[0].draw.is_whole:
            self._store.read_ahead(numbers, ((0, height) for height in self._store.shapes[rows, 0].tolist()))
        else:
            tops = part.plan[..., 0].min(1)
            self._store.read_ahead(
                numbers, zip(tops, (part.plan[..., 0] + part.plan[..., 2]).max(1) - tops, strict=True)
            )
        for position, (index, crops) in enumerate(zip(numbers, part.plan.tolist(), strict=True)):
            pixels, draw = self._store.pixels(index), part.draw(position)
            for view, target, (*place, mirror) in zip(part.views, part.images, crops, strict=True):
                view.writer.write(target[position], pixels, Crop(place, mirror, view.draw.is_whole, draw))
        return []


class _EncodedImage:
    """An encoded image of known size: its bytes, or all its pixels if only a general decoder can read it."""

    def __init__(self, key: str, data: bytes, decoder: Any):
        self.key, self.data = key, data
        self._decoder = decoder
        self._whole: np.ndarray | None = None
        self._head = head_of(data)
        self.size = self._partial_decode_size() or JpegHeader(*self._decode_whole().shape[:2])

    def _partial_decode_size(self) -> JpegHeader | None:
        """The size of a JPEG that can be decoded in parts: complete, upright beyond doubt, and not too large."""
        head = self._head
        is_upright = jpeg_orientation(self.data) == 1 if head is None or head.may_be_turned else True
        if not is_upright or not self.data.endswith(END_OF_IMAGE):
            return None
        header = JpegHeader(head.height, head.width) if head else self._decoder.header(self.data)
        return header if header and header.height * header.width <= max_pixels() else None

    def _decode_whole(self) -> np.ndarray:
        if self._whole is None:
            self._whole = decode(self.data, key=self.key).permute(1, 2, 0).numpy()
        return self._whole

    @cached_property
    def _tiling(self) -> Tiling | None:  # of which several crops of a photo are cut
        return tiling_of(self.data, self._head) if self._head else None

    def part(self, box: tuple[int, int, int, int], scale: int) -> Part:
        if self._whole is None:
            tiling = self._tiling if self._bytes_spared(box) > _LEAST_SPARED else None
            data, place = cut(self.data, tiling, box, scale) if tiling else (self.data, box)
            if part := self._decoder.decode(data, place, scale):
                return part
        return Part(self._decode_whole(), box)

    def _bytes_spared(self, box: tuple[int, int, int, int]) -> float:
        """What a decoder need not read of these bytes if the box is cut out: codes beside it, and all above."""
        top, _, height, width = box
        return len(self.data) * (top + height - height * width / self.size.width) / self.size.height


_LEAST_SPARED = 10_000  # bytes: a cut takes about as long as decoding so many


class _ThreadDecoder(threading.local):
    """A decoder for each thread."""

    def __init__(self) -> None:
        self.decoder = open_decoder()

    def __reduce__(self) -> tuple:  # of a copy of the loader, such as for another process
        return _ThreadDecoder, ()


class EncodedFiller:
    """Fills batches from a store of encoded images; each thread has a decoder of its own."""

    smallest_task = 2

    def __init__(self, store: Store, keys: Sequence[str], scaled_decoding: bool, skips: SkipLog | None):
        self._store, self._keys, self._skips = store, keys, skips
        self._scales = SCALES if scaled_decoding else SCALES[:1]
        self._local = _ThreadDecoder()

    def plan(self, views: Sequence[View], indices: np.ndarray, epoch: int, occurrences: np.ndarray) -> np.ndarray:
        """Numbers from which crops follow once the sizes of the images are known, (N, views, DRAWS)."""
        return np.stack([view.draw.numbers(epoch, indices, occurrences) for view in views], axis=1)

    def fill(self, part: BatchPart, reads: Sequence[Future] | None = None) -> list[int]:
        """Write a part of a batch. Return the rows that were skipped.

        `reads` has the bytes of the images, or the errors in their place. None: they are read here.
        """
        opened = [
            self._call_or_skip(self._open_image, self._keys[index], reads[position] if reads else None)
            for position, index in enumerate(part.indices.tolist())
        ]
        sizes = np.array([image.size if image else (1, 1) for image in opened])
        drawn = [view.draw.crops(part.plan[:, number], sizes) for number, view in enumerate(part.views)]
        empty = []
        for position, (image, crops) in enumerate(zip(opened, np.stack(drawn, axis=1).tolist(), strict=True)):
            if image is None or not self._call_or_skip(self._write_crops, image.key, part, position, image, crops):
                empty.append(position)
        return empty

    def _call_or_skip(self, function: Any, key: str, *arguments: Any) -> Any:
        try:
            return function(key, *arguments)
        except Exception as error:
            is_of_image = isinstance(error, DecodeError | MissingKeyError | FileNotFoundError)
            if self._skips is not None and is_of_image and not hasattr(error, "is_of_transform"):
                self._skips.add(key, str(error))
                return None
            if not isinstance(error, DecodeError):  # which names the key
                error.add_note(f"while loading {key}")
            raise

    def _open_image(self, key: str, read: Future | None) -> _EncodedImage:
        return _EncodedImage(key, read.result() if read else read_bytes(self._store, key), self._local.decoder)

    def _write_crops(
        self, key: str, part: BatchPart, position: int, image: _EncodedImage, crops: list[list[int]]
    ) -> bool:
        """Decode what all crops of an image need together, once, and write each."""
        draw = part.draw(position)
        places = list(zip(part.views, (memory[position] for memory in part.images), crops, strict=True))
        if part.views[0].draw.is_whole:
            smallest = min(min(image.size[0] // crop[2], image.size[1] // crop[3]) for crop in crops)
            pixels, (top, left, height, width) = image.part((0, 0, *image.size), self._scale(smallest))
            whole = pixels[int(top) : math.ceil(top + height), int(left) : math.ceil(left + width)]
            for view, row, (*place, mirror) in places:
                view.writer.write(row, whole, Crop(place, mirror, True, draw))
        else:
            smallest = min(min(crop[2] // view.draw.size[0], crop[3] // view.draw.size[1]) for view, _, crop in places)
            top, left = min(crop[0] for crop in crops), min(crop[1] for crop in crops)
            bottom, right = max(crop[0] + crop[2] for crop in crops), max(crop[1] + crop[3] for crop in crops)
            pixels, box = image.part((top, left, bottom - top, right - left), self._scale(smallest))
            shrunk = box[2] / (bottom - top)  # 1 where the decoder knows no smaller scale
            for view, row, (y, x, height, width, mirror) in places:
                within = box[0] + (y - top) * shrunk, box[1] + (x - left) * shrunk, height * shrunk, width * shrunk
                view.writer.write(row, pixels, Crop(within, mirror, False, draw))
        return True

    def _scale(self, smallest: int) -> int:
        """At which part of its size an image may be decoded."""
        return max((scale for scale in self._scales if scale <= smallest), default=1)
