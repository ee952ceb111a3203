"""The ledger: every claim of the write-ups in our words, its figure as they give it, and what tests it here.

Claims and figures are theirs; no measurement of ours is in this file. A claim about seconds on another machine is
tested as a ratio of two of its figures, or as a direction if it has only one figure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from labkit.data.stores import DISKS
from labkit.teach.claims import trials
from labkit.teach.claims.frames import Read, more_by, on_gpu, paired, reckoned, separate
from labkit.teach.claims.verdicts import (
    BESIDE,
    MEASURED,
    SIMULATED,
    UNEQUAL,
    Rule,
    faster,
    reaches,
    tried,
    unchanged,
)  # fmt: skip

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
                      more_by(separate((_FEEDING, _ALONE), (_MIXING, "lk.mixup"))), unchanged),
            _beside_test("a small step with mixing over one without, all on the CPU", "06",
                         more_by(separate(("07 loading behind computing", _ALONE), (_MIXING, "lk.mixup")))),
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
