"""Marigold's training pairs, over any store: RGB, depth in meters, masks and normalized depth.

Each set has a preset: how it stores depth, which pixels are valid, how its list file names the pairs. The tensors are
Marigold's, bit for bit: `reference` computes them by its own steps in its own order, all at full size, resized last;
the fast way gives the same bits. After decoding, all steps but one treat each pixel alone, so they can follow the
resize, and a table over all pixel values can replace them. The exception is the quantiles, which need the whole
picture, but only how often each value occurs.
"""

import os
import random
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from labkit.data.decode import PixelLimit, load_pixels, open_image
from labkit.data.remote import as_store
from labkit.data.stores import read_bytes
from labkit.errors import ArgumentError, DecodeError, MissingFileError, MissingKeyError
from labkit.util.arguments import require_choice, require_local_path
from labkit.util.strings import PackedStrings

# (top, bottom, left, right): fractions of height and width, or pixels.
REGIONS = {
    "garg": (0.40810811, 0.99189189, 0.03594771, 0.96405229),
    "eigen": (0.3324324, 0.91351351, 0.0359477, 0.96405229),
    "nyu": (45, 471, 41, 601),
}


@dataclass(frozen=True)
class Preset:
    """How one depth set is stored, cropped and masked.

    Args:
        per_meter: The stored integer for one meter.
        min_m: Valid depths are greater than this, in meters.
        max_m: Valid depths are less than this, in meters.
        columns: The files that a line of the list names, in order. After a pair, a third column may follow (KITTI's
            focal length); it is ignored.
        crop: (height, width) cropped from the bottom center before anything else.
        train_mask: Region outside which no pixel is valid in training, a key of `REGIONS`.
        eval_mask: The same in evaluation.
        train_size: (height, width) of the result in training.
    """

    per_meter: float
    min_m: float
    max_m: float
    columns: tuple[str, ...] = ("rgb", "depth")
    crop: tuple[int, int] | None = None
    train_mask: str | None = None
    eval_mask: str | None = None
    train_size: tuple[int, int] | None = None

    def crop_slices(self, height: int, width: int) -> tuple[slice, slice]:
        """Rows and columns of a picture that the crop keeps. Raises ValueError if the picture is too small."""
        new_height, new_width = self.crop or (height, width)
        top, left = height - new_height, (width - new_width) // 2
        if min(top, left) < 0:
            raise ArgumentError(f"{height} x {width} pixels (height x width) cannot be cropped to {self.crop}")
        return slice(top, height), slice(left, left + new_width)

    def region(self, *, train: bool) -> str | None:
        """Name of the region that the masks keep, or None."""
        return self.train_mask if train else self.eval_mask


def region_slices(name: str | None, height: int, width: int) -> tuple[slice, slice]:
    """Rows and columns of a region; all of them without a name."""
    top, bottom, left, right = REGIONS[name] if name else (0, height, 0, width)
    if isinstance(top, float):
        top, bottom, left, right = int(top * height), int(bottom * height), int(left * width), int(right * width)
    return slice(top, bottom), slice(left, right)


_REMEDY = "course.make_depth(root, count) makes pairs and a list"
_KITTI_CROP = (352, 1216)

PRESETS = {
    "hypersim": Preset(1000.0, 1e-5, 65.0, train_size=(480, 640)),
    "vkitti": Preset(100.0, 1e-5, 80, crop=_KITTI_CROP, eval_mask="eigen"),
    "nyu": Preset(1000.0, 1e-3, 10.0, columns=("rgb", "depth", "filled"), train_mask="nyu", eval_mask="nyu"),
    "kitti": Preset(256.0, 1e-5, 80, crop=_KITTI_CROP, train_mask="eigen", eval_mask="eigen"),
}


class FileList(NamedTuple):
    """The pairs of a list file that have a depth.

    Args:
        names: Column -> file names, in the order of the list.
        lines: Line number of each pair, from 1.
        n_without_depth: Lines left out because their depth is `None`.
    """

    names: dict[str, PackedStrings]
    lines: np.ndarray
    n_without_depth: int


def read_list(path: str | os.PathLike, preset: Preset) -> FileList:
    """Read a list file: one pair per line, its file names separated by white space.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has a wrong number of columns, or there is no pair; names the file, the line and a remedy.
    """
    try:  # as Python reads a file: `str.splitlines` would also split at U+2028 and the like
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingFileError(f"{path} is not a list file: {_REMEDY}") from error
    accepted, names_by_line = sorted({len(preset.columns), 3}), {}
    for number, line in enumerate(lines, 1):
        names = line.split()
        if len(names) not in accepted:
            raise ArgumentError(
                f"line {number} of {path} has {len(names)} columns instead of {' or '.join(map(str, accepted))}: each "
                f"line lists {', '.join(preset.columns)}, in this order, as names without blanks; is this list for "
                "another preset?"
            )
        if names[1] != "None":  # KITTI has pictures without a depth map
            names_by_line[number] = names[: len(preset.columns)]
    if not names_by_line:
        raise ArgumentError(f"{path} names no pair that has a depth: {_REMEDY}")
    columns = map(PackedStrings, zip(*names_by_line.values(), strict=True))
    numbers = np.fromiter(names_by_line, np.int64)
    return FileList(dict(zip(preset.columns, columns, strict=True)), numbers, len(lines) - len(numbers))


