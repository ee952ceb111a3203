"""Strings: many in two arrays that workers share, the words for a wrong argument, and a figure as text."""

import base64
import copy
import io
import math
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from matplotlib import pyplot
from PIL import Image

from labkit import PackedStrings
from labkit.util.arguments import require_choice, require_fraction, require_int, require_positive
from labkit.util.pictures import png_base64

BROKEN = os.fsdecode(b"caf\xe9/\xff.jpg")  # a file name that is no UTF-8
STRINGS = ["a/1.png", "", "ä/日本/🙂.jpg", "with\nbreak\tand\x00nul", "a/1.png", BROKEN]


# File names of any bytes, and other text.
names = st.binary(max_size=12).map(os.fsdecode) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
places = st.none() | st.integers(-8, 8)


@settings(deadline=None)
@given(st.lists(names, max_size=8), st.builds(slice, places, places, places.filter(lambda step: step != 0)))
@example(STRINGS * 700, slice(-2, 99))
@example(["x" * 100_000, "y"], slice(None))
def test_they_are_their_list_also_copied_pickled_and_as_arrays(strings, part):
    packed, encoded, count = PackedStrings(iter(strings)), [os.fsencode(string) for string in strings], len(strings)
    assert packed == strings == list(packed)
    assert [packed[index] for index in np.arange(-count, count)] == strings * 2
    assert (len(packed), packed[part], list(reversed(packed))) == (count, strings[part], strings[::-1])
    for index in (count, -count - 1, 10**12):
        with pytest.raises(IndexError, match=f"index {index} .* {count} strings"):
            packed[index]
    block, offsets = packed.arrays()
    assert (block.dtype, offsets.dtype) == (np.uint8, np.int64)
    assert block.tobytes() == b"".join(encoded)
    assert offsets.tolist() == [0, *np.cumsum([*map(len, encoded)])]
    copies = copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))
    assert all(copied == strings for copied in (*copies, PackedStrings.from_arrays(block, offsets)))


@pytest.mark.parametrize("other", [STRINGS[:-1], [*STRINGS[:-1], "other"], None], ids=str)
def test_other_things_are_not_equal(other):
    assert PackedStrings(STRINGS) != other


def test_they_are_searched_shown_and_not_hashed():
    packed = PackedStrings(STRINGS)
    assert (packed.index("ä/日本/🙂.jpg"), packed.count("a/1.png")) == (2, 2)
    assert BROKEN in packed
    assert "b" not in packed
    with pytest.raises(TypeError):
        hash(packed)
    assert repr(PackedStrings([])) == "PackedStrings(0 strings, 0.0 MB)"
    assert repr(PackedStrings(["x" * 4_000_000, *[""] * 125_000])) == "PackedStrings(125001 strings, 5.0 MB)"


def test_a_pickle_is_as_small_as_the_strings():
    """spawn sends it to every worker."""
    strings = [f"folder/{number:06}.jpg" for number in range(10_000)]
    assert len(pickle.dumps(PackedStrings(strings))) < sum(map(len, strings)) + 8 * len(strings) + 1000


BLOCK, OFFSETS = np.frombuffer(b"abcdef", np.uint8), np.array([0, 2, 6])


@pytest.mark.parametrize(
    ("block", "offsets"),
    [
        (BLOCK, OFFSETS[:-1]), (BLOCK, OFFSETS[1:]), (BLOCK, OFFSETS[:0]), (BLOCK, np.array([0, 7, 6])),
        (BLOCK, OFFSETS.astype("i4")), (BLOCK.astype(np.int8), OFFSETS), (BLOCK, OFFSETS[None]),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_together_are_refused(block, offsets):
    with pytest.raises(ValueError, match=r"^these arrays are not packed strings$"):
        PackedStrings.from_arrays(block, offsets)


def test_made_from_another_one_shares_its_memory():
    one = PackedStrings(STRINGS)
    other = PackedStrings(one)
    assert all(np.shares_memory(*pair) for pair in zip(one.arrays(), other.arrays(), strict=True))
    assert len(pickle.dumps([one, other])) < 1.5 * len(pickle.dumps([one]))


def test_no_object_for_each_string():
    """Names by the million are packed, and gone through, in little more than their own bytes."""
    count, length = 30_000, 40
    tracemalloc.start()
    strings = PackedStrings(f"{number:0{length}d}" for number in range(count))
    _, while_packing = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    assert sum(map(len, strings)) == count * length
    _, while_reading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert while_packing < 2 * count * (length + 8)  # objects would take `count * 73` besides
    assert while_reading - before < count * length / 2


@pytest.mark.parametrize(
    ("check", "good", "bad", "accepted"),
    [
        (require_int, [1, np.int64(7)], [0, -1, 1.0, "2", True, None], "an integer >= 1"),
        (lambda name, value: require_int(name, value, 0), [0, 1], [-1], "an integer >= 0"),
        (require_positive, [1, 0.5, np.float32(2)], [0, -1, math.inf, math.nan, "2", True, None], "a number > 0"),
        (require_fraction, [0, 1, 0.5], [-0.1, 1.1, math.nan, "0", True, None], "a number from 0 to 1"),
        (lambda name, value: require_choice(name, value, ["a", "b"]), ["a", "b"], ["c", None, 0], "one of a, b"),
    ],
)
def test_a_wrong_argument_is_told_what_was_given_and_what_is_accepted(check, good, bad, accepted):
    assert [check("batch_size", value) for value in good] == good
    for value in bad:
        with pytest.raises(ValueError) as caught:
            check("batch_size", value)
        assert str(caught.value) == f"batch_size must be {accepted}, got {value!r}"


def test_a_figure_is_a_png_of_the_asked_size_whatever_a_user_has_set():
    with pyplot.rc_context({"savefig.format": "svg", "savefig.dpi": 300}):
        figure = pyplot.figure(figsize=(2, 1))
        with Image.open(io.BytesIO(base64.b64decode(png_base64(figure, dpi=50)))) as picture:
            assert (picture.format, picture.size) == ("PNG", (100, 50))
