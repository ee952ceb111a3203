"""Resize a crop of decoded pixels straight into its place in a batch.

There are two kinds of result, because the loaders that people use differ: `antialias=True` gives what torchvision's v2
transforms and Pillow give, `antialias=False` OpenCV's bilinear, as Albumentations uses it. Enlarged crops are the same
in both, except for rounding.
"""

import cv2
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

Box = tuple[float, float, float, float]


def resize_into(target: np.ndarray, pixels: np.ndarray, box: Box, antialias: bool) -> None:
    """Write a crop of `pixels` into `target`.

    Args:
        target: uint8 (height, width, 3), contiguous; overwritten.
        pixels: uint8 (H, W, 3).
        box: Top, left, height and width of the crop in `pixels`. Fractions of a pixel count: after decoding at 1/4,
            rounding would move the crop by up to half of a pixel that is four times as large.
        antialias: Average over all source pixels when shrinking.
    """
    if any(side % 1 for side in box):
        (_resize_fractional_antialias if antialias else _resize_fractional)(target, pixels, box)
        return
    top, left, height, width = map(int, box)
    crop = pixels[top : top + height, left : left + width]
    if antialias and (height > target.shape[0] or width > target.shape[1]):
        _resize_antialias(target, crop)
    else:
        cv2.resize(crop, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)


def flip_into(target: np.ndarray) -> None:
    """Mirror an image of a batch left to right, in place."""
    cv2.flip(target, 1, dst=target)


def _resize_antialias(target: np.ndarray, crop: np.ndarray) -> None:
    if not crop.flags.writeable:  # a mapped file: torch has no read-only tensors, and warns
        crop = crop.copy()
    # Add the batch axis before permuting: from its stride torch recognises channels-last memory, and does not copy.
    image = torch.from_numpy(crop)[None].permute(0, 3, 1, 2)
    resized = interpolate(image, target.shape[:2], mode="bilinear", antialias=True)
    np.copyto(target, resized.permute(0, 2, 3, 1)[0].numpy())


def _resize_fractional(target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
    top, left, height, width = box
    step_y, step_x = height / target.shape[0], width / target.shape[1]
    place = np.array([[step_x, 0, left + step_x / 2 - 0.5], [0, step_y, top + step_y / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(pixels, place, target.shape[1::-1], dst=target, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def _resize_fractional_antialias(target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
    top, left, height, width = box
    corners = (left, top, min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0]))
    resized = Image.fromarray(pixels).resize(target.shape[1::-1], Image.Resampling.BILINEAR, box=corners)
    np.copyto(target, np.asarray(resized))
