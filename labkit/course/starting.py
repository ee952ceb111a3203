"""`where_to_start`: from what a training waits for to the call and the notebook that help, with measured gains."""

import html
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import nan
from typing import Any

import pandas as pd

from labkit.course.claim_trials import Frames, Reading, on_gpu, paired, read_folder
from labkit.course.ladder import EXPERIMENT as _LADDER, FRAME as LADDER_FRAME
from labkit.measure.frames import load_frame
from labkit.measure.statistics import format_ratio
from labkit.util.machine import NOTEBOOK_FOLDER

NOTEBOOK = "00_measure"
FRAME = "00_start.csv"  # next to the notebooks: the runs of the stored tour that the table reads
HERE = "this machine"
_REFERENCE = "reference run on a GPU"
_ASK = "Ask `python -m labkit watch train.py` first what a step waits for (notebook 12)."


@dataclass(frozen=True)
class _Change:
    """One change to a loader, and the two variants of an experiment whose ratio is its gain.

    Args:
        waits_for: What the step waits for, as `labkit watch` names it.
        call: The name in `lk.` that makes the change.
        notebook: The one that teaches it.
        does: What it does, in words.
        compared: What is compared, in words.
        experiment, variant, baseline: As in the frame; `*` stands for anything.
        step: The same step in the write-ups' checklist; empty if it has none.
        needs_gpu: Only runs on a CUDA device count.
        is_cold: Only cold reads count; others are named as doubtful.
    """

    waits_for: str
    call: str
    notebook: str
    does: str
    compared: str
    experiment: str
    variant: str
    baseline: str
    step: str = ""
    needs_gpu: bool = False
    is_cold: bool = False

    def rows_behind(self, frame: pd.DataFrame) -> pd.Series:
        """Which rows of a frame the gain is read from: a mask."""
        asked = (self.variant, self.baseline)
        is_asked = [any(fnmatchcase(str(label), pattern) for pattern in asked) for label in frame["variant"]]
        is_here = [fnmatchcase(str(name), self.experiment) for name in frame["experiment"]]
        return pd.Series(is_asked, frame.index, dtype=bool) & pd.Series(is_here, frame.index, dtype=bool)


_CHANGES = (
    _Change("read", "lk.read_shards", "08_shard_formats", "files packed into shards, read in order",
            "shards over files, cold disk", "08 disk, cold", "shards of *", "files", "shards", is_cold=True),
    _Change("read", "lk.TarStore", "09_marigold_storage", "an index of a tar, for any order",
            "an index over tarfile", "09 an iteration of Marigold", "index", "tarfile"),
    _Change("decode", "lk.ImageDataset", "02_read_image", "a faster decoder, the same pixels",
            "turbojpeg over PIL", "02 decoders, imagenet", "turbojpeg", "pil", "read_image"),
    _Change("decode", "lk.make_loader", "03_persistent_workers", "one worker per core",
            "workers over none", "03 workers", "one per core", "no worker", "workers"),
    _Change("decode", "lk.map_items", "11_resize_once", "smaller JPEGs, made once",
            "short side 256 over as it came", "11 formats", "JPEG at 256", "JPEG folder", "resize once"),
    _Change("decode", "lk.PixelStore", "11b_raw_pixels", "raw pixels, decoded once",
            "raw pixels over JPEG", _LADDER, "raw pixels: PixelStore", "no antialiasing"),
    _Change("augment", "lk.make_augment", "04_tensor_transforms", "v2 on tensors, not on PIL's images",
            "tensors over PIL", "04 transforms", "tensors", "PIL", "v2 on tensors"),
    _Change("augment", "lk.Recipe", "05_albumentations", "strong colors by Albumentations",
            "Albumentations over v2", "05 heavy recipe", "albumentations, heavy", "v2, heavy"),
    _Change("augment", "lk.mixup", "06_kornia_gpu", "colors and mixing where the step runs",
            "colors on the GPU over the CPU", "06 who augments", "CPU crops, device colors", "CPU does all",
            "augment on the GPU", needs_gpu=True),
    _Change("copy", "lk.CUDAPrefetcher", "07_cuda_prefetch", "copies the next batch during the step",
            "prefetched over waiting", "07 feeding a training step", "prefetched", "pinned",
            "prefetch to the GPU", needs_gpu=True),
    _Change("Python's lock", "lk.BatchLoader", "11b_raw_pixels", "threads that work without the lock",
            "threads over workers", _LADDER, "threads: BatchLoader", "OpenCV crops*"),
    _Change("Python's lock", "course.compare_peers", "13_peers", "another library's loader",
            "DALI on the CPU over torchvision", "13 peers imagenet", "DALI", "torchvision v1", "DALI"),
    _Change("start", "lk.LoaderConfig", "03_persistent_workers", "workers that stay alive",
            "second epoch, kept over new", "12 epochs 1 and 2*", "*persistent*epoch 2*", "*default*epoch 2*",
            "persistent workers"),
    _Change("sizes", "lk.collect_sizes", "10_image_sizes", "sizes of all images before training",
            "over one search per image", "10 steps from * names", "lk.collect_sizes", "one search per image"),
)  # fmt: skip


