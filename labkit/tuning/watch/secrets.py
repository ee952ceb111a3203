"""The command line as it may be shown: without the values of passwords and tokens."""

import re
import shlex
from collections.abc import Sequence

from labkit.core import redact

_SECRET = re.compile(
    r"token|passw|secret|credential|api[-_]?key|access[-_]?key|\bauth|(^|[-_])(key|pw|pwd)$", re.IGNORECASE
)


def shown_command(name: str, arguments: Sequence[str], *, is_module: bool = False) -> str:
    """`train.py --epochs 1`, with `...` for what an option named like a secret is given, and without home folders."""
    shown, hides = list[str](), False
    for argument in arguments:
        shown.append("..." if hides and not argument.startswith("-") else _shown(argument))
        hides = argument.startswith("-") and _names_a_secret(argument)
    words = [*(["-m"] if is_module else []), name, *shown]
    return " ".join(word if word == "..." else _without_home(shlex.quote(word)) for word in words)


def _shown(argument: str) -> str:
    option, equals, _ = argument.partition("=")
    return f"{option}=..." if equals and _names_a_secret(option) else redact(argument)


def _names_a_secret(option: str) -> bool:
    return re.fullmatch(r"[\w.-]+", option) is not None and _SECRET.search(option) is not None


def _without_home(word: str) -> str:
    return re.sub(r"^'?(/home/[^/\s]+|/Users/[^/\s]+|/root)(?=/|$)", "~", word)
