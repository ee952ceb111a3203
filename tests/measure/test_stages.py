"""StageClock: where the time of a hand-written loop goes."""

import itertools

import pytest

import labkit as lk


def test_the_seconds_of_a_stage_add_up_also_after_an_error():
    watch = lk.StageClock(clock=itertools.accumulate([0, 2, 10, 3, 100, 4]).__next__)
    with watch("decode"):
        pass
    with watch("resize"):
        pass
    with pytest.raises(ZeroDivisionError), watch("decode"):
        raise ZeroDivisionError
    assert watch.seconds == {"decode": 6, "resize": 3}
    assert watch.frame("pil").to_dict("list") == {
        "variant": ["pil", "pil"], "stage": ["decode", "resize"], "seconds": [6, 3]
    }  # fmt: skip


def test_a_frame_of_nothing_has_its_columns():
    assert list(lk.StageClock().frame("pil")) == ["variant", "stage", "seconds"]
