"""Names of latent caches: the sizes that they state, and the images that these belong to."""

import pytest

from labkit.data.sizes import parse_cache_name, sizes_from_caches

SD = "_0512x0512_sd.npz"

SIZELESS = (
    "a.npz", "a_te_outputs.npz", "a_sd3_te.npz", "a_0512x0768_flux_te.npz", "a_0512x0768_te_outputs.npz",
    "a_0512x0768.npz", "a_0512x0768_sd", "a_0512x0768_sd.npz.tmp", "a_0512x0768_SD.npz", "a_0512x0768_sd.NPZ",
    "a_512x768_sd.npz", "a_00512x0768_sd.npz", "a_0512X0768_sd.npz", "a_0512x0768_sd15.npz", "_0512x0768_sd.npz",
    "a_-512x0768_sd.npz", "a_\u0660512x0768_sd.npz", "a_0000x0000_sd.npz", "a-0512x0768_sd.npz",
    "a_0512x0768_sd.npz\n",
)  # fmt: skip


@pytest.mark.parametrize("model", ["sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a_0512x0768", ("a", 512, 768)),
        ("a_b_0512x0768", ("a_b", 512, 768)),
        ("a_0100x0100_0512x0768", ("a_0100x0100", 512, 768)),
        ("a_10000x0007", ("a", 10_000, 7)),
        ("__0512x0768", ("_", 512, 768)),
        ("line\nbreak [1]*_0512x0768", ("line\nbreak [1]*", 512, 768)),
        ("日本_0512x0768", ("日本", 512, 768)),
    ],
)
def test_names_of_caches(name, expected, model):
    assert parse_cache_name(f"{name}_{model}.npz") == expected


@pytest.mark.parametrize("name", SIZELESS)
def test_names_that_state_no_size(name):
    assert parse_cache_name(name) is None


@pytest.mark.parametrize(
    ("images", "caches", "expected"),
    [
        # sd-scripts' issue 1770: `-` sorts before `_`, and the merge gave the first image the second one's size.
        (
            ["beach_towel.png", "beach_towel-crop.png"],
            ["beach_towel_0640x0480_sd.npz", "beach_towel-crop_0320x0200_sd.npz"],
            {"beach_towel.png": (640, 480), "beach_towel-crop.png": (320, 200)},
        ),
        (["a.png", "ab.png"], ["ab" + SD], {"ab.png": (512, 512)}),  # a.png must not adopt it
        (["a_b.png", "a.png"], ["a_b" + SD], {"a_b.png": (512, 512)}),
        (["[x]*.png"], ["[x]*" + SD], {"[x]*.png": (512, 512)}),
        (["a.b.png", "a.png"], ["a.b" + SD], {"a.b.png": (512, 512)}),
        (["a.jpg", "a.png"], ["a" + SD], {}),  # either may have written it
        (["a.jpg", "a.JPG"], ["a" + SD], {}),
        (["a.png", "a_0512x0512_sd.png"], ["a" + SD], {}),  # it may be the oldest kind, of the second
        (["a.png"], ["a" + SD, "a_0512x0512_sdxl.npz", "a_0512x0512_flux.npz"], {"a.png": (512, 512)}),
        (["a.png"], ["a" + SD, "a_0512x0513_sdxl.npz", "a" + SD], {"a.png": None}),
        (["a.png"], ["a_0000x0000_sdxl.npz", "a" + SD], {"a.png": (512, 512)}),
        (["A.png"], ["a" + SD], {}),
        (["a.png"], ["b" + SD], {}),
        ([], ["a" + SD], {}),
    ],
)
def test_a_cache_belongs_to_the_image_of_its_stem(images, caches, expected):
    assert sizes_from_caches(images, caches) == expected
    assert sizes_from_caches(images[::-1], caches[::-1]) == expected
