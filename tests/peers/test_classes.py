"""Who takes part in which class."""

from dataclasses import replace

import pytest

from labkit.peers.adapters.own import LIMITS, OWN
from labkit.peers.peer import CLASSES, FLOAT32, RAW_PIXELS, chosen_classes, class_of_profile
from labkit.peers.registry import PEERS


def members(name):
    return {peer.name for peer in (*PEERS.values(), *OWN, *LIMITS) if CLASSES[name].admits(peer)}


def test_raw_pixels_and_jpegs_are_never_in_one_class():
    for name, in_class in CLASSES.items():
        sources = {peer.source == RAW_PIXELS for peer in PEERS.values() if peer.name in members(name)}
        assert sources == {name.startswith("raw")}, in_class


def test_who_gives_floats_only_is_among_the_floats():
    assert "turboloader raw" in members("raw-float32") - members("raw-uint8")
    assert {"FFCV raw", "labkit PixelStore"} <= members("raw-float32") & members("raw-uint8")


def test_each_class_has_its_own_limit():
    assert {"decode limit", "entropy limit"} <= members("jpeg-uint8") & members("jpeg-float32") & members(
        "camera-uint8"
    )
    assert "memcpy limit" in members("raw-uint8") - members("raw-float32")
    assert "write limit" in members("raw-float32") - members("raw-uint8")


def test_a_profile_is_all_that_gives_bytes():
    everyone = class_of_profile("camera")
    assert everyone.profile == "camera"
    for peer in PEERS.values():
        assert everyone.admits(peer) == (peer.dtypes != (FLOAT32,))
        assert not everyone.admits(replace(peer, dtypes=(FLOAT32,)))


def test_names_on_the_command_line():
    assert chosen_classes("") == [None]
    assert chosen_classes("all") == list(CLASSES)
    assert chosen_classes("raw-uint8, jpeg-uint8") == ["raw-uint8", "jpeg-uint8"]
    with pytest.raises(ValueError, match=r"jpeg-uint8.*got 'raw-uint9'"):
        chosen_classes("raw-uint9")
