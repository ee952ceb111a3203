"""The segments of a JPEG that stand before its compressed data: markers, each with a length.

Source: ITU-T T.81, annex B.
"""

from collections.abc import Iterator
from typing import NamedTuple

APP1, COMMENT, START_OF_SCAN = 0xE1, 0xFE, 0xDA
APPLICATION_MARKERS = frozenset([*range(0xE0, 0xF0), COMMENT])  # APP0 to APP15, and comments
END_OF_IMAGE = b"\xff\xd9"
EXIF_PREFIX = b"Exif\0\0"


class Segment(NamedTuple):
    """One segment: its marker's second byte, and the offsets of the body's start and end."""

    marker: int
    start: int
    end: int


def segment_at(data: bytes, offset: int) -> Segment | None:
    """The segment at `offset`, after any fill bytes; None where `data` ends or no marker stands."""
    while data.startswith(b"\xff\xff", offset):
        offset += 1
    if len(data) < offset + 4 or data[offset] != 0xFF:
        return None
    return Segment(data[offset + 1], offset + 4, offset + 2 + int.from_bytes(data[offset + 2 : offset + 4], "big"))


def iter_segments(data: bytes) -> Iterator[Segment]:
    """The segments of a JPEG, up to its first scan header."""
    segment = segment_at(data, 2)
    while segment:
        yield segment
        segment = None if segment.marker == START_OF_SCAN else segment_at(data, segment.end)


def has_exif(data: bytes) -> bool:
    """Whether a segment before a JPEG's first scan holds EXIF."""
    return any(
        segment.marker == APP1 and data.startswith(EXIF_PREFIX, segment.start) for segment in iter_segments(data)
    )