def where_to_start(results: str | os.PathLike | None = None, *, runs: Iterable[pd.DataFrame] = ()) -> "Start":
    """What to change, by what a step waits for: only what was certainly faster. Times nothing.

    Gains are those of the runs that tours have recorded on this machine, else of the stored run, which is named.

    Args:
        results: Folder of a tour's results. Default: where a running tour collects frames, else `results` here or
            next to the notebooks' folder, if it exists.
        runs: Frames measured just now; they replace recorded runs of the same experiment.

    Returns:
        A table to show or print. Its `.frame` has one row per change whose 95 % interval lies above 1: `waits_for`,
        `call`, `does`, `compared`, `gain` (ratio of rates), `ci_low`, `ci_high`, `n_runs`, `origin` (whose runs),
        `doubt`, `notebook`, `step` (of the write-ups' checklist). `.judge(steps)` compares an order of steps.

    Raises:
        FileNotFoundError: `results` holds no frames of this machine.
        ValueError: a file in it is not a frame, or runs come from another machine.

    Example:
        >>> print(course.where_to_start())

    Taught in: notebooks/00_measure.ipynb
    """
    return start_from([*read_folder(results), *runs])


def start_from(runs: Iterable[pd.DataFrame]) -> "Start":
    """The table of `where_to_start`, from these runs of this machine, and else from the stored ones."""
    paths = [NOTEBOOK_FOLDER / name for name in (LADDER_FRAME, FRAME)]
    stored = Frames([load_frame(path) for path in paths if path.is_file()], of_any_machine=True)
    own = Frames(runs)
    rows = []
    for change in _CHANGES:
        found, origin = _read(change, own, stored)
        if found and found.low > 1:
            rows.append({
                "waits_for": change.waits_for, "call": change.call, "does": change.does, "compared": change.compared,
                "gain": found.ratio, "ci_low": found.low, "ci_high": found.high, "n_runs": found.n_runs,
                "origin": origin, "doubt": found.doubt, "notebook": change.notebook, "step": change.step,
            })  # fmt: skip
    return Start(pd.DataFrame(rows, columns=_COLUMNS).astype({"gain": float}))  # also where there are no rows


_COLUMNS = ["waits_for", "call", "does", "compared", "gain", "ci_low", "ci_high", "n_runs", "origin", "doubt",
            "notebook", "step"]  # fmt: skip


def runs_behind(frames: Iterable[pd.DataFrame]) -> pd.DataFrame | None:
    """The rows of frames that the table reads, to store as `FRAME`; None if there are none."""
    found = [rows for frame in frames for change in _CHANGES if len(rows := frame[change.rows_behind(frame)])]
    return pd.concat(found, ignore_index=True).drop_duplicates() if found else None


