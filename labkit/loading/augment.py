"""One augmentation recipe in four libraries, doing the same work, so that their speeds can be compared."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from labkit.errors import ArgumentError
from labkit.util.arguments import require_a, require_choice, require_int
from labkit.util.machine import needing
from labkit.util.process import on_cpu

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Range = tuple[float, float]

LIBRARIES = ("pil", "v2", "albumentations", "kornia")
PARTS = ("all", "geometry", "photometry")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, from 0 to 1, as nearly every training has them
_BLUR_PX, _SOLARIZE_FROM = 23, 128


@dataclass(frozen=True)
class Recipe:
    """What an augmentation does. The library that does it is the other argument of `make_augment`.

    Args:
        size: Pixels of the square output.
        scale: Range of the crop's share of the image area.
        ratio: Range of the crop's width / height.
        flip: Probability of a left-right flip.
        brightness, contrast, saturation: Ranges of the factors of the color jitter; 1 changes nothing.
        hue: Range of the hue shift, in turns of the color circle.
        jitter: Probability of the color jitter.
        gray: Probability of dropping all color.
        blur: Probability of a Gaussian blur of 23 pixels with a sigma from `blur_sigma`.
        solarize: Probability of inverting all values >= 128.

    >>> augment = lk.make_augment(Recipe(size=128, gray=0.2))
    """

    size: int = 224
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: Range = (0.6, 1.4)
    contrast: Range = (0.6, 1.4)
    saturation: Range = (0.6, 1.4)
    hue: Range = (-0.1, 0.1)
    jitter: float = 1.0
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: Range = (0.1, 2.0)
    solarize: float = 0.0

    def __post_init__(self) -> None:
        require_int("size", self.size)

    def color_ranges(self) -> dict[str, Range]:
        """The arguments of every library's ColorJitter."""
        return {name: getattr(self, name) for name in ("brightness", "contrast", "saturation", "hue")}


#: Recipes that `make_augment` knows by name. light: as in supervised training on ImageNet. heavy: the photometric part
#: of self-supervised training (SimCLR, BYOL: jitter, gray, blur, solarize).
RECIPES = {"light": Recipe(), "heavy": Recipe(jitter=0.8, gray=0.2, blur=0.5, solarize=0.2)}


@overload
def make_augment(recipe: str | Recipe, library: Literal["kornia"], *, part: str = "all") -> nn.Module: ...
@overload
def make_augment(
    recipe: str | Recipe = "light", library: str = "v2", *, part: str = "all"
) -> Callable[[Any], Tensor]: ...
def make_augment(recipe: str | Recipe = "light", library: str = "v2", *, part: str = "all") -> Callable[[Any], Tensor]:
    """Build a recipe as a callable, which can be pickled and so sent to workers.

    Args:
        recipe: A key of `RECIPES`, or a `Recipe`.
        library: `"pil"` (torchvision's first transforms, on PIL images), `"v2"` (torchvision's second, on tensors),
            `"albumentations"` (on NumPy arrays, by OpenCV) or `"kornia"` (on float batches, on any device).
        part: `"geometry"` crops, resizes and flips; `"photometry"` changes colors, converts and normalizes;
            `"all"` does both, in that order.

    Returns:
        A function of a uint8 tensor (3, H, W); `"pil"` also takes a PIL image. `"kornia"` takes a uint8 batch
        (N, 3, H, W) and draws for each image; `"v2"` also takes such a batch, with one draw for all of it.
        It returns normalized float32 (..., 3, size, size); with `"geometry"` values of 0-255, uint8 (kornia: float32).

        On a GPU, `"kornia"` with `"photometry"` never makes the host wait: the jitter's four steps have a fixed order
        (brightness, contrast, saturation, hue), as a drawn one would be read back, and no constant is copied. Its
        crops do make the host wait, so crop in the workers.

    >>> augment = lk.make_augment("light", "v2")
    >>> augment(torch.zeros(3, 300, 400, dtype=torch.uint8)).shape
    torch.Size([3, 224, 224])

    Raises:
        ValueError: unknown recipe, library or part.

    Taught in: notebooks/04_tensor_transforms.ipynb
    """
    if isinstance(recipe, str):
        recipe = RECIPES[require_choice("recipe", recipe, RECIPES)]
    require_a(Recipe, "recipe", recipe, f"a labkit.loading.augment.Recipe, or one of {', '.join(RECIPES)}")
    require_choice("part", part, PARTS)
    build: dict[str, Callable[[Recipe, bool, bool], Callable[[Any], Tensor]]] = {
        "pil": _pil,
        "v2": _v2,
        "albumentations": _Albumentations,
        "kornia": _Kornia,
    }
    make = build[require_choice("library", library, LIBRARIES)]
    with needing(f"lk.make_augment(library={library!r})", "lab"):
        return make(recipe, part != "photometry", part != "geometry")


