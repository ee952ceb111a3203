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
    shown, hides_next = [], False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        hides, hides_next = hides_next, False
        if hides and not argument.startswith("-"):
            shown.append("...")
        elif re.fullmatch(r"[\w.-]+", option) and _SECRET.search(option) and (argument.startswith("-") or equals):
            shown.append(f"{option}=..." if equals else option)
            hides_next = not equals
        else:
            shown.append(redact(argument))
    words = [*(["-m"] if is_module else []), name, *shown]
    return " ".join(word if word == "..." else _without_home(shlex.quote(word)) for word in words)


def _without_home(word: str) -> str:
    return re.sub(r"^'?(/home/[^/\s]+|/Users/[^/\s]+|/root)(?=/|$)", "~", word)
