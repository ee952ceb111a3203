"""Marigold's tensors by Marigold's own steps, in its order: everything at full size, the resize last."""

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from labkit.data.depth.presets import Preset, region_slices

QUANTILES = (0.02, 1.0 - 0.02)  # of the valid depths: they become -1 and 1
FAR_PLANE = 1.0  # where an invalid pixel of the filled depth is put


def plain_sample(pictures: dict[str, np.ndarray], preset: Preset, *, train: bool, flipped: bool) -> dict[str, Tensor]:
    """All tensors of one pair.

    Args:
        pictures: Column of the list -> pixels as stored: `rgb` uint8 (H, W, 3), `depth` and `filled` uint16 (H, W).
        preset: The set that they belong to.
        train: With normalised depth, mirrored if `flipped`, and resized.
        flipped: Mirror left and right.

    Returns:
        What `DepthPairs` lists, but for `index` and the path.

    Raises:
        ValueError: the pictures are too small for the crop, or none of their pixels has a valid depth.
    """
    rows, columns = preset.crop_slices(*pictures["rgb"].shape[:2])
    rasters = {**rgb_tensors(pictures["rgb"]), **depth_tensors(pictures, preset)}
    rasters = {name: raster[:, rows, columns] for name, raster in rasters.items()}
    region = preset.region(train=train)
    for kind in ("raw", "filled"):
        rasters[f"valid_mask_{kind}"] = valid_mask(rasters[f"depth_{kind}_linear"], preset, region)
    return _for_training(rasters, preset, flipped) if train else rasters


def rgb_tensors(pixels: np.ndarray) -> dict[str, Tensor]:
    """int32 0 to 255 and float32 -1 to 1, by way of int64 and float64."""
    rgb = np.transpose(pixels, (2, 0, 1)).astype(int)
    return {"rgb_int": torch.from_numpy(rgb).int(), "rgb_norm": torch.from_numpy(rgb / 255.0 * 2.0 - 1.0).float()}


def depth_tensors(pictures: dict[str, np.ndarray], preset: Preset) -> dict[str, Tensor]:
    """Metres, float32 by way of float64; where the set has no filled depth, the raw one stands in."""
    raw = torch.from_numpy(pictures["depth"] / preset.per_metre).float()[None]
    filled = raw.clone()
    if "filled" in pictures:
        filled = torch.from_numpy(pictures["filled"] / preset.per_metre).float()[None]
    return {"depth_raw_linear": raw, "depth_filled_linear": filled}


def valid_mask(depth: Tensor, preset: Preset, region: str | None = None) -> Tensor:
    """bool: depth strictly between the preset's limits, and inside the region."""
    rows, columns = region_slices(region, *depth.shape[-2:])
    inside = torch.zeros_like(depth, dtype=torch.bool)
    inside[:, rows, columns] = True
    return (depth > preset.min_m) & (depth < preset.max_m) & inside


def normalise_depth(depth: Tensor, valid: Tensor) -> Tensor:
    """Linear, so that the 2 % quantile of the valid depths becomes -1 and the 98 % quantile 1; clipped there."""
    depths = depth[valid & (depth > 0)]
    refuse_empty(len(depths))
    return scale_depth(depth, torch.quantile(depths, torch.tensor(QUANTILES)))


def scale_depth(depth: Tensor, near_far: Tensor) -> Tensor:
    """Near becomes -1 and far 1; clipped there."""
    near, far = near_far
    return torch.clip((depth - near) / (far - near) * 2.0 - 1.0, -1.0, 1.0)


def refuse_empty(n_valid: int) -> None:
    """Quantiles of nothing are an error."""
    if not n_valid:
        raise ValueError("no pixel has a valid depth: take the pair out of the list, or check the preset")


def _for_training(rasters: dict[str, Tensor], preset: Preset, flipped: bool) -> dict[str, Tensor]:
    if flipped:
        rasters = {name: raster.flip(-1) for name, raster in rasters.items()}
    for kind in ("raw", "filled"):
        depth, valid = rasters[f"depth_{kind}_linear"], rasters[f"valid_mask_{kind}"]
        rasters[f"depth_{kind}_norm"] = normalise_depth(depth, valid)
    rasters["depth_filled_norm"][~rasters["valid_mask_filled"]] = FAR_PLANE
    if preset.train_size is None:
        return rasters
    size = list(preset.train_size)
    return {name: resize(raster, size, InterpolationMode.NEAREST_EXACT) for name, raster in rasters.items()}
