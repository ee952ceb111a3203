"""The rules and readings behind the verdicts on claims: from recorded frames to ratios, outcomes and verdicts.

Claims that need no timing are tried on the spot.
"""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from labkit.course.reference import reference_runs
from labkit.data.decode import decode
from labkit.data.stores import FolderStore
from labkit.errors import ArgumentError, MissingFileError
from labkit.measure.frames import load_frame, measured_runs
from labkit.measure.recorder import RESULTS_VARIABLE
from labkit.measure.statistics import format_ratio, quiet_summary, speedup_interval, speedup_of
from labkit.util.machine import IS_CLONE, NOTEBOOK_FOLDER, env_id, photo_root

HOLDS = "holds"
LARGER = "larger here"
SMALLER = "smaller here"
MIXED = "larger and smaller here"
CONDITION = "holds under a condition"
FAILS = "does not hold"
NEEDS_GPU = "needs a GPU"
MISSING = "not measured yet"
OPEN = "inconclusive"
VERDICTS = (HOLDS, LARGER, SMALLER, MIXED, CONDITION, FAILS, OPEN, NEEDS_GPU, MISSING)
NOT_JUDGED = "not judged"

# What a test shows. Verdicts rest on the first kind alone; the others are shown next to it.
MEASURED = "measured"
SIMULATED = "simulated"
UNEQUAL = "unequal work"
BESIDE = "beside the claim"
KINDS = (MEASURED, SIMULATED, UNEQUAL, BESIDE)

SAME_WITHIN = 1.05  # a claim of "no change" or "no cost" allows a change of a twentieth
GAIN_WITHIN = 2.0  # a claimed ratio of 3x is a gain of 2: half to twice that gain agrees with it, 2x to 5x


@dataclass(frozen=True)
class Reading:
    """What one test of a claim found.

    Args:
        ratio: How many times as fast, or as large; nan for a trial.
        low, high: Its 95 % interval; nan if there is none.
        n_runs: Number of counted runs of each variant (or of photos).
        experiment: Experiment of the frame, or the kind of trial.
        scale: Scale of the runs; "" if it does not matter.
        device: "cpu" or "cuda".
        passed: Whether a trial, which has no ratio, ended as claimed.
        note: What was seen, in words.
        doubt: Why it allows no conclusion; "" if it does.
    """

    ratio: float = nan
    low: float = nan
    high: float = nan
    n_runs: int = 0
    experiment: str = ""
    scale: str = ""
    device: str = ""
    passed: bool | None = None
    note: str = ""
    doubt: str = ""

    def __str__(self) -> str:
        if isnan(self.ratio):
            return self.note
        note = f" ({self.note})" if self.note else ""
        return f"{format_ratio(self.ratio)}x{format_interval(self.low, self.high)}{note}"


def format_interval(low: float, high: float) -> str:
    """An interval with a space before it, or "" for nan."""
    return "" if isnan(low) else f" [{format_ratio(low)}, {format_ratio(high)}]"


Range = tuple[float, float]
Rule = Callable[[Reading, Any], str]
"""Maps a reading and the ratios that agree with the claimed one, which only `reaches` needs, to an outcome."""


def agreeing_range(claimed: float, up_to: float | None = None) -> Range:
    """Lowest and highest ratio that agree with a claimed one: their gain is half to twice the claimed gain.

    Args:
        claimed: The claimed ratio, above 1.
        up_to: Its upper end, where a range is claimed.
    """
    return 1 + (claimed - 1) / GAIN_WITHIN, 1 + ((up_to or claimed) - 1) * GAIN_WITHIN


def faster(reading: Reading, agrees: Range | None = None) -> str:
    """Rule for a claim without a figure: the interval must lie above 1."""
    return HOLDS if reading.low > 1 else FAILS if reading.high < 1 else OPEN


def reaches(reading: Reading, agrees: Range) -> str:
    """Rule for a claimed ratio: the interval must lie within the ratios that agree with it."""
    lowest, highest = agrees
    if reading.low > highest:
        return LARGER
    if reading.high < lowest:
        return SMALLER if reading.low > 1 else FAILS
    return HOLDS if reading.low >= lowest and reading.high <= highest else OPEN


def unchanged(reading: Reading, agrees: Range | None = None) -> str:
    """Rule for a claim of no change: the interval must lie within `SAME_WITHIN` of 1."""
    if reading.low > SAME_WITHIN or reading.high < 1 / SAME_WITHIN:
        return FAILS
    return HOLDS if reading.low >= 1 / SAME_WITHIN and reading.high <= SAME_WITHIN else OPEN


def tried(reading: Reading, agrees: Range | None = None) -> str:
    """Rule for a trial."""
    return HOLDS if reading.passed else FAILS


