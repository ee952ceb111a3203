"""An image's width, height and EXIF orientation from its first bytes, without decoding it.

What Pillow says, or refuses, is final, but for a JPEG or PNG that it refuses for its metadata alone.
"""

import io
import os
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base

from labkit.data.decode import IF_TRUSTED
from labkit.data.image_formats import JPEG, OTHER_PLUGINS, PLUGINS, PNG, format_of
from labkit.data.orientation import has_late_metadata, open_without_metadata, pillow_orientation

MAX_SIDE = 999_999_999  # pixels; a larger number is not a size


class Header(NamedTuple):
    """What a file's header states.

    width, height: Pixels as stored, not rotated. orientation: As `lk.decode` turns the image, 1 to 8; None where there
    is no size. error: Why there is none.
    """

    width: int | None = None
    height: int | None = None
    orientation: int | None = None
    error: str = ""


def read_header(path: str) -> Header:
    """Size and orientation of one image file, as Pillow states them. What Pillow refuses has an `error` and no size."""
    try:
        return _read_with_pillow(path)
    except UnidentifiedImageError:
        is_empty = os.path.getsize(path) == 0
        return Header(error="the file is empty" if is_empty else "no image format that this Pillow reads")
    except Image.DecompressionBombError as error:
        return Header(error=f"{str(error).rstrip('.')}: {IF_TRUSTED}")
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise errors of any kind
        return Header(error=getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")


def _read_with_pillow(path: str) -> Header:
    with open(path, "rb") as file, _open(file) as image:
        is_late = image.format in PNG.names_in_pillow and has_late_metadata(
            lambda n, at: os.pread(file.fileno(), n, at)
        )
        orientation = pillow_orientation(image, load=is_late)
        stored = getattr(image, "tag_v2", {})  # of a TIFF, whose `size` is that of the turned image
        width, height = map(stored.get, (Base.ImageWidth, Base.ImageLength), image.size)
        return Header(width, height, orientation)


def _open(file: io.BufferedReader) -> Image.Image:
    try:
        return Image.open(file, formats=_plugins())
    except (UnidentifiedImageError, ValueError, SyntaxError):
        file.seek(0)
        if format_of(file.peek()) in (JPEG, PNG) and (image := open_without_metadata(file.read())):
            return image
        raise


def _plugins() -> list[str]:
    """Names of those that are there: some come with other packages, such as pillow_jxl."""
    Image.init()
    return [name for name in (*PLUGINS, *OTHER_PLUGINS) if name in Image.OPEN]
