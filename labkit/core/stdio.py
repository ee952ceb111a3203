"""Output of commands in any locale."""

import io
import sys


def print_utf8() -> None:
    """Switch ASCII streams to UTF-8, as in a C locale without coercion; for commands only.

    Otherwise a file name, or the ellipsis in shortened help, would make a command fail.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding in ("ascii", "ANSI_X3.4-1968", "US-ASCII"):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
