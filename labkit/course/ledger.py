"""The ledger: every claim of the write-ups in our words, its figure as they give it, and what tests it here.

Claims and figures are theirs; no measurement of ours is in this file. A claim about seconds on another machine is
tested as a ratio of two of its figures, or as a direction if it has only one figure. `claims` compares the ledger with
the runs of this machine, in words and as a picture.
"""

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, isnan, nan
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from labkit.course import claim_trials as trials
from labkit.course.claim_trials import (
    BESIDE,
    CONDITION,
    FAILS,
    HOLDS,
    LARGER,
    MEASURED,
    MISSING,
    MIXED,
    NEEDS_GPU,
    NOT_JUDGED,
    OPEN,
    SIMULATED,
    SMALLER,
    UNEQUAL,
    VERDICTS,
    Frames,
    Read,
    Reading,
    Rule,
    agreeing_range,
    derived_ratio,
    faster,
    format_interval,
    on_gpu,
    outcome,
    paired,
    reaches,
    read_folder,
    reckoned,
    separate,
    together,
    tried,
    unchanged,
)
from labkit.data.simulated_disks import DISKS
from labkit.measure.plots import COLORS, SMALL_PT, make_axes, put_legend_below, write_title
from labkit.measure.statistics import format_ratio


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


_SEEK_S = DISKS["hdd"].seek_ms / 1e3
_HYPERSIM_FILES, _ITERATION_FILES = 2 * 53_885, 64  # in Marigold's training list, and in one of its iterations


@dataclass(frozen=True)
class Test:
    """One setting in which a claim is tested.

    Args:
        setting: In words; a verdict "under a condition" names it.
        notebook: Number of the notebook that measures it, or explains it if it is a trial.
        read: Returns the reading, or None if nothing has been measured.
        rule: From the reading (and the ratios that agree with the claimed one) to an outcome; None: not judged.
        needs_gpu: Only runs on a CUDA device count.
        kind: What it shows, one of `KINDS`; only a measured test has a rule.
    """

    setting: str
    notebook: str
    read: Read
    rule: Rule | None = None
    needs_gpu: bool = False
    kind: str = MEASURED


@dataclass(frozen=True)
class Claim:
    """A row of the ledger.

    Args:
        id: As in the table of claims.
        text: The claim, in our words.
        figure: Its figure, as the write-up gives it.
        tests: The tests; the verdict is based on the measured ones.
        claimed: The ratio that the figure states or implies; None if it states a direction only.
        up_to: Its upper end, if the figure is a range.
        note: What a reader must know about the row.
    """

    id: str
    text: str
    figure: str
    tests: tuple[Test, ...]
    claimed: float | None = None
    up_to: float | None = None
    note: str = ""


def _gpu_test(setting: str, notebook: str, read: Read, rule: Rule) -> Test:
    return Test(setting, notebook, on_gpu(read), rule, needs_gpu=True)


def _trial_test(setting: str, notebook: str, trial: trials.Trial) -> Test:
    return Test(setting, notebook, trials.read_trial(trial), tried)


_simulated_test, _unequal_test, _beside_test = (partial(Test, kind=kind) for kind in (SIMULATED, UNEQUAL, BESIDE))


def _with_seeks(n_seeks: int) -> Callable[[np.ndarray], np.ndarray]:
    """Time per image with `n_seeks` seeks of a disk, over the time without; from rates in images/s."""
    return lambda rates: 1 + n_seeks * _SEEK_S * rates


def _tar_over_folder(n_scanned: int) -> Callable[[np.ndarray], np.ndarray]:
    """Time of an iteration from a tar on a rotating disk, over that from a folder there; from rates in pairs/s.

    A file in a folder costs two seeks; a member of a tar, and each header that is scanned, one.
    """

    def ratio(rates: np.ndarray) -> np.ndarray:
        computing_s = _ITERATION_FILES / 2 / rates
        tar_s = (n_scanned + _ITERATION_FILES) * _SEEK_S
        return (tar_s + computing_s) / (2 * _ITERATION_FILES * _SEEK_S + computing_s)

    return ratio


