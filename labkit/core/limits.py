"""The most that one file may make labkit hold in memory: what a damaged or hostile one asks beyond is refused.

Pixels have a limit of their own, `labkit.data.decoders.MAX_PIXELS`.
"""

import os

MAX_FILE_VARIABLE = "LABKIT_MAX_FILE_MB"

MAX_TAR_HEADER_BYTES = 1 << 20
"""Of one member's headers: long names, pax records, the map of a sparse file."""

MAX_MEMBERS = 10_000_000
"""Of an archive that is extracted: the names of all are held."""

MAX_XZ_DICTIONARY_BYTES = 256 << 20
"""Of memory that an xz stream may ask for its dictionary: `xz -9` asks for 65 MiB."""


def max_file_bytes() -> int:
    """Largest file that is read whole from an archive or over HTTP: 1024 MB (1e6 bytes), or `LABKIT_MAX_FILE_MB`.

    Raises:
        ValueError: the variable is no number above 0.
    """
    said = os.environ.get(MAX_FILE_VARIABLE) or "1024"
    try:
        most = int(float(said) * 1e6)
    except (ValueError, OverflowError):
        most = 0
    if most < 1:
        raise ValueError(f"{MAX_FILE_VARIABLE}={said!r}: a number of megabytes above 0 is wanted")
    return most
