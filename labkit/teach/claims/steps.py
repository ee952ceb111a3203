"""The write-ups' checklist of steps, in their order, beside what each step brought in the runs of this machine."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from typing import Any

import pandas as pd

from labkit.teach.claims.frames import Frames, Read, on_gpu, paired, read_folder
from labkit.teach.claims.verdicts import Reading


@dataclass(frozen=True)
class Step:
    """A step of the checklist: what it compares, the notebook that measures it, and how to read its gain."""

    name: str
    compared: str
    notebook: str
    read: Read


_STEPS = (
    Step("read_image", "torchvision's decoder over PIL's", "02", paired("02 decoders, imagenet", "torchvision", "pil")),
    Step("v2 on tensors", "tensors over PIL images", "04", paired("04 transforms", "tensors", "PIL")),
    Step("workers", "one worker per core over none", "03", paired("03 workers", "one per core", "no worker")),
    Step("persistent workers", "the whole second epoch, kept over new", "12",
         paired("12 epochs 1 and 2*", "*persistent*epoch 2*", "*default*epoch 2*")),
    Step("prefetch to the GPU", "a stream of its own over waiting", "07",
         on_gpu(paired("07 feeding a training step", "prefetched", "pinned"))),
    Step("augment on the GPU", "colors on the GPU over the CPU", "06",
         on_gpu(paired("06 who augments", "CPU crops, device colors", "CPU does all"))),
    Step("resize once", "JPEG at 256 over JPEG as it came", "11", paired("11 formats", "JPEG at 256", "JPEG folder")),
    Step("shards", "shards over files, warm disk", "08", paired("08 disk, warm", "shards of *", "files")),
    Step("DALI", "DALI on the CPU over torchvision", "13", paired("13 peers imagenet", "DALI", "torchvision v1")),
)  # fmt: skip


def checklist(results: str | os.PathLike | None = None, *, runs: Iterable[pd.DataFrame] = ()) -> pd.DataFrame:
    """The steps in the write-ups' order, with their measured gains. Times nothing; arguments as for `claims`.

    Returns:
        One row per step: `place` (in their order, from 1), `step`, `compared`, `notebook`, `measured` (ratio, nan if it
        has not been measured), `ci_low`, `ci_high` (95 %), `place_by_gain` (1 is the largest ratio; NA if not
        measured). Every ratio has a baseline of its own: ratios of different steps do not multiply.

    Taught in: notebooks/14_claims.ipynb
    """
    frames = Frames([*read_folder(results), *runs])
    table = pd.DataFrame([_row(place, step, frames) for place, step in enumerate(_STEPS, 1)])
    return table.assign(place_by_gain=table["measured"].rank(ascending=False, method="first").astype("Int64"))


def _row(place: int, step: Step, frames: Frames) -> dict[str, Any]:
    found = step.read(frames) or Reading(nan)
    return {
        "place": place, "step": step.name, "compared": step.compared, "notebook": step.notebook,
        "measured": found.ratio, "ci_low": found.low, "ci_high": found.high,
    }  # fmt: skip
