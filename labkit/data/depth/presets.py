"""Marigold's depth sets: how each stores depth, which pixels count, and how its list file names the pairs."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from labkit.core import PackedStrings

# (top, bottom, left, right): shares of height and width, or pixels.
REGIONS = {
    "garg": (0.40810811, 0.99189189, 0.03594771, 0.96405229),
    "eigen": (0.3324324, 0.91351351, 0.0359477, 0.96405229),
    "nyu": (45, 471, 41, 601),
}


@dataclass(frozen=True)
class Preset:
    """How one depth set is stored, cut and masked.

    Args:
        per_metre: Stored integer that stands for one metre.
        min_m: Depth is valid if greater.
        max_m: And less than this, in metres.
        columns: What a line of the list names, in order. Where only a pair is named, a third column may follow (KITTI's
            focal length); it is not used.
        crop: (height, width) cut from the middle of the lower edge before anything else.
        train_mask: Region outside which no pixel is valid in training, a key of `REGIONS`.
        eval_mask: The same in evaluation.
        train_size: (height, width) of the result in training.
    """

    per_metre: float
    min_m: float
    max_m: float
    columns: tuple[str, ...] = ("rgb", "depth")
    crop: tuple[int, int] | None = None
    train_mask: str | None = None
    eval_mask: str | None = None
    train_size: tuple[int, int] | None = None

    def crop_slices(self, height: int, width: int) -> tuple[slice, slice]:
        """Rows and columns of a picture that are kept. Raises ValueError where it is too small."""
        if self.crop is None:
            return slice(0, height), slice(0, width)
        if height < self.crop[0] or width < self.crop[1]:
            raise ValueError(f"{height} x {width} pixels (height x width) cannot be cropped to {self.crop}")
        top, left = height - self.crop[0], (width - self.crop[1]) // 2
        return slice(top, height), slice(left, left + self.crop[1])

    def region(self, *, train: bool) -> str | None:
        """Name of the region that the masks keep."""
        return self.train_mask if train else self.eval_mask


def region_slices(name: str | None, height: int, width: int) -> tuple[slice, slice]:
    """Rows and columns of a mask's region; without a name, everything."""
    top, bottom, left, right = REGIONS[name] if name else (0, height, 0, width)
    if name and isinstance(top, float):
        top, bottom, left, right = int(top * height), int(bottom * height), int(left * width), int(right * width)
    return slice(top, bottom), slice(left, right)


_KITTI_CROP = (352, 1216)

PRESETS = {
    "hypersim": Preset(1000.0, 1e-5, 65.0, train_size=(480, 640)),
    "vkitti": Preset(100.0, 1e-5, 80, crop=_KITTI_CROP, eval_mask="eigen"),
    "nyu": Preset(1000.0, 1e-3, 10.0, columns=("rgb", "depth", "filled"), train_mask="nyu", eval_mask="nyu"),
    "kitti": Preset(256.0, 1e-5, 80, crop=_KITTI_CROP, train_mask="eigen", eval_mask="eigen"),
}


def find_preset(preset: str | Preset) -> Preset:
    """A preset by its name, or the one that was given."""
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}, or hand in a Preset")
    return PRESETS[preset]


@dataclass(frozen=True)
class FileList:
    """The pairs of a list file that have a depth.

    Args:
        path: The list file.
        names: Column -> names of the files, in the order of the list.
        lines: Line number of each pair, from 1.
        n_without_depth: Lines left out because their depth is `None`.
    """

    path: Path
    names: dict[str, PackedStrings]
    lines: np.ndarray
    n_without_depth: int

    def place(self, index: int) -> str:
        """Where the list names a pair, for an error message."""
        return f"line {self.lines[index]} of {self.path}"


def read_list(path: str | os.PathLike, preset: Preset) -> FileList:
    """Read a list file: one pair a line, its names separated by white space.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line with another number of columns, or no pair at all; names file, line and remedy.
    """
    path, columns, lines, n_without_depth = Path(path), [], [], 0
    for number, line in enumerate(_lines(path), 1):
        names = line.split()
        _check_columns(names, f"line {number} of {path}", preset)
        if names[1] == "None":  # KITTI has pictures without a depth map
            n_without_depth += 1
        else:
            columns.append(names[: len(preset.columns)])
            lines.append(number)
    if not lines:
        raise ValueError(f"{path} names no pair that has a depth: labkit.make_depth(root, count) makes pairs and list")
    packed = {
        name: PackedStrings(found) for name, found in zip(preset.columns, zip(*columns, strict=True), strict=True)
    }
    return FileList(path, packed, np.array(lines, np.int64), n_without_depth)


def _lines(path: Path) -> list[str]:
    """Lines as Python reads a file: `str.splitlines` would also cut at U+2028 and its kin."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.readlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(
            f"{path} is no list file: labkit.make_depth(root, count) makes pairs and list"
        ) from error


def _check_columns(names: list[str], place: str, preset: Preset) -> None:
    wanted = sorted({len(preset.columns), 3})
    if len(names) not in wanted:
        raise ValueError(
            f"{place} has {len(names)} columns, not {' or '.join(map(str, wanted))}: a line names "
            f"{', '.join(preset.columns)}, in this order, in names without blanks; is the list another preset's?"
        )