QUANTILES = (0.02, 1.0 - 0.02)  # of the valid depths; normalized to -1 and 1
FAR_PLANE = 1.0  # value of invalid pixels in the filled depth


def plain_sample(pictures: dict[str, np.ndarray], preset: Preset, *, train: bool, flipped: bool) -> dict[str, Tensor]:
    """All tensors of one pair, by Marigold's steps in their order.

    Args:
        pictures: Column of the list -> pixels as stored: `rgb` uint8 (H, W, 3), `depth` and `filled` uint16 (H, W).
        preset: The set that the pictures belong to.
        train: Add normalized depth, mirror if `flipped`, and resize.
        flipped: Mirror left and right.

    Returns:
        The tensors of a `DepthPairs` item, without `index` and the path.

    Raises:
        ValueError: the pictures are too small for the crop, none of their pixels has a valid depth, or in training
            all valid depths are the same.
    """
    crop = preset.crop_slices(*pictures["rgb"].shape[:2])
    raw = meters(pictures["depth"], preset)[None]
    filled = meters(pictures["filled"], preset)[None] if "filled" in pictures else raw.clone()
    rasters = {**rgb_tensors(pictures["rgb"]), "depth_raw_linear": raw, "depth_filled_linear": filled}
    rasters = {name: raster[:, crop[0], crop[1]] for name, raster in rasters.items()}
    inside = torch.zeros_like(rasters["depth_raw_linear"], dtype=torch.bool)
    rows, columns = region_slices(preset.region(train=train), *inside.shape[-2:])
    inside[:, rows, columns] = True
    for kind in ("raw", "filled"):
        rasters[f"valid_mask_{kind}"] = within_limits(rasters[f"depth_{kind}_linear"], preset) & inside
    if not train:
        return rasters
    if flipped:
        rasters = {name: raster.flip(-1) for name, raster in rasters.items()}
    for kind in ("raw", "filled"):
        depth = rasters[f"depth_{kind}_linear"]
        depths = depth[rasters[f"valid_mask_{kind}"] & (depth > 0)]
        require_valid_depths(len(depths))
        rasters[f"depth_{kind}_norm"] = scale_depth(depth, torch.quantile(depths, torch.tensor(QUANTILES)))
    rasters["depth_filled_norm"][~rasters["valid_mask_filled"]] = FAR_PLANE
    if preset.train_size is None:
        return rasters
    size = list(preset.train_size)
    return {name: resize(raster, size, InterpolationMode.NEAREST_EXACT) for name, raster in rasters.items()}


def rgb_tensors(pixels: np.ndarray) -> dict[str, Tensor]:
    """RGB as int32, 0 to 255, and as float32, -1 to 1; computed in int64 and float64."""
    rgb = np.transpose(pixels, (2, 0, 1)).astype(int)
    return {"rgb_int": torch.from_numpy(rgb).int(), "rgb_norm": torch.from_numpy(rgb / 255.0 * 2.0 - 1.0).float()}


def meters(pixels: np.ndarray, preset: Preset) -> Tensor:
    """Depth in meters, float32, computed in float64."""
    return torch.from_numpy(pixels / preset.per_meter).float()


def within_limits(depth: Tensor, preset: Preset) -> Tensor:
    """Whether each depth is strictly between the preset's limits."""
    return (depth > preset.min_m) & (depth < preset.max_m)


def scale_depth(depth: Tensor, near_far: Tensor) -> Tensor:
    """Scale linearly from near, -1, to far, 1; clip there. Raises ValueError where there is nothing between them."""
    near, far = near_far
    if not near < far:
        low, high = (f"{share:.0%}" for share in QUANTILES)
        raise ArgumentError(
            f"its depths have no range: {low} and {high} of the valid ones lie within {near:g} m, and scaling by that "
            "divides by zero: remove the pair from the list"
        )
    return torch.clip((depth - near) / (far - near) * 2.0 - 1.0, -1.0, 1.0)


def require_valid_depths(n_valid: int) -> None:
    """Raise ValueError if there is no depth to take quantiles of."""
    if not n_valid:
        raise ArgumentError("no pixel has a valid depth: remove the pair from the list, or check the preset")


