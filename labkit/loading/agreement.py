"""Do the libraries do the same work? Equal draws must give equal pixels."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from labkit.errors import ArgumentError
from labkit.loading.augment import LIBRARIES, MEAN, STD, Recipe, make_augment

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


def agreement(images: Sequence[Tensor], libraries: Sequence[str] = LIBRARIES) -> pd.DataFrame:
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
