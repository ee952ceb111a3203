"""Marigold's tensors by a faster way, with the same bits.

After decoding, all steps but one treat each pixel alone: they can follow the resize, and a table over all pixel values
can replace them. The exception is the quantiles. They need the whole picture, but only how often each value occurs.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from labkit.data.depth.presets import Preset, region_slices
from labkit.data.depth.reference import FAR_PLANE, QUANTILES, require_valid_depths, rgb_tensors, scale_depth, valid_mask


class _View(NamedTuple):
    """The pixels of the cropped picture that make the result: int64 rows and columns, and which lie in the region."""

    rows: np.ndarray
    columns: np.ndarray
    inside: np.ndarray
    region: tuple[slice, slice]

    def select(self, pixels: np.ndarray) -> np.ndarray:
        return pixels.take(self.rows, axis=0).take(self.columns, axis=1)


def fast_sample(pictures: dict[str, np.ndarray], preset: Preset, *, train: bool, flipped: bool) -> dict[str, Tensor]:
    """The tensors of `plain_sample`, bit for bit."""
    crop = preset.crop_slices(*pictures["rgb"].shape[:2])
    pictures = {column: pixels[crop] for column, pixels in pictures.items()}
    sides = pictures["rgb"].shape[:2]
    region = region_slices(preset.region(train=train), *sides)
    view = _make_view(sides, (train and preset.train_size) or sides, region, flipped)
    raw = _depth_tensors(pictures["depth"], preset, view, train)
    if "filled" in pictures:
        filled = _depth_tensors(pictures["filled"], preset, view, train)
    else:
        filled = {name: tensor.clone() for name, tensor in raw.items()}
    if train:
        filled["depth_{}_norm"][~filled["valid_mask_{}"]] = FAR_PLANE
    depth = {name.format(kind): tensors[name] for name in raw for kind, tensors in (("raw", raw), ("filled", filled))}
    return {**_rgb_tensors(view.select(pictures["rgb"])), **depth}


def _make_view(sides: tuple[int, int], new_sides: tuple[int, int], region: tuple[slice, slice], flipped: bool) -> _View:
    rows, columns = map(_nearest_pixels, sides, new_sides)
    if flipped:
        columns = sides[1] - 1 - columns  # mirror first: mirroring a resized picture would pick other neighbours
    in_rows, in_columns = (
        (pixels >= part.start) & (pixels < part.stop) for pixels, part in zip((rows, columns), region, strict=True)
    )
    return _View(rows, columns, in_rows[:, None] & in_columns, region)


@cache
def _nearest_pixels(length: int, new_length: int) -> np.ndarray:
    """The pixel that each pixel of a resized side copies. torch does the rounding: its result is resized numbers."""
    numbers = torch.arange(length, dtype=torch.float32).view(1, 1, -1, 1)  # float32: rounding depends on the dtype
    return interpolate(numbers, size=(new_length, 1), mode="nearest-exact").flatten().long().numpy()


def _rgb_tensors(pixels: np.ndarray) -> dict[str, Tensor]:
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return {"rgb_int": torch.from_numpy(planes).int(), "rgb_norm": torch.from_numpy(_rgb_table().take(planes))}


def _depth_tensors(pixels: np.ndarray, preset: Preset, view: _View, train: bool) -> dict[str, Tensor]:
    """Depth in metres, its mask and, in training, normalised depth."""
    metres, valid = _depth_tables(preset)
    selected = view.select(pixels)
    linear = torch.from_numpy(metres.take(selected))[None]
    mask = torch.from_numpy(valid.take(selected) & view.inside)[None]
    tensors = {"depth_{}_linear": linear, "valid_mask_{}": mask}
    if train:
        tensors["depth_{}_norm"] = scale_depth(linear, _near_far(pixels[view.region], preset))
    return tensors


@cache
def _rgb_table() -> np.ndarray:
    """`rgb_norm` of each value."""
    values = np.arange(256, dtype=np.uint8)
    return rgb_tensors(values[None, :, None])["rgb_norm"].numpy().ravel()


@cache
def _depth_tables(preset: Preset) -> tuple[np.ndarray, np.ndarray]:
    """Metres, float32, and validity of each 16-bit value."""
    metres = torch.from_numpy(np.arange(1 << 16) / preset.per_metre).float()
    return metres.numpy(), valid_mask(metres[None, None], preset)[0, 0].numpy()


def _near_far(pixels: np.ndarray, preset: Preset) -> Tensor:
    """`torch.quantile` of the valid depths, by counting values instead of sorting pixels."""
    metres, valid = _depth_tables(preset)
    values = np.flatnonzero(valid & (metres > 0))
    counts = np.bincount(pixels.ravel(), minlength=1 << 16)[values]
    last_ranks = counts.cumsum()
    require_valid_depths(last_ranks[-1])
    ranks = torch.tensor(QUANTILES).to(_rank_dtype()) * (last_ranks[-1].item() - 1)
    neighbours = torch.stack([ranks, ranks.ceil()]).long().numpy()
    below, above = torch.from_numpy(metres[values[np.searchsorted(last_ranks, neighbours, side="right")]])
    return torch.lerp(below, above, (ranks - ranks.long()).float())


@cache
def _rank_dtype() -> torch.dtype:
    """The dtype in which `torch.quantile` computes ranks: float32, or float64 since PyTorch's pull request 187574."""
    length, q = 96_313, torch.tensor(QUANTILES[1])
    rank = q * (length - 1)
    step = (torch.arange(length) > rank.long()).float()  # 0, then 1: its quantile is the fraction of the rank
    return torch.float32 if torch.quantile(step, q) == rank.frac() else torch.float64
