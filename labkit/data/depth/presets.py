"""Marigold's depth sets: how each stores depth, which pixels are valid, and how its list file names the pairs."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from labkit.core import PackedStrings, require_choice

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
        per_metre: The stored integer for one metre.
        min_m: Valid depths are greater than this, in metres.
        max_m: Valid depths are less than this, in metres.
        columns: The files that a line of the list names, in order. After a pair, a third column may follow (KITTI's
            focal length); it is ignored.
        crop: (height, width) cropped from the bottom centre before anything else.
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
        """Rows and columns of a picture that the crop keeps. Raises ValueError if the picture is too small."""
        new_height, new_width = self.crop or (height, width)
        top, left = height - new_height, (width - new_width) // 2
        if min(top, left) < 0:
            raise ValueError(f"{height} x {width} pixels (height x width) cannot be cropped to {self.crop}")
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


_REMEDY = "labkit.make_depth(root, count) makes pairs and a list"
_KITTI_CROP = (352, 1216)

PRESETS = {
    "hypersim": Preset(1000.0, 1e-5, 65.0, train_size=(480, 640)),
    "vkitti": Preset(100.0, 1e-5, 80, crop=_KITTI_CROP, eval_mask="eigen"),
    "nyu": Preset(1000.0, 1e-3, 10.0, columns=("rgb", "depth", "filled"), train_mask="nyu", eval_mask="nyu"),
    "kitti": Preset(256.0, 1e-5, 80, crop=_KITTI_CROP, train_mask="eigen", eval_mask="eigen"),
}


def find_preset(preset: str | Preset) -> Preset:
    """`preset` itself, or the preset of that name. Raises ValueError for an unknown name."""
    return preset if isinstance(preset, Preset) else PRESETS[require_choice("preset", preset, PRESETS)]


@dataclass(frozen=True)
class FileList:
    """The pairs of a list file that have a depth.

    Args:
        path: The list file.
        names: Column -> file names, in the order of the list.
        lines: Line number of each pair, from 1.
        n_without_depth: Lines left out because their depth is `None`.
    """

    path: Path
    names: dict[str, PackedStrings]
    lines: np.ndarray
    n_without_depth: int

    def place(self, index: int) -> str:
        """The line that names a pair, for an error message."""
        return f"line {self.lines[index]} of {self.path}"


def read_list(path: str | os.PathLike, preset: Preset) -> FileList:
    """Read a list file: one pair per line, its file names separated by white space.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has a wrong number of columns, or there is no pair; names the file, the line and a remedy.
    """
    path, names_by_line, number = Path(path), {}, 0
    for number, line in enumerate(_read_lines(path), 1):
        names = line.split()
        _check_columns(names, f"line {number} of {path}", preset)
        if names[1] != "None":  # KITTI has pictures without a depth map
            names_by_line[number] = names[: len(preset.columns)]
    if not names_by_line:
        raise ValueError(f"{path} names no pair that has a depth: {_REMEDY}")
    columns = map(PackedStrings, zip(*names_by_line.values(), strict=True))
    lines = np.fromiter(names_by_line, np.int64)
    return FileList(path, dict(zip(preset.columns, columns, strict=True)), lines, number - len(lines))


def _read_lines(path: Path) -> list[str]:
    """Lines as Python reads a file: `str.splitlines` would also split at U+2028 and the like."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.readlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"{path} is not a list file: {_REMEDY}") from error


def _check_columns(names: list[str], place: str, preset: Preset) -> None:
    accepted = sorted({len(preset.columns), 3})
    if len(names) not in accepted:
        raise ValueError(
            f"{place} has {len(names)} columns instead of {' or '.join(map(str, accepted))}: each line lists "
            f"{', '.join(preset.columns)}, in this order, as names without blanks; is this list for another preset?"
        )
