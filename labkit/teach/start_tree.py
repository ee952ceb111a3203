"""The decision tree of `where_to_start`, described once: questions, parts of loading, and what to change for each.

The picture, the text and the tests are made from this description. It holds no figure: gains are read from frames.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import pandas as pd

from labkit.teach.claims import Read, on_gpu, paired
from labkit.teach.ladder import EXPERIMENT as _LADDER


@dataclass(frozen=True)
class Gain:
    """What a change brings: one variant of an experiment over another.

    Args:
        compared: The two, in words.
        experiment, variant, baseline: As in the frame; `*` stands for anything.
        needs_gpu: Only runs on a CUDA device count.
        is_cold: Only cold reads count: others are named as doubtful.
    """

    compared: str
    experiment: str
    variant: str
    baseline: str
    needs_gpu: bool = False
    is_cold: bool = False

    @property
    def read(self) -> Read:
        """How to read it from frames, whatever their device."""
        return paired(self.experiment, self.variant, self.baseline, cold=self.is_cold)

    @property
    def read_reference(self) -> Read:
        """The same from runs on a CUDA device, stored reference runs included."""
        return on_gpu(self.read)

    def behind(self, frame: pd.DataFrame) -> pd.Series:
        """Which rows of a frame it is read from: a mask."""
        variants = frame["variant"].astype(str)
        asked = [self.variant, self.baseline]
        is_asked = variants.map(lambda label: any(fnmatchcase(label, pattern) for pattern in asked)).astype(bool)
        is_here = frame["experiment"].astype(str).map(lambda name: fnmatchcase(name, self.experiment)).astype(bool)
        return is_asked & is_here


@dataclass(frozen=True)
class Choice:
    """A change to try.

    Args:
        call: The name in `lk.` that does it.
        notebooks: Those that teach it, the first one first.
        does: What it does, in words.
        gain: What it brings; None if it is no speed-up.
        step: The same step in the write-ups' checklist; empty if it has none.
    """

    call: str
    notebooks: tuple[str, ...]
    does: str
    gain: Gain | None = None
    step: str = ""


@dataclass(frozen=True)
class Part:
    """A part of loading, how a reader knows that the step waits for it, and what to change, the simplest first."""

    name: str
    sign: str
    choices: tuple[Choice, ...]


QUESTION = "Is my step waiting for data?"
WATCH = "python -m labkit watch train.py"
ASK = (WATCH, "or lk.ReplayLoader: the same step on repeated batches")
TAUGHT = "12_find_the_stall"
SECOND_QUESTION = "For which part? The same report names it."
SPLIT = "lk.StageClock tells decode from augment: notebook 01."
OTHER = "another question"

NOT_WAITING = Part("no", "the report says: leave the loader as it is", (
    Choice("lk.compare", ("00_measure",), "time any change before you keep it"),
))  # fmt: skip

PARTS = (
    Part("read", "fetch: it waits for storage", (
        Choice("lk.read_shards", ("08_shard_formats", "08b_shard_order"), "files packed into shards, read in order",
               Gain("shards over files, cold disk", "08 disk, cold", "shards of *", "files", is_cold=True), "shards"),
        Choice("lk.TarStore", ("09_marigold_storage",), "an index of a tar, for any order",
               Gain("an index over tarfile", "09 an iteration of Marigold", "index", "tarfile")),
    )),
    Part("decode", "prepare: JPEGs become pixels", (
        Choice("lk.ImageDataset", ("02_read_image", "01_naive_pil"), "a faster decoder, the same pixels",
               Gain("turbojpeg over PIL", "02 decoders, imagenet", "turbojpeg", "pil"), "read_image"),
        Choice("lk.make_loader", ("03_persistent_workers",), "one worker per core",
               Gain("workers over none", "03 workers", "one per core", "no worker"), "workers"),
        Choice("lk.map_items", ("11_resize_once",), "smaller JPEGs, made once",
               Gain("short side 256 over as it came", "11 formats", "JPEG at 256", "JPEG folder"), "resize once"),
        Choice("lk.PixelStore", ("11b_raw_pixels",), "raw pixels, decoded once",
               Gain("raw pixels over JPEG", _LADDER, "raw pixels: PixelStore", "no antialiasing")),
    )),
    Part("augment", "prepare: crops and colors", (
        Choice("lk.make_augment", ("04_tensor_transforms",), "v2 on tensors, not on PIL's images",
               Gain("tensors over PIL", "04 transforms", "tensors", "PIL"), "v2 on tensors"),
        Choice("lk.Recipe", ("05_albumentations",), "strong colors by Albumentations",
               Gain("Albumentations over v2", "05 heavy recipe", "albumentations, heavy", "v2, heavy")),
        Choice("lk.mixup", ("06_kornia_gpu",), "colors and mixing where the step runs",
               Gain("colors on the GPU over the CPU", "06 who augments", "CPU crops, device colors", "CPU does all",
                    needs_gpu=True), "augment on the GPU"),
    )),
    Part("copy", "copy: from host to GPU", (
        Choice("lk.CUDAPrefetcher", ("07_cuda_prefetch",), "copies the next batch during the step",
               Gain("prefetched over waiting", "07 feeding a training step", "prefetched", "pinned", needs_gpu=True),
               "prefetch to the GPU"),
    )),
    Part("Python's lock", "hand-over: batches are ready, and one process passes them on", (
        Choice("lk.BatchLoader", ("11b_raw_pixels",), "threads that work without the lock",
               Gain("threads over workers", _LADDER, "threads: BatchLoader", "OpenCV crops*")),
        Choice("lk.compare_peers", ("13_peers",), "another library's loader",
               Gain("DALI on the CPU over torchvision", "13 peers imagenet", "DALI", "torchvision v1"), "DALI"),
    )),
    Part("start", "start: an epoch's first batch", (
        Choice("lk.LoaderConfig", ("03_persistent_workers", "12_find_the_stall"), "workers that stay alive",
               Gain("second epoch, kept over new", "12 epochs 1 and 2*", "*persistent*epoch 2*", "*default*epoch 2*"),
               "persistent workers"),
    )),
    Part(OTHER, "not about one step", (
        Choice("lk.collect_sizes", ("10_image_sizes", "10b_image_headers"), "sizes of all images before training",
               Gain("over one search per image", "10 steps from * names", "lk.collect_sizes",
                    "one search per image")),
        Choice("lk.plan", ("15_at_scale",), "cores and storage for more GPUs"),
        Choice("lk.claims", ("14_claims",), "does a claim that I read hold here?"),
    )),
)  # fmt: skip


def gains() -> list[Gain]:
    """All gains that the tree names."""
    choices = [choice for part in (NOT_WAITING, *PARTS) for choice in part.choices]
    return [choice.gain for choice in choices if choice.gain]
