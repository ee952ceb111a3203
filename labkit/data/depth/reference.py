"""Marigold's tensors by Marigold's own steps in their own order: all at full size, resized last."""

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from labkit.data.depth.presets import Preset, region_slices

QUANTILES = (0.02, 1.0 - 0.02)  # of the valid depths; normalised to -1 and 1
FAR_PLANE = 1.0  # value of invalid pixels in the filled depth


def plain_sample(pictures: dict[str, np.ndarray], preset: Preset, *, train: bool, flipped: bool) -> dict[str, Tensor]:
    """All tensors of one pair.

    Args:
        pictures: Column of the list -> pixels as stored: `rgb` uint8 (H, W, 3), `depth` and `filled` uint16 (H, W).
        preset: The set that the pictures belong to.
        train: Add normalised depth, mirror if `flipped`, and resize.
        flipped: Mirror left and right.

    Returns:
        The tensors of a `DepthPairs` item, without `index` and the path.

    Raises:
        ValueError: the pictures are too small for the crop, or none of their pixels has a valid depth.
    """
    rows, columns = preset.crop_slices(*pictures["rgb"].shape[:2])
    rasters = {**rgb_tensors(pictures["rgb"]), **depth_tensors(pictures, preset)}
    rasters = {name: raster[:, rows, columns] for name, raster in rasters.items()}
    region = preset.region(train=train)
    for kind in ("raw", "filled"):
        rasters[f"valid_mask_{kind}"] = valid_mask(rasters[f"depth_{kind}_linear"], preset, region)
    return _prepare_for_training(rasters, preset, flipped) if train else rasters


def rgb_tensors(pixels: np.ndarray) -> dict[str, Tensor]:
    """RGB as int32, 0 to 255, and as float32, -1 to 1; computed in int64 and float64."""
    rgb = np.transpose(pixels, (2, 0, 1)).astype(int)
    return {"rgb_int": torch.from_numpy(rgb).int(), "rgb_norm": torch.from_numpy(rgb / 255.0 * 2.0 - 1.0).float()}


def depth_tensors(pictures: dict[str, np.ndarray], preset: Preset) -> dict[str, Tensor]:
    """Depth in metres, float32, computed in float64. A set without filled depth uses the raw one."""
    raw = torch.from_numpy(pictures["depth"] / preset.per_metre).float()[None]
    filled = raw.clone()
    if "filled" in pictures:
        filled = torch.from_numpy(pictures["filled"] / preset.per_metre).float()[None]
    return {"depth_raw_linear": raw, "depth_filled_linear": filled}


def valid_mask(depth: Tensor, preset: Preset, region: str | None = None) -> Tensor:
    """Whether each depth is strictly between the preset's limits and inside the region; bool."""
    rows, columns = region_slices(region, *depth.shape[-2:])
    inside = torch.zeros_like(depth, dtype=torch.bool)
    inside[:, rows, columns] = True
    return (depth > preset.min_m) & (depth < preset.max_m) & inside


def normalise_depth(depth: Tensor, valid: Tensor) -> Tensor:
    """Scale linearly from the 2 % quantile of the valid depths, -1, to the 98 % quantile, 1; clip there."""
    depths = depth[valid & (depth > 0)]
    require_valid_depths(len(depths))
    return scale_depth(depth, torch.quantile(depths, torch.tensor(QUANTILES)))


def scale_depth(depth: Tensor, near_far: Tensor) -> Tensor:
    """Scale linearly from near, -1, to far, 1; clip there."""
    near, far = near_far
    return torch.clip((depth - near) / (far - near) * 2.0 - 1.0, -1.0, 1.0)


def require_valid_depths(n_valid: int) -> None:
    """Raise ValueError if there is no depth to take quantiles of."""
    if not n_valid:
        raise ValueError("no pixel has a valid depth: remove the pair from the list, or check the preset")


def _prepare_for_training(rasters: dict[str, Tensor], preset: Preset, flipped: bool) -> dict[str, Tensor]:
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
