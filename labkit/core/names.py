"""Which names count as images, wherever they lie."""

import os
import sys

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def is_image(key: str) -> bool:
    """Whether a key names a JPEG, PNG or WebP file, and no part of it is hidden (begins with a dot)."""
    return key.lower().endswith(IMAGE_SUFFIXES) and not key.startswith(".") and "/." not in key


def is_file_key(key: str) -> bool:
    """Whether a key can name a file below a folder: one that does not lead out of it, and is no folder itself."""
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair: no file has such a name
        return False
    parts = key.split("/")
    return parts[0] != "" and parts[-1] not in ("", ".") and ".." not in parts


def key_from_name(name: str) -> str:
    """A file's name, as the system gives it, as a key: UTF-8, whatever the locale.

    On a C locale with Python's own remedies switched off, names come as ASCII and the other bytes as surrogates.
    """
    return name if _NAMES_ARE_UTF8 else os.fsencode(name).decode("utf-8", "surrogateescape")


def path_from_key(key: str) -> str:
    """A key, or a name that an archive or a list states, as the system takes it. Raises ValueError where it cannot."""
    return key if _NAMES_ARE_UTF8 else os.fsdecode(key.encode("utf-8", "surrogateescape"))


_NAMES_ARE_UTF8 = sys.getfilesystemencoding() == "utf-8"
