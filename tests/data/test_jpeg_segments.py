"""Walking a JPEG's segments; `test_headers.py` and `test_decoders.py` hold the walker to Pillow on damaged files."""

import pytest

from labkit.course.oracles import exif_of, picture
from labkit.data.partial_jpeg import (
    APP1,
    START_OF_SCAN,
    Segment,
    iter_segments,
    segment_at,
    segments_before_scan,
    without_segments,
)
from tests.image_files import encoded


@pytest.mark.parametrize("fill", [b"", b"\xff", b"\xff" * 5])
def test_segments_up_to_the_first_scan(fill):
    data = encoded(picture(), exif=exif_of(6))
    padded = data[:2] + fill + data[2:]
    segments = list(iter_segments(padded))
    assert [segment.marker for segment in segments if segment.marker in (APP1, START_OF_SCAN)] == [APP1, START_OF_SCAN]
    assert segments[-1].marker == START_OF_SCAN
    assert segments_before_scan(padded) == segments


def test_without_the_segments_of_a_marker():
    data, plain = encoded(picture(), exif=exif_of(6)), encoded(picture())
    assert without_segments(data, {APP1}) == without_segments(plain, {APP1}) == plain
    assert without_segments(plain[:20] + b"stray" + plain[20:], {APP1}) is None


# The last three: a length below 2, and markers that have none.
@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\xff\xff\xff", b"\xff\xe1\x00", b"abcdef", b"\xff\xe1\0\1", b"\xff\x01\0\4", b"\xff\xd0\0\4"],
)
def test_where_no_segment_begins(data):
    assert segment_at(data, 0) is None
    assert list(iter_segments(b"\xff\xd8" + data)) == []
    assert segments_before_scan(b"\xff\xd8" + data) == []


def test_offsets_are_those_of_the_body():
    assert segment_at(b"..\xff\xfe\x00\x05abc", 2) == Segment(0xFE, 6, 9)
