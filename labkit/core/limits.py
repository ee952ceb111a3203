"""Limits on the memory that one file may take: a damaged or hostile file that states more is refused.

Pixels have a limit of their own, `labkit.data.decoders.MAX_PIXELS`.
"""

import os
from contextlib import suppress

MAX_FILE_VARIABLE = "LABKIT_MAX_FILE_MB"

MAX_TAR_HEADER_BYTES = 1 << 20
"""Headers of one member: long names, pax records, the map of a sparse file."""

MAX_MEMBERS = 10_000_000
"""Members of an archive that is extracted: all names are kept in memory."""

MAX_PATH_BYTES = 4096
"""Name of a member, or target of a link, in an archive: Linux's PATH_MAX. Time grows with the square of their depth."""

MAX_XZ_DICTIONARY_BYTES = 256 << 20
"""Dictionary of an xz stream: `xz -9` needs 65 MiB."""


def max_file_bytes() -> int:
    """Largest file that is read completely from an archive or over HTTP: 1024 MB (1e6 bytes), or `LABKIT_MAX_FILE_MB`.

    Raises:
        ValueError: the variable is not a number > 0.
    """
    text = os.environ.get(MAX_FILE_VARIABLE) or "1024"
    with suppress(ValueError, OverflowError):
        if (limit := int(float(text) * 1e6)) > 0:
            return limit
    raise ValueError(f"{MAX_FILE_VARIABLE} must be a number of megabytes > 0, got {text!r}")
