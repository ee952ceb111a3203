"""Marigold's training pairs, over any store: RGB, depth in metres, masks and normalised depth."""

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from labkit.data.decoders import DecodeError, open_image
from labkit.data.depth.fast import fast_sample
from labkit.data.depth.presets import Preset, find_preset, read_list
from labkit.data.depth.reference import plain_sample
from labkit.data.stores import Store

MODES = ("train", "evaluate")
_KINDS = {"rgb": (3, ("uint8",), "8-bit RGB"), "depth": (2, ("uint8", "uint16"), "8- or 16-bit gray")}


class DepthPairs(Dataset):
    """Pairs of a photo and its depth, as Marigold's own data set gives them, bit for bit.

    Args:
        store: Where the encoded pictures lie: a folder, a tar (with or without `./` before its names), a server.
        filename_list: Text file, one pair a line: `rgb depth`, for NYU `rgb depth filled`. KITTI's lines may end with a
            focal length; those whose depth is `None` are left out. Names are relative to the store's root.
        preset: `"hypersim"`, `"vkitti"`, `"nyu"`, `"kitti"`, or a `Preset`, such as
            `dataclasses.replace(PRESETS["kitti"], eval_mask="garg")`.
        mode: `"train"`: mirrored at random, with normalised depth, resized. `"evaluate"`: none of this.
        flip_p: Probability of a mirrored pair in training, one draw of `random.random()` a pair.
        fast: Without Marigold's detours over int64 and float64, quantiles from a histogram, resized before anything is
            computed. The same bits: the difference is 0, for every key of every preset.

    Items: a dict. H x W are the preset's `train_size`, else the size of the (cropped) picture.
        rgb_int: int32 (3, H, W), 0 to 255. rgb_norm: float32 (3, H, W), -1 to 1.
        depth_raw_linear, depth_filled_linear: float32 (1, H, W), metres; equal where the set has no filled depth.
        valid_mask_raw, valid_mask_filled: bool (1, H, W).
        depth_raw_norm, depth_filled_norm: float32 (1, H, W), -1 to 1 from the 2 % to the 98 % quantile of the valid
            depths; invalid pixels of the filled one are 1. Training only.
        index: int. rgb_relative_path: str.

    Raises:
        FileNotFoundError: no list file. ValueError: a line of it that fits no pair, an unknown preset or mode.
        KeyError: (items) a file that the store does not hold. DecodeError: one that is no such picture.

    Source: prs-eth/Marigold, src/dataset, src/util/depth_transform.py. Taught in: notebooks/09_marigold_storage.ipynb
    """

    def __init__(
        self,
        store: Store,
        filename_list: str | os.PathLike,
        *,
        preset: str | Preset = "hypersim",
        mode: str = "train",
        flip_p: float = 0.5,
        fast: bool = False,
    ):
        self.store = store
        self.preset = find_preset(preset)
        self.mode = _checked_mode(mode)
        self.flip_p = flip_p
        self.fast = fast
        self.files = read_list(filename_list, self.preset)
        self.keys = self.files.names["rgb"]

    def __repr__(self) -> str:
        left_out = self.files.n_without_depth
        note = f", {left_out} lines without depth left out" if left_out else ""
        return f"DepthPairs({self.files.path.name!r}, {len(self)} pairs, mode={self.mode!r}{note})"

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        encoded = {column: self._read(column, index) for column in self.preset.columns}
        try:
            rasters = make_sample(encoded, self.preset, mode=self.mode, flip_p=self.flip_p, fast=self.fast)
        except ValueError as error:
            raise type(error)(f"{self.keys[index]} ({self.files.place(index)}): {error}") from error
        return {**rasters, "index": index, "rgb_relative_path": self.keys[index]}

    def _read(self, column: str, index: int) -> bytes:
        try:
            return self.store.read(self.files.names[column][index])
        except KeyError as error:
            place = self.files.place(index)
            raise KeyError(f"{error.args[0]}, but {place} names it: names start at the store's root") from error


def make_sample(
    encoded: Mapping[str, bytes],
    preset: str | Preset = "hypersim",
    *,
    mode: str = "train",
    flip_p: float = 0.5,
    fast: bool = False,
) -> dict[str, Tensor]:
    """The tensors of one pair, for files that come from elsewhere than a store, such as a stream of WebDataset shards.

    Args:
        encoded: `rgb`, `depth` and, where the preset has it, `filled`: contents of the files.
        preset, mode, flip_p, fast: As for `DepthPairs`.

    Returns:
        A dict as `DepthPairs` gives it, without `index` and `rgb_relative_path`.

    Raises:
        DecodeError: a file that is no such picture; names the column.
        ValueError: pictures of different sizes, too small for the crop, or without any valid depth.
    """
    preset, train = find_preset(preset), _checked_mode(mode) == "train"
    pictures = {column: decode_picture(encoded[column], column) for column in preset.columns}
    _check_sizes(pictures)
    flipped = train and random.random() < flip_p
    return (fast_sample if fast else plain_sample)(pictures, preset, train=train, flipped=flipped)


def decode_picture(data: bytes, column: str) -> np.ndarray:
    """Pixels as they are stored: `rgb` uint8 (H, W, 3); `depth` and `filled` uint16 or uint8 (H, W).

    Raises:
        DecodeError: no such picture; names the column.
    """
    n_axes, dtypes, kind = _KINDS["rgb" if column == "rgb" else "depth"]
    try:
        pixels = np.asarray(open_image(data))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise what they like, and a bomb is an error of its own class
        raise DecodeError(f"{column}: no whole picture in {len(data)} bytes: {error}") from error
    if pixels.ndim != n_axes or pixels.shape[2:] not in ((), (3,)) or pixels.dtype not in dtypes:
        raise DecodeError(f"{column}: {pixels.dtype} of shape {pixels.shape} is not {kind}: are the columns in order?")
    return pixels


def _checked_mode(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
    return mode


def _check_sizes(pictures: dict[str, np.ndarray]) -> None:
    sizes = {column: pixels.shape[:2] for column, pixels in pictures.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the pictures of a pair differ in size (height, width): {sizes}")
