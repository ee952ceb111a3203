"""Write the images of a store straight into their places in a batch."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.data import (
    MAX_PIXELS,
    SCALES,
    DecodeError,
    Frame,
    Part,
    SkipLog,
    decode,
    jpeg_orientation,
    open_decoder,
)
from labkit.data.stores import Store
from labkit.pipeline.batch_loader.crops import flips, middle_crops, random_crops, uniforms
from labkit.pipeline.batch_loader.output import CropWriter


@dataclass(frozen=True)
class Draw:
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


class PixelFiller:
    """Fills batches from a `PixelStore`."""

    smallest_task = 8  # images; for fewer, a task costs more than it saves

    def __init__(self, store: Any, draw: Draw, writer: CropWriter):
        self._store, self._draw, self._writer = store, draw, writer

    def plan(self, indices: np.ndarray, epoch: int, occurrences: np.ndarray) -> np.ndarray:
        """Crops of a batch, (N, 5). Drawn for all at once: NumPy takes as long for one image as for all, and in
        between releases the GIL, which the threads that resize would then have to take back each time."""
        return self._draw.crops(self._draw.numbers(epoch, indices, occurrences), self._store.shapes[indices])

    def fill(self, rows: np.ndarray, indices: np.ndarray, plan: np.ndarray) -> list[int]:
        """Write images into `rows`, the memory of a part of a batch. Return the rows that stay empty: none."""
        numbers, crops = indices.tolist(), plan.tolist()
        self._store.read_ahead(numbers, ((top, height) for top, _, height, *_ in crops))
        for row, index, (*crop, mirror) in zip(rows, numbers, crops, strict=True):
            self._writer.write(row, self._store.pixels(index), crop, mirror)
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

    def part(self, crop: list[int], scale: int) -> Part:
        part = self._decoder.decode(self.data, crop, scale) if self._whole is None else None
        return part or Part(self._decode_whole(), (crop[0], crop[1], crop[2], crop[3]))


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
        self, store: Store, keys: Sequence[str], draw: Draw, writer: CropWriter, scaled_decoding: bool,
        skips: SkipLog | None,
    ):  # fmt: skip
        self._store, self._keys, self._draw, self._writer, self._skips = store, keys, draw, writer, skips
        self._scales = SCALES if scaled_decoding else SCALES[:1]
        self._local = _ThreadDecoder()

    def plan(self, indices: np.ndarray, epoch: int, occurrences: np.ndarray) -> np.ndarray:
        """Numbers from which crops follow once the sizes of the images are known, (N, DRAWS)."""
        return self._draw.numbers(epoch, indices, occurrences)

    def fill(
        self, rows: np.ndarray, indices: np.ndarray, plan: np.ndarray, reads: Sequence[Future] | None = None
    ) -> list[int]:
        """Write images into `rows`, the memory of a part of a batch. Return the rows whose images were skipped.

        `reads` has the bytes of the images, or the errors in their place. None: they are read here.
        """
        opened = [
            self._call_or_skip(self._open_image, self._keys[index], reads[position] if reads else None)
            for position, index in enumerate(indices.tolist())
        ]
        sizes = np.array([image.size if image else (1, 1) for image in opened])
        crops = self._draw.crops(plan, sizes).tolist()
        empty = []
        for position, (image, (*crop, mirror)) in enumerate(zip(opened, crops, strict=True)):
            if image is None or not self._call_or_skip(
                self._write_crop, image.key, rows[position], image, crop, mirror
            ):
                empty.append(position)
        return empty

    def _call_or_skip(self, function: Any, key: str, *arguments: Any) -> Any:
        try:
            return function(key, *arguments)
        except DecodeError as error:
            if self._skips is None:
                raise
            self._skips.add(key, str(error))
            return None
        except Exception as error:
            error.add_note(f"while loading {key}")
            raise

    def _open_image(self, key: str, read: Future | None) -> _EncodedImage:
        return _EncodedImage(key, read.result() if read else self._store.read(key), self._local.decoder)

    def _write_crop(self, key: str, row: np.ndarray, image: _EncodedImage, crop: list[int], mirror: int) -> bool:
        smallest = min(crop[2:]) // self._draw.size
        part = image.part(crop, max((scale for scale in self._scales if scale <= smallest), default=1))
        self._writer.write(row, *part, mirror)
        return True
