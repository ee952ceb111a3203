"""Image sizes in the names of latent caches, as kohya-ss/sd-scripts writes them beside the images."""

import re

Size = tuple[int, int]  # (width, height), pixels as stored
MAX_SIDE = 999_999_999  # pixels: no image has more, and what states more states no size

# `{stem}_{width:04d}x{height:04d}_{model}.npz`. What else ends in .npz states no size: text-encoder outputs
# (`{stem}_te_outputs.npz`, `{stem}_flux_te.npz`, ...) and the oldest caches, which are `{stem}.npz`.
_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")
_PIXELS = r"(\d{4}|[1-9]\d{4,8})"
_NAME = re.compile(rf"(.+)_{_PIXELS}x{_PIXELS}_(?:{'|'.join(_MODELS)})\.npz", re.ASCII | re.DOTALL)


def parse_cache_name(name: str) -> tuple[str, int, int] | None:
    """(stem, width, height) that a cache's name states, or None where it states none.

    The size is the image's own, as its header has it: neither the training bucket's nor turned by EXIF. The stem is
    the image's name without its suffix. `0000x0000`, which stands for an image that could not be read, states none,
    nor does a side of more than `MAX_SIDE`.

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

    A cache belongs to the image of exactly its stem. None marks an image whose caches disagree. A cache that more
    than one image may have written counts for none of them: `a.jpg` and `a.png` share their names, and
    `a_0512x0512_sd.npz` may be the oldest kind of cache, of an `a_0512x0512_sd.png`.

    Args:
        images: File names.
        caches: File names that end in `.npz`.

    Returns:
        Image -> (width, height) or None. An image that no cache names is absent.
    """
    by_stem = _images_by_stem(images) if caches else {}
    sizes: dict[str, Size | None] = {}
    for cache in caches:
        parsed = parse_cache_name(cache)
        image = by_stem.get(parsed[0]) if parsed else None
        if image is None or cache.removesuffix(".npz") in by_stem:
            continue
        if sizes.setdefault(image, parsed[1:]) != parsed[1:]:
            sizes[image] = None
    return sizes


def _images_by_stem(images: list[str]) -> dict[str, str | None]:
    """Stem -> image, None where several images share the stem."""
    by_stem: dict[str, str | None] = {}
    for image in images:
        stem = image.rpartition(".")[0]
        by_stem[stem] = None if stem in by_stem else image
    return by_stem