def outcome(reading: Reading | None, rule: Rule | None, agrees: Range | None, *, needs_gpu: bool = False) -> str:
    """The outcome of a single test; without a rule it is not judged."""
    if reading is None:
        return NEEDS_GPU if needs_gpu else MISSING
    if rule is None:
        return NOT_JUDGED
    return OPEN if reading.doubt else rule(reading, agrees)


def together(outcomes: Sequence[str]) -> str:
    """The verdict on a claim: it holds if all of its tests do, and under a condition if only some do.

    Where no test holds, one that fails is enough against the claim; where none fails, the claim is right in direction,
    and its figure is another here. A test that is inconclusive, not measured or needs a GPU never counts as held.
    """
    found = set(outcomes)
    if found >= {LARGER, SMALLER} and not found & {HOLDS, FAILS}:
        return MIXED
    strongest = next(one for one in (HOLDS, FAILS, LARGER, SMALLER, OPEN, NEEDS_GPU, MISSING) if one in found)
    return CONDITION if strongest == HOLDS and found != {HOLDS} else strongest


_SCALE_RANKS = {"ci": 1, "laptop": 2, "gpu": 3}
REHEARSAL = "ci scale is a rehearsal"
NOT_COLD = "the kernel did not confirm that the bytes came from the disk"


class Frames:
    """Recorded runs of one machine, by experiment; later frames replace earlier ones.

    Args:
        frames: Runs of one or more experiments each.
        of_any_machine: They may be of another machine, as stored ones are.

    Raises:
        ValueError: runs of another machine.

    Attributes:
        machine: The `env_id` of the runs; empty if there are none.
    """

    def __init__(self, frames: Iterable[pd.DataFrame], *, of_any_machine: bool = False):
        self._runs: dict[str, pd.DataFrame] = {}
        for frame in frames:
            frame = frame.assign(scale=frame.get("scale", ""))
            self._runs |= {str(name): runs for name, runs in frame.groupby("experiment", sort=False)}
        machines = sorted({str(name) for runs in self._runs.values() for name in runs["env_id"].unique()})
        self.machine = ", ".join(machines)
        if machines and machines != [env_id()] and not of_any_machine:
            raise ArgumentError(
                f"runs of {self.machine} cannot be judged here: this machine is {env_id()}; judge them on the "
                "machine that recorded them"
            )

    def find(self, pattern: str) -> pd.DataFrame | None:
        """Runs of the experiment that matches (`*` stands for anything), of the largest scale; else None."""
        matches = [runs for experiment, runs in self._runs.items() if fnmatchcase(experiment, pattern)]
        return max(matches, key=lambda runs: _SCALE_RANKS.get(runs["scale"].iloc[0], 0), default=None)


class _GPUFrames(Frames):
    """Runs on a CUDA device only: of this machine, or else of a stored reference run."""

    def __init__(self, own: Frames):
        self._own = own

    def find(self, pattern: str) -> pd.DataFrame | None:
        runs = self._own.find(pattern)
        if runs is not None and set(runs["device"]) == {"cuda"}:
            return runs
        stored = reference_runs(pattern).values()
        return next((runs for runs in stored if set(runs["device"]) == {"cuda"}), None)


Read = Callable[[Frames], Reading | None]


def read_folder(results: str | os.PathLike | None) -> list[pd.DataFrame]:
    """All frames of this machine.

    Args:
        results: The folder that tours write to, or this machine's folder in it; must exist. Default: where a running
            tour collects frames, else `results` here or next to the notebooks' folder, if it exists.

    Raises:
        FileNotFoundError: `results` does not exist or holds no frames of this machine; says what to run.
        ValueError: a file in it is not a frame of runs; names it.
    """
    if results is not None:
        folders = [Path(results, env_id(), "frames"), Path(results, "frames")]
    elif collected := os.environ.get(RESULTS_VARIABLE):
        folders = [Path(collected)]
    else:
        beside = NOTEBOOK_FOLDER.parent if IS_CLONE else Path("..")  # a wheel's run as copies, in a folder
        folders = [root / "results" / env_id() / "frames" for root in (Path(), beside)]
    folder = next(filter(Path.is_dir, folders), None)
    if results is not None and folder is None:
        machine = f"this machine ({env_id()})"
        raise MissingFileError(f"no frames of {machine} in {results}: `python -m labkit tour` records them")
    return [load_frame(path) for path in sorted(folder.glob("*.csv"))] if folder else []


