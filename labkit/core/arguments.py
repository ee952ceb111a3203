"""Argument checks with one form of error: the argument, what it accepts, and what was given."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def require_int(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int, if it is an integer (also NumPy's) and not below `minimum`; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return int(value)


def require_positive(name: str, value: Any) -> float:
    """`value`, if it is a finite number > 0; else ValueError."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")
    return value


def require_fraction(name: str, value: Any) -> float:
    """`value`, if it is a number from 0 to 1; else ValueError."""
    if not _is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return value


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """`value`, if it is one of `choices`; else ValueError, which lists them."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
