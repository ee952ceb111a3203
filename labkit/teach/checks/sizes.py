"""The checks of the exercises in notebook 10: image sizes."""

import random
from typing import Any

from labkit.teach.exercises import exercise, frame_exercise, number_exercise

_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")

# Kind of name that a wrong answer misreads -> such names, and what they state.
_NAMES = {
    **{f"the caches of {model}": [(f"cat_0512x0768_{model}.npz", ("cat", 512, 768))] for model in _MODELS},
    "stems with _ in them": [("my_cat_2_0512x0768_sd.npz", ("my_cat_2", 512, 768))],
    "stems that look like a size": [("cat_0001x0002_0512x0768_sd.npz", ("cat_0001x0002", 512, 768))],
    "sizes above 9999": [("cat_12000x0768_sd.npz", ("cat", 12_000, 768))],
    "caches of text encoders": [
        ("cat_te_outputs.npz", None), ("cat_flux_te.npz", None), ("cat_0512x0768_sd3_te.npz", None),
    ],
    "caches without a size": [("cat.npz", None), ("cat_sd.npz", None)],
    "files that are not caches": [
        ("cat_0512x0768.jpg", None), ("cat_0512x0768_sd.npz.part", None), ("cat_0512x_sd.npz", None),
    ],
    "unknown models": [("cat_0512x0768_vae.npz", None)],
}  # fmt: skip


def _cache(stem: str, width: int = 5, height: int = 6, model: str = "sd") -> str:
    return f"{stem}_{width:04}x{height:04}_{model}.npz"


# Case -> images, caches, and the sizes that they settle.
_CHAIN = {
    "plain names": (["a.png", "b.jpg"], [_cache("a"), _cache("b", 7, 8, "sdxl")], {"a.png": (5, 6), "b.jpg": (7, 8)}),
    "sd-scripts issue 1770, `-` before `_`": (
        ["beach_towel.png", "beach_towel-crop.png"],
        [_cache("beach_towel"), _cache("beach_towel-crop", 7, 8)],
        {"beach_towel.png": (5, 6), "beach_towel-crop.png": (7, 8)},
    ),
    "no cache, beside a longer name": (["a.png", "ab.png"], [_cache("ab")], {"ab.png": (5, 6)}),
    "no cache, beside a longer name with `_`": (["a.png", "a_b.png"], [_cache("a_b")], {"a_b.png": (5, 6)}),
    "brackets and stars": (["[x]*.png"], [_cache("[x]*")], {"[x]*.png": (5, 6)}),
    "dots in the stem": (["a.b.png", "a.png"], [_cache("a.b")], {"a.b.png": (5, 6)}),
    "a text encoder's cache": (["a.png"], ["a_sd3_te.npz", "a_te_outputs.npz", "a.npz"], {}),
    "caches that agree": (["a.png"], [_cache("a"), _cache("a", model="sdxl")], {"a.png": (5, 6)}),
    "caches that disagree": (["a.png"], [_cache("a"), _cache("a", 7, 8, "sdxl")], {}),
    "two images of one stem": (["a.png", "a.jpg"], [_cache("a")], {}),
    "a cache without an image": (["b.png"], [_cache("a")], {}),
}


number_exercise("10.1", "A number, in files per second.", 254 * 906 / 136)
number_exercise("10.4", "A number, in seconds.", 20_000 * 2 * 8e-3)
frame_exercise("10.5", "A frame from lk.compare with at least five rounds that count.", rounds=5, widest=0.2)


@exercise("10.2")
def check_name_reader(answer: Any) -> str | None:
    """A function of a name that returns (stem, width, height) or None."""
    for what, names in _NAMES.items():
        for name, expected in names:
            found = answer(name)
            if (found is None) != (expected is None) or (expected and tuple(found) != expected):
                return f"{what}: {name!r} should give {expected!r}; it gave {found!r}"
    return None


@exercise("10.3")
def check_size_lookup(answer: Any) -> str | None:
    """A function of (images, caches) that returns {image: (width, height)}."""
    for done, (what, (images, caches, expected)) in enumerate(_CHAIN.items()):
        for seed in range(3):  # the answer must not rely on an order
            shuffled = [random.Random(seed).sample(names, len(names)) for names in (images, caches)]
            found = {image: tuple(size) for image, size in answer(*shuffled).items()}
            if found != expected:
                return f"folder {done + 1} of {len(_CHAIN)}, {what}: it returned {found} instead of {expected}"
    return None
