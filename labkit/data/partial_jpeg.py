"""Part of a JPEG: only the rows and columns that a crop needs, at full size or at 1/2, 1/4 or 1/8 of it.

A crop of a photo is smaller than the photo, and a decoder that knows the crop saves the inverse DCT and the color
conversion of everything beside it, and all work on what lies below it. libjpeg-turbo can do that since version 3;
of the Python packages that carry libjpeg-turbo none offers it, so the library's own C API is called here.
Where no libjpeg-turbo 3 is found, `WholeDecoder` does the same by decoding everything with simplejpeg.
"""

import ctypes
import ctypes.util
import os
import sys
import weakref
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import numpy as np

LIBRARY_VARIABLE = "LABKIT_LIBTURBOJPEG"
REMEDY = 'python -m pip install "labkit[fast]", or name a libturbojpeg of version 3 in ' + LIBRARY_VARIABLE

# Of the other scales (7/8, 3/4, ...) libjpeg-turbo has no SIMD code: they cost more than full size.
SCALES = (1, 2, 4, 8)

_SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLORSPACE = 4, 5, 6, 7, 8  # TJPARAM
_LOSSLESS = 15
_DECOMPRESS, _RGB = 1, 0  # TJINIT, TJPF
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)  # of a minimum coded unit in pixels, by TJSAMP
_SMOOTHED = 2  # columns and rows beside a pixel that its chroma is interpolated from


class Frame(NamedTuple):
    """What a JPEG's header says. Pixels."""

    height: int
    width: int


class Part(NamedTuple):
    """Decoded pixels and where in them the crop lies.

    pixels: uint8 (height, width, 3) RGB, valid until the decoder is used again.
    box: top, left, height, width of the crop in these pixels; whole numbers at full size.
    """

    pixels: np.ndarray
    box: tuple[float, float, float, float]


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "xywh"]


