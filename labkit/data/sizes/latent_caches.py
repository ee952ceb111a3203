"""Image sizes from the names of latent caches, which kohya-ss/sd-scripts writes beside the images."""

import re

Size = tuple[int, int]  # (width, height), pixels as stored
MAX_SIDE = 999_999_999  # pixels; a larger number is not a size

# `{stem}_{width:04d}x{height:04d}_{model}.npz`. Other names in .npz state no size: text-encoder outputs
# (`{stem}_te_outputs.npz`, `{stem}_flux_te.npz`, ...) and the oldest caches, which are `{stem}.npz`.
_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")
_PIXELS = r"(\d{4}|[1-9]\d{4,8})"
_NAME = re.compile(rf"(.+)_{_PIXELS}x{_PIXELS}_(?:{'|'.join(_MODELS)})\.npz", re.ASCII | re.DOTALL)


def parse_cache_name(name: str) -> tuple[str, int, int] | None:
    """(stem, width, height) from the name of a cache, or None if it states no size.

    The size is that in the image's header, not the training bucket's, and before EXIF rotation. The stem is the image's
    name without its suffix. `0000x0000`, which marks an unreadable image, is not a size, nor is a side of more than
    `MAX_SIDE`.

    Source: `get_latents_npz_path` in kohya-ss/sd-scripts. Taught in: notebooks/10_image_sizes.ipynb
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    stem, width, height = match.groups()
    size = int(width), int(height)
    return (stem, *size) if min(size) > 0 else None


def sizes_from_caches(images: list[str], caches: list[str]) -> dict[str, Size | None]:
    """Sizes that the caches of one folder state for the images beside them.

    A cache belongs to the image with exactly its stem. None marks an image whose caches disagree. A cache that could
    belong to several images is ignored: `a.jpg` and `a.png` have the same stem, and `a_0512x0512_sd.npz` may also be a
    cache of the oldest kind, of an `a_0512x0512_sd.png`.

    Args:
        images: File names.
        caches: File names that end in `.npz`.

    Returns:
        Image -> (width, height) or None. Images without a cache are absent.
    """
    if not caches:
        return {}
    by_stem: dict[str, str | None] = {}
    sizes: dict[str, Size | None] = {}
    for image in images:
        stem = image.rpartition(".")[0]
        by_stem[stem] = None if stem in by_stem else image  # None: several images share the stem
    for cache in caches:
        parsed = parse_cache_name(cache)
        named = by_stem.get(parsed[0]) if parsed else None
        if parsed is None or named is None or cache.removesuffix(".npz") in by_stem:
            continue
        if sizes.setdefault(named, parsed[1:]) != parsed[1:]:
            sizes[named] = None
    return sizes