_FOUR_STEPS, _HEADERS, _COLD_HEADERS = "10 steps from * names", "10 sizes from headers", "10 headers from a cold disk"
_SEARCH = "one search per image"
_DECODERS, _SMALL, _LARGE = "14 decoders at 224", "02 decoders, imagenet", "02 decoders, camera"
_PIL, _MARIGOLD = "PIL + ToTensor", "09 an iteration of Marigold"
_TRANSFORMS, _WHO, _FEEDING = "04 transforms", "06 who augments", "07 feeding a training step"
_HEAVY, _SHARDS, _EPOCHS = "05 heavy recipe", "shards of *", "12 epochs 1 and 2*"
_MIXING = "06 mixing on the device"
_ALONE = "compute alone"

LEDGER = (
    Claim(
        "sizes-4000-20min",
        "Collecting the sizes of some thousand images takes minutes on one disk and seconds on another.",
        "4000 images: up to 20 min, 10 s on other disks; 20,000 on a hard disk: 30 min",
        (
            Test("this machine's disk against its memory", "10",
                 separate((_HEADERS, "lk.collect_sizes"), (_COLD_HEADERS, "one reader"), cold=True), reaches),
            _simulated_test("a rotating disk against memory", "10",
                            reckoned(_HEADERS, "lk.collect_sizes", _with_seeks(2), "two seeks per file")),
        ),
        claimed=20 * 60 / 10,
        note="Seconds of other machines cannot be tested; the ratio of the two disks can. In issue 1493 of sd-scripts "
             "the 10 s are a guess at new code, not another disk.",
    ),
    Claim(
        "sizes-6x",
        "One scan of the folder, a dictionary, a precompiled pattern and processes collect sizes about 6x as fast.",
        "254 files/s (906 images) became 1606 files/s (136 images)",
        (
            Test("all four steps, names in memory", "10", paired(_FOUR_STEPS, "+ processes", _SEARCH), reaches),
            Test("without processes", "10", paired(_FOUR_STEPS, "+ precompiled pattern", _SEARCH), reaches),
        ),
        claimed=1606 / 254,
        note="Their two rates come from two sets of images. On one set the gain grows with the folder: no constant.",
    ),
    Claim(
        "workers-clamp",
        "Clamping the workers to os.cpu_count() avoids a crash on one CPU and contention on many.",
        "min(requested, os.cpu_count())",
        (
            _trial_test("one CPU, persistent workers", "03", trials.clamped_on_one_cpu),
            Test("one worker per core against four", "03", paired("03 workers", "one per core", "four per core"),
                 faster),
            _trial_test("a process that may not use all cores", "03", trials.clamped_where_bound),
        ),
        note="os.cpu_count() counts the host's cores; lk.usable_cores() asks affinity and the cgroup as well.",
    ),
    Claim(
        "persistent-zero", "Persistent workers without workers raise an error.",
        "persistent_workers=True, num_workers=0",
        (_trial_test("DataLoader of torch", "03", trials.persistent_without_workers),),
    ),
    Claim(
        "marigold-tar",
        "Training from a tar takes an hour per iteration, from plain files in folders minutes, with a busy GPU.",
        "about 1 h; minutes and ~100 % GPU utilisation",
        (
            Test("the first iteration, from memory", "09",
                 paired(_MARIGOLD, "folder", "tarfile"), reaches),
            _simulated_test("the first iteration from a rotating disk", "09",
                            reckoned(_MARIGOLD, "folder", _tar_over_folder(2 * _HYPERSIM_FILES), "two workers scan")),
            _simulated_test("later iterations from a rotating disk", "09",
                            reckoned(_MARIGOLD, "folder", _tar_over_folder(0), "nothing to scan")),
        ),
        claimed=60 / 10,
        note="\"Minutes\" is taken as ten at most. The utilisation needs a GPU. When to unpack: notebook 09.",
    ),
    Claim(
        "decode-pil", "PIL with ToTensor is the slowest of three ways to a tensor.",
        "6.8 s for 1000 images of 224 x 224 (cv2 5.9 s, read_image 3.2 s)",
        (
            Test("cv2 over PIL, 224 x 224", "14", paired(_DECODERS, "cv2 + ToTensor", _PIL), faster),
            Test("read_image over PIL, 224 x 224, floats from both", "14",
                 paired(_DECODERS, "read_image, to float", _PIL), faster),
            _unequal_test("read_image's bytes over PIL's floats, 224 x 224", "14",
                          paired(_DECODERS, "read_image", _PIL)),
        ),
    ),
    Claim(
        "decode-cv2", "cv2 with ToTensor is a little faster than PIL with ToTensor.",
        "5.9 s against 6.8 s for 1000 images of 224 x 224",
        (
            Test("224 x 224", "14", paired(_DECODERS, "cv2 + ToTensor", _PIL), reaches),
            Test("500 x 375, decoding alone", "02", paired(_SMALL, "cv2", "pil"), reaches),
            Test("2000 x 1500, decoding alone", "02", paired(_LARGE, "cv2", "pil"), reaches),
        ),
        claimed=6.8 / 5.9,
    ),
    Claim(
        "decode-read-image", "read_image is twice as fast as PIL with ToTensor.",
        "3.2 s against 6.8 s for 1000 images of 224 x 224 (\"2x\")",
        (
            Test("224 x 224, floats from both", "14", paired(_DECODERS, "read_image, to float", _PIL), reaches),
            Test("500 x 375, decoding alone", "02", paired(_SMALL, "torchvision", "pil"), reaches),
            Test("2000 x 1500, decoding alone", "02", paired(_LARGE, "torchvision", "pil"), reaches),
            _unequal_test("bytes over PIL's floats, 224 x 224", "14", paired(_DECODERS, "read_image", _PIL)),
        ),
        claimed=6.8 / 3.2,
        note="The 2x compares unequal work: read_image leaves bytes, ToTensor makes floats.",
    ),
    Claim(
        "persistent-epoch2",
        "With persistent workers and prefetch_factor=2 the second epoch of a small training is shorter.",
        "ResNet-18, CIFAR-10: 4.7 and 4.6 s by default; 4.8 and 3.9 s; GPU use 68 % -> 85 %",
        (
            Test("the whole second epoch", "12",
                 paired(_EPOCHS, "*persistent*epoch 2*", "*default*epoch 2*"), reaches),
            _beside_test("the whole first epoch", "12",
                         paired(_EPOCHS, "*persistent*epoch 1*", "*default*epoch 1*")),
        ),
        claimed=4.6 / 3.9,
        note="The start and the end of the workers are inside the clock. prefetch_factor=2 is torch's default. GPU use "
             "needs a GPU.",
    ),
    Claim(
        "two-steps", "read_image and persistent workers together raise a loader's throughput by a third to double.",
        "+30 % to +100 %",
        (Test("500 x 375, crop and flip", "14",
              paired("14 both steps", "read_image, persistent workers", "PIL, new workers"), reaches),),
        claimed=1.3, up_to=2.0,
    ),
    Claim(
        "v2-tensors", "torchvision v2 on tensors removes the overhead of PIL.", "\"zero-copy\"",
        (
            Test("crop and flip", "04", paired("04 crop and flip alone", "tensors", "PIL"), faster),
            Test("crop, flip, color jitter, normalise", "04", paired(_TRANSFORMS, "tensors", "PIL"), faster),
        ),
        note="No zero-copy in either: nearly every step of v2 makes a new tensor (notebook 04).",
    ),
    Claim(
        "batched-transforms", "One call of a transform per batch, not one per sample, cuts overhead.", "no figure",
        (Test("normalising", "04", paired(_TRANSFORMS, "tensors, normalised per batch", "tensors"), faster),),
        note="Random transforms of torchvision must not be batched: they draw once a call (notebook 04).",
    ),
    Claim(
        "kornia-gpu", "With Kornia on the GPU the CPU only decodes, and is no longer the bottleneck.", "no figure",
        (
            _gpu_test("colors on the GPU", "06", paired(_WHO, "CPU crops, device colors", "CPU does all"), faster),
            _beside_test("if colors were free", "06", paired(_WHO, "CPU crops only", "CPU does all")),
        ),
    ),
    Claim(
        "cuda-prefetch", "A prefetcher with a CUDA stream of its own hides the copy behind computing.", "no figure",
        (
            _gpu_test("against copies that wait", "07", paired(_FEEDING, "prefetched", "pinned"), faster),
            _gpu_test("against copies not waited for", "07",
                     paired(_FEEDING, "prefetched", "pinned, non_blocking"), faster),
            _beside_test("loading behind computing, one worker", "07",
                         paired("07 loading behind computing", "one worker", "no worker")),
        ),
    ),
    Claim(
        "wds-shards", "Sequential shards remove the seeks, and stream from object storage.", "no figure",
        (
            Test("a cold disk", "08", paired("08 disk, cold", _SHARDS, "files", cold=True), faster),
            Test("a warm disk", "08", paired("08 disk, warm", _SHARDS, "files"), faster),
            _simulated_test("HTTP, 50 ms set", "08", paired("08 HTTP, 50 ms", _SHARDS, "files")),
            _simulated_test("S3, a mock on this machine", "08", paired("08 S3", _SHARDS, "files")),
        ),
        note="The largest shards against single files. When to use them: notebook 09.",
    ),
    Claim(
        "dali-2x", "DALI, with decoding helped by the GPU, easily doubles the throughput.", "\"easily doubles\"",
        (
            _gpu_test("decoding on the GPU", "13", paired("13 peers on a GPU", "DALI (GPU)", "DataLoader"), reaches),
            _beside_test("DALI on the CPU over torchvision v1", "13",
                         paired("13 peers imagenet", "DALI", "torchvision v1")),
        ),
        claimed=2.0,
    ),
    Claim(
        "mixup-free", "MixUp and CutMix on the GPU cost nothing.", "\"zero cost\"",
        (
            _gpu_test("a step with mixing over one without", "06",
                      derived_ratio(separate((_FEEDING, _ALONE), (_MIXING, "lk.mixup"))), unchanged),
            _beside_test("a small step with mixing over one without, all on the CPU", "06",
                         derived_ratio(separate(("07 loading behind computing", _ALONE), (_MIXING, "lk.mixup")))),
            _beside_test("the snippet that goes around", "06", trials.read_trial(trials.reading_back)),
        ),
        claimed=1.0,
    ),
    Claim(
        "albumentations-cpu", "Albumentations is the best choice for complex color changes if the CPU has room.",
        "no figure",
        (
            Test("heavy recipe, over v2", "05", paired(_HEAVY, "albumentations, heavy", "v2, heavy"), faster),
            Test("heavy recipe, over PIL", "05", paired(_HEAVY, "albumentations, heavy", "pil, heavy"), faster),
        ),
        note="Among libraries on the CPU; whether a GPU does it better is kornia-gpu's question.",
    ),
    Claim(
        "resize-once",
        "Resizing once to short side 256 makes loading cheaper and does not change the distribution.",
        "\"does not change the distribution\"",
        (
            Test("loading, 500 x 375", "11", paired("11 formats", "JPEG at 256", "JPEG folder"), faster),
            Test("detail in crops, 500 x 375", "11", trials.detail_kept("imagenet"), unchanged),
            Test("detail in crops, 2000 x 1500", "11", trials.detail_kept("camera"), unchanged),
        ),
        note="The boxes are distributed as before; what lies in them is measured.",
    ),
    Claim(
        "seeded-workers", "A generator and a worker_init_fn make persistent, parallel loading reproducible.",
        "no figure",
        (
            _trial_test("a rerun with as many workers", "03", trials.seeded_again),
            _trial_test("a rerun with another number of workers", "03", partial(trials.seeded_again, num_workers=1)),
            _trial_test("a data set with its own generator", "03", partial(trials.seeded_again, own_generator=True)),
        ),
        note="Libraries that keep a generator, as Albumentations does, are the last case.",
    ),
)  # fmt: skip


