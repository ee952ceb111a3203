"""`lk.make_augment`: one recipe in four libraries, the same pixels for fixed draws, the same laws for free ones."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import labkit as lk
from labkit import course
from labkit.loading.augment import FIXED, MEAN, RECIPES, STD, Recipe
from labkit.loading.seeding import RandomSources

LIBRARIES, PARTS = ("pil", "v2", "albumentations", "kornia"), ("all", "geometry", "photometry")
STILL = Recipe(scale=(1, 1), ratio=(1, 1), flip=0, jitter=0)
every_library = pytest.mark.parametrize("library", LIBRARIES)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)

# Mean and largest difference from v2, of 255. Measured on six photos: hue differs most among what does not resize
# (mean 0.33, largest 7: 8-bit arithmetic in PIL and OpenCV), saturation has the largest mean (0.81: rounding).
# Kornia resizes without a filter against aliasing, OpenCV with another one: they differ along edges.
WITHIN = {
    **{(operation, library): (1.0, 10.0) for operation in FIXED for library in LIBRARIES},
    ("shrink", "pil"): (0.01, 1), ("enlarge", "pil"): (0.01, 1),
    ("shrink", "albumentations"): (2.5, 40), ("enlarge", "albumentations"): (0.5, 2),
    ("shrink", "kornia"): (5, 80), ("enlarge", "kornia"): (1.5, 30),
}  # fmt: skip


@pytest.fixture(scope="module")
def photos(first_photos):
    """uint8 (3, 224, 224)."""
    dataset = lk.ImageDataset(lk.FolderStore(first_photos(2)))
    return [functional.center_crop(dataset[number][0], [224, 224]) for number in range(2)]


def applied(augment, image):
    """One picture through any library."""
    return augment(image[None])[0] if getattr(augment, "takes_batches", False) else augment(image)


def seeded(augment, seed=0):
    RandomSources(augment).seed(seed)
    return augment


def denormalised(result):
    """Values of 0 to 255 again."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (result * std + mean) * 255