def _pil(recipe: Recipe, geometry: bool, photometry: bool) -> Callable[[Any], Tensor]:
    from torchvision import transforms

    steps = _torchvision_steps(transforms, recipe, geometry, photometry, transforms.ToTensor())
    return transforms.Compose([_to_pil, *steps, *[transforms.PILToTensor()] * (not photometry)])


def _v2(recipe: Recipe, geometry: bool, photometry: bool) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2

    with on_cpu():  # RandomResizedCrop makes a tensor, which forked workers could not read from a GPU
        return v2.Compose(_torchvision_steps(v2, recipe, geometry, photometry, v2.ToDtype(torch.float32, scale=True)))


def _torchvision_steps(transforms: Any, recipe: Recipe, geometry: bool, photometry: bool, to_float: Any) -> list[Any]:
    """Transforms that have the same names in both generations of torchvision."""
    steps = []
    if geometry:
        steps += [
            transforms.RandomResizedCrop(recipe.size, scale=recipe.scale, ratio=recipe.ratio, antialias=True),
            transforms.RandomHorizontalFlip(recipe.flip),
        ]
    if photometry:  # uint8 for as long as possible: a quarter of the bytes
        steps += [*_torchvision_colors(transforms, recipe), to_float, transforms.Normalize(MEAN, STD)]
    return steps


def _torchvision_colors(transforms: Any, recipe: Recipe) -> list[Any]:
    blur = transforms.GaussianBlur(_BLUR_PX, recipe.blur_sigma)
    steps = {
        transforms.RandomApply([transforms.ColorJitter(**recipe.color_ranges())], recipe.jitter): recipe.jitter,
        transforms.RandomGrayscale(recipe.gray): recipe.gray,
        transforms.RandomApply([blur], recipe.blur): recipe.blur,
        transforms.RandomSolarize(_SOLARIZE_FROM, recipe.solarize): recipe.solarize,
    }
    return [step for step, probability in steps.items() if probability > 0]


class _Albumentations:
    """Arrays are (H, W, 3), as decoded images already lie in memory, so neither conversion copies."""

    def __init__(self, recipe: Recipe, geometry: bool, photometry: bool):
        albumentations = import_albumentations()
        steps = []
        if geometry:
            crop = {"size": (recipe.size, recipe.size), "scale": recipe.scale, "ratio": recipe.ratio}
            steps += [
                # Without area_for_downscale it samples when shrinking, where the other libraries filter.
                albumentations.RandomResizedCrop(**crop, area_for_downscale="image"),
                albumentations.HorizontalFlip(p=recipe.flip),
            ]
        if photometry:
            steps += [*_albumentations_colors(albumentations, recipe), albumentations.Normalize(MEAN, STD)]
        self.compose = albumentations.Compose(steps)

    def __call__(self, image: Tensor) -> Tensor:
        pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
        return torch.from_numpy(self.compose(image=pixels)["image"]).permute(2, 0, 1)


