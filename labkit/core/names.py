"""File names: which count as images, which may be keys, and how they are encoded."""

import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")  # what labkit decodes
OTHER_IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".pbm", ".pgm", ".pnm", ".ppm", ".tif",
    ".tiff",
)  # fmt: skip
# Hidden, or made by a system for itself: thumbnails and deleted files of a NAS or Windows, attributes of macOS' files.
_HIDDEN = re.compile(r"(?:^|/)(?:\.|(?:@eaDir|#recycle|\$RECYCLE\.BIN|__MACOSX)(?:/|$))")
_MAX_NAME_BYTES = 255  # on almost every filesystem
_NAMES_ARE_UTF8 = sys.getfilesystemencoding() == "utf-8"


def is_hidden(key: str) -> bool:
    """Whether a part of a key begins with a dot, or is a folder that a system keeps for itself, such as `__MACOSX`."""
    return _HIDDEN.search(key) is not None


def is_image(key: str) -> bool:
    """Whether a key names a JPEG, PNG or WebP file that is not hidden."""
    return key.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(key)


def checked_suffixes(ignore: str | Iterable[str]) -> tuple[str, ...]:
    """Suffixes to leave out, in lower case; ValueError if one does not begin with a dot."""
    suffixes = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    if wrong := [suffix for suffix in suffixes if not isinstance(suffix, str) or not re.match(r"\.\w", suffix)]:
        raise ValueError(f"ignore takes suffixes, such as ignore=('.gif', '.bmp'), got {wrong[0]!r}")
    return tuple(suffix.lower() for suffix in suffixes)


def n_images(number: int) -> str:
    """A number of images in words, such as `2 images`."""
    return f"{number} image{'s' if number != 1 else ''}"


def images_among(names: Iterable[str], ignore: tuple[str, ...], place: str) -> Iterator[str]:
    """Those of some names that are images; hidden ones and those with suffixes to `ignore` are left out.

    Raises:
        ValueError: at the end, where there are images that labkit does not decode; counts them, and names `place`.
    """
    others: Counter[str] = Counter()
    for name in names:
        suffix = os.path.splitext(name)[1].lower()
        if suffix in ignore or is_hidden(name):
            continue
        if suffix in IMAGE_SUFFIXES:
            yield name
        elif suffix in OTHER_IMAGE_SUFFIXES:
            others[suffix] += 1
    if others:
        counts = ", ".join(f"{n_files} {suffix}" for suffix, n_files in others.most_common())
        raise ValueError(
            f"{place} holds {n_images(others.total())} with suffixes that labkit does not read ({counts}; it reads "
            f"{', '.join(IMAGE_SUFFIXES)}): convert them, or leave them out with ignore={tuple(sorted(others))!r}"
        )


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