def fast_sample(pictures: dict[str, np.ndarray], preset: Preset, *, train: bool, flipped: bool) -> dict[str, Tensor]:
    """The tensors of `plain_sample`, bit for bit."""
    crop = preset.crop_slices(*pictures["rgb"].shape[:2])
    pictures = {column: pixels[crop] for column, pixels in pictures.items()}
    sides = pictures["rgb"].shape[:2]
    region = region_slices(preset.region(train=train), *sides)
    rows, columns = map(_nearest_pixels, sides, (train and preset.train_size) or sides)  # those that make the result
    if flipped:
        columns = sides[1] - 1 - columns  # mirror first: mirroring a resized picture would pick other neighbors
    in_rows, in_columns = (
        (pixels >= part.start) & (pixels < part.stop) for pixels, part in zip((rows, columns), region, strict=True)
    )
    inside = in_rows[:, None] & in_columns
    meters_of, is_valid = _depth_tables(preset)

    def selected(column: str) -> np.ndarray:
        return pictures[column].take(rows, axis=0).take(columns, axis=1)

    def depth_tensors(column: str) -> list[Tensor]:
        """Depth in meters, its mask and, in training, normalized depth."""
        linear = torch.from_numpy(meters_of.take(selected(column)))[None]
        mask = torch.from_numpy(is_valid.take(selected(column)) & inside)[None]
        norm = [scale_depth(linear, _near_far(pictures[column][region], preset))] if train else []
        return [linear, mask, *norm]

    raw = depth_tensors("depth")
    filled = depth_tensors("filled") if "filled" in pictures else [tensor.clone() for tensor in raw]
    if train:
        filled[2][~filled[1]] = FAR_PLANE
    planes = np.ascontiguousarray(selected("rgb").transpose(2, 0, 1))
    rasters = {"rgb_int": torch.from_numpy(planes).int(), "rgb_norm": torch.from_numpy(_rgb_table().take(planes))}
    for name, *both in zip(("depth_{}_linear", "valid_mask_{}", "depth_{}_norm"), raw, filled, strict=False):
        rasters |= {name.format(kind): tensor for kind, tensor in zip(("raw", "filled"), both, strict=True)}
    return rasters


@cache
def _nearest_pixels(length: int, new_length: int) -> np.ndarray:
    """The pixel that each pixel of a resized side copies. torch does the rounding: its result is resized numbers."""
    numbers = torch.arange(length, dtype=torch.float32).view(1, 1, -1, 1)  # float32: rounding depends on the dtype
    return interpolate(numbers, size=(new_length, 1), mode="nearest-exact").flatten().long().numpy()


@cache
def _rgb_table() -> np.ndarray:
    """`rgb_norm` of each value."""
    return rgb_tensors(np.arange(256, dtype=np.uint8)[None, :, None])["rgb_norm"].numpy().ravel()


@cache
def _depth_tables(preset: Preset) -> tuple[np.ndarray, np.ndarray]:
    """Meters, float32, and validity of each 16-bit value."""
    depths = meters(np.arange(1 << 16), preset)
    return depths.numpy(), within_limits(depths, preset).numpy()


def _near_far(pixels: np.ndarray, preset: Preset) -> Tensor:
    """`torch.quantile` of the valid depths, by counting values instead of sorting pixels."""
    meters_of, is_valid = _depth_tables(preset)
    values = np.flatnonzero(is_valid & (meters_of > 0))
    last_ranks = np.bincount(pixels.ravel(), minlength=1 << 16)[values].cumsum()
    require_valid_depths(last_ranks[-1])
    ranks = torch.tensor(QUANTILES).to(_rank_dtype()) * (last_ranks[-1].item() - 1)
    neighbors = torch.stack([ranks, ranks.ceil()]).long().numpy()
    below, above = torch.from_numpy(meters_of[values[np.searchsorted(last_ranks, neighbors, side="right")]])
    return torch.lerp(below, above, (ranks - ranks.long()).float())


@cache
def _rank_dtype() -> torch.dtype:
    """The dtype in which `torch.quantile` computes ranks: float32, or float64 since PyTorch's pull request 187574."""
    length, q = 96_313, torch.tensor(QUANTILES[1])
    rank = q * (length - 1)
    step = (torch.arange(length) > rank.long()).float()  # 0, then 1: its quantile is the fraction of the rank
    return torch.float32 if torch.quantile(step, q) == rank.frac() else torch.float64


MODES = ("train", "evaluate")
_RGB = (3,), ("uint8",), "8-bit RGB"
_DEPTH = (), ("uint8", "uint16"), "8- or 16-bit gray"