def _albumentations_colors(albumentations: Any, recipe: Recipe) -> list[Any]:
    start = _SOLARIZE_FROM / 255
    steps = {
        albumentations.ColorJitter(**recipe.color_ranges(), p=recipe.jitter): recipe.jitter,
        albumentations.ToGray(p=recipe.gray): recipe.gray,
        albumentations.GaussianBlur((_BLUR_PX, _BLUR_PX), recipe.blur_sigma, p=recipe.blur): recipe.blur,
        albumentations.Solarize((start, start), p=recipe.solarize): recipe.solarize,
    }
    return [step for step, probability in steps.items() if probability > 0]


class _Kornia(nn.Module):
    """A whole batch at once, with draws for each image."""

    takes_batches = True

    def __init__(self, recipe: Recipe, geometry: bool, photometry: bool):
        super().__init__()
        from kornia import augmentation

        steps = []
        if geometry:
            steps += [
                augmentation.RandomResizedCrop(
                    (recipe.size, recipe.size), recipe.scale, recipe.ratio,
                    cropping_mode="resample",  # one grid sampling; the default, "slice", loops over images
                ),
                augmentation.RandomHorizontalFlip(recipe.flip),
            ]  # fmt: skip
        if photometry:
            steps += [*_kornia_colors(augmentation, recipe), _Normalize()]
        self.steps = nn.Sequential(*steps)
        self.full_white = 1.0 if photometry else 255.0

    def forward(self, batch: Tensor) -> Tensor:
        if batch.ndim != 4 or batch.dtype != torch.uint8:
            raise ArgumentError(f"batch must be uint8 (N, 3, H, W), got {batch.dtype} of shape {tuple(batch.shape)}")
        augmented = self.steps(batch.to(torch.float32).div_(255))
        return augmented if self.full_white == 1 else augmented * self.full_white


def _kornia_colors(augmentation: Any, recipe: Recipe) -> list[nn.Module]:
    # With a fixed order, Kornia does not look at the draws to leave steps out.
    jitter = augmentation.ColorJitter(**recipe.color_ranges(), p=recipe.jitter, order=(0, 1, 2, 3))
    steps = {
        jitter: recipe.jitter,
        augmentation.RandomGrayscale(p=recipe.gray): recipe.gray,
        _Blur(recipe.blur, recipe.blur_sigma): recipe.blur,
        _Solarize(recipe.solarize): recipe.solarize,
    }
    return [step for step, probability in steps.items() if probability > 0]


class _Sometimes(nn.Module):
    """Changes each image of a batch with a probability. Kornia's own blur and solarize read values back."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def change(self, batch: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Tensor) -> Tensor:
        chosen = torch.rand(len(batch), 1, 1, 1, device=batch.device) < self.probability
        return torch.where(chosen, self.change(batch), batch)


class _Blur(_Sometimes):
    def __init__(self, probability: float, sigmas: Range):
        super().__init__(probability)
        self.sigmas = sigmas

    def change(self, batch: Tensor) -> Tensor:
        from kornia.filters import filter2d_separable

        sigma = torch.empty(len(batch), 1, device=batch.device).uniform_(*self.sigmas)
        offsets = torch.arange(_BLUR_PX, device=batch.device) - _BLUR_PX // 2
        kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
        kernel = kernel / kernel.sum(1, keepdim=True)
        return filter2d_separable(batch, kernel, kernel)


class _Solarize(_Sometimes):
    def change(self, batch: Tensor) -> Tensor:
        return torch.where(batch < (_SOLARIZE_FROM - 0.5) / 255, batch, 1 - batch)


class _Normalize(nn.Module):
    """Kornia's own keeps mean and std on the CPU, and copies both to the device with each batch."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        return batch.sub(self.mean).div_(self.std)


