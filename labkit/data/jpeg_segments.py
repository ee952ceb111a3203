"""The segments of a JPEG that stand before its compressed data: markers, each with a length.

Source: ITU-T T.81, annex B.
"""

import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

APP1, COMMENT, START_OF_SCAN = 0xE1, 0xFE, 0xDA
APPLICATION_MARKERS = frozenset([*range(0xE0, 0xF0), COMMENT])  # APP0 to APP15, and comments
END_OF_IMAGE = b"\xff\xd9"

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15
_SCALABLE_FRAMES = frozenset(
    [0xC0, 0xC1, 0xC2, 0xC9, 0xCA]
)  # DCT: baseline, extended, progressive; Huffman, arithmetic
# Markers with a length that may stand before a scan. Others have none, or nobody reads a file that has them.
_WITH_LENGTH = _FRAMES | APPLICATION_MARKERS | {0xC4, 0xCC, *range(0xDA, 0xE0)}
_HEAD = struct.Struct(">BBH")


class Segment(NamedTuple):
    """One segment: its marker's second byte, and the offsets of the body's start and end."""

    marker: int
    start: int
    end: int


def segment_at(data: bytes, offset: int) -> Segment | None:
    """The segment at `offset`, after any fill bytes; None where `data` ends or no marker with a length stands."""
    while len(data) >= offset + _HEAD.size:
        first, marker, length = _HEAD.unpack_from(data, offset)
        if first != 0xFF:
            return None
        if marker != 0xFF:
            is_segment = marker in _WITH_LENGTH and length >= 2
            return Segment(marker, offset + 4, offset + 2 + length) if is_segment else None
        offset += 1
    return None


def iter_segments(data: bytes) -> Iterator[Segment]:
    """The segments of a JPEG, up to its first scan header or to where no segment follows the one before it."""
    segment = segment_at(data, 2)
    while segment:
        yield segment
        segment = None if segment.marker == START_OF_SCAN else segment_at(data, segment.end)


def segments_before_scan(data: bytes) -> list[Segment]:
    """All segments up to the first scan header, and that; none if something else stands between them."""
    segments = list(iter_segments(data))
    return segments if segments and segments[-1].marker == START_OF_SCAN else []


def without_segments(data: bytes, markers: Container[int]) -> bytes | None:
    """A JPEG without the segments of these markers; None if something else stands between its segments."""
    segments = segments_before_scan(data)
    unwanted = [segment for segment in segments if segment.marker in markers]
    starts = [0, *(segment.end for segment in unwanted)]
    ends = [*(segment.start - 4 for segment in unwanted), len(data)]
    return b"".join(data[start:end] for start, end in zip(starts, ends, strict=True)) if segments else None


def is_scalable(data: bytes) -> bool:
    """Whether libjpeg-turbo can decode these bytes at a reduced size: a JPEG with a DCT frame of 8 bits a sample.

    A lossless frame has no coefficients to leave out: libjpeg-turbo before 3.1.4 scales one all the same and writes
    behind its buffer, which ends the process.

    Source: https://github.com/libjpeg-turbo/libjpeg-turbo/releases/tag/3.1.4
    """
    frame = next((segment for segment in iter_segments(data) if segment.marker in _FRAMES), None)
    return frame is not None and frame.marker in _SCALABLE_FRAMES and data[frame.start : frame.start + 1] == b"\x08"
