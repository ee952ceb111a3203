"""Write a crop of a photo into its place, resized as torchvision, Pillow or OpenCV do."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

Box = Sequence[float]  # top, left, height, width

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class Resizer:
    """How photos and crops of them are resized.

    Args:
        antialias: Average over all source pixels when shrinking, as torchvision and Pillow do. False: as OpenCV does,
            and so Albumentations. Enlarged crops are the same in both, except for rounding.
        interpolation: One of `INTERPOLATIONS`; for others than bilinear antialiasing is needed.
    """

    antialias: bool = True
    interpolation: str = "bilinear"

    def crop(self, target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
        """Write a crop of `pixels` into `target`: pixels beyond the crop do not count, as in `RandomResizedCrop`.

        Args:
            target: uint8 (height, width, 3), contiguous; overwritten.
            pixels: uint8 (H, W, 3).
            box: Top, left, height and width of the crop in `pixels`. Fractions of a pixel count: after decoding at 1/4,
                rounding would move the crop by up to half of a pixel that is four times as large.
        """
        if any(side % 1 for side in box):
            (self._by_pillow if self.antialias else _warp)(target, pixels, box)
            return
        top, left, height, width = map(int, box)
        crop = pixels[top : top + height, left : left + width]
        is_smaller = height > target.shape[0] or width > target.shape[1]
        if self.interpolation != "bilinear":
            self._by_pillow(target, crop, (0, 0, height, width))
        elif self.antialias and is_smaller:
            _interpolate(target, crop)
        else:
            cv2.resize(crop, target.shape[1::-1], dst=target, interpolation=cv2.INTER_LINEAR)

    def fit(self, target: np.ndarray, pixels: np.ndarray, place: Sequence[float]) -> None:
        """Write a part of a whole photo that is resized first, bit for bit as torchvision's v2 resizes tensors.

        Pillow, and so timm, takes four times as long, for pixels that differ by 1 (bicubic: 2) in one of some hundreds.

        Args:
            target: As for `crop`.
            pixels: uint8 (H, W, 3).
            place: Of `center_crops`.
        """
        top, left, height, width = map(int, place)
        if (height, width) != pixels.shape[:2]:
            whole = np.empty((height, width, 3), np.uint8)
            if self.antialias:
                _interpolate(whole, pixels, self.interpolation)
            else:
                cv2.resize(pixels, (width, height), dst=whole, interpolation=cv2.INTER_LINEAR)
            pixels = whole
        seen = pixels[max(0, top) :, max(0, left) :][
            : target.shape[0] - max(0, -top), : target.shape[1] - max(0, -left)
        ]
        if seen.shape != target.shape:
            target[:] = 0
        np.copyto(target[max(0, -top) :, max(0, -left) :][: seen.shape[0], : seen.shape[1]], seen)

    def _by_pillow(self, target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
        top, left, height, width = box
        corners = (left, top, min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0]))
        resized = Image.fromarray(pixels).resize(target.shape[1::-1], INTERPOLATIONS[self.interpolation], box=corners)
        np.copyto(target, np.asarray(resized))


def _interpolate(target: np.ndarray, crop: np.ndarray, mode: str = "bilinear") -> None:
    if not crop.flags.writeable:  # a mapped file: torch has no read-only tensors, and warns
        crop = crop.copy()
    # Add the batch axis before permuting: from its stride torch recognizes channels-last memory, and does not copy.
    image = torch.from_numpy(crop)[None].permute(0, 3, 1, 2)
    resized = interpolate(image, target.shape[:2], mode=mode, antialias=True)
    np.copyto(target, resized.permute(0, 2, 3, 1)[0].numpy())


def _warp(target: np.ndarray, pixels: np.ndarray, box: Box) -> None:
    top, left, height, width = box
    step_y, step_x = height / target.shape[0], width / target.shape[1]
    place = np.array([[step_x, 0, left + step_x / 2 - 0.5], [0, step_y, top + step_y / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(pixels, place, target.shape[1::-1], dst=target, flags=flags, borderMode=cv2.BORDER_REPLICATE)
