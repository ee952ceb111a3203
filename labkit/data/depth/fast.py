"""Marigold's tensors by a shorter way, with the same bits.

After decoding, every step but one looks at each pixel alone: it may as well follow the resize, and a table over the
values that a pixel can have may stand for it. The one is the quantiles. They need the whole picture, but only how often
each value occurs in it.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from labkit.data.depth.presets import Preset, region_slices
from labkit.data.depth.reference import FAR_PLANE, QUANTILES, refuse_empty, rgb_tensors, scale_depth, valid_mask


class _View(NamedTuple):
    """Which pixels of the cropped picture make the result: int64 rows and columns, and whether each is in the mask."""

    rows: np.ndarray
    columns: np.ndarray
    inside: np.ndarray

    def of(self, pixels: np.ndarray) -> np.ndarray:
        return pixels.take(self.rows, axis=0).take(self.columns, axis=1)


def fast_sample(pictures: dict[str, np.ndarray], preset: Preset, *, train: bool, flipped: bool) -> dict[str, Tensor]:
    """As `plain_sample`, and equal to it bit for bit."""
    crop = preset.crop_slices(*pictures["rgb"].shape[:2])
    pictures = {column: pixels[crop] for column, pixels in pictures.items()}
    height, width = pictures["rgb"].shape[:2]
    region = region_slices(preset.region(train=train), height, width)
    view = _view(height, width, preset.train_size if train else None, region, flipped)
    raw = _depth(pictures["depth"], preset, view, region if train else None)
    filled = {name: tensor.clone() for name, tensor in raw.items()}
    if "filled" in pictures:
        filled = _depth(pictures["filled"], preset, view, region if train else None)
    if train:
        filled["norm"][~filled["mask"]] = FAR_PLANE
    return {**_rgb(view.of(pictures["rgb"])), **_named(raw, filled)}


def _named(raw: dict[str, Tensor], filled: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"linear": "depth_{}_linear", "mask": "valid_mask_{}", "norm": "depth_{}_norm"}
    kinds = {"raw": raw, "filled": filled}
    return {names[part].format(kind): tensors[part] for part in raw for kind, tensors in kinds.items()}


def _view(height: int, width: int, size: tuple[int, int] | None, region: tuple[slice, slice], flipped: bool) -> _View:
    rows, columns = (_nearest(*sides) for sides in zip((height, width), size or (height, width), strict=True))
    if flipped:
        columns = width - 1 - columns  # of the mirrored picture: resizing first would round to the other neighbour
    in_rows, in_columns = (
        (pixels >= part.start) & (pixels < part.stop) for pixels, part in zip((rows, columns), region, strict=True)
    )
    return _View(rows, columns, in_rows[:, None] & in_columns)


@cache
def _nearest(length: int, new_length: int) -> np.ndarray:
    """Which pixel each pixel of a resized side is a copy of: torch's own rounding, by resizing the numbers."""
    numbers = torch.arange(length, dtype=torch.float32).view(1, 1, -1, 1)  # float32: torch rounds by the values' type
    return interpolate(numbers, size=(new_length, 1), mode="nearest-exact").flatten().long().numpy()


def _rgb(pixels: np.ndarray) -> dict[str, Tensor]:
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return {"rgb_int": torch.from_numpy(planes).int(), "rgb_norm": torch.from_numpy(_rgb_table().take(planes))}


def _depth(pixels: np.ndarray, preset: Preset, view: _View, region: tuple[slice, slice] | None) -> dict[str, Tensor]:
    """`linear`, `mask` and, where the training region is given, `norm`."""
    metres, valid = _depth_tables(preset)
    kept = view.of(pixels)
    linear = torch.from_numpy(metres.take(kept))[None]
    mask = torch.from_numpy(valid.take(kept) & view.inside)[None]
    if region is None:
        return {"linear": linear, "mask": mask}
    return {"linear": linear, "mask": mask, "norm": scale_depth(linear, _near_far(pixels[region], preset))}


@cache
def _rgb_table() -> np.ndarray:
    """What `rgb_tensors` makes of each value."""
    values = np.arange(256, dtype=np.uint8)
    return rgb_tensors(values[None, :, None])["rgb_norm"].numpy().ravel()


@cache
def _depth_tables(preset: Preset) -> tuple[np.ndarray, np.ndarray]:
    """Metres, float32, and validity of each value that 16 bits can hold."""
    metres = torch.from_numpy(np.arange(1 << 16) / preset.per_metre).float()
    return metres.numpy(), valid_mask(metres[None, None], preset)[0, 0].numpy()


def _near_far(pixels: np.ndarray, preset: Preset) -> Tensor:
    """`torch.quantile` of the valid depths, from how often each value occurs instead of a sort."""
    metres, valid = _depth_tables(preset)
    values = np.flatnonzero(valid & (metres > 0))
    counts = np.bincount(pixels.ravel(), minlength=1 << 16)[values]
    last_ranks = counts.cumsum()
    refuse_empty(last_ranks[-1])
    ranks = torch.tensor(QUANTILES).to(_rank_dtype()) * (last_ranks[-1].item() - 1)
    below, above = (
        torch.from_numpy(metres[values[np.searchsorted(last_ranks, rank.long().numpy(), side="right")]])
        for rank in (ranks, ranks.ceil())
    )
    return torch.lerp(below, above, (ranks - ranks.long()).float())


@cache
def _rank_dtype() -> torch.dtype:
    """In which precision `torch.quantile` computes ranks: float32 once, float64 since pull request 187574. Ask it."""
    length, q = 96_313, torch.tensor(QUANTILES[1])
    rank = q * (length - 1)
    step = (torch.arange(length) > rank.long()).float()  # 0, then 1: its quantile is the fraction of the rank
    return torch.float32 if torch.quantile(step, q) == rank.frac() else torch.float64
