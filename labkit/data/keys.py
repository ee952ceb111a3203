"""Which names count as images, wherever they lie."""

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def is_image(key: str) -> bool:
    """Whether a key names a JPEG, PNG or WebP file, and no part of it is hidden (begins with a dot)."""
    return key.lower().endswith(IMAGE_SUFFIXES) and not key.startswith(".") and "/." not in key