class _Fraction(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


class RegionDecoder:
    """Decodes parts of 8-bit RGB and gray JPEGs into memory of its own. One a thread; the GIL is released meanwhile.

    Pixels are those of a decoding of the whole image, bit for bit, at any scale.

    Raises:
        ImportError: there is no libjpeg-turbo 3; names the remedy.

    Source: ITU-T T.81 via libjpeg-turbo (tj3SetCroppingRegion). Taught in: notebooks/11_resize_once.ipynb
    """

    def __init__(self):
        self._library = load_library()
        self._memory = np.empty(0, np.uint8)
        self._renew()

    def _renew(self) -> None:
        """Start with a new handle: after an error libjpeg-turbo keeps tables that spoil the images to come."""
        self._handle = self._library.tj3Init(_DECOMPRESS)
        if not self._handle:
            raise MemoryError("libjpeg-turbo gave no decoder")
        self._freed = weakref.finalize(self, self._library.tj3Destroy, self._handle)

    def _failed(self) -> None:
        self._freed()
        self._renew()

    def header(self, data: bytes) -> Frame | None:
        """Size of the image, or None where it is not a JPEG that this decoder can take."""
        handle, get = self._handle, self._library.tj3Get
        if self._library.tj3DecompressHeader(handle, data, len(data)) != 0:
            return self._failed()
        known = 0 <= get(handle, _SUBSAMPLING) < len(_BLOCK_WIDTHS) and 0 <= get(handle, _COLORSPACE) <= 2
        if not known or get(handle, _PRECISION) != 8 or get(handle, _LOSSLESS) == 1:
            return None
        return Frame(get(handle, _HEIGHT), get(handle, _WIDTH))

    def decode(self, data: bytes, crop: tuple[int, int, int, int], scale: int = 1) -> Part | None:
        """Decode what a crop needs.

        Args:
            data: A JPEG that `header` accepted.
            crop: Top, left, height and width in pixels of the full image.
            scale: One of `SCALES`: 2 for an image of half the height and half the width.

        Returns:
            The pixels, or None where the data are damaged.
        """
        library, handle = self._library, self._handle
        frame = self.header(data)
        if frame is None:
            return None
        block = -(-_BLOCK_WIDTHS[library.tj3Get(handle, _SUBSAMPLING)] // scale)
        top, height = _widened(crop[0], crop[2], frame.height, scale)
        left, width = _widened(crop[1], crop[3], frame.width, scale)
        width += left % block
        left -= left % block
        pixels = self._pixels(height, width)
        failed = (
            library.tj3SetScalingFactor(handle, _Fraction(1, scale))
            or library.tj3SetCroppingRegion(handle, _Region(left, top, width, height))
            or library.tj3Decompress8(handle, data, len(data), pixels.ctypes.data, 0, _RGB)
        )
        if failed:
            return self._failed()
        return Part(pixels, (crop[0] / scale - top, crop[1] / scale - left, crop[2] / scale, crop[3] / scale))

    def _pixels(self, height: int, width: int) -> np.ndarray:
        size = height * width * 3
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].reshape(height, width, 3)


class WholeDecoder:
    """As `RegionDecoder`, by decoding the whole image with simplejpeg."""

    def __init__(self):
        import simplejpeg

        self._simplejpeg = simplejpeg

    def header(self, data: bytes) -> Frame | None:
        """Size of the image, or None where it is not a JPEG that this decoder can take."""
        try:
            height, width, colorspace, _ = self._simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError):  # KeyError: a subsampling that it has no name for, such as 4:4:1
            return None
        return Frame(height, width) if colorspace in ("RGB", "YCbCr", "Gray") else None

    def decode(self, data: bytes, crop: tuple[int, int, int, int], scale: int = 1) -> Part | None:
        """Decode all of it; arguments and result as of `RegionDecoder.decode`."""
        frame = self.header(data)
        if frame is None:
            return None
        height, width = (-(-side // scale) if scale > 1 else 0 for side in frame)
        try:
            pixels = self._simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return None
        return Part(pixels, tuple(side / scale for side in crop))


def open_decoder() -> RegionDecoder | WholeDecoder:
    """The best that there is here."""
    try:
        return RegionDecoder()
    except ImportError:
        return WholeDecoder()


@cache
def load_library() -> ctypes.CDLL:
    """libturbojpeg of version 3: as named by the environment, installed by pip, or the system's own."""
    for place in _places():
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        if hasattr(library, "tj3SetCroppingRegion"):
            return _declared(library)
    raise ImportError(f"no libturbojpeg of version 3 was found: {REMEDY}")


def _places() -> list[str]:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return [named]
    try:
        packaged = [str(file.locate()) for file in files("turbojpeg") or () if "libturbojpeg" in file.name]
    except PackageNotFoundError:
        packaged = []
    beside_python = [str(path) for path in sorted(Path(sys.prefix, "lib").glob("libturbojpeg.*"))]  # as conda has it
    found = ctypes.util.find_library("turbojpeg")
    return [*packaged, *beside_python, *([found] if found else [])]


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """With types: ctypes would cut pointers to 32 bits."""
    handle, number, data = ctypes.c_void_p, ctypes.c_int, (ctypes.c_char_p, ctypes.c_size_t)
    library.tj3Init.restype = handle
    library.tj3Destroy.restype = None
    arguments = {
        "tj3Init": [number],
        "tj3Destroy": [handle],
        "tj3Get": [handle, number],
        "tj3DecompressHeader": [handle, *data],
        "tj3SetScalingFactor": [handle, _Fraction],
        "tj3SetCroppingRegion": [handle, _Region],
        "tj3Decompress8": [handle, *data, ctypes.c_void_p, number, number],
    }
    # Letting go of Python's lock for less than microseconds would cost more than it gives: other threads wake for it.
    holding = ctypes.PyDLL(library._name, handle=library._handle)
    for name in ("tj3Get", "tj3DecompressHeader", "tj3SetScalingFactor", "tj3SetCroppingRegion"):
        setattr(library, name, getattr(holding, name))
    for name, types in arguments.items():
        getattr(library, name).argtypes = types
    return library


def _widened(start: int, length: int, limit: int, scale: int) -> tuple[int, int]:
    """First scaled pixel and number of scaled pixels that hold a crop and what its edge is interpolated from."""
    first = max(0, start // scale - _SMOOTHED)
    end = min(-(-limit // scale), -(-(start + length) // scale) + _SMOOTHED)
    return first, end - first
