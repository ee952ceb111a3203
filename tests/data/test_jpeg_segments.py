"""Walking a JPEG's segments; `test_headers.py` and `test_decoders.py` hold the walker to Pillow on damaged files."""

import pytest

from labkit.data.jpeg_segments import APP1, START_OF_SCAN, Segment, has_exif, iter_segments, segment_at
from labkit.teach.conformance import exif_of, picture
from tests.image_files import encoded


@pytest.mark.parametrize("fill", [b"", b"\xff", b"\xff" * 5])
def test_segments_up_to_the_first_scan(fill):
    data = encoded(picture(), exif=exif_of(6))
    padded = data[:2] + fill + data[2:]
    segments = list(iter_segments(padded))
    assert [segment.marker for segment in segments if segment.marker in (APP1, START_OF_SCAN)] == [APP1, START_OF_SCAN]
    assert segments[-1].marker == START_OF_SCAN
    assert has_exif(padded)
    assert not has_exif(encoded(picture()))


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xff\xff", b"\xff\xe1\x00", b"abcdef"])
def test_where_no_segment_begins(data):
    assert segment_at(data, 0) is None
    assert list(iter_segments(b"\xff\xd8" + data)) == []
    assert not has_exif(b"\xff\xd8" + data)


def test_offsets_are_those_of_the_body():
    assert segment_at(b"..\xff\xfe\x00\x05abc", 2) == Segment(0xFE, 6, 9)