_MIN_WIDTH, _MAX_WIDTH = 80, 120


def lines_of(table: pd.DataFrame, width: int) -> Iterator[str]:
    """Lines of at most `width` characters (80 to 120): a paragraph per claim, then the number of each verdict."""
    width = min(max(width, _MIN_WIDTH), _MAX_WIDTH)
    for row in table.itertuples():
        yield f"{row.id:<20} {row.verdict.upper():<24} {ratios(row)}".rstrip()
        for text in (row.claim, f"Theirs: {row.figure}.", row.condition and f"Condition: {row.condition}."):
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
        for text in row.because.splitlines():
            yield from textwrap.wrap(text, width, initial_indent="    - ", subsequent_indent="      ")
        yield ""
    counts = table["verdict"].value_counts()
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    yield from textwrap.wrap(f"{len(table)} claims: {summary}.", width)


def ratios(row: Any) -> str:
    """Measured ratio, interval and claimed ratio of a row; "" if nothing was measured."""
    if isnan(row.measured):
        return ""
    claimed = "" if isnan(row.claimed) else f", claimed {format_ratio(row.claimed)}x"
    return f"{format_ratio(row.measured)}x{format_interval(row.ci_low, row.ci_high)}{claimed}"


def explain(tests: Sequence[dict[str, Any]], note: str) -> str:
    """A line for each test, those that are not judged last, then what is missing, and the claim's note."""
    seen = sorted((test for test in tests if test["outcome"] not in (MISSING, NEEDS_GPU)), key=_is_beside)
    lines = [_explain_test(test) for test in seen]
    if any(test["outcome"] == NEEDS_GPU for test in tests):
        lines.append("No runs on a CUDA device, here or stored: `python -m labkit reference` records them.")
    missing = pd.DataFrame(
        [test for test in tests if test["outcome"] == MISSING and not _is_beside(test)], columns=["notebook", "setting"]
    )
    for notebook, settings in missing.groupby("notebook", sort=False)["setting"]:
        lines.append(f"Not measured yet: {'; '.join(settings)}: `python -m labkit tour --only {notebook}`.")
    return "\n".join([*lines, note]).rstrip()


