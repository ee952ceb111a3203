"""From the bytes of a photo to its rows in a batch: read, header, boxes, one partial decode, and every crop's row."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from labkit.data.dataset import SkipLog
from labkit.data.decode import decode, max_pixels
from labkit.data.orientation import jpeg_orientation
from labkit.data.partial_jpeg import END_OF_IMAGE, SCALES, JpegHeader, Part, head_of, open_decoder
from labkit.data.stores import Store, read_bytes
from labkit.data.tiles import Tiling, cut, tiling_of
from labkit.errors import DecodeError, MissingKeyError
from labkit.loading.crops import RESIZED, SIDES, Box, Crop, CropPolicies
from labkit.loading.rows import Batch

_LEAST_SPARED = 10_000  # bytes: a cut takes about as long as decoding so many


class EncodedImages:
    """The images of a store of encoded files, as rows of batches; each thread has a decoder of its own.

    Args:
        store: Where the bytes come from.
        keys: Of the images; the indices of a batch count in them.
        policies: Which crops of each are written.
        scaled_decoding: Whether photos may be decoded at 1/2, 1/4 and 1/8 of their size.
        skips: Where an image that cannot be decoded, or is gone, is noted. None: it is an error.
    """

    smallest_task = 2  # images

    def __init__(
        self, store: Store, keys: Sequence[str], policies: CropPolicies, scaled_decoding: bool, skips: SkipLog | None
    ):
        self._store, self._keys, self._policies, self._skips = store, keys, policies, skips
        self._scales = np.array(SCALES if scaled_decoding else SCALES[:1])
        self._is_sound = np.zeros(0 if policies.train else len(keys), bool)  # images that were decoded to their end
        self._local = _ThreadDecoder()

    def filler(self, batch: Batch) -> Callable[..., list[int]]:
        """What writes some rows of a batch, in any thread, and returns those that stay empty.

        It is called with a slice of rows, and perhaps with futures of their images' bytes; without, it reads them.
        """
        draws = self._policies.draw(batch.epoch, batch.indices, batch.occurrences)
        return partial(self._fill, batch, draws)

    def _fill(self, batch: Batch, draws: np.ndarray, rows: slice, reads: Sequence[Future] | None = None) -> list[int]:
        images = [
            self._read(self._keys[index], reads[number] if reads else None)
            for number, index in enumerate(batch.indices[rows].tolist())
        ]
        sizes = np.array([image.size if image else (1, 1) for image in images])
        crops = self._policies.of(draws[rows], sizes)
        scales = self._scales_for(crops)
        boxes = self._policies.boxes(crops, scales)
        each = zip(images, crops.tolist(), boxes.tolist(), scales.tolist(), strict=True)
        written = [
            image is not None and self._write(batch, position, image, *what)
            for position, (image, *what) in enumerate(each, rows.start)
        ]
        return [position for position, is_written in enumerate(written, rows.start) if not is_written]

    def _read(self, key: str, read: Future | None) -> "_EncodedImage | None":
        """The image with its size, from its bytes; None if it is skipped."""
        try:
            data = read.result() if read else read_bytes(self._store, key)
            return _EncodedImage(key, data, self._local.decoder)
        except Exception as error:
            if not self._skips_image(key, error):
                raise
            return None

    def _write(
        self, batch: Batch, position: int, image: "_EncodedImage", crops: list[list[int]], box: Box, scale: int
    ) -> bool:
        """Decode the box, once for all crops of an image, and write the row of each; False if the image is skipped."""
        try:
            pixels, box_place = self._decode(image, box, scale, batch.indices[position])
            step = box_place[2] / box[2]  # decoded pixels for each of the photo's: 1 / scale, or 1 of a whole one
            y, x = box_place[0] - box[0] * step, box_place[1] - box[1] * step  # of the photo's corner in these pixels
            for number, fields in enumerate(crops):
                top, left, height, width, *_ = crop = Crop(*fields)
                crop_place = y + top * step, x + left * step, height * step, width * step
                batch.write(position, number, pixels, crop_place, crop)
        except Exception as error:
            if not self._skips_image(image.key, error):
                raise
            return False
        return True

    def _decode(self, image: "_EncodedImage", box: Box, scale: int, index: int) -> Part:
        """The pixels of the box, and where it lies in them."""
        if self._policies.train:
            return image.decode(box, scale)
        # Evaluation looks at the same box in each epoch: a damage below it is looked for in the first one.
        part = image.decode_from_corner(box, scale, to_end=not self._is_sound[index])
        self._is_sound[index] = True
        return part

    def _scales_for(self, crops: np.ndarray) -> np.ndarray:
        """At which part of its size each photo may be decoded and still not have to be enlarged for it: int (N,)."""
        smallest = (crops[..., SIDES] // crops[..., RESIZED]).min((1, 2))
        return self._scales[np.maximum(np.searchsorted(self._scales, smallest, "right") - 1, 0)]

    def _skips_image(self, key: str, error: Exception) -> bool:
        """Whether an image is left out for an error, and noted as such; else the error gets the image's key.

        Who calls this raises. The error's traceback would hold this frame, and this frame the error: such a circle
        keeps a whole batch in memory until Python's collector finds it.
        """
        is_of_image = isinstance(error, DecodeError | MissingKeyError | FileNotFoundError)
        if self._skips is not None and is_of_image and not hasattr(error, "is_of_transform"):
            self._skips.add(key, str(error))
            return True
        if not isinstance(error, DecodeError):  # which names the key
            error.add_note(f"while loading {key}")
        return False


class _ThreadDecoder(threading.local):
    """A decoder for each thread."""

    def __init__(self) -> None:
        self.decoder = open_decoder()

    def __reduce__(self) -> tuple:  # of a copy of the loader, such as for another process
        return _ThreadDecoder, ()


class _EncodedImage:
    """An encoded image of known size: its bytes, or all its pixels if only a general decoder can read it."""

    def __init__(self, key: str, data: bytes, decoder: Any):
        self.key, self._data, self._decoder = key, data, decoder
        self._whole: np.ndarray | None = None
        self._head = head_of(data)
        self.size = self._size_of_plain_jpeg() or self._decode_whole().shape[:2]

    def _size_of_plain_jpeg(self) -> tuple[int, int] | None:
        """Height and width of a JPEG that can be decoded in parts: complete, upright beyond doubt, not too large."""
        head = self._head
        is_upright = jpeg_orientation(self._data) == 1 if head is None or head.may_be_turned else True
        if not is_upright or not self._data.endswith(END_OF_IMAGE):
            return None
        header = JpegHeader(head.height, head.width) if head else self._decoder.header(self._data)
        return header if header and header.height * header.width <= max_pixels() else None

    def _decode_whole(self) -> np.ndarray:
        if self._whole is None:
            self._whole = decode(self._data, key=self.key).permute(1, 2, 0).numpy()
        return self._whole

    def decode(self, box: Box, scale: int) -> Part:
        """The pixels of a box, perhaps at a part of their size."""
        if self._whole is None:
            tiling = self._tiling_worth_a_cut(box)
            data, place = cut(self._data, tiling, box, scale) if tiling else (self._data, box)
            if part := self._decoder.decode(data, place, scale):
                return part
        return Part(self._decode_whole(), box)

    def decode_from_corner(self, box: Box, scale: int, *, to_end: bool) -> Part:
        """The same, in pixels that begin at the photo's corner; `to_end`: look for damage below the box, too."""
        if self._whole is None:
            top, left, height, width = box
            to_row = self.size[0] if to_end else top + height
            if part := self._decoder.decode(self._data, (top, left, to_row - top, width), scale, from_corner=True):
                return Part(part.pixels, (*part.place[:2], height / scale, part.place[3]))
        return Part(self._decode_whole(), box)

    def _tiling_worth_a_cut(self, box: Box) -> Tiling | None:
        """The pieces of a tiled JPEG, if to cut the box out of its bytes spares more than it takes."""
        if self._head is None or not self._head.restart_interval:
            return None
        top, _, height, width = box
        # What a decoder then need not read: the codes beside the box, and all above.
        spared_bytes = len(self._data) * (top + height - height * width / self.size[1]) / self.size[0]
        return tiling_of(self._data, self._head) if spared_bytes > _LEAST_SPARED else None