class Start:
    """The table of `where_to_start`."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame

    def __str__(self) -> str:
        return f"{_ASK}\n{self._shown().to_string(index=False)}"

    __repr__ = __str__

    def to_html(self, pages: Collection[str]) -> str:
        """The table as HTML; names of notebooks that have a page next to it are links."""
        shown = self._shown()
        shown["notebook"] = [
            f'<a href="{name}.html">{name}</a>' if name in pages else name for name in shown["notebook"]
        ]
        return f"<p>{html.escape(_ASK)}</p>{shown.to_html(index=False, escape=False)}"

    def to_markdown(self) -> str:
        """The table in Markdown, whose links to notebooks JupyterLab, GitHub and the site follow."""
        shown = self._shown()
        shown["notebook"] = [f"[{name}]({name}.ipynb)" for name in shown["notebook"]]
        rows = [shown.columns, ["---"] * len(shown.columns), *shown.itertuples(index=False)]
        return "\n".join([_ASK, "", *(f"| {' | '.join(row)} |" for row in rows)])

    _repr_markdown_ = to_markdown

    def judge(self, steps: pd.DataFrame) -> pd.DataFrame:
        """Judge an order of steps: how late it comes to the part that a training may wait for.

        Args:
            steps: The table of `checklist`: `step`, `place`, `measured`.

        Returns:
            One row per part that a step can wait for: `first_step` of the order that is about it, its `place` (NA:
            none is) and `measured` gain, and the largest gain of this table for the part, `best_gain`, by
            `best_call`. `attrs["sentence"]` says in words what follows.
        """
        rows = []
        for part in dict.fromkeys(change.waits_for for change in _CHANGES if change.waits_for != "sizes"):
            names = [change.step for change in _CHANGES if change.waits_for == part and change.step]
            theirs = steps[steps["step"].isin(names)].sort_values("place")
            best = self.frame[self.frame["waits_for"] == part].nlargest(1, "gain")
            rows.append({
                "part": part, "first_step": _first(theirs["step"], ""), "place": _first(theirs["place"], pd.NA),
                "measured": _first(theirs["measured"], nan), "best_call": _first(best["call"], ""),
                "best_gain": _first(best["gain"], nan),
            })  # fmt: skip
        table = pd.DataFrame(rows).astype({"place": "Int64"}).set_index("part")
        places = table["place"].dropna().sort_values()
        meant = "; ".join(f"step {place} for {part}" for part, place in places.items())
        missing = ", ".join(part for part, place in table["place"].items() if pd.isna(place))
        left_out = f" No step is for a training that waits for {missing}." if missing else ""
        table.attrs["sentence"] = f"The first step that is meant for each wait: {meant}.{left_out}"
        return table

    def _shown(self) -> pd.DataFrame:
        gains = [
            f"{row.compared}: {format_ratio(row.gain)}x [{format_ratio(row.ci_low)}, {format_ratio(row.ci_high)}], "
            + row.origin + (f", in doubt: {row.doubt}" if row.doubt else "")
            for row in self.frame.itertuples()
        ]  # fmt: skip
        do = self.frame["call"] + ": " + self.frame["does"]
        return pd.DataFrame({
            "waits for": self.frame["waits_for"], "do": do, "gain": gains, "notebook": self.frame["notebook"],
        })  # fmt: skip


def _first(values: pd.Series, default: Any) -> Any:
    return values.iloc[0] if len(values) else default


def _read(change: _Change, own: Frames, stored: Frames) -> tuple[Reading | None, str]:
    """The first reading of these: this machine's, the stored tour's, a reference run's; and whose it is."""
    read = paired(change.experiment, change.variant, change.baseline, cold=change.is_cold)
    for frames, origin in ((own, HERE), (stored, f"stored run on {stored.machine}")):
        reading = read(frames)
        if reading and (reading.device == "cuda" or not change.needs_gpu):
            return reading, origin
    return (on_gpu(read)(Frames([])) if change.needs_gpu else None), _REFERENCE
