"""The lines of a report, with what the notebooks measured of another way to do what a line does.

Those are the stored run's figures, of the lab's machine and photos, whole loaders for the most part: they say what is
worth trying, not what it will bring.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from labkit.measure.statistics import format_ratio
from labkit.util.machine import NOTEBOOK_FOLDER
from labkit.watching.lines import MAKING, STEP, Line, short_path

STORED = NOTEBOOK_FOLDER / "results.json"  # is read as `labkit tour --store` wrote it; a wheel may have none


# What to do, the notebook that measured it, and the figure there that tells how many times as fast it is.
_COLORS = "colors on whole batches, on a GPU", "06_kornia_gpu", "crops alone over Albumentations"
_DECODER = "decoded by TorchCodec", "02_read_image", "TorchCodec over Pillow"
_FLOATS = "read_image in place of PIL", "02_read_image", "read_image over PIL, floats from both"
_BATCHED = "one call per batch", "04_tensor_transforms", "normalized per batch over per sample"
_TENSORS = "on tensors in place of PIL images", "04_tensor_transforms", "tensors over PIL images, crop and flip"
_RESIZED = "stored at that size once", "11_resize_once", "JPEG at 256 over the photos, DataLoader workers"
_FILLED = "lk.BatchLoader fills one batch", "11b_raw_pixels", "BatchLoader over DataLoader workers"

# By what a line calls, without underscores and in small letters: transforms, their functions, and those that decode.
CURES = {
    **dict.fromkeys(("colorjitter", "randomgrayscale", "gaussianblur", "randomsolarize"), _COLORS),
    **dict.fromkeys(("convert", "load", "pilloader", "defaultloader"), _DECODER),  # PIL opens first, and decodes here
    **dict.fromkeys(("totensor", "piltotensor"), _FLOATS),
    "normalize": _BATCHED,
    "randomresizedcrop": _TENSORS, "resizedcrop": _TENSORS,
    "resize": _RESIZED,
    **dict.fromkeys(("stack", "copy", "collate", "defaultcollate", "collatetensorfn"), _FILLED),
}  # fmt: skip


class Gain(NamedTuple):
    """What a cure brought where it was measured.

    cure: In words; empty: none is known.
    gain: How many times as fast it was; None: unknown.
    notebook: Where, such as `"06_kornia_gpu"`.
    """

    cure: str = ""
    gain: float | None = None
    notebook: str = ""

    def __str__(self) -> str:
        number = self.notebook.partition("_")[0]
        return f"{self.cure}: {format_ratio(self.gain)}x, notebook {number}" if self.gain is not None else ""


def gain_of(what: str) -> Gain:
    """The measured gain of a line that makes a batch, if there is one beyond doubt: its whole interval is above 1.

    Args:
        what: What the line calls: a transform, or a function.

    Example: `str(gain_of("ToTensor"))`, such as `"read_image in place of PIL: 1.82x, notebook 02"`.
    """
    cure = CURES.get(what.replace("_", "").lower())
    words, *of_figure = cure or ("", "", "")
    numbers = _figures(STORED).get(tuple(of_figure))
    return Gain(words, numbers[0], of_figure[0]) if numbers and min(numbers) > 1 else Gain()


@cache
def _figures(path: Path) -> dict[tuple[str, ...], list[float]]:
    """The figures of the stored run: ratio and interval, by notebook and name; none where it is missing or damaged."""
    try:
        notebooks = json.loads(path.read_bytes())["notebooks"]
        figures = ((name, *each) for name, found in notebooks.items() for each in found["figures"].items())
        return {(name, figure): [*map(float, numbers)] for name, figure, numbers in figures}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a report needs none of them
        return {}


LEAST_S = 0.2  # of what is told, in all: less is a matter of chance, and of little weight
_LEAST_OF_LINES, _MOST_LINES, LINES_TOLD = 0.01, 20, 4


def lines_table(seconds: Mapping[Line, float]) -> pd.DataFrame:
    """The lines of each part that are at least a hundredth of it, the largest first."""
    rows = []
    for part in (MAKING, STEP):
        of_part = {line: each for line, each in seconds.items() if line.part == part}
        total = sum(of_part.values())
        for line, each in sorted(of_part.items(), key=lambda item: -item[1])[:_MOST_LINES]:
            if total >= LEAST_S and each >= _LEAST_OF_LINES * total:
                gain = gain_of(line.what) if part == MAKING else Gain()
                rows.append({"part": part, "share": each / total, **line._asdict(), **gain._asdict()})
    return pd.DataFrame(rows, columns=["part", "share", *Line._fields[1:], *Gain._fields])


def told_line(row: dict[str, Any]) -> str:
    """A row in words."""
    gain = f" ({Gain(row['cure'], row['gain'], row['notebook'])})" if row["cure"] else ""
    return f"{row['share']:.0%} {row['what']}, {short_path(row['path'])}:{row['number']}{gain}"