class DepthPairs(Dataset):
    """Pairs of a photo and its depth, the same bits as Marigold's own data set.

    Args:
        store: Where the encoded pictures are: a folder, a tar (with or without `./` before its names), a server.
        filename_list: Text file, one pair per line: `rgb depth`, for NYU `rgb depth filled`. KITTI's lines may end with
            a focal length; lines whose depth is `None` are left out. Names are relative to the store's root.
        preset: `"hypersim"`, `"vkitti"`, `"nyu"`, `"kitti"`, or a `Preset`, such as
            `dataclasses.replace(PRESETS["kitti"], eval_mask="garg")`.
        mode: `"train"`: mirror at random, normalize depth, resize. `"evaluate"`: none of these.
        flip_p: Probability of mirroring a pair in training; one call of `random.random()` per pair.
        fast: Resize before computing, skip Marigold's detours through int64 and float64, and take quantiles from a
            histogram. The bits are the same: the difference is 0, for every key of every preset.

    An item is a dict; H x W is the preset's `train_size`, or else the size of the (cropped) picture.

    Items:
        rgb_int: int32 (3, H, W), 0 to 255. rgb_norm: float32 (3, H, W), -1 to 1.
        depth_raw_linear, depth_filled_linear: float32 (1, H, W), meters; equal if the set has no filled depth.
        valid_mask_raw, valid_mask_filled: bool (1, H, W).
        depth_raw_norm, depth_filled_norm: float32 (1, H, W), -1 to 1 from the 2 % to the 98 % quantile of the valid
            depths; invalid pixels of the filled one are 1. Training only.
        index: int. rgb_relative_path: str.

    >>> pairs = lk.DepthPairs(lk.TarStore("hypersim.tar"), "list.txt", fast=True)  # doctest: +SKIP
    >>> pairs[0]["rgb_int"].shape  # doctest: +SKIP
    torch.Size([3, 480, 640])

    Raises:
        FileNotFoundError: no list file. ValueError: a line that names no pair, an unknown preset or mode.
        KeyError: (items) the store has no such file. DecodeError: (items) a file is not the expected picture.

    Source: prs-eth/Marigold, src/dataset, src/util/depth_transform.py. Taught in: notebooks/09_marigold_storage.ipynb
    """

    def __init__(
        self,
        store: Any,
        filename_list: str | os.PathLike,
        *,
        preset: str | Preset = "hypersim",
        mode: str = "train",
        flip_p: float = 0.5,
        fast: bool = False,
    ):
        self.preset = preset if isinstance(preset, Preset) else PRESETS[require_choice("preset", preset, PRESETS)]
        self.mode = require_choice("mode", mode, MODES)
        self.flip_p = flip_p
        self.fast = fast
        self.list = require_local_path("filename_list", filename_list)
        self._pixel_limit = PixelLimit()
        self.names, self.lines, self.n_without_depth = read_list(self.list, self.preset)
        self.keys = self.names["rgb"]
        is_reader = callable(getattr(store, "read", None)) and not isinstance(store, type)
        self.store: Any = store if is_reader else as_store(store)  # the list has the keys

    def __repr__(self) -> str:
        note = f", {self.n_without_depth} lines without depth left out" if self.n_without_depth else ""
        return f"DepthPairs({self.list.name!r}, {len(self)} pairs, mode={self.mode!r}{note})"

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = f"line {self.lines[index]} of {self.list}"
        try:
            encoded = {column: read_bytes(self.store, names[index]) for column, names in self.names.items()}
        except KeyError as error:
            raise MissingKeyError(
                f"{error.args[0]}, but {place} names it: names are relative to the store's root"
            ) from error
        try:
            pictures = {column: decode_picture(data, column) for column, data in encoded.items()}
            sizes = {column: pixels.shape[:2] for column, pixels in pictures.items()}
            if len(set(sizes.values())) > 1:
                raise ArgumentError(f"the pictures of a pair differ in size (height, width): {sizes}")
            train, make = self.mode == "train", fast_sample if self.fast else plain_sample
            rasters = make(pictures, self.preset, train=train, flipped=train and random.random() < self.flip_p)
        except ValueError as error:
            raise type(error)(f"{self.keys[index]} ({place}): {error}") from error
        return {**rasters, "index": index, "rgb_relative_path": self.keys[index]}


def decode_picture(data: bytes, column: str) -> np.ndarray:
    """Pixels as they are stored: `rgb` uint8 (H, W, 3); `depth` and `filled` uint16 or uint8 (H, W).

    Raises:
        DecodeError: not such a picture; names the column.
    """
    channels, dtypes, kind = _RGB if column == "rgb" else _DEPTH
    try:
        pixels = np.asarray(load_pixels(data, open_image(data)))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise all kinds of errors
        raise DecodeError(f"{column}: no complete picture in {len(data)} bytes: {error}") from error
    if pixels.ndim < 2 or pixels.shape[2:] != channels or pixels.dtype not in dtypes:
        raise DecodeError(f"{column}: {pixels.dtype} of shape {pixels.shape} is not {kind}: are the columns in order?")
    return pixels
