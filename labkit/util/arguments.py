"""Argument checks with one form of error, and the limits on the memory that one file may take.

An error names the argument, what it accepts, and what was given. A damaged or hostile file that states more than a
limit is refused. Pixels have a limit of their own, `labkit.data.decode.max_pixels`.
"""

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from labkit.errors import ArgumentError, FolderError, MissingFileError, WrongTypeError
from labkit.util.redact import redact, strip_credentials


def require_int(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int, if it is an integer (also NumPy's) and not below `minimum`; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ArgumentError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return int(value)


def require_seed(value: Any, name: str = "seed") -> int:
    """`value` as an int: a seed is any integer that 64 bits hold, also NumPy's; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not -(1 << 63) <= int(value) < 1 << 64:
        raise ArgumentError(f"{name} must be an integer from -2**63 to 2**64 - 1, got {value!r:.200}")
    return int(value)


def require_positive(name: str, value: Any) -> float:
    """`value`, if it is a finite number > 0; else ValueError."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ArgumentError(f"{name} must be a number > 0, got {value!r}")
    return value


def require_fraction(name: str, value: Any) -> float:
    """`value`, if it is a number from 0 to 1; else ValueError."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {value!r}")
    return value


def require_range(name: str, values: Any, *, maximum: float = math.inf) -> None:
    """ValueError if `values` are not two numbers above 0, the smaller first, up to `maximum`."""
    pair = list(values) if isinstance(values, Iterable) else []
    if len(pair) != 2 or not all(map(is_number, pair)) or not 0 < pair[0] <= pair[1] <= maximum:
        raise ArgumentError(
            f"{name} must be (smallest, largest) with 0 < smallest <= largest <= {maximum}, got {values!r:.200}"
        )


def check_normalization(mean: Any, std: Any) -> None:
    """ValueError if these are not three numbers each, or of values from 0 to 255: those are not normalized by them."""
    for name, values in (("mean", mean), ("std", std)):
        plain = values.tolist() if hasattr(values, "tolist") else values  # of arrays and tensors
        channels = list(plain) if isinstance(plain, Iterable) else []
        is_sound = len(channels) == 3 and all(is_number(value) and math.isfinite(value) for value in channels)
        if not is_sound or (name == "std" and min(channels) <= 0):
            bound = " > 0" if name == "std" else ""
            raise ArgumentError(f"{name} must be three numbers{bound}, for red, green and blue, got {values!r:.200}")
        if max(channels) > 1:
            raise ArgumentError(
                "mean and std are of values from 0 to 1, and some of these are above, as those of values from 0 to 255 "
                f"are: divide by 255, got {name}={values!r:.200}"
            )


def require_path(name: str, value: Any, *, what: str = "a path, such as 'data/photos'") -> str:
    """`value` as text, with `~` for a home folder expanded, if it is a path or URL; else TypeError, which says `what`
    it should be."""
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise WrongTypeError(f"{name} must be {what}: got {_shown(value)}")
    return os.path.expanduser(path)


def require_local_path(name: str, value: Any) -> Path:
    """`value` as a Path, if it can be one of this machine; TypeError for no path, ValueError for a URL."""
    path = require_path(name, value)
    if "://" in path:
        raise ArgumentError(f"{name} must be a path of this machine, got a URL: {strip_credentials(path)}")
    return Path(path)


def require_file(name: str, value: Any, folder_remedy: str) -> Path:
    """`value` as the Path of a file of this machine that exists; else an error, for a folder with a remedy."""
    path = require_local_path(name, value)
    if path.is_dir():
        raise FolderError(f"{path} is a folder: {folder_remedy}")
    if not path.exists():
        raise MissingFileError(f"{path} does not exist (looked for in {os.getcwd()}): check the path")
    return path


REPORT_BEGINNINGS = {
    "json": '{\n "schema_version": ',
    "html": '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="generator" content="labkit watch">',
}
"""How the files begin that `labkit watch` writes, by which it knows its own."""
REPORT_VERSION = 1  # of what `labkit watch --json` writes: the next one renames a key, or changes what it means


def require_report(name: str, value: Any, *keys: str) -> dict[str, Any]:
    """What `labkit watch --json` wrote to this file, if it has these keys and a known version; else an error."""
    path = require_file(name, value, "name the file that `labkit watch --json` wrote")
    try:
        report = json.loads(path.read_bytes())
        version = int(report.get("schema_version", 0))  # 0: written before there were versions, with the same keys
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path} is not a report of `labkit watch --json`: {error}") from error
    if version > REPORT_VERSION:
        raise ArgumentError(
            f"{path} has schema_version {version}, and this labkit reads {REPORT_VERSION} and earlier ones: "
            "upgrade labkit, or watch that run again with this one"
        )
    if absent := [key for key in keys if key not in report]:
        raise ArgumentError(
            f"{path} is not a report of `labkit watch --json`, or was written by an earlier labkit: it has no "
            f"{' and no '.join(absent)}; watch that run again"
        )
    return report


def require_callable(name: str, value: Any, what: str = "a function or another object that can be called") -> None:
    """TypeError if `value` is neither None nor can be called, or is a class in place of one of its objects."""
    if value is not None and not callable(value):
        raise WrongTypeError(f"{name} must be {what}, got {_shown(value)}")
    if isinstance(value, type) and any("__call__" in vars(base) for base in value.__mro__):
        raise WrongTypeError(f"{name} must be {what}, got {_shown(value)}: make one of it, {value.__name__}(...)")


def require_flag(name: str, value: Any) -> bool:
    """`value` as a bool, if it is True or False, also NumPy's, or 1 or 0; else ValueError: "False" would be true."""
    if (isinstance(value, Real) or type(value).__name__.startswith("bool")) and value in (0, 1):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, got {value!r:.100}")


def require_a(kind: type | tuple[type, ...], name: str, value: Any, what: str) -> Any:
    """`value`, if it is of a `kind`; else TypeError, which says `what` it should be."""
    if not isinstance(value, kind):
        raise WrongTypeError(f"{name} must be {what}, got {_shown(value)}")
    return value


def require_iterable(name: str, value: Any, what: str) -> Any:
    """`value`, if a loop can go over it, by iteration or by numbers; else TypeError, which says `what` it should be."""
    if not isinstance(value, Iterable) and (isinstance(value, type) or not hasattr(value, "__getitem__")):
        raise WrongTypeError(f"{name} must be {what}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value in a message: a class by its name, anything else with its type."""
    return kind_of(value) if isinstance(value, type) else f"{redact(repr(value)):.100}, of type {kind_of(value)}"


def kind_of(value: Any) -> str:
    """What a message calls a value of the wrong kind: the name of its type, or that it is a class."""
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """`value`, if it is one of `choices`; else ValueError, which lists them."""
    choices = list(choices)
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def is_number(value: Any) -> bool:
    """Whether it is a real number, also NumPy's; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


MAX_FILE_VARIABLE = "LABKIT_MAX_FILE_MB"


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
