"""An image's width, height and EXIF orientation from its first bytes, without decoding it.

libjpeg-turbo (simplejpeg) reads a JPEG's frame header; PNG and still WebP state their size at a fixed offset. Any file
that is not flawless there goes to Pillow, and so does every other format: what Pillow says, or refuses, is final, but
for a JPEG that it refuses for its metadata alone.
"""

import io
import math
import os

from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base

from labkit.data.decode import IF_TRUSTED
from labkit.data.image_formats import JPEG, PNG, PREFIX_BYTES, Header, format_of, has_late_metadata_in
from labkit.data.orientation import open_without_metadata, pillow_orientation

MAX_SIDE = 999_999_999  # pixels; a larger number is not a size


def read_header(path: str) -> Header:
    """Size and orientation of one image file, as Pillow states them. What Pillow refuses has an `error` and no size."""
    try:
        return _fast_header(path) or _read_with_pillow(path)
    except UnidentifiedImageError:
        is_empty = os.path.getsize(path) == 0
        return Header(error="the file is empty" if is_empty else "no image format that this Pillow reads")
    except Image.DecompressionBombError as error:
        return Header(error=f"{str(error).rstrip('.')}: {IF_TRUSTED}")
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise errors of any kind
        return Header(error=getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")


def _fast_header(path: str) -> Header | None:
    """The header of a plain JPEG, PNG or WebP; None if Pillow must decide."""
    file = os.open(path, os.O_RDONLY)  # half the time of `open`
    try:
        data = os.read(file, PREFIX_BYTES)
        found = format_of(data)
        header = found and found.read_header(data, file)
    finally:
        os.close(file)
    limit = Image.MAX_IMAGE_PIXELS or math.inf  # above it, Pillow warns of a decompression bomb or refuses the file
    return header if header and 0 < (header.width or 0) * (header.height or 0) <= limit else None


class _BoundedFile(io.BufferedReader):
    """A file whose reads never ask for more memory than the file has bytes, whatever length its header states."""

    def __init__(self, path: str):
        super().__init__(io.FileIO(path))
        self._n_bytes = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, self._n_bytes))


def _read_with_pillow(path: str) -> Header:
    with _BoundedFile(path) as file, _open(file) as image:
        is_late = image.format in PNG.names_in_pillow and has_late_metadata_in(file.fileno())
        orientation = pillow_orientation(image, load=is_late)
        stored = getattr(image, "tag_v2", {})  # of a TIFF, whose `size` is that of the turned image
        width, height = map(stored.get, (Base.ImageWidth, Base.ImageLength), image.size)
        return Header(width, height, orientation)


def _open(file: _BoundedFile) -> Image.Image:
    try:
        return Image.open(file)
    except (UnidentifiedImageError, ValueError, SyntaxError):
        file.seek(0)
        if format_of(file.peek(PREFIX_BYTES)) in (JPEG, PNG) and (image := open_without_metadata(file.read())):
            return image
        raise