def gradient(height=48, width=40):
    """Smooth, and no two of its rows, columns or channels alike."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows * 5, columns * 6, 235 - rows * 2 - columns]).to(torch.uint8)


def test_fixed_draws_give_the_same_pixels_in_every_library(photos):
    found = course.agreement(photos).set_index(["operation", "library"])
    assert set(found.index) == set(WITHIN) - {(operation, "v2") for operation in FIXED}
    for place, row in found.iterrows():
        mean, largest = WITHIN[place]
        assert row["mean"] <= mean, place
        assert row["largest"] <= largest, place


def test_agreement_wants_pictures_that_need_no_resizing():
    with pytest.raises(ValueError, match=r"images must have shape \(3, 224, 224\), got \(3, 100, 224\)"):
        course.agreement([torch.zeros(3, 100, 224, dtype=torch.uint8)])


def grayed(pixels):
    return np.repeat((pixels * [0.299, 0.587, 0.114]).sum(2, keepdims=True), 3, axis=2)


# What an operation does to pixels (H, W, 3) of 0-255, in NumPy's words: formulas of its definition, no library's code.
BY_HAND = {
    "flip": lambda pixels: pixels[:, ::-1],
    "brightness": lambda pixels: np.clip(pixels * 1.3, 0, 255),
    "contrast": lambda pixels: 0.7 * pixels + 0.3 * grayed(pixels).mean(),
    "saturation": lambda pixels: 0.6 * pixels + 0.4 * grayed(pixels),
    "gray": grayed,
    "solarize": lambda pixels: np.where(pixels >= 128, 255 - pixels, pixels),
}


@every_library
@pytest.mark.parametrize("operation", BY_HAND)
def test_operations_are_those_of_their_definition(photos, library, operation):
    expected = BY_HAND[operation](photos[0].permute(1, 2, 0).double().numpy())
    augment = lk.make_augment(FIXED[operation], library)
    found = denormalised(applied(augment, photos[0])).permute(1, 2, 0).numpy()
    assert np.abs(found - expected).max() <= 2.5  # up to three roundings
    assert np.abs(found - expected).mean() <= 1


@every_library
@every_recipe
@pytest.mark.parametrize("part", PARTS)
def test_outputs_are_as_stated_also_after_pickling(library, recipe, part):
    augment = lk.make_augment(replace(RECIPES[recipe], size=32), library, part=part)
    unpickled = pickle.loads(pickle.dumps(augment))
    result = applied(seeded(augment), gradient())
    assert torch.equal(result, applied(seeded(unpickled), gradient()))
    assert result.shape == (3, *((48, 40) if part == "photometry" else (32, 32)))
    if part == "geometry":
        assert result.dtype == (torch.float32 if library == "kornia" else torch.uint8)
        assert 0 <= result.min() <= result.max() <= 255
        assert result.max() > 20  # of 255, not of 1
    else:
        assert result.dtype == torch.float32
        assert -0.5 <= denormalised(result).min() <= denormalised(result).max() <= 255.5


def test_pil_takes_pil_images():
    augment, image = lk.make_augment(replace(STILL, size=48), "pil"), gradient(48, 48)
    assert torch.equal(augment(Image.fromarray(image.permute(1, 2, 0).numpy())), augment(image))


@every_library
def test_all_is_geometry_then_photometry(library):
    recipe = replace(RECIPES["heavy"], size=32)
    if library == "albumentations":  # each of its pipelines draws once more for itself: only the geometry is free here
        recipe = replace(recipe, jitter=0, blur=0, gray=1, solarize=1)
    whole, first, then = (lk.make_augment(recipe, library, part=part) for part in PARTS)
    for seed in range(10):
        expected, cropped = (applied(seeded(each, seed), gradient()) for each in (whole, first))
        found = applied(then, cropped.round().to(torch.uint8))
        if library == "kornia":  # on the way, its floats were rounded to bytes
            assert (found - expected).abs().mean() < 0.03
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("recipe", "light, heavy"), ("library", "pil, v2, albumentations, kornia"), ("part", "all, geometry, photometry")],
)
def test_unknown_names_are_refused_with_those_that_there_are(name, accepted):
    with pytest.raises(ValueError, match=f"{name} must be one of {accepted}, got 'half'"):
        lk.make_augment(**{name: "half"})


@pytest.mark.parametrize("batch", [torch.rand(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)])
def test_kornia_refuses_what_it_would_scale_wrongly(batch):
    with pytest.raises(ValueError, match=r"batch must be uint8 \(N, 3, H, W\), got torch\."):
        lk.make_augment("light", "kornia")(batch)


@every_recipe
@pytest.mark.parametrize(("library", "n_distinct"), [("v2", 1), ("kornia", 16)])
def test_v2_draws_once_for_a_batch_and_kornia_for_each_image(recipe, library, n_distinct):
    results = lk.make_augment(replace(RECIPES[recipe], size=32), library)(gradient().expand(16, 3, 48, 40))
    assert len({row.numpy().tobytes() for row in results}) == n_distinct


@every_recipe
def test_kornias_colors_never_make_the_host_wait(recipe):
    colors, batch = lk.make_augment(recipe, "kornia", part="photometry"), gradient().expand(8, 3, 48, 40)
    assert course.count_readbacks(colors, batch)[1] == 0
    with lk.simulated_cuda(course.SimulatedDevice(kernel_s=5e-6)) as cuda:
        colors, batch = colors.cuda(), batch.contiguous().cuda()
        torch.cuda.synchronize()
        assert course.count_readbacks(colors, batch)[1] == 0
        start_s = cuda.now_s
        for _ in range(3):
            torch.cuda._sleep(15_000_000)  # cycles, 10 ms: the step
            colors(batch)
        assert cuda.now_s - start_s < 10e-3  # the simulated host is free before the first step has ended
        assert "wait" not in set(cuda.timeline().query("start_s >= @start_s").kind)


def test_the_guides_loop_never_makes_the_host_wait(cuda):
    """As in `notebooks/guide/faster_loaders.md`; on a GPU, CUDA itself raises where the host would wait."""
    colors = lk.make_augment("light", "kornia", part="photometry").to("cuda")
    pinned = [(gradient().expand(8, 3, 48, 40).contiguous().pin_memory(), torch.arange(8).pin_memory())] * 4
    batches = iter(lk.CUDAPrefetcher(pinned, "cuda"))
    cutmix = v2.CutMix(num_classes=8)
    cutmix(colors(next(batches)[0]), torch.arange(8, device="cuda"))  # loads its kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images, labels in batches:
            cutmix(colors(images), labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The laws of free draws
