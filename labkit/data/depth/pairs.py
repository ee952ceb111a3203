"""Marigold's training pairs, over any store: RGB, depth in metres, masks and normalised depth."""

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from labkit.core import require_choice
from labkit.data.decoders import DecodeError, open_image
from labkit.data.depth.fast import fast_sample
from labkit.data.depth.presets import Preset, find_preset, read_list
from labkit.data.depth.reference import plain_sample
from labkit.data.stores import Store

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
        mode: `"train"`: mirror at random, normalise depth, resize. `"evaluate"`: none of these.
        flip_p: Probability of mirroring a pair in training; one call of `random.random()` per pair.
        fast: Resize before computing, skip Marigold's detours through int64 and float64, and take quantiles from a
            histogram. The bits are the same: the difference is 0, for every key of every preset.

    An item is a dict; H x W is the preset's `train_size`, or else the size of the (cropped) picture.

    Items:
        rgb_int: int32 (3, H, W), 0 to 255. rgb_norm: float32 (3, H, W), -1 to 1.
        depth_raw_linear, depth_filled_linear: float32 (1, H, W), metres; equal if the set has no filled depth.
        valid_mask_raw, valid_mask_filled: bool (1, H, W).
        depth_raw_norm, depth_filled_norm: float32 (1, H, W), -1 to 1 from the 2 % to the 98 % quantile of the valid
            depths; invalid pixels of the filled one are 1. Training only.
        index: int. rgb_relative_path: str.

    Raises:
        FileNotFoundError: no list file. ValueError: a line that names no pair, an unknown preset or mode.
        KeyError: (items) the store has no such file. DecodeError: (items) a file is not the expected picture.

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
        self.mode = require_choice("mode", mode, MODES)
        self.flip_p = flip_p
        self.fast = fast
        self.files = read_list(filename_list, self.preset)
        self.keys = self.files.names["rgb"]

    def __repr__(self) -> str:
        n_without = self.files.n_without_depth
        note = f", {n_without} lines without depth left out" if n_without else ""
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
            raise KeyError(f"{error.args[0]}, but {place} names it: names are relative to the store's root") from error


def make_sample(
    encoded: Mapping[str, bytes],
    preset: str | Preset = "hypersim",
    *,
    mode: str = "train",
    flip_p: float = 0.5,
    fast: bool = False,
) -> dict[str, Tensor]:
    """The tensors of one pair whose files do not come from a store, but from WebDataset shards, for example.

    Args:
        encoded: Contents of the files `rgb`, `depth` and, if the preset has it, `filled`.
        preset, mode, flip_p, fast: As in `DepthPairs`.

    Returns:
        A dict like an item of `DepthPairs`, without `index` and `rgb_relative_path`.

    Raises:
        DecodeError: a file is not the expected picture; names the column.
        ValueError: the pictures differ in size, are too small for the crop, or have no valid depth.
    """
    preset, train = find_preset(preset), require_choice("mode", mode, MODES) == "train"
    pictures = {column: decode_picture(encoded[column], column) for column in preset.columns}
    sizes = {column: pixels.shape[:2] for column, pixels in pictures.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the pictures of a pair differ in size (height, width): {sizes}")
    flipped = train and random.random() < flip_p
    return (fast_sample if fast else plain_sample)(pictures, preset, train=train, flipped=flipped)


def decode_picture(data: bytes, column: str) -> np.ndarray:
    """Pixels as they are stored: `rgb` uint8 (H, W, 3); `depth` and `filled` uint16 or uint8 (H, W).

    Raises:
        DecodeError: not such a picture; names the column.
    """
    channels, dtypes, kind = _RGB if column == "rgb" else _DEPTH
    try:
        pixels = np.asarray(open_image(data))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise all kinds of errors
        raise DecodeError(f"{column}: no complete picture in {len(data)} bytes: {error}") from error
    if pixels.ndim < 2 or pixels.shape[2:] != channels or pixels.dtype not in dtypes:
        raise DecodeError(f"{column}: {pixels.dtype} of shape {pixels.shape} is not {kind}: are the columns in order?")
    return pixels