def import_albumentations() -> Any:
    """Import the library without letting it ask its server for a newer version."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    return albumentations


def _to_pil(image: Any) -> Any:
    from torchvision.transforms.functional import to_pil_image

    return to_pil_image(image) if isinstance(image, Tensor) else image


# Do the libraries do the same work? Equal draws must give equal pixels.

_NO_CHANGE = Recipe(scale=(1, 1), ratio=(1, 1), flip=0, jitter=0)
_JITTER = replace(_NO_CHANGE, brightness=(1, 1), contrast=(1, 1), saturation=(1, 1), hue=(0, 0), jitter=1)

# Recipes without randomness: one operation each, on a whole square image.
FIXED = {
    "shrink": replace(_NO_CHANGE, size=112),
    "enlarge": replace(_NO_CHANGE, size=320),
    "flip": replace(_NO_CHANGE, flip=1),
    "brightness": replace(_JITTER, brightness=(1.3, 1.3)),
    "contrast": replace(_JITTER, contrast=(0.7, 0.7)),
    "saturation": replace(_JITTER, saturation=(0.6, 0.6)),
    "hue": replace(_JITTER, hue=(0.08, 0.08)),
    "gray": replace(_NO_CHANGE, gray=1),
    "blur": replace(_NO_CHANGE, blur=1, blur_sigma=(1.5, 1.5)),
    "solarize": replace(_NO_CHANGE, solarize=1),
}


def agreement(images: Sequence[Tensor], libraries: Sequence[str] = LIBRARIES) -> "pd.DataFrame":
    """Compare the libraries with torchvision's v2 on the same pixels, operation by operation.

    Args:
        images: uint8 (3, H, W) with H = W = 224, so that only "shrink" and "enlarge" resize.
        libraries: Names from `LIBRARIES`.

    Returns:
        One row per operation and library: `operation`, `library`, `mean` and `largest` absolute difference, on the
        scale of 0 to 255.

    Raises:
        ValueError: an image has another shape.

    Taught in: notebooks/05_albumentations.ipynb
    """
    import pandas as pd  # here: augmenting needs none

    wrong = [tuple(image.shape) for image in images if tuple(image.shape) != (3, 224, 224)]
    if wrong:
        raise ArgumentError(f"images must have shape (3, 224, 224), got {wrong[0]}")
    rows = []
    for operation, recipe in FIXED.items():
        expected = _apply_to_all(make_augment(recipe, "v2"), images)
        for library in libraries:
            if library != "v2":
                found = _apply_to_all(_per_image(recipe, library), images)
                off = (found - expected).abs()
                rows.append(
                    {"operation": operation, "library": library, "mean": float(off.mean()), "largest": float(off.max())}
                )
    return pd.DataFrame(rows)


def _per_image(recipe: Recipe, library: str) -> Callable[[Tensor], Tensor]:
    augment = make_augment(recipe, library)
    return (lambda image: augment(image[None])[0]) if getattr(augment, "takes_batches", False) else augment


def _apply_to_all(augment: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> Tensor:
    """Results on the scale of 0 to 255, without the normalization."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return torch.stack([(augment(image) * std + mean) * 255 for image in images])


def plot_images(
    images: Tensor | Sequence[Tensor], titles: Sequence[str] | None = None, *, columns: int = 8, message: str = ""
) -> "Figure":
    """Draw images side by side.

    Args:
        images: uint8 (3, H, W), or floating point with values 0 to 1.
        titles: One per image.
        columns: Images per row.
        message: What the images show, computed from them; written above all.

    >>> figure = lk.plot_images([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)], ["black", "white"])
    """
    import matplotlib.pyplot as plt  # here: augmenting needs no plotting library

    from labkit.measure.plots import SMALL_PT, WIDTH_IN, characters_per_line, write_title

    rows, width = math.ceil(len(images) / columns), WIDTH_IN / columns
    names = [fill(title, characters_per_line(width, 1.1 * SMALL_PT)) for title in titles or ()]
    n_lines = max((name.count("\n") + 1 for name in names), default=0)
    size = (WIDTH_IN, (width + 0.17 * n_lines) * rows + (0.3 if message else 0))
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, (axis, image) in enumerate(zip(axes.flat, images, strict=False)):
        pixels = image if image.dtype == torch.uint8 else image.clamp(0, 1)
        axis.imshow(pixels.cpu().permute(1, 2, 0).numpy())
        if names:
            axis.set_title(names[number], fontsize=SMALL_PT)
    if message:
        write_title(figure, message)
    return figure