def paired(experiment: str, variant: str, baseline: str, *, cold: bool = False) -> Read:
    """Speed-up of one variant over another of the same experiment, by rounds; with `cold`, runs must have been cold."""

    def read(frames: Frames) -> Reading | None:
        runs = frames.find(experiment)
        own, base = (_find_label(runs, label) for label in (variant, baseline))
        if runs is None or own is None or base is None:
            return None
        runs = runs[runs["variant"].isin([own, base])]
        row = quiet_summary(runs, base).loc[own]  # its note says how stable the runs are
        ratio, low, high = row[["speedup", "ci_low", "ci_high"]]
        n_runs = int(row["n_runs"])
        return Reading(ratio, low, high, n_runs, note=row["note"], **_describe_origin(runs, cold=cold))

    return read


def separate(quick: tuple[str, str], slow: tuple[str, str], *, cold: bool = False) -> Read:
    """Ratio of the rates of two variants of different experiments, each given as (experiment, variant).

    With `cold`, runs of the slow one must have been cold.
    """

    def read(frames: Frames) -> Reading | None:
        one, other = _find_runs(frames, *quick), _find_runs(frames, *slow)
        if one is None or other is None or one["env_id"].iloc[0] != other["env_id"].iloc[0]:
            return None
        rates = [runs["images_per_s"].to_numpy() for runs in (one, other)]
        interval = speedup_interval(*rates, n_looks=max(map(_n_looks, (one, other))))
        origin = _describe_origin(one, other, cold=cold)
        return Reading(speedup_of(*rates), *interval, min(map(len, rates)), note="not interleaved", **origin)

    return read


def reckoned(experiment: str, variant: str, ratio_of: Callable[[np.ndarray], np.ndarray], note: str) -> Read:
    """Ratio computed from a measured rate: `ratio_of` the images/s of each run, with their interval."""

    def read(frames: Frames) -> Reading | None:
        runs = _find_runs(frames, experiment, variant)
        if runs is None:
            return None
        ratios = ratio_of(runs["images_per_s"].to_numpy())
        origin = _describe_origin(runs)
        interval = speedup_interval(ratios, n_looks=_n_looks(runs))
        return Reading(speedup_of(ratios), *interval, len(runs), note=note, **origin)

    return read


def on_gpu(read: Read) -> Read:
    """The same reading, from runs on a CUDA device only."""
    return lambda frames: read(_GPUFrames(frames))


def derived_ratio(read: Read) -> Read:
    """One plus a share that was read, with its interval: the cost of something added."""

    def more(frames: Frames) -> Reading | None:
        share = read(frames)
        return share and replace(share, ratio=1 + share.ratio, low=1 + share.low, high=1 + share.high)

    return more


def _n_looks(runs: pd.DataFrame) -> int:
    """How often `compare` looked at runs: 1 for those of other timers."""
    looks = runs["n_looks"].dropna() if "n_looks" in runs else pd.Series(dtype=int)
    return int(looks.max()) if len(looks) else 1


def _find_runs(frames: Frames, experiment: str, variant: str) -> pd.DataFrame | None:
    """Runs of a variant, without warm-ups."""
    runs = frames.find(experiment)
    label = _find_label(runs, variant)
    return None if runs is None or label is None else measured_runs(runs[runs["variant"] == label])


def _find_label(runs: pd.DataFrame | None, pattern: str) -> str | None:
    """The last variant that matches: the one with the most shards or workers."""
    labels = [] if runs is None else [label for label in runs["variant"].unique() if fnmatchcase(label, pattern)]
    return labels[-1] if labels else None


def _describe_origin(*frames: pd.DataFrame, cold: bool = False) -> dict[str, Any]:
    """Fields of a `Reading` that say where it comes from; with `cold`, the last frame has to be of cold runs."""
    counted = [measured_runs(frame) for frame in frames]
    names = {name: pd.concat(counted)[name].astype(str).unique() for name in ("experiment", "scale", "device")}
    is_warm = cold and set(counted[-1]["page_cache"]) != {"cold"}
    doubts = [REHEARSAL] * ("ci" in names["scale"]) + [NOT_COLD] * is_warm
    return {**{name: "; ".join(values) for name, values in names.items()}, "doubt": "; ".join(doubts)}


SHORT_SIDE = 256  # as in the claim
_MAX_PHOTOS, _N_BOXES = 16, 4
_BOUND_SCRIPT = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(min(8, os.cpu_count()))"

Trial = Callable[[], tuple[bool, str] | None]


def read_trial(trial: Trial) -> Read:
    """Reading of a trial, which runs once per process."""
    once = functools.cache(trial)

    def read(frames: Frames) -> Reading:
        passed, note = once() or (None, "")
        doubt = "this system does not allow the trial" if passed is None else ""
        return Reading(passed=passed, note=note, experiment="tried on the spot", doubt=doubt)

    return read


def persistent_without_workers() -> tuple[bool, str]:
    """Does torch refuse persistent workers with num_workers=0?"""
    try:
        DataLoader(TensorDataset(torch.zeros(1)), num_workers=0, persistent_workers=True)
    except ValueError as error:
        return True, f"ValueError: {error}"
    return False, "no error"


