"""Files that are written whole or not at all."""

import os
import re

import pytest

from labkit.measure.files import write_whole, written_whole


def test_a_file_is_written_whole(tmp_path):
    target = tmp_path / "new" / "folder" / "a.bin"
    write_whole(target, b"one")
    write_whole(target, b"two")
    assert target.read_bytes() == b"two"
    assert list(target.parent.iterdir()) == [target]


def test_nothing_is_left_of_a_file_that_failed(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"before")

    def failing() -> None:
        with written_whole(target) as partial_path:
            partial_path.write_bytes(b"half")
            assert (target.read_bytes(), partial_path.parent) == (b"before", tmp_path)
            assert re.fullmatch(rf"\.{os.getpid()}-[0-9a-f]{{8}}\.partial", partial_path.name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_name_as_long_as_names_get(tmp_path):
    write_whole(tmp_path / ("n" * 255), b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


def test_writers_at_once_do_not_meet(tmp_path):
    target = tmp_path / "a.bin"
    with written_whole(target) as one, written_whole(target) as two:
        one.write_bytes(b"1" * 1000)
        two.write_bytes(b"2" * 1000)
        assert one != two
    assert target.read_bytes() == b"1" * 1000  # the outer block ends last
    assert list(tmp_path.iterdir()) == [target]
