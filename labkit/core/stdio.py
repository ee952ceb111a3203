"""What commands print, on any locale."""

import sys


def print_utf8() -> None:
    """Print UTF-8 where the streams know ASCII alone, as on a C locale whose coercion is off; for commands only.

    Else a file name, or the dots with which help is shortened, would end a command in an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "encoding", None) in ("ascii", "ANSI_X3.4-1968", "US-ASCII"):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
