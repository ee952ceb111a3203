"""The checks of the exercises in notebook 10: image sizes."""

import random
from typing import Any

from labkit.teach.exercises import exercise, judge, near

_MODELS = ("sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima")

# What is wrong with a reader of names -> the names and what they state.
_NAMES = {
    **{f"the caches of {model}": [(f"cat_0512x0768_{model}.npz", ("cat", 512, 768))] for model in _MODELS},
    "stems with _ in them": [("my_cat_2_0512x0768_sd.npz", ("my_cat_2", 512, 768))],
    "stems that look like a size": [("cat_0001x0002_0512x0768_sd.npz", ("cat_0001x0002", 512, 768))],
    "sizes above 9999": [("cat_12000x0768_sd.npz", ("cat", 12_000, 768))],
    "caches of text encoders": [
        ("cat_te_outputs.npz", None), ("cat_flux_te.npz", None), ("cat_0512x0768_sd3_te.npz", None),
    ],
    "caches without a size": [("cat.npz", None), ("cat_sd.npz", None)],
    "files that are no cache": [
        ("cat_0512x0768.jpg", None), ("cat_0512x0768_sd.npz.part", None), ("cat_0512x_sd.npz", None),
    ],
    "models that nobody knows": [("cat_0512x0768_vae.npz", None)],
}  # fmt: skip


def _cache(stem: str, width: int = 5, height: int = 6, model: str = "sd") -> str:
    return f"{stem}_{width:04}x{height:04}_{model}.npz"


# A link of the chain -> images, caches, and the sizes that are settled.
_CHAIN = {
    "plain names": (["a.png", "b.jpg"], [_cache("a"), _cache("b", 7, 8, "sdxl")], {"a.png": (5, 6), "b.jpg": (7, 8)}),
    "issue 1770, `-` before `_`": (
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


@exercise("10.1")
def a_rate_in_a_smaller_folder(answer: Any) -> str | None:
    """A number, in files per second."""
    return near(answer, 254 * 906 / 136)


@exercise("10.2")
def a_reader_of_names(answer: Any) -> str | None:
    """A function of a name that returns (stem, width, height) or None."""
    for what, names in _NAMES.items():
        for name, expected in names:
            found = answer(name)
            if (found is None) != (expected is None) or (expected and tuple(found) != expected):
                return f"{what}: {name!r} gives {found!r}; {expected!r} is wanted"
    return None


@exercise("10.3")
def the_bug_chain(answer: Any) -> str | None:
    """A function of (images, caches) that returns {image: (width, height)}."""
    for done, (what, (images, caches, expected)) in enumerate(_CHAIN.items()):
        for seed in range(3):  # an order that the answer cannot rely on
            shuffled = [random.Random(seed).sample(names, len(names)) for names in (images, caches)]
            found = {image: tuple(size) for image, size in answer(*shuffled).items()}
            if found != expected:
                return f"folder {done + 1} of {len(_CHAIN)}, {what}: {found} came back; {expected} is wanted"
    return None


@exercise("10.4")
def headers_from_a_hard_disk(answer: Any) -> str | None:
    """A number, in seconds."""
    return near(answer, 20_000 * 2 * 8e-3)


@exercise("10.5")
def two_ways_to_sizes(answer: Any) -> str | None:
    """A frame from lk.compare with at least five rounds that count."""
    return judge(answer, rounds=5, widest=0.2)
