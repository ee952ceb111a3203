"""Which names count as images, wherever they lie."""

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def is_image(key: str) -> bool:
    """Whether a key names a JPEG, PNG or WebP file, and no part of it is hidden (begins with a dot)."""
    return key.lower().endswith(IMAGE_SUFFIXES) and not key.startswith(".") and "/." not in key


def names_a_file(key: str) -> bool:
    """Whether a key can name a file below a folder: one that does not lead out of it, and is no folder itself."""
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair: no file has such a name
        return False
    parts = key.split("/")
    return parts[0] != "" and parts[-1] not in ("", ".") and ".." not in parts
