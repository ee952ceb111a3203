"""File names: which count as images, which may be keys, and how they are encoded."""

import os
import sys
import zlib
from pathlib import Path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_MAX_NAME_BYTES = 255  # on almost every filesystem
_NAMES_ARE_UTF8 = sys.getfilesystemencoding() == "utf-8"


def is_image(key: str) -> bool:
    """Whether a key names a JPEG, PNG or WebP file, and no part of it is hidden (begins with a dot)."""
    return key.lower().endswith(IMAGE_SUFFIXES) and not key.startswith(".") and "/." not in key


def is_file_key(key: str) -> bool:
    """Whether a key can name a file below a folder: it does not lead out of the folder, and does not name a folder."""
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which no file name holds
        return False
    parts = key.split("/")
    return parts[0] != "" and parts[-1] not in ("", ".") and ".." not in parts


def key_from_name(name: str) -> str:
    """A file name, as the system gives it, as a key: UTF-8, whatever the locale.

    In a C locale without Python's UTF-8 mode, names arrive as ASCII with all other bytes as surrogates.
    """
    return name if _NAMES_ARE_UTF8 else os.fsencode(name).decode("utf-8", "surrogateescape")


def path_from_key(key: str) -> str:
    """A key, or a name from an archive or a list, as the system takes it; ValueError if it cannot be a file name."""
    return key if _NAMES_ARE_UTF8 else os.fsdecode(key.encode("utf-8", "surrogateescape"))


def sibling_path(path: Path, ending: str, *, hidden: bool = False) -> Path:
    """`path` with an ending added to its name; if that is too long, a checksum takes the place of the name."""
    prefix = "." if hidden else ""
    name = f"{prefix}{path.name}{ending}"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = f"{prefix}{zlib.crc32(os.fsencode(path.name)):08x}{ending}"
    return path.with_name(name)
