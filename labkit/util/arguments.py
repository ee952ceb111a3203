"""Argument checks with one form of error, and the limits on the memory that one file may take.

An error names the argument, what it accepts, and what was given. A damaged or hostile file that states more than a
limit is refused. Pixels have a limit of their own, `labkit.data.decode.MAX_PIXELS`.
"""

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from labkit.errors import ArgumentError


def require_int(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int, if it is an integer (also NumPy's) and not below `minimum`; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ArgumentError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return int(value)


def require_positive(name: str, value: Any) -> float:
    """`value`, if it is a finite number > 0; else ValueError."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ArgumentError(f"{name} must be a number > 0, got {value!r}")
    return value


def require_fraction(name: str, value: Any) -> float:
    """`value`, if it is a number from 0 to 1; else ValueError."""
    if not _is_number(value) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {value!r}")
    return value


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """`value`, if it is one of `choices`; else ValueError, which lists them."""
    choices = list(choices)
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


MAX_FILE_VARIABLE = "LABKIT_MAX_FILE_MB"

MAX_PATH_BYTES = 4096
"""Name of a member of a shard: Linux's PATH_MAX. Time grows with the square of its depth."""


def max_file_bytes() -> int:
    """Largest member of a shard that is read: 1024 MB (1e6 bytes), or `LABKIT_MAX_FILE_MB`.

    Raises:
        ValueError: the variable is not a number > 0.
    """
    text = os.environ.get(MAX_FILE_VARIABLE) or "1024"
    with suppress(ValueError, OverflowError):
        if (limit := int(float(text) * 1e6)) > 0:
            return limit
    raise ArgumentError(f"{MAX_FILE_VARIABLE} must be a number of megabytes > 0, got {text!r}")