def _is_beside(test: dict[str, Any]) -> bool:
    return test["kind"] != MEASURED


def _explain_test(test: dict[str, Any]) -> str:
    if _is_beside(test):
        return f"{test['kind'].capitalize()}, {test['setting']}: {test['seen']}: {NOT_JUDGED}."
    setting = test["setting"][0].upper() + test["setting"][1:]
    reason = f" ({test['doubt']})" if test["doubt"] else ""
    if not reason and test["outcome"] == OPEN and test["claimed"] > 1 and test["ci_low"] > 1:
        reason = ", though faster is certain"
    return f"{setting}: {test['seen']}: {test['outcome']}{reason}."


_FROM_TEST = ["claimed", "notebook", "experiment", "measured", "ci_low", "ci_high", "n_runs"]
_DECIDING = {CONDITION: HOLDS, MIXED: LARGER}


def claims(results: str | os.PathLike | None = None, *, runs: Iterable[pd.DataFrame] = ()) -> pd.DataFrame:
    """The ledger: each claim, its figure, what this machine's runs say, and a verdict.

    Times nothing. Runs come from frames that the notebooks have recorded; what needs no clock is tried once, now.

    Args:
        results: Folder of a tour's results. Default: where a running tour collects frames, else `results` here or
            next to the notebooks' folder, if it exists.
        runs: Frames measured just now; they replace stored runs of the same experiment.

    Returns:
        One row per claim: `id`, `claim`, `figure` (the write-up's), `claimed` (the ratio in it), `notebook` and
        `experiment` that test it, `measured` ratio with `ci_low` and `ci_high` (95 %), `n_runs`, `verdict`,
        `condition` (where it holds), `because` (a line per test, in words), `scale` and `device` of the runs.
        If a claim has several tests, `measured` is the first that supports the verdict, and `attrs["tests"]` holds a
        dict for each. Its `kind` is `measured`, `simulated`, `unequal work` or `beside the claim`: only measured ones
        are judged. `agrees_from` and `agrees_to` are the ratios that agree with the claimed one.

        Verdicts: `holds`, `larger here`, `smaller here` (right in direction, with another figure), `larger and smaller
        here` (in different settings), `holds under a condition`, `does not hold`, `inconclusive` (because of the
        interval, or of doubts about the runs), `needs a GPU`, `not measured yet`.

    Raises:
        FileNotFoundError: `results` holds no frames of this machine.
        ValueError: a file in it is not a frame, or runs come from another machine.

    Taught in: notebooks/14_claims.ipynb
    """
    return judged([*read_folder(results), *runs])


