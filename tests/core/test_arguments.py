"""One form of error for a wrong argument."""

import math

import numpy as np
import pytest

from labkit.util.arguments import require_choice, require_fraction, require_int, require_positive


@pytest.mark.parametrize(
    ("check", "good", "bad", "accepted"),
    [
        (require_int, [1, np.int64(7)], [0, -1, 1.0, "2", True, None], "an integer >= 1"),
        (require_positive, [1, 0.5, np.float32(2)], [0, -1, math.inf, math.nan, "2", True, None], "a number > 0"),
        (require_fraction, [0, 1, 0.5], [-0.1, 1.1, math.nan, "0", True, None], "a number from 0 to 1"),
        (lambda name, value: require_choice(name, value, ["a", "b"]), ["a", "b"], ["c", None, 0], "one of a, b"),
    ],
)
def test_what_was_given_and_what_is_accepted(check, good, bad, accepted):
    assert [check("batch_size", value) for value in good] == good
    for value in bad:
        with pytest.raises(ValueError) as caught:
            check("batch_size", value)
        assert str(caught.value) == f"batch_size must be {accepted}, got {value!r}"


def test_another_minimum():
    assert require_int("num_workers", 0, 0) == 0
    with pytest.raises(ValueError, match=r"num_workers must be an integer >= 0, got -1"):
        require_int("num_workers", -1, 0)
