"""Which way is up: the EXIF orientation of an image, as Pillow finds it, from as few bytes as settle it.

It is what Pillow's `ImageOps.exif_transpose` finds: in EXIF, or else in XMP, in front of the pixels or, in a PNG,
behind them. Metadata that Pillow cannot read state nothing. For the usual JPEG the answer follows from a few bytes,
without Pillow; where these do not settle it, Pillow decides. Decoders and `sizes` ask the same functions.

Source: Exif 2.32 (CIPA DC-008), section 4.6.4; TIFF 6.0, section 2; PNG, third edition, section 11.3.
"""

import io
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from labkit.data.partial_jpeg import APP1, APPLICATION_MARKERS, segments_before_scan, without_segments

if TYPE_CHECKING:  # stores know formats by their suffixes, and do without Pillow
    from PIL import Image

_ORIENTATION = 0x0112  # the tag
EXIF_PREFIX = b"Exif\0\0"
_UNREAD_MARKERS = APPLICATION_MARKERS - {0xE0, 0xEE}  # APP0 and APP14 tell a decoder the color space
PNG_TEXT_METADATA = (b"exif\0", b"Raw profile type exif", b"XML:com.adobe.xmp")  # keywords that Pillow reads
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_CHUNK_START = 32  # bytes: length, kind, and as much of the body as holds the longest keyword
TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_SHORT = 3
_VALUE_BYTES = {1: 1, 2: 1, _SHORT: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}  # by TIFF type


def orientation_of(data: bytes, image: "Image.Image") -> int:
    """The EXIF orientation, 1 to 8, of what is still to be turned.

    Args:
        data: The encoded bytes.
        image: The same, opened by Pillow. Its pixels are decoded if only that shows what a PNG has behind them.
    """
    is_late = image.format == "PNG" and has_late_metadata(lambda n, at: data[at : at + n], len(data))
    return pillow_orientation(image, load=is_late)


def pillow_orientation(image: "Image.Image", *, load: bool) -> int:
    """The orientation as Pillow finds it, 1 to 8; 1 where it finds none, or only damaged metadata.

    Args:
        image: An opened image.
        load: Decode the pixels first, for the metadata behind them.
    """
    from PIL import Image

    try:
        if load:
            image.load()
        # Of the base class: a PNG's own would decode the pixels whenever no EXIF stands in front of them.
        orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # Pillow's readers of metadata raise errors of any kind
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def open_without_metadata(data: bytes) -> "Image.Image | None":
    """A JPEG or PNG that Pillow does not open for what stands in its metadata, opened without them, or None.

    The `info` of a JPEG has EXIF with the orientation that the metadata state, and nothing else of them.
    """
    from PIL import Image, UnidentifiedImageError

    bare = without_segments(data, _UNREAD_MARKERS) or _without_png_metadata(data)
    if bare is None:
        return None
    try:
        image = Image.open(io.BytesIO(bare), formats=("JPEG", "PNG"))
    except (UnidentifiedImageError, ValueError, SyntaxError):
        return None
    if image.format != "PNG":
        exif = Image.Exif()
        exif[_ORIENTATION] = jpeg_orientation(data) or 1
        image.info["exif"] = exif.tobytes()
    return image


def _without_png_metadata(data: bytes) -> bytes | None:
    """A PNG with only the chunks that its pixels need; None if it is not a PNG, whose first chunk is its header."""
    if data[12:16] != b"IHDR":
        return None
    kept, offset = [data[:8]], 8
    while offset + 12 <= len(data):
        end = offset + 12 + int.from_bytes(data[offset : offset + 4], "big")
        kind = data[offset + 4 : offset + 8]
        if kind[:1].isupper() or kind == b"tRNS":  # the case of the first letter says whether a chunk is needed
            kept.append(data[offset:end])
        offset = end
    return b"".join(kept)


def jpeg_orientation(data: bytes) -> int | None:
    """The orientation of a whole JPEG, 1 to 8, without Pillow; None if Pillow must decide."""
    segments = segments_before_scan(data)
    blocks = [(data[start:end], end - start) for marker, start, end in segments if marker == APP1]
    return stated_orientation(blocks) if segments else None


def stated_orientation(blocks: Iterable[tuple[bytes, int]]) -> int | None:
    """What the APP1 segments of a JPEG state, 1 to 8: 1 if there are none; None if Pillow must decide.

    Args:
        blocks: Of each segment in front of the first scan, the first bytes or all, and the number of all.
    """
    n_exif, orientation, may_be_in_xmp = 0, 0, False
    for block, n_bytes in blocks:
        if block.startswith(EXIF_PREFIX):
            n_exif += 1
            found = _tiff_orientation(block[len(EXIF_PREFIX) :], n_bytes - len(EXIF_PREFIX))
            if found is None or n_exif > 1:  # Pillow joins several
                return None
            orientation = found
        else:
            may_be_in_xmp |= len(block) < n_bytes or b"tiff:Orientation" in block
    return None if may_be_in_xmp and not orientation else orientation or 1


def _tiff_orientation(tiff: bytes, n_bytes: int) -> int | None:
    """Orientation in the first directory of a TIFF block, 1 to 8; 0 if it has none, None if Pillow must decide.

    Args:
        tiff: The first bytes of the block, or all.
        n_bytes: The number of all.
    """
    order = TIFF_ORDERS.get(tiff[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, start)
        entries = tiff[start + 2 : start + 2 + 12 * count]
        for tag, kind, n_values, value in struct.iter_unpack(f"{order}HHI4s", entries):
            if tag == _ORIENTATION:
                (number,) = struct.unpack_from(f"{order}H", value)
                return None if (kind, n_values) != (_SHORT, 1) else number if 1 <= number <= 8 else 1
            size = _VALUE_BYTES.get(kind, n_bytes) * n_values
            if size > 4 and struct.unpack(f"{order}I", value)[0] + size > n_bytes:  # Pillow reads no further
                return None
    except struct.error:  # the directory is outside the bytes at hand
        return None
    return 0 if len(entries) == 12 * count else None


def has_late_metadata(read: Callable[[int, int], bytes], n_bytes: int, offset: int = 8) -> bool:
    """Whether a PNG may have EXIF or XMP behind its pixels, as many programs write them.

    Args:
        read: `read(n, offset)` gives up to n bytes of the file.
        n_bytes: Of the file.
        offset: Where a chunk begins, in front of the pixels or at their first.
    """
    is_behind = False
    while len(start := read(_CHUNK_START, offset)) >= 12:
        length, kind = int.from_bytes(start[:4], "big"), start[4:8]
        if kind == b"IEND":
            return False
        if is_behind and _is_metadata(kind, start[8:]):
            return True
        if kind == b"IDAT" and not is_behind:
            is_behind = True
            # Nearly all writers give all chunks of pixels but the last the same length: go to where the last but one
            # is, if nothing stands behind them.
            last = offset + ((n_bytes - offset - 12) // (length + 12) - 1) * (length + 12)
            offset = last if last > offset and read(8, last) == start[:8] else offset
        offset += length + 12
    return False


def _is_metadata(kind: bytes, body: bytes) -> bool:
    return kind == b"eXIf" or (kind in _PNG_TEXTS and body.startswith(PNG_TEXT_METADATA))