def judged(runs: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The table of `claims`, from these runs alone."""
    frames = Frames(runs)
    rows = [_judge_claim(claim, frames) for claim in LEDGER]
    table = pd.DataFrame([row for row, _ in rows])
    table.attrs["tests"] = [test for _, tests in rows for test in tests]
    return table


def _judge_claim(claim: Claim, frames: Frames) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The claim's row, and its tests' rows."""
    tests = [_run_test(claim, test, frames) for test in claim.tests]
    judged_tests = [test for test in tests if test["kind"] == MEASURED]
    verdict = together([test["outcome"] for test in judged_tests])
    deciding = [test for test in judged_tests if test["outcome"] == _DECIDING.get(verdict, verdict)]
    condition = "; ".join(test["setting"] for test in deciding) if verdict == CONDITION else ""
    row = {
        "id": claim.id, "claim": claim.text, "figure": claim.figure, **{name: deciding[0][name] for name in _FROM_TEST},
        "verdict": verdict, "condition": condition, "because": explain(tests, claim.note),
        "scale": deciding[0]["scale"], "device": deciding[0]["device"],
    }  # fmt: skip
    return row, tests


def _run_test(claim: Claim, test: Test, frames: Frames) -> dict[str, Any]:
    found = test.read(frames)
    reading = found or Reading()
    agrees = None if claim.claimed is None else agreeing_range(claim.claimed, claim.up_to)
    return {
        "id": claim.id, "setting": test.setting, "kind": test.kind, "notebook": test.notebook,
        "experiment": reading.experiment, "claimed": nan if claim.claimed is None else claim.claimed,
        "agrees_from": agrees[0] if agrees else nan, "agrees_to": agrees[1] if agrees else nan,
        "measured": reading.ratio, "ci_low": reading.low, "ci_high": reading.high, "n_runs": reading.n_runs,
        "outcome": outcome(found, test.rule, agrees, needs_gpu=test.needs_gpu),
        "seen": str(reading), "doubt": reading.doubt, "scale": reading.scale, "device": reading.device,
    }  # fmt: skip


_LABEL_WIDTH = 36  # characters in a line
_CLAIMED = COLORS[1]
_KINDS = {MEASURED: (COLORS[0], ""), SIMULATED: (COLORS[4], "D"), UNEQUAL: (COLORS[3], "P"), BESIDE: ("0.45", "d")}
_OUTCOMES = {HOLDS: "o", LARGER: ">", SMALLER: "<", FAILS: "X", OPEN: "s"}


def plot_claims(data: pd.DataFrame, *, ax: Axes | None = None, **kwargs: Any) -> Axes:
    """Ratio of each test with its 95 % interval and the claimed ratio, on a logarithmic axis.

    Measured ratios, on which verdicts rest, are blue: their marks say the outcome, and so do the words on the right.
    Simulated ones, unequal work and what stands beside a claim are hollow, in colors and marks of their own. The orange
    line spans the ratios that agree with the claimed one. A test without a ratio has words only.

    Args:
        data: The table of `claims()`.
        **kwargs: Passed to `Axes.errorbar` for the ratios.
    """
    tests = pd.DataFrame(data.attrs["tests"])
    ax = ax or make_axes(2.4 + 0.36 * len(tests))
    for row, test in enumerate(tests.to_dict("records")):
        _draw_test(ax, row, test, **kwargs)
    first = ~tests["id"].duplicated()
    labels = [
        f"{name}   {setting}" if new else setting
        for name, setting, new in zip(tests["id"], tests["setting"], first, strict=True)
    ]
    ax.set_yticks(range(len(tests)), [fill(label, _LABEL_WIDTH) for label in labels], fontsize=SMALL_PT)
    for row in tests.index[first][1:]:
        ax.axhline(row - 0.5, color="0.9", linewidth=0.8, zorder=0)
    ax.axvline(1, color="0.3", linewidth=1.2, zorder=1)
    ax.set(xscale="log", xlabel="ratio (x); 1 is no difference", ylim=(len(tests) - 0.4, -0.6), xlim=_limits(tests))
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    _add_legend(ax)
    write_title(ax, _describe_outcomes(tests))
    return ax


def _describe_outcomes(tests: pd.DataFrame) -> str:
    """How many measured tests ended in which way."""
    measured = tests[(tests["kind"] == MEASURED) & (tests["outcome"] != NOT_JUDGED)]
    counts = measured["outcome"].value_counts()
    parts = [f"{outcome} {counts[outcome]}" for outcome in (*_OUTCOMES, NEEDS_GPU, MISSING) if outcome in counts]
    return f"{len(measured)} tests: {', '.join(parts)}" if parts else "no test was measured"


def _limits(tests: pd.DataFrame) -> tuple[float, float]:
    """Room for all ratios, but not for all intervals: those of two rounds may span decades."""
    ratios = tests[["measured", "claimed", "agrees_to"]].where(tests["measured"].notna()).stack()
    return min(0.5, ratios.min() / 2), max(2.0, ratios.max() * 2)


def _draw_test(ax: Axes, row: int, test: dict[str, Any], **kwargs: Any) -> None:
    color, marker = _KINDS[test["kind"]]
    said = test["kind"] if test["outcome"] == NOT_JUDGED else test["outcome"]
    ratio = ""
    if isfinite(test["measured"]):
        ratio = f"{format_ratio(test['measured'])}x  "
        error = [[test["measured"] - test["ci_low"]], [test["ci_high"] - test["measured"]]]
        is_filled = test["kind"] == MEASURED and test["outcome"] != OPEN
        style = {
            "fmt": marker or _OUTCOMES[test["outcome"]], "color": color, "markersize": 7, "capsize": 3,
            "markerfacecolor": color if is_filled else "white",
        }  # fmt: skip
        ax.errorbar(test["measured"], row, xerr=error if isfinite(test["ci_low"]) else None, **{**style, **kwargs})
        _draw_claim(ax, row, test)
    ax.annotate(f"{ratio}{said}", (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL_PT)


def _draw_claim(ax: Axes, row: int, test: dict[str, Any]) -> None:
    if isfinite(test["claimed"]) and test["kind"] != BESIDE:
        ax.plot([test["agrees_from"], test["agrees_to"]], [row, row], color=_CLAIMED, linewidth=6, alpha=0.3, zorder=0)
        ax.scatter(test["claimed"], row, marker="|", s=160, linewidth=3, color=_CLAIMED, zorder=4)


def _add_legend(ax: Axes) -> None:
    blue = _KINDS[MEASURED][0]
    for kind, marker in _OUTCOMES.items():
        face = "white" if kind == OPEN else blue
        ax.plot([], [], marker, color=blue, markerfacecolor=face, label=f"{MEASURED}: {kind}")
    for kind, (color, marker) in list(_KINDS.items())[1:]:
        ax.plot([], [], marker, color=color, markerfacecolor="white", label=f"{kind}: {NOT_JUDGED}")
    ax.plot([], [], "|", color=_CLAIMED, markersize=12, markeredgewidth=3, label="claimed")
    ax.plot([], [], color=_CLAIMED, linewidth=6, alpha=0.3, label="agrees with it")
    put_legend_below(ax, columns=2)