def clamped_on_one_cpu() -> tuple[bool, str]:
    """Is a request for 8 persistent workers accepted when it is clamped to one CPU?"""
    try:
        DataLoader(TensorDataset(torch.zeros(1)), num_workers=min(8, 1), persistent_workers=True)
    except ValueError as error:
        return False, f"1 worker: ValueError: {error}"
    return True, "8 clamped to 1 CPU asks for 1 worker, no error"


def clamped_where_bound() -> tuple[bool, str] | None:
    """Does the clamp notice that a process may use one core only, as in a batch job or under taskset?"""
    if not hasattr(os, "sched_setaffinity"):
        return None
    n_workers = int(subprocess.check_output([sys.executable, "-c", _BOUND_SCRIPT], text=True))
    return n_workers == 1, f"bound to 1 core, it asks for {n_workers} worker(s)"


class Draws(Dataset):
    """Samples are random numbers: from the generators that are seeded for workers, or from the data set's own."""

    def __init__(self, own_generator: bool):
        self.own = np.random.default_rng() if own_generator else None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.own is not None:
            return torch.tensor([index, self.own.random()])
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])


def seed_worker(worker: int) -> None:
    """The popular recipe."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def _draw_two_epochs(num_workers: int, own_generator: bool) -> torch.Tensor:
    loader = DataLoader(
        Draws(own_generator), batch_size=2, shuffle=True, num_workers=num_workers, persistent_workers=True,
        worker_init_fn=seed_worker, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return torch.cat([batch for _ in range(2) for batch in loader])


def seeded_again(num_workers: int = 2, own_generator: bool = False) -> tuple[bool, str]:
    """Does a second run give the samples of the first, which had two workers?

    Args:
        num_workers: Workers of the second run.
        own_generator: The data set, or a library in it, has its own generator.
    """
    same = torch.equal(_draw_two_epochs(2, own_generator), _draw_two_epochs(num_workers, own_generator))
    return same, f"two epochs {'come out the same' if same else 'differ'}"


def reading_back() -> tuple[bool, str]:
    """Does the write-ups' CutMix leave all values on the device?"""
    from labkit.course.readbacks import count_readbacks
    from labkit.course.reference import writeup_cutmix

    images, labels = torch.rand(4, 3, 32, 32), torch.arange(4)
    _, reads = count_readbacks(lambda: writeup_cutmix(images, labels, num_classes=4))
    return reads == 0, f"reads {reads} values back a batch: on a GPU, the host waits each time"


def detail_kept(profile: str) -> Read:
    """Detail in random crops of photos that were first resized to `SHORT_SIDE`, over that in crops of the originals.

    Detail is the standard deviation of the Laplacian. Each photo gives one ratio, since its crops are similar. Needs
    the photos of this scale, which a tour makes.
    """

    def read(frames: Frames) -> Reading | None:
        ratios = _measure_detail(profile)
        if ratios is None:
            return None
        interval, note = speedup_interval(ratios), f"detail, {len(ratios)} photos"
        return Reading(speedup_of(ratios), *interval, len(ratios), "pixels compared on the spot", note=note)

    return read


@functools.cache
def _measure_detail(profile: str) -> np.ndarray | None:
    if not photo_root(profile).is_dir():
        return None
    store = FolderStore(photo_root(profile))
    keys = store.keys()[:: max(1, len(store) // _MAX_PHOTOS)][:_MAX_PHOTOS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.array([_detail_ratio(store.read(key)) for key in keys])


def _detail_ratio(data: bytes) -> float:
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.v2.functional import resize, to_pil_image

    pixels = decode(data)
    large = min(pixels.shape[1:]) > SHORT_SIDE  # nothing is enlarged
    smaller = resize(pixels, [SHORT_SIDE], antialias=True) if large else pixels
    photo, prepared = to_pil_image(pixels), to_pil_image(smaller)
    boxes = [RandomResizedCrop.get_params(pixels, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(_N_BOXES)]
    zoom = prepared.width / photo.width
    ratios = [_measure_crop(prepared, box, zoom) / _measure_crop(photo, box, 1.0) for box in boxes]
    return float(np.exp(np.median(np.log(ratios))))


def _measure_crop(image: Any, box: tuple[int, int, int, int], zoom: float) -> float:
    import cv2
    from PIL import Image

    top, left, height, width = (zoom * side for side in box)
    edges = (left, top, min(left + width, image.width), min(top + height, image.height))
    crop = image.resize((224, 224), Image.Resampling.BILINEAR, box=edges).convert("L")
    return float(cv2.Laplacian(np.asarray(crop), cv2.CV_64F).std())
